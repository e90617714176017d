"""Reports of several runs: each number is told by run, at one window if there is one; the same run twice is one."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from qkscope.config import StudyConfig, StudyRunConfig
from qkscope.report.claims import Claims
from qkscope.report.findings import FINDINGS
from qkscope.report.front import answers, front
from qkscope.report.gather import gather
from qkscope.report.report import report_html
from qkscope.results.study import Study, StudyRun, build
from tests.report.test_truth import Truth, mean, read, results

QUERIES, KEYS = Truth(5.0, 2.0, 1.0), Truth(1.0, 4.0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A, in which queries follow position more closely, B, in which keys do, and long: A's planting at two windows."""
    folder = tmp_path_factory.mktemp("runs")
    results(folder, "A", QUERIES, 1.0, 256).rename(folder / "A")
    results(folder, "B", KEYS, 1.0, 256).rename(folder / "B")
    results(folder, "long", QUERIES, 1.0, 512).rename(folder / "long")
    results(folder, "long", QUERIES, 1.0, 256).rename(folder / "long-at-256")
    results(folder, "alone", KEYS, 1.0, 512).rename(folder / "alone")
    return folder


def study(folder: Path, *names: str) -> Study:
    runs = [StudyRunConfig(path=folder / name) for name in names]
    return gather(StudyConfig(runs=runs), folder / "tables", points=False)


@pytest.fixture(scope="module")
def two(folder) -> Study:
    return study(folder, "A", "B")


def test_every_number_of_two_runs_is_told_by_run(two):
    said = dict(answers(Claims(two)))
    assert said["What was measured?"] == "4 query heads of each of 2 models at a window of 256 tokens."
    for question, table, column, percent in (
        ("How much of queries and keys is position?", "heads", "position_share_q", True),
        ("Who follows position more closely?", "rotated", "r_q_a", False),
        ("How positional are these heads?", "qk", "r_q", False),
    ):
        for label in "AB":
            value = mean(two, label, table, column)
            assert value.text(percent) in said[question], "as the report of this run alone tells it"
    text = read(report_html(two, [], []))
    for pooled in ("all heads of", "8 query heads", "Of 8 heads"):
        assert pooled not in text


def test_a_comparison_within_runs_that_disagree_is_told_of_each(two):
    claims = Claims(two)
    assert claims.axes.headline == (
        "A: Queries follow position more closely than keys; B: Keys follow position more closely than queries"
    )
    assert claims.axes.order == 0
    assert re.search(r"A: Queries: correlations .* B: Keys: correlations", claims.axes.detail)


def test_tiles_have_the_number_of_each_run_with_its_interval(two):
    claims = Claims(two)
    shares = [mean(two, label, "heads", "position_share") for label in "AB"]
    tile = next(tile for tile in front(claims).tiles if tile.label == "of what varies in queries and keys is position")
    assert tile.number == f"{shares[0].value:.0%} · {shares[1].value:.0%}"
    a, b = (f"{label} {share.interval(percent=True)}" for share, label in zip(shares, "AB", strict=True))
    assert tile.interval == f"{a} · {b}", "in the order of the numbers"
    assert front(claims).of == "A, B, window 256"


def test_one_number_goes_by_the_name_of_position_in_scores(two):
    for claims in Claims(two).each.values():
        tile = next(tile for tile in front(claims).tiles if "in scores" in tile.label)
        part = claims.terms.values["position"]
        assert tile.number == part.share()
        assert f"position {part.share()}" in claims.terms.headline
        assert claims.score_share.values["part_position"] == part


def test_runs_of_different_windows_are_compared_at_the_nested_one(folder):
    claims = Claims(study(folder, "A", "long"))
    assert claims.window == "window 256"
    assert claims.not_compared is None
    assert claims.compared is not None
    text = read(report_html(claims.study, [], []))
    assert "at a window of 256 tokens" in front(claims).sentence or "are one run" in front(claims).sentence
    assert "256 to 512" not in front(claims).of
    nested = mean(claims.study.at[256], "long", "heads", "position_share_q")
    assert nested.text(percent=True) in dict(answers(claims))["How much of queries and keys is position?"]
    assert "long, window 256" in text
    assert "long, window 512" not in text, "every number is at one window"
    assert "captured at windows of 256 to 512 tokens" in text


def test_without_a_nested_run_windows_are_told_and_nothing_is_compared(folder):
    claims = Claims(study(folder, "A", "alone"))
    assert claims.compared is None
    assert claims.window == "window 256 (A), 512 (alone)"
    assert front(claims).lead.startswith("The two runs are not compared head by head: ")
    said = dict(answers(claims))["How much of queries and keys is position?"]
    assert "(A at window 256)" in said
    assert "(alone at window 512)" in said


def test_the_same_run_twice_is_one_model(folder, tmp_path):
    captured = shutil.copytree(folder / "A", tmp_path / "A")
    summary = json.loads((captured / "summary.json").read_text())
    summary["models"]["A"]["dataset"]["digest"] = "0" * 64
    (captured / "summary.json").write_text(json.dumps(summary))
    twice = build([StudyRunConfig(path=captured), StudyRunConfig(path=captured, label="again")])
    claims, alone = Claims(twice), Claims(build([StudyRunConfig(path=captured)]))
    assert claims.labels == ["A"]
    assert front(claims).tiles == front(alone).tiles
    assert dict(answers(claims))["What may be compared?"] == "again is A again, the same run, and counts once."


def untrained() -> Study:
    """Heads whose scores hardly vary, by the published class content-focused, and with a share around zero."""
    index = {"model": "m", "family": "", "layer": 0, "head": range(4), "k_head": range(4)}
    parts = {"part_position": -0.01, "part_key": 0.03, "part_query": 0.03, "part_content": 0.95}
    shares = dict.fromkeys(("position_share", "position_share_q", "position_share_k"), -0.04)
    heads = pd.DataFrame(index | parts | {"head_class": "flat", "decay": 1e-5} | shares)
    qk = pd.DataFrame(index | {"pc": 0, "r_q": 0.1, "r_k": 0.1})
    headline = {"position_share": {"mean": -0.04, "low": -0.04, "high": 0.1}}
    return Study((StudyRun("m", window=256, headline=headline),), {"heads": heads, "qk": qk})


def test_random_weights_are_flat_and_their_shares_are_not_negative():
    claims = Claims(untrained())
    text = read(report_html(claims.study, [], []))
    assert claims.first.headline.startswith("100% of heads are flat, attending almost evenly, ")
    assert "position alone determines no more than 10% of the variance" in claims.first.headline
    kinds = dict(answers(claims))["What kinds of heads are there?"]
    assert kinds.startswith("By the parts of their scores over a window of 256 tokens: 100% [")
    assert "] flat. By the published classes, on PC0: 100% [" in kinds
    assert "≤ 10%" in text
    told = [claim.headline for claim in (claims.first, claims.share, claims.terms) if claim is not None]
    assert not re.search(r"[-−]\d+(\.\d+)?%", " ".join(told)), "no negative share in words"


def test_the_window_stands_beside_the_parts():
    claims = Claims(untrained())
    score = next(finding for finding in FINDINGS if finding.id == "score").fill(claims)
    assert [row.label for row in score.rows] == ["m, window 256"]
    finding = next(f for f in front(claims).findings if "of what little varies" in f.sentence)
    assert finding.sure.endswith("window 256")
    page = read(report_html(claims.study, [], []))
    assert "Parts and classes depend on the window of the run: m 256." in page


def test_plasticity_is_that_of_queries_turned_to_one_place():
    sections = {finding.id: finding for finding in FINDINGS}
    columns = {name: {m.column: m.label for m in sections[name].measures} for name in ("plasticity", "context")}
    assert columns["context"]["ap_fixed_overall"] == "plasticity"
    assert "ap_overall" not in columns["context"]
    assert all("as published" in label for column, label in columns["plasticity"].items() if "fixed" not in column)


def test_of_many_runs_the_smallest_and_the_largest_are_named():
    base = untrained()
    heads = [
        base.tables["heads"].assign(model=f"m{i}", part_content=0.5 + 0.05 * i, head_class="content") for i in range(5)
    ]
    runs = tuple(replace(base.runs[0], label=f"m{i}", headline={}) for i in range(5))
    claims = Claims(Study(runs, {"heads": pd.concat(heads, ignore_index=True)}))
    assert "content 50% (m0) to 70% (m4)" in claims.terms.headline
    assert front(claims).of == "5 runs, m0 to m4, window 256"
