"""Files that belong to another run, or to other weights, are refused in one line that names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from qkscope.capture.corpus import Corpus, Passage
from qkscope.capture.options import CaptureOptions
from qkscope.capture.run import capture
from qkscope.capture.texts import Document
from qkscope.cli.main import app
from qkscope.errors import DatasetError
from qkscope.results.effects import write_measured
from qkscope.results.schema import TABLES
from qkscope.runs.run import open_run
from qkscope.runs.source import LoadSpec
from tests.capture.families import build, families

TOKENS = Passage(np.arange(3, 23), tuple(f"t{i % 7}" for i in range(20)))


def captured(folder: Path, seed: int, added: float = 0.0, window: int = 60) -> Path:
    model = build(families()["llama"])
    with torch.no_grad():
        next(model.parameters()).add_(added)
    ids = [np.random.default_rng(100 * seed + i).integers(3, 96, window) for i in range(16)]
    corpus = Corpus([Document(f"d{i}", f"text {i}") for i in range(16)], ids, passage=TOKENS)
    return capture(model, corpus, folder, CaptureOptions(window=window, sample=100), {"id": "tiny"})


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run, and another of other weights on other texts, each with tables under one label."""
    place = tmp_path_factory.mktemp("foreign")
    for run in (captured(place / "run", 0), captured(place / "other", 1, 0.1)):
        done, _ = invoke("analyze", run, "-o", run / "tables", "-q", "--points", "2", "--model", "run")
        assert done == 0
    return place


@pytest.fixture
def place(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "place"))


def invoke(*arguments: object) -> tuple[int, list[str]]:
    """The exit code and what was printed, to standard output or as an error."""
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    return done.exit_code, done.output.splitlines()


def test_the_passage_of_another_run_is_refused(place):
    shutil.copyfile(place / "other" / "passage.safetensors", place / "run" / "passage.safetensors")
    said = f"{place / 'run' / 'passage.safetensors'} differs from its checksum; copy or capture the run again"
    code, lines = invoke("analyze", place / "run", "-o", place / "out", "--only", "pca", "--points", "2")
    assert (code, lines[-1]) == (2, f"error: {said}")
    assert not (place / "out").exists()
    assert invoke("verify", place / "run")[1][0] == said


def test_a_run_that_takes_the_place_of_another_is_read_anew(place):
    """Not from what this process has read of the former."""

    def numbers(folder: Path) -> tuple[float, float]:
        run = open_run(folder)
        (head,), _ = run.source.load([run.heads[-1]], LoadSpec(passage=True))
        return float(head.passage.q.sum()), float(head.moments.total_q.mean[0])

    run, other = place / "run", place / "other"
    before = numbers(run), numbers(other), numbers(run)
    for source, target in ((run, place / "between"), (other, run), (place / "between", other)):
        source.rename(target)
    assert numbers(run) == before[1] != before[0]


@pytest.mark.parametrize("name", ["effects", "passage"])
def test_tables_that_are_copied_from_another_folder_are_refused(place, name):
    """Those that a run does not give again: nothing but the summary tells whose they are."""
    run, tables = place / "run", place / "run" / "tables"
    if name == "effects":
        for number, folder in enumerate((run, place / "other")):
            write_measured(folder / "tables", {"effects": effects(kl=number)}, open_run(folder).source.identity())
    assert invoke("top", tables)[0] == invoke("verify", run)[0] == 0
    (tables / f"{name}.csv").unlink(missing_ok=True)
    shutil.copyfile(place / "other" / "tables" / f"{name}.parquet", tables / f"{name}.parquet")
    said = (
        f"{tables} has rows of run in {name} that summary.json does not record: they were changed, or copied from "
        f"another folder; move {name} away, or write them again"
    )
    assert invoke("verify", run)[1][0] == said
    for command in (("top", tables), ("report", tables, "-o", place / "out"), ("card", tables, "l00h01")):
        code, lines = invoke(*command)
        assert (code, lines[-1]) == (2, f"error: {said}"), command
    summary = json.loads((tables / "summary.json").read_text())
    del summary["models"]["run"]["measured"]
    (tables / "summary.json").write_text(json.dumps(summary))
    assert invoke("verify", run)[1][0] == said, "beside tables that had none"


def effects(**columns: float) -> pd.DataFrame:
    """A table of effects with numbers that are not short in decimals."""
    random = np.random.default_rng(0).normal(size=4) / 3
    values = {"text": [""] * 4, "": random}
    frame = pd.DataFrame({column.name: values.get(column.dtype, [1] * 4) for column in TABLES["effects"]})
    return frame.assign(model="run", layer=0, head=range(4), k_head=0, term="key", **columns)


def test_effects_are_known_by_either_of_their_files(place):
    tables = place / "run" / "tables"
    write_measured(tables, {"effects": effects(kl=np.nan)}, open_run(place / "run").source.identity())
    (tables / "effects.parquet").unlink()
    assert invoke("top", tables)[0] == 0
    text = (tables / "effects.csv").read_text().replace("run,", "run2,", 1)
    (tables / "effects.csv").write_text(text)
    assert "has rows of run2 in effects that summary.json does not record" in invoke("top", tables)[1][-1]


def test_passages_of_an_earlier_run_are_not_recorded_for_the_next(place):
    """A file that is put back after its label was analysed again, from a run without a passage."""
    tables = place / "run" / "tables"
    before = (tables / "passage.parquet").read_bytes()
    assert invoke("analyze", place / "other", "-o", tables, "-q", "--model", "run")[0] == 0
    assert invoke("top", tables)[0] == 0
    (tables / "passage.parquet").write_bytes(before)
    assert "has rows of run in passage that summary.json does not record" in invoke("top", tables)[1][-1]


def test_a_run_of_other_weights_is_not_the_same_at_another_window(place):
    at = captured(place / "run-at-40", 0, 0.2, window=40)
    run = place / "run"
    said = f"{at} is a run of other weights than {run}, not the same at another window; rename it, or leave it out"
    for command in (("report", run, "-o", place / "out"), ("card", run, "l00h01", "--window", "40")):
        code, lines = invoke(*command)
        assert (code, lines[-1]) == (2, f"error: {said}"), command
    with pytest.raises(DatasetError, match="a run of other weights"):
        open_run(run).at(40)
