"""``qkscope study capture``, and the windows at which a report compares."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from qkscope.cli.main import app
from qkscope.report.gather import gather, study_config
from tests.capture.conftest import WORDS, save
from tests.capture.families import families


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("study"), np.random.default_rng(0)
    save(families()["llama"], folder / "model")
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(rng.choice(WORDS, 200)))
    (folder / "study.yaml").write_text(
        "title: two windows\n"
        "runs:\n"
        "  - {path: runs/short, weights: model, window: 64, phase: one, step: 1}\n"
        "  - {path: runs/long, weights: model, window: 128, phase: two, step: 2}\n"
    )
    return folder / "study.yaml"


def capture(study: Path, *more: str):
    command = ["study", "capture", str(study), "--texts", str(study.parent / "texts"), "--dtype", "float32", *more]
    return CliRunner().invoke(app, command)


def test_every_run_is_captured_at_its_window_and_at_that_of_the_comparison(study: Path):
    done = capture(study)
    assert done.exit_code == 0, done.output
    runs = {
        path.name: json.loads((path / "run.json").read_text())["window"] for path in (study.parent / "runs").iterdir()
    }
    assert runs == {"short": 64, "long": 128, "long-at-64": 64}
    assert "is captured already" in capture(study).output
    found = gather(study_config([str(study)]), study.parent / "tables", points=False, workers=1)
    assert found.labels == ["short", "long"]
    assert [run.window for run in found.runs] == [64, 64]
    assert [run.window for run in found.as_captured.runs] == [64, 128]
    assert {window: there.labels for window, there in found.at.items()} == {64: ["short", "long"], 128: ["long"]}
    assert set(found.tables["heads"]["decay_range"]) == {32}, "the range common to all runs"
    # The same weights on the same tokens: the two runs at 64 are one.
    both = found.tables["rotated"].groupby("model")["bias_strength"].apply(list)
    np.testing.assert_allclose(both["short"], both["long"])


def test_what_a_study_does_not_say_is_asked_for(study: Path):
    other = study.parent / "bare.yaml"
    other.write_text("runs:\n  - {path: nowhere, window: 64}\n")
    assert "add weights" in capture(other).output
    other.write_text("runs:\n  - {path: nowhere, weights: model}\n")
    assert "add window" in capture(other).output
