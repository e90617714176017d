"""Messages of commands during their work and at the end."""

from __future__ import annotations

import itertools
import logging
import re
import sys

import pytest
from typer.testing import CliRunner

import qkscope
from qkscope.cli.common import log, set_up_logging
from qkscope.cli.ending import clickable, print_findings
from qkscope.cli.main import app
from qkscope.config import StudyRunConfig
from qkscope.errors import QkscopeError
from qkscope.progress import duration, in_view, progress
from qkscope.results.study import build
from tests.studies import write_model


@pytest.fixture
def terminal(monkeypatch, capsys):
    """A terminal where every look at the clock finds it seven seconds later; returns the lines written to it."""
    clock = itertools.count(0.0, 7.0)
    monkeypatch.setattr("qkscope.progress.in_view", lambda: True)
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    return lambda: [line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if line.strip()]


def test_a_finished_bar_shows_how_long_it_took(terminal):
    with progress("figures") as on_progress:
        on_progress(1, 2)
        on_progress(2, 2)
    last = terminal()[-1]
    assert last.startswith("figures: 100%")
    assert re.search(r"2/2 \[01:03<00:00, +0\.0\d figures/s\]", last), last


def test_a_capture_counts_tokens_and_names_documents(terminal):
    with progress("capturing", "tokens") as on_progress:
        on_progress(50, 100, "1 of 2 documents")
        on_progress(100, 100, "2 of 2 documents")
    last = terminal()[-1]
    assert last.startswith("capturing: 100%")
    assert last.endswith("tokens/s, 2 of 2 documents]")


def test_messages_stand_above_the_bar(terminal):
    set_up_logging(quiet=False, verbose=False)
    with progress("heads") as on_progress:
        on_progress(0, 2)
        log.error("failed: l00h01")
        on_progress(2, 2)
    log.handlers.clear()
    assert "failed: l00h01" in terminal()


def test_the_time_left_counts_neither_loading_nor_earlier_attempts(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("qkscope.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level("INFO", logger="qkscope"), progress("capturing", "tokens") as on_progress:
        for seconds, done in ((600.0, 5), (610.0, 6), (620.0, 7)):  # ten minutes of loading, then 10 s a document
            now[0] = seconds
            on_progress(100 * done, 1000, f"{done} of 10 documents")
    assert "7 of 10 documents, 10.0 tokens/s, 30 s left" in caplog.text


def test_only_errors_means_no_bar(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(log, "level", logging.WARNING)
    assert in_view()
    monkeypatch.setattr(log, "level", logging.ERROR)
    log.manager._clear_cache()
    assert not in_view()


def test_help_names_options_whole_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for command in ("capture", "analyze", "reach"):
        shown = CliRunner().invoke(app, [command, "--help"]).output
        assert "…\n" not in shown.replace(" …\n", "")
    assert "--trust-remote-code" in CliRunner().invoke(app, ["capture", "--help"]).output


def test_the_hub_that_does_not_answer_is_told_once(capsys):
    requests = logging.getLogger("huggingface_hub.utils._http")
    set_up_logging(quiet=False, verbose=False)
    for attempt in range(1, 6):
        requests.warning("'Name or service not known' thrown while requesting HEAD https://somewhere")
        requests.warning("Retrying in 8s [Retry %d/5].", attempt)
    said = capsys.readouterr().err
    assert said == "the Hub does not answer; retrying for half a minute\n"
    set_up_logging(quiet=False, verbose=True)
    assert requests.filters == []
    set_up_logging(quiet=True, verbose=False)
    requests.warning("Retrying in 8s [Retry 1/5].")
    assert capsys.readouterr().err == ""
    requests.filters.clear()
    log.handlers.clear()


def test_the_end_is_two_lines_and_paths_are_links_on_a_terminal(tmp_path, capsys, monkeypatch):
    study = build([StudyRunConfig(path=write_model(tmp_path / "m", "m", layers=2, heads=4))])
    print_findings(study)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("m, window 4,096: ")
    print_findings(study, quiet=True)
    assert capsys.readouterr().out == ""
    page = tmp_path / "a page.html"
    assert clickable(page) == str(page)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert clickable(page) == f"\x1b]8;;{page.as_uri()}\x1b\\{page}\x1b]8;;\x1b\\"


def test_no_time_is_zero_seconds():
    assert duration(0.04) == "1 second"


def test_the_help_of_export_says_what_its_formats_need():
    shown = CliRunner().invoke(app, ["export", "--help"]).output
    assert "kvpress-stats (of a capture --keep undone-cov)" in " ".join(shown.replace("│", " ").split())


def test_without_gguf_the_message_names_the_extra(tmp_path, monkeypatch):
    models = pytest.importorskip("qkscope.capture.model")
    from qkscope.capture.options import ModelOptions

    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    with pytest.raises(QkscopeError, match=r"tiny.gguf needs the package gguf; .* pip install 'qkscope\[gguf\]'"):
        models.load_model(ModelOptions(str(tmp_path / "tiny.gguf")))


# ---- what nobody foresaw ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError("of\na kind"), OSError("without a number")])
def test_a_bug_is_one_line_with_its_own_code_and_a_file(tmp_path, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("qkscope.report.gather.study_config", fails)
    done = CliRunner().invoke(app, ["report", "x", "-o", str(tmp_path / "report")])
    assert done.exit_code == 3
    (line,) = done.output.splitlines()
    (file,) = tmp_path.glob("qkscope-*.txt")
    reason = " ".join(str(error).split())
    said = f"error: unexpected {type(error).__name__} ({reason}); please report it with the traceback in {file}"
    assert line == said
    assert "in fails" in file.read_text()
    assert not (tmp_path / "report").exists()
    told = CliRunner().invoke(app, ["report", "x", "-o", str(tmp_path / "report"), "--verbose"])
    assert "Traceback (most recent call last)" in told.output


def test_a_bug_with_nowhere_to_write_it_is_still_one_line(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setattr("qkscope.report.gather.study_config", fails)
    done = CliRunner().invoke(app, ["report", "x", "-o", str(tmp_path / "report")])
    assert done.exit_code == 3
    said = "error: unexpected ZeroDivisionError (no reason given)"
    assert done.output == f"{said}; rerun with --verbose for the traceback\n"


def test_nothing_that_is_printed_can_move_the_cursor(capsys, tmp_path):
    hostile = "\x1b]0;owned\x07\x9b2J\u202eevil\ttab"
    set_up_logging(quiet=False, verbose=False)
    log.error("%s\n%s", hostile, "second line")
    said = capsys.readouterr().err
    assert said == "\\x1b]0;owned\\x07\\x9b2J\\x202eevil\ttab\nsecond line\n"
    assert "\x1b" not in clickable(tmp_path / "a\x1b[2J.html")
    log.handlers.clear()


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["demo", "--fast"],
        ["capture", "m", "--texts", "t"],
        ["plan", "m"],
        ["effects", "m", "r", "--texts", "t"],
    ],
)
def test_a_command_that_needs_torch_says_how_to_install_it(tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    expected = "error: capturing needs torch; install it with: pip install torch, then pip install 'qkscope[capture]'"
    instead = "; without it: qkscope demo --planted" if command[0] == "demo" else ""
    assert done.output.splitlines() == [expected + instead]


def test_a_capture_from_python_says_so_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(QkscopeError, match="capturing needs torch; install it with: pip install torch"):
        qkscope.capture_model(None, [[1, 2, 3]])
