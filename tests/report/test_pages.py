import base64
import html
import json
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qkscope.analyses.components import TAXONOMY
from qkscope.config import StudyRunConfig
from qkscope.errors import TableError
from qkscope.figures.catalogue import FIGURES_BY_NAME
from qkscope.figures.hero import HERO
from qkscope.figures.write import SkippedFigure, write_figures
from qkscope.report.claims import Claims
from qkscope.report.explorer import explorer_html, views
from qkscope.report.explorerdata import COMPLEMENT_AXES, WIDE, head_frame, metrics, packed, point_words, rows_per_kind
from qkscope.report.findings import FINDINGS
from qkscope.report.front import answers
from qkscope.report.page import as_json
from qkscope.report.report import GENERATOR, check_pages, head_list, report_html
from qkscope.report.values import CLASS_COLUMNS
from qkscope.results.schema import TABLES
from qkscope.results.study import Study, StudyRun, build
from tests.studies import make_points, published_shape, write_model

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\"'&{{7*7}}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return published_shape(tmp_path_factory.mktemp("study"), heads=40)


def test_the_opening_answers_with_the_numbers_of_the_tables(whole):
    said = dict(answers(Claims(whole)))
    assert len(said) == 11
    assert said["What was measured?"].startswith(
        "40 query heads of each of 11 models at a window of 131,072 tokens, and 10 checkpoints"
    )
    means = whole.pc0[~whole.pc0["model"].str.contains("step")].groupby("model")["r_q"].mean()
    number = r"([\d.]+) \[[^]]+\] \((\S+)\)"
    told = re.search(f"at {number} to {number}, keys", said["How positional are these heads?"])
    assert told is not None, "the smallest and the largest, with their names and intervals"
    assert told.groups() == (f"{means.min():.2f}", means.idxmin(), f"{means.max():.2f}", means.idxmax())
    rotated = whole.tables["rotated"]
    positive = (rotated["bias_strength"] > 0).groupby(rotated["model"]).mean()[list(means.index)]
    assert f"{positive.min():.0%}" in said["Which way is the bias?"]
    assert "stage3-step-4720000 to lc-32k-to-64k-step-20000" in said["What changed over training?"]
    assert "does not change beyond its intervals" in said["What changed over training?"]
    assert "do not compare" in said["What may be compared?"]
    strongest = rotated[rotated["model"] == whole.labels[0]].nlargest(1, "bias_window").iloc[0]
    head = f"l{strongest['layer']:02d}h{strongest['head']:02d}"
    assert said["Which heads stand out?"].startswith(f"{whole.labels[0]}: Strongest bias by the published line: {head}")


def test_one_run_of_one_table_answers_what_it_can(tmp_path):
    pd.DataFrame({"layer": [0, 0], "head": [0, 1], "pc": 0, "r_q": [0.9, 0.1], "r_k": [0.8, 0.1]}).to_csv(
        tmp_path / "qk.csv"
    )
    questions = [question for question, _ in answers(Claims(build([StudyRunConfig(path=tmp_path)])))]
    assert questions == ["What was measured?", "How positional are these heads?", "What kinds of heads are there?"]


def test_every_number_and_figure_of_the_findings_exists_and_every_figure_has_a_place():
    """A column with a typing error would be left out of its table without a word."""
    derived = {
        "qk": {"abs_r_k", "discordant", *TAXONOMY},
        "heads": {"decays", *CLASS_COLUMNS},
        "rotated": {"positive", "mu_q_a_positive"},
    }
    known = {name: {column.name for column in TABLES[name]} | more for name, more in derived.items()}
    measures = [measure for finding in FINDINGS for measure in finding.measures]
    assert [measure for measure in measures if measure.column not in known[measure.table]] == []
    shown = {name for finding in FINDINGS for name in finding.figures}
    assert set(FIGURES_BY_NAME) - shown == {HERO.name}
    assert shown <= set(FIGURES_BY_NAME)
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    assert [name for name in sorted(shown) if name.rpartition("/")[2].split("_", 1)[1] not in page] == []


def test_every_finding_of_the_study_is_a_section_with_published_values_and_a_caveat(whole):
    sections = {finding.id: finding.fill(Claims(whole)) for finding in FINDINGS}
    assert list(sections) == [
        "share",
        "separability",
        "amplification",
        "taxonomy",
        "axes",
        "bias",
        "windows",
        "plane",
        "complement",
        "planes",
        "distance",
        "score",
        "cause",
        "plasticity",
        "context",
        "simpson",
        "training",
    ]
    assert all(section.caveat for section in sections.values())
    axes = {row.label: row.cells for row in sections["axes"].rows}["llama3.2-3b, window 131,072"]
    assert [cell.published for cell in axes] == ["0.83", "0.63", None, "0.814", "0.898"]
    assert "published +0.65" in " ".join(sections["simpson"].lines)
    assert "(published 0.67 → 0.87)" in " ".join(sections["training"].lines)
    assert "Published over 11 models and 3,239 heads" in " ".join(sections["share"].lines)


def test_the_page_is_one_file_that_asks_for_nothing(whole):
    page = report_html(
        whole, [], [SkippedFigure("qk-pca/01_pc_roles", "Roles", "there is no table")], explorer="explorer.html"
    )
    assert "default-src 'none'" in html.unescape(page)
    assert not re.search(r"""(?:src|href)=["'](?!data:|#|explorer\.html)""", page)
    assert not re.search(r"\son\w+=", re.sub(r"<script.*?</script>", "", page, flags=re.S))
    assert "Not drawn: “Roles”, because there is no table." in page


def test_everything_the_user_named_is_text(tmp_path):
    write_model(tmp_path / "m", "m", layers=4, heads=8, points=4)
    study = build(
        [
            StudyRunConfig(path=tmp_path / "m", label=HOSTILE, family=HOSTILE, phase=HOSTILE),
            StudyRunConfig(path=tmp_path / "m", phase="p"),
        ],
        HOSTILE,
    )
    for page in (report_html(study, [], [], command=HOSTILE), explorer_html(study)):
        assert "<img src=x" not in page
        assert "alert(2)</script>" not in page
        assert "49" not in re.findall(r"<title>(.*?)</title>", page)[0]


def test_json_in_a_page_reads_back():
    value = {"label": HOSTILE, "line": "\u2028", "list": [1, None, 0.5]}
    text = str(as_json(value))
    assert "<" not in text
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json([float("nan")])


def test_the_table_of_heads_holds_every_head_once(whole):
    listed = head_list(whole)
    assert len(listed["layer"]) == len(listed["run"]) == 21 * 40
    assert [column["name"] for column in listed["columns"]][:3] == ["ap_fixed_overall", "explained_variance", "r_q"]
    first = whole.pc0.iloc[0]
    assert listed["values"][2][0] == pytest.approx(first["r_q"], rel=1e-4)


def test_tables_of_different_heads_are_put_side_by_side_without_losing_any():
    qk = pd.DataFrame({"model": "m", "family": "", "layer": [0, 0], "head": [0, 1], "pc": 0, "r_q": 0.5, "r_k": 0.5})
    rotated = pd.DataFrame({"model": "m", "family": "", "layer": [0, 1], "head": [1, 0], "r_k_a": [0.1, 0.2]})
    frame = head_frame(Study((StudyRun("m"),), {"qk": qk, "rotated": rotated}))
    assert frame[["layer", "head"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0]]
    assert frame["r_k_a"].isna().tolist() == [True, False, False]
    assert [metric.column for metric in metrics(frame)] == ["r_q", "r_k", "r_k_a"]


def test_a_run_at_each_window_is_a_view_with_the_tables_of_that_window(tmp_path):
    for name, window in (("short", 1024), ("long", 4096), ("long-at-1024", 1024)):
        write_model(tmp_path / name, name.removesuffix("-at-1024"), layers=2, heads=4, window=window, seed=window)
    entries = [StudyRunConfig(path=str(tmp_path / name)) for name in ("short", "long")]
    at_1024 = build([StudyRunConfig(path=str(tmp_path / "long-at-1024"), window=1024)])
    study = build(entries, other_windows=[at_1024])
    points = make_points(pd.DataFrame({"model": ["long"], "layer": 0, "head": 0}), 1024, np.random.default_rng(0))
    for at_common_window in (study, study.at[1024]):
        at_common_window.tables["points"] = points
    for whole, first in ((study.as_captured, 4096), (study, 1024)):
        found = {(view.label, view.window): view for view in views(whole)}
        assert sorted(found) == [("long", 1024), ("long", 4096), ("short", 1024)]
        assert next(view.window for view in views(whole) if view.label == "long") == first
        for (label, window), view in found.items():
            folder = tmp_path / (f"{label}-at-1024" if (label, window) == ("long", 1024) else label)
            rows = pd.read_parquet(folder / "rotated.parquet")
            np.testing.assert_array_equal(view.frame["bias_window"], rows["bias_window"])
            assert ("points" in view.tables) == ((label, window) == ("long", 1024))


# ---- points --------------------------------------------------------------------------------------


def unpacked(text: str, window: int) -> dict[str, dict[str, np.ndarray]]:
    """The page's script in Python."""
    blob = zlib.decompress(base64.b64decode(text))
    columns = len(WIDE) + COMPLEMENT_AXES
    ranges = np.frombuffer(blob, "<f4", 2 * columns)
    at = ranges.nbytes
    counts = np.frombuffer(blob, "<u2", 2, at)
    at += 4
    kinds: dict[str, dict[str, np.ndarray]] = {"q": {}, "k": {}}
    for kind, n in zip("qk", counts, strict=True):
        kinds[kind]["position"] = np.frombuffer(blob, "<u2", n, at) / 65535 * window
        at += 2 * n
        for c, name in enumerate(WIDE):
            kinds[kind][name] = ranges[2 * c] + ranges[2 * c + 1] * np.frombuffer(blob, "<u2", n, at)
            at += 2 * n
        kinds[kind]["word"] = np.frombuffer(blob, "<u2", n, at)
        at += 2 * n
    for kind, n in zip("qk", counts, strict=True):
        for c in range(COMPLEMENT_AXES):
            place = 2 * (len(WIDE) + c)
            kinds[kind][f"svd_{c}"] = ranges[place] + ranges[place + 1] * np.frombuffer(blob, "u1", n, at)
            at += n
    assert at == len(blob)
    return kinds


def test_points_survive_packing_to_their_resolution():
    points = make_points(pd.DataFrame({"model": ["m"], "layer": 0, "head": 0}), 4096, np.random.default_rng(0), rows=90)
    found = unpacked(packed(points, 4096, 500), 4096)
    for kind in "qk":
        part = points[points["kind"] == kind]
        np.testing.assert_allclose(found[kind]["position"], part["position"], atol=0.04)
        for name in WIDE:
            np.testing.assert_allclose(found[kind][name], part[name], atol=np.ptp(points[name]) / 65535)
        np.testing.assert_allclose(found[kind]["svd_3"], part["svd_3"], atol=np.ptp(points["svd_3"]) / 255)
    assert len(unpacked(packed(points, 4096, 40), 4096)["q"]["a"]) == 40
    assert not found["q"]["word"].any()


def test_points_say_which_word_they_are():
    points = make_points(pd.DataFrame({"model": ["m"], "layer": 0, "head": 0}), 4096, np.random.default_rng(0), rows=90)
    named = points.assign(token=[None if at % 7 == 0 else f"w{at % 5}" for at in points["position"]])
    vocabulary = point_words(named)
    assert vocabulary == ["", "w0", "w1", "w2", "w3", "w4"]
    found = unpacked(packed(named, 4096, 500, vocabulary), 4096)
    for kind in "qk":
        expected = named[named["kind"] == kind]["token"].fillna("").tolist()
        assert [vocabulary[number] for number in found[kind]["word"]] == expected
    assert point_words(points) == [""]


def test_points_without_a_complement_or_of_one_kind_are_packed_too():
    points = make_points(pd.DataFrame({"model": ["m"], "layer": 0, "head": 0}), 64, np.random.default_rng(0), rows=9)
    bare = points[points["kind"] == "q"].drop(columns=[f"svd_{i}" for i in range(60)])
    found = unpacked(packed(bare, 64, 500), 64)
    assert len(found["q"]["a"]) == 9
    assert len(found["k"]["a"]) == 0
    assert (found["q"]["svd_0"] == 0).all()


def test_a_page_of_many_heads_stays_within_its_budget():
    for heads in (1, 1000, 4000):
        per_head = 4 * 2 * (len(WIDE) + COMPLEMENT_AXES) + 4 + rows_per_kind(heads) * 2 * (12 + COMPLEMENT_AXES)
        assert heads * per_head * 4 / 3 < 12e6


def test_a_thousand_heads_fit_into_forty_megabytes(tmp_path):
    study = build([StudyRunConfig(path=write_model(tmp_path, "m", layers=25, heads=100, points=100))])
    assert len(explorer_html(study).encode()) < 40e6 / 10


def test_figures_are_part_of_the_page(tmp_path):
    study = build([StudyRunConfig(path=write_model(tmp_path / "m", "m", layers=2, heads=4))])
    written, left_out = write_figures(study, tmp_path / "figures", workers=1)
    page = report_html(study, written, left_out)
    versions = len(written) + sum(figure.folded is not None for figure in written)
    assert page.count("data:image/webp;base64,") == 2 * versions, "each once in both themes, also if a finding shows it"


def test_our_own_pages_may_be_replaced_and_no_others(tmp_path):
    page = tmp_path / "explorer.html"
    check_pages(page)
    for ours in ("<title>x · qkscope explorer</title>", "<title>x · qkscope</title>", GENERATOR.decode()):
        page.write_text(f"<!doctype html><head>{ours}</head>")
        check_pages(page)
    page.write_text("<!doctype html><title>Notes on qkscope</title>")
    with pytest.raises(TableError, match="was not written by qkscope"):
        check_pages(page)
    page.unlink()
    os.mkfifo(page)
    with pytest.raises(TableError, match="is not a regular file"):
        check_pages(page)
