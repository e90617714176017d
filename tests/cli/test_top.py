"""The commands ``top`` and ``compare`` on captured runs, and the same from Python."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import transformers as tf
from typer.testing import CliRunner

import qkscope
from qkscope.cli.common import heads_in_a_line
from qkscope.cli.main import app
from qkscope.cli.top import heads_as_lines
from qkscope.errors import ConfigError, TableError
from qkscope.headids import TERMS
from qkscope.report.claims import Claims
from qkscope.report.front import answers, front
from qkscope.report.gather import gather, study_config
from qkscope.results.derived import top_heads
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
    pd.testing.assert_frame_equal(qkscope.open(runs / "base").top(n=3), from_python)
    assert len(qkscope.plot.map(runs / "base", "part_position").axes) == 2
    best = qkscope.open(runs / "base").head(*table.loc[0, ["layer", "head"]])
    assert best.part_position == pytest.approx(table.loc[0, "part_position"])


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


def captured(folder: Path, *, attn: str = "sdpa", documents: int = 16, **options: object) -> Path:
    """A run of the same weights on the same documents."""
    rng = np.random.default_rng(0)
    model = build(Family(tf.LlamaConfig(**BASE)))
    model.set_attn_implementation(attn)
    texts = [rng.integers(3, 96, WINDOW) for _ in range(documents)]
    qkscope.capture_model(model, texts, folder=folder, progress=False, **{"window": WINDOW} | options)
    return folder


def test_a_copied_run_is_the_same_run_under_its_new_name(runs, tmp_path):
    invoke("top", runs / "base", "-q")
    shutil.copytree(runs / "base", tmp_path / "copy")
    written = (tmp_path / "copy" / "tables" / "summary.json").stat().st_mtime_ns
    assert set(qkscope.top(tmp_path / "copy")["model"]) == {"copy"}
    assert (tmp_path / "copy" / "tables" / "summary.json").stat().st_mtime_ns == written, "the tables are used again"
    said = invoke("compare", runs / "base", tmp_path / "copy", "-o", tmp_path / "cmp", "-q")
    assert said == "base and copy are one run: every difference is zero.\n"
    assert len(qkscope.plot.map(tmp_path / "copy", "part_position").axes) == 2
    summary = tmp_path / "copy" / "tables" / "summary.json"
    summary.write_text(summary.read_text().replace('"qkscope": "', '"qkscope": "0.'))  # of another version
    assert set(qkscope.top(tmp_path / "copy")["model"]) == {"copy"}


def test_three_documents_are_too_few_to_compare(runs, tmp_path):
    few = captured(tmp_path / "few", documents=3)
    said = "few has no intervals, which a comparison needs; it was measured on 3 documents: capture 4 or more"
    with pytest.raises(TableError, match=said):
        qkscope.compare(few, runs / "base")
    qkscope.analyze(runs / "base", tmp_path / "plain")
    qkscope.analyze(runs / "base", tmp_path / "plain", intervals=False)
    with pytest.raises(TableError, match=r"base has no intervals, .*; analyse it again, without intervals=False"):
        qkscope.compare(tmp_path / "plain", runs / "base")


def test_runs_are_compared_at_the_largest_window_that_both_have(tmp_path):
    short, long = captured(tmp_path / "short", window=64), captured(tmp_path / "long", compare_at=(32, 64))
    said = invoke("compare", long, short, "--workers", 1, "-o", tmp_path / "cmp", "-q").splitlines()[0]
    assert said == "long-at-64 and short are one run: every difference is zero."
    doubled = captured(tmp_path / "doubled", window=64, attn="eager")
    comparison = qkscope.compare(qkscope.open(long), doubled)
    assert comparison.paired
    assert comparison.sentence.startswith("From long-at-64 to doubled at a window of 64 tokens, ")
    assert comparison.sentence.endswith("64 tokens is the largest window that both were captured at.")
    assert "largest window" not in qkscope.compare(short, doubled).sentence
    other = captured(tmp_path / "other", window=48)
    with pytest.raises(
        TableError, match=r"long was .* 96 tokens and other at 48; .*capture long with compare_at 48 too"
    ):
        qkscope.compare(long, other)


def test_another_kernel_of_attention_is_no_change(tmp_path):
    """Differences of 1e-8 have intervals of 1e-9."""
    comparison = qkscope.compare(captured(tmp_path / "sdpa"), captured(tmp_path / "eager", attn="eager"))
    assert not comparison.same
    assert 0 < comparison.table["difference"].abs().max() < 1e-3
    assert comparison.table["changed"].mean() <= 0.05
    assert comparison.table.groupby("column")["changed"].mean().max() <= 0.05
    assert "no mean over heads of" in comparison.sentence
    assert (comparison.summary["sign_p"] == 1).mean() > 0.9


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
    assert f"base, window {WINDOW}: all 16 heads are flat: their scores vary by less than 0.1 logits\n" in said
    table = pd.read_parquet(tmp_path / "tables" / "heads.parquet")
    table = table.assign(head_class=["flat"] * 2 + ["content"] * (len(table) - 2))
    rotated = pd.read_parquet(tmp_path / "tables" / "rotated.parquet")
    first = top_heads(table.iloc[2:], "part_position", 1).iloc[0]
    line = heads_in_a_line({"heads": table, "rotated": rotated})
    assert line.startswith(
        f"base, window {WINDOW}: most position in its scores l{first.layer:02d}h{first['head']:02d} ("
    )
    assert line.endswith("; 2 of 16 heads flat")
    copying = table.assign(role=["induction", *["mixed"] * (len(table) - 1)], echo=0.25, induction=0.5)
    assert "; induction l00h00 (75%); 2 of 16" in heads_in_a_line({"heads": copying, "rotated": rotated})
    assert "induction" not in heads_in_a_line({"heads": copying.assign(role="sink"), "rotated": rotated})
    assert "flat" not in heads_in_a_line({"heads": table.iloc[2:]})
    for flat in ("l00h00", "l00h01"):
        assert flat not in line


@pytest.mark.parametrize("command", ["view", "card", "report"])
def test_commands_that_draw_name_heads_too(runs, tmp_path, command):
    invoke("top", runs / "base", "-q")
    more = {"view": ["--no-open", "-o", tmp_path / "e.html"], "card": ["l01h02", "-o", tmp_path / "l01h02.png"],
            "report": ["-o", tmp_path / "report"]}[command]  # fmt: skip
    said = invoke(command, runs / "base", *more)
    assert f"base, window {WINDOW}: all 16 heads are flat" in said
    if command == "card":
        assert re.search(rf"l01h02 of base, flat: position \d+%, .* scores, window {WINDOW}\n", said)


def test_the_window_stands_beside_the_parts(runs, tmp_path):
    """Parts depend on it."""
    lines = invoke("top", runs / "base", "-n", 2, "-o", tmp_path / "top.csv", "-q").splitlines()
    assert lines[0].endswith(f"content   decay   (window {WINDOW})")
    assert pd.read_csv(tmp_path / "top.csv")["window"].tolist() == [WINDOW] * 2
    assert repr(qkscope.open(runs / "base").head(0, 1)).endswith(f"of the variance of its scores, window {WINDOW})")


def test_wide_values_do_not_touch_the_class():
    row = {"model": "m", "layer": 0, "head": 1, "decay": 0.000412, "decay_low": 2.82e-05, "decay_high": 0.00082}
    (title, line) = heads_as_lines(
        pd.DataFrame([row | {"head_class": "flat", "part_position": 0.5, "role": "sink"}]), "decay"
    )
    assert "0.000412 [2.82e-05, 0.00082]  flat " in line
    assert title.index("class") == line.index("flat")
    assert title.index("role") == line.index("sink")


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "glm4", "phi3", "granite", "gpt-neox"])
def test_random_weights_are_flat(family):
    """The published class calls them content-focused."""
    assert random_classes(family) == {"flat"}


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_random_weights_with_normalised_queries_and_keys_look_at_content(family):
    """Vectors of fixed length have scores that vary by about a logit, whatever the weights are, and not by position."""
    assert random_classes(family) <= {"content", "mixed"}


@pytest.mark.parametrize("size", [64, 512])
def test_random_scores_vary_by_0004_times_the_hidden_size(size):
    """From about 250 on random weights are content, not flat: scores have the variance of 0.02² times the input's."""
    shape = {"hidden_size": size, "intermediate_size": size, "num_attention_heads": size // 32, "vocab_size": 96}
    config = tf.LlamaConfig(**BASE | shape | {"num_key_value_heads": size // 32, "num_hidden_layers": 1})
    texts = [np.random.default_rng(seed).integers(3, 96, WINDOW) for seed in range(8)]
    run = qkscope.capture_model(build(Family(config)), texts, window=WINDOW, progress=False)
    scores = qkscope.scores(run)
    assert scores["logit_sd"].mean() == pytest.approx(0.0004 * size, rel=0.1)
    assert set(scores["head_class"]) == {"flat" if size == 64 else "content"}


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
