"""The commands ``top`` and ``compare`` on captured runs, and the same from Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import transformers as tf
from typer.testing import CliRunner

import qkscope
from qkscope.cli.main import app
from qkscope.errors import ConfigError
from qkscope.heads import TERMS
from qkscope.report.claims import Claims
from qkscope.report.front import answers, front
from qkscope.report.gather import gather, study_config
from tests.capture.families import BASE, Family, build, families
from tests.helpers import small_dataset

WINDOW = 96


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Weights with two rotary bases, captured on the same documents."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 96, WINDOW) for _ in range(16)]
    for name, base in (("base", 10_000.0), ("doubled", 20_000.0)):
        rope = {"rope_type": "default", "rope_theta": base}
        model = build(Family(tf.LlamaConfig(**BASE | {"rope_parameters": rope})))
        qkscope.capture_model(model, texts, window=WINDOW, folder=folder / name, progress=False)
    return folder


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def test_top_names_the_heads_with_their_parts_and_keeps_the_tables(runs, tmp_path):
    lines = invoke("top", runs / "base", "-n", 3, "--workers", 1, "-o", tmp_path / "top.csv", "-q").splitlines()
    table = pd.read_csv(tmp_path / "top.csv")
    assert [line[:6] for line in lines[1:]] == [f"l{r.layer:02d}h{r.head:02d}" for r in table.itertuples()]
    assert table["part_position"].is_monotonic_decreasing
    assert {"part_position_low", "part_position_high", "head_class", "decay"} <= set(table)
    written = (runs / "base" / "tables" / "summary.json").stat().st_mtime_ns
    again = invoke("top", runs / "base", "--by", "decay", "-n", 2, "-q")
    assert (runs / "base" / "tables" / "summary.json").stat().st_mtime_ns == written, "the tables are used again"
    assert again.splitlines()[0].split()[1] == "decay"
    from_python = qkscope.top(qkscope.open(runs / "base"), n=3)
    assert from_python[["layer", "head"]].to_numpy().tolist() == table[["layer", "head"]].to_numpy().tolist()


def test_compare_says_what_changed_with_paired_intervals(runs, tmp_path):
    said = invoke("compare", runs / "base", runs / "doubled", "--workers", 1, "-o", tmp_path / "cmp", "-q")
    comparison = qkscope.compare(runs / "base", runs / "doubled")
    assert said.splitlines()[0] == comparison.sentence == repr(comparison)
    assert comparison.sentence.startswith(f"From base to doubled at a window of {WINDOW} tokens, ")
    assert comparison.paired
    assert {path.name for path in (tmp_path / "cmp").iterdir()} == {"compare.csv", "compare_means.csv", "compare.png"}
    rows = pd.read_csv(tmp_path / "cmp" / "compare.csv").query("column == 'part_position'")
    for name in ("base", "doubled"):
        scores = qkscope.scores(qkscope.open(runs / name)).set_index(["layer", "head"])["part_position"]
        column = rows.set_index(["layer", "head"])["a" if name == "base" else "b"]
        pd.testing.assert_series_equal(column, scores, check_names=False, rtol=1e-9)
    heads = pd.read_csv(runs / "base" / "tables" / "heads.csv").set_index(["layer", "head"])
    width = (rows.set_index(["layer", "head"]).eval("high - low")).median()
    assert width < (heads["part_position_high"] - heads["part_position_low"]).median(), "narrower than one run's own"


def test_a_run_with_itself_does_not_differ(runs, tmp_path):
    said = invoke("compare", runs / "base", runs / "base", "--workers", 1, "-o", tmp_path / "cmp", "-q")
    assert said == "base and base are one run: every difference is zero.\n"


def test_a_report_of_two_runs_opens_on_what_differs(runs, tmp_path):
    study = gather(study_config([str(runs / "base"), str(runs / "doubled")]), tmp_path / "tables", points=False)
    comparison = qkscope.compare(runs / "base", runs / "doubled")
    first = front(Claims(study))
    assert first.sentence == comparison.sentences[0]
    assert first.sentence.startswith(f"From base to doubled at a window of {WINDOW} tokens, ")
    head = comparison.changed_most(comparison.main_column, 1).iloc[0]
    assert f"{comparison.main_column} changed most in l{head.layer:02d}h{int(head['head']):02d} (" in first.lead
    alone = gather(study_config([str(runs / "base")]), tmp_path / "alone", points=False)
    assert Claims(alone).compared is None
    assert "What may be compared?" not in dict(answers(Claims(alone)))


def test_a_report_of_runs_that_cannot_be_compared_says_why(runs, tmp_path):
    qkscope.analyze(qkscope.open(runs / "doubled"), tmp_path / "plain", intervals=False)
    study = gather(study_config([str(runs / "base"), str(tmp_path / "plain")]), tmp_path / "tables", points=False)
    assert Claims(study).compared is None
    assert answers(Claims(study))[-1] == (
        "What may be compared?",
        f"The two runs are not compared head by head: {tmp_path / 'plain'} has no replicates.parquet: its tables have "
        "no intervals, or are of an earlier version; analyse the run again.",
    )


def test_a_dataset_needs_its_tables_first(tmp_path):
    dataset = small_dataset(tmp_path / "data", layers=1)
    with pytest.raises(ConfigError, match=r"is a dataset of vectors; write its tables with qkscope\.analyze"):
        qkscope.top(qkscope.open(dataset))
    done = CliRunner().invoke(app, ["top", str(dataset)])
    assert done.exit_code == 2
    assert f"{dataset} has no tables yet; run: qkscope analyze {dataset} -o results, then give results" in done.output
    invoke("analyze", dataset, "-o", tmp_path / "results", "--workers", 1, "-q")
    assert len(invoke("top", tmp_path / "results", "--by", "posvar_q", "-n", 4, "-q").splitlines()) == 5


def test_commands_end_by_naming_heads(runs, tmp_path):
    said = invoke("analyze", runs / "base", "-o", tmp_path / "tables", "--workers", 1)
    first = qkscope.top(tmp_path / "tables", n=1).iloc[0]
    assert f"base: most position in its scores l{first.layer:02d}h{int(first['head']):02d} (" in said


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "glm4", "phi3", "granite", "gpt-neox"])
def test_random_weights_are_flat(family):
    """The published class calls them content-focused."""
    assert random_classes(family) == {"flat"}


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_random_weights_with_normalised_queries_and_keys_look_at_content(family):
    """Vectors of fixed length have scores that vary by about a logit, whatever the weights are, and not by position."""
    assert random_classes(family) <= {"content", "mixed"}


def random_classes(family: str) -> set[str]:
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 96, WINDOW) for _ in range(8)]
    run = qkscope.capture_model(build(families()[family]), texts, window=WINDOW, progress=False)
    scores = qkscope.scores(run)
    assert len(scores) == len(run.heads)
    assert scores[[f"part_{term}" for term in TERMS]].sum(axis=1).to_numpy() == pytest.approx(1.0, abs=1e-12)
    first = run.head(0, 0)
    assert (first.head_class, sum(first.parts.values())) == (scores["head_class"][0], pytest.approx(1.0))
    return set(scores["head_class"])
