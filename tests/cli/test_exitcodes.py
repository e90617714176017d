"""Exit codes of every command: 2 when nothing was done, 3 for what nobody foresaw, 130 and 143 when it was stopped.

0 and 1 are tested where the commands are; docs/formats.md says once what each code means.
"""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from qkscope.cli.main import app
from qkscope.cli.published import pca_analyze_app, rotate_analyze_app
from qkscope.cli.visualize import pca_visualize_app, rotate_visualize_app

FIRST_STEP = {
    "analyze": (["nowhere", "-o", "out"], "qkscope.runs.run.open_run"),
    "demo": (["-o", "afile/demo"], "qkscope.files.atomic.check_writable"),
    "capture": (["./nowhere", "--texts", "nowhere", "-o", "out"], "qkscope.files.inprogress.check_capture_folder"),
    "plan": (["./nowhere"], "qkscope.capture.plan.estimate"),
    "merge": (["nowhere", "-o", "out"], "qkscope.capture.assemble.merge"),
    "top": (["nowhere"], "qkscope.results.analyze.tables_of"),
    "compare": (["nowhere", "nowhere", "-o", "out"], "qkscope.results.runtables.compared"),
    "report": (["nowhere", "-o", "out"], "qkscope.report.gather.study_config"),
    "view": (["nowhere", "-o", "out.html"], "qkscope.report.gather.study_config"),
    "card": (["nowhere", "l00h00", "-o", "card.png"], "qkscope.runs.run.open_run"),
    "effects": (["./nowhere", "nowhere", "--texts", "nowhere", "-o", "out"], "qkscope.files.runfolder.RunFolder.open"),
    "reach": (["nowhere", "-o", "out"], "qkscope.runs.run.open_run"),
    "export": (
        ["nowhere", "--to", "triattention", "-o", "stats.pt"],
        "qkscope.integrations.exports.formats.export_run",
    ),
    "push": (["nowhere", "owner/name"], "qkscope.integrations.hub.push.push"),
    "pull": (["no/where", "-o", "out"], "qkscope.integrations.hub.pull.pull"),
    "verify": (["nowhere"], "qkscope.results.verify.check_run"),
    "doctor": (["afile"], "qkscope.cli.doctor.examine"),
    "study capture": (["nowhere.yaml", "--texts", "nowhere"], "qkscope.cli.study.load_study_config"),
    "pca-analyze": (["--config", "nowhere.yaml"], "qkscope.results.config.load_configs"),
    "rotate-analyze": (["--config", "nowhere.yaml"], "qkscope.results.config.load_configs"),
    "pca-visualize": (["--config", "nowhere.yaml"], "qkscope.results.config.load_configs"),
    "rotate-visualize": (["--config", "nowhere.yaml"], "qkscope.results.config.load_configs"),
}
"""What a command cannot use, and a function that it calls early."""
PUBLISHED = {
    "pca-analyze": pca_analyze_app,
    "rotate-analyze": rotate_analyze_app,
    "pca-visualize": pca_visualize_app,
    "rotate-visualize": rotate_visualize_app,
}
WITHOUT_ERRORS = {"doctor"}
"""It reports problems, with code 1, and has no input that it could not use."""
LOADS_TORCH_FIRST = {"capture", "effects", "plan"}
"""Without torch, these end before that function."""


def commands(group: typer.Typer) -> set[str]:
    names = {str(command.name) for command in group.registered_commands}
    return names | {
        f"{inner.name} {name}" for inner in group.registered_groups for name in commands(inner.typer_instance)
    }


def invoke(name: str):
    given, _ = FIRST_STEP[name]
    on, words = (PUBLISHED[name], []) if name in PUBLISHED else (app, name.split())
    return CliRunner().invoke(on, [*words, *given])


def replace_first_step(monkeypatch, name: str, by) -> None:
    """Put a function in the place of the first step; modules that import it must have the real one for later tests."""
    if name in LOADS_TORCH_FIRST:
        pytest.importorskip("torch")
    importlib.import_module("qkscope.results.analyze")
    importlib.import_module("qkscope.report.gather")
    monkeypatch.setattr(FIRST_STEP[name][1], by)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tracebacks"))
    (tmp_path / "tracebacks").mkdir()
    (tmp_path / "afile").write_text("x")
    return tmp_path


def test_every_command_is_in_the_table():
    assert set(FIRST_STEP) == commands(app) | set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(set(FIRST_STEP) - WITHOUT_ERRORS))
def test_an_input_that_cannot_be_used_is_code_2_and_one_line(place, name):
    done = invoke(name)
    errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert (done.exit_code, len(errors)) == (2, 1), done.output
    assert sorted(path.name for path in place.iterdir()) == ["afile", "tracebacks"]


@pytest.mark.parametrize("name", sorted(FIRST_STEP))
def test_what_nobody_foresaw_is_code_3_with_a_saved_traceback(place, monkeypatch, name):
    def fails(*_, **__):
        raise ZeroDivisionError("of a kind")

    replace_first_step(monkeypatch, name, fails)
    done = invoke(name)
    assert done.exit_code == 3, done.output
    (saved,) = (place / "tracebacks").iterdir()
    assert (
        f"error: unexpected ZeroDivisionError (of a kind); please report it with the traceback in {saved}"
        in done.output
    )
    assert "in fails" in saved.read_text()


@pytest.mark.parametrize("name", sorted(FIRST_STEP))
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_stopped_says_so(monkeypatch, name, number, code):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored, if a shell started the tests
    replace_first_step(monkeypatch, name, lambda *_, **__: os.kill(os.getpid(), number))
    try:
        done = invoke(name)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == code, done.output
    assert "stopped; " in done.output
