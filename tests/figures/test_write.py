import io
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from qkscope.config import StudyRunConfig
from qkscope.errors import TableError
from qkscope.figures.catalogue import CATALOGUE, FIGURES_BY_NAME, PUBLISHED
from qkscope.figures.figure import NotApplicable, window_of
from qkscope.figures.style import house_style, plain, shortened
from qkscope.figures.write import pictures, save, write_figures
from qkscope.results.study import Study, build
from tests.studies import published_shape, write_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return published_shape(tmp_path_factory.mktemp("study"), heads=60, points=1)


@pytest.fixture(scope="module")
def drawn(whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    counted = []
    written, left_out = write_figures(
        whole, folder, command="qkscope report s.yaml", on_done=lambda *n: counted.append(n)
    )
    return folder, written, left_out, counted


def test_the_catalogue_is_the_published_one():
    names = [figure.name for figure in PUBLISHED]
    assert CATALOGUE[:22] == PUBLISHED
    assert len(names) == len(set(names)) == 22
    numbers = [re.match(r"(qk-pca|qk-rotation)/(\d\d)_", name).groups() for name in names]
    assert numbers == [("qk-pca", f"{i:02d}") for i in range(1, 13)] + [
        ("qk-rotation", f"{i:02d}") for i in range(1, 11)
    ]


def test_every_figure_is_a_folder_of_four_files(drawn, whole):
    folder, written, left_out, counted = drawn
    assert [one.name for one in left_out] == [
        "rope/01_plane_spectrum",
        "distance/01_distance_curves",
        "distance/02_curves_by_depth",
        "cause/01_score_terms",
        "cause/02_effects",
        "cause/03_descriptions",
        "cause/04_reach",
        "cause/05_cut_cost",
        "cause/06_roles",
        "audit/02_same_weights",
        "front/01_hero",
    ]
    missing = {one.name for one in left_out}
    assert [one.name for one in written] == [figure.name for figure in CATALOGUE if figure.name not in missing]
    assert counted[0] == (0, 28)
    assert counted[-1] == (28, 28)
    for one in written:
        place = folder / one.name
        files = ["README.md", "data.csv", "figure-dark.png", "figure.png", "figure.svg"]
        if one.folded is not None:
            end = one.folded.suffix
            files += [f"data-{end}.csv", *(f"figure-{end}{form}" for form in (".png", "-dark.png", ".svg"))]
        assert sorted(p.name for p in place.iterdir()) == sorted(files)
        assert (place / "figure.png").read_bytes() == one.png
        assert (place / "figure-dark.png").read_bytes() == one.dark
        assert "<text" in (place / "figure.svg").read_text()
        readme = (place / "README.md").read_text()
        assert all(sentence in readme for sentence in one.says)
        assert one.says
        assert "qkscope report s.yaml" in readme
        assert readme.rstrip().endswith(one.says[0])
        data, prepared = pd.read_csv(place / "data.csv"), FIGURES_BY_NAME[one.name].prepared(whole)
        for label in whole.labels:
            assert (f"- {label} (" in readme) == (label in set(prepared["model"])), "the runs that are drawn, no others"
        assert list(data.columns) == list(prepared.columns)
        assert len(data) == len(prepared)


@pytest.mark.parametrize("name", ["qk-pca/02_rq_vs_rk_scatter", "qk-rotation/07_bias_vs_separation"])
def test_drawing_again_gives_the_same_bytes(drawn, whole, name):
    folder, *_ = drawn
    with house_style():
        again = FIGURES_BY_NAME[name].draw(FIGURES_BY_NAME[name].prepare(whole))
        data = FIGURES_BY_NAME[name].prepared(whole)
        for file, content in zip(("figure.png", "figure.svg", "figure-dark.png"), pictures(again, window_of(data)),
                                 strict=True):  # fmt: skip
            assert (folder / name / file).read_bytes() == content


BROKEN = re.compile(
    r"\bnan\b|(?<![\d.,])1 (heads|layers|tokens|documents)\b|  |\.\.(?!\.)| [,.;:]|[?!]\."
    r"|(falls|rises|fell|rose) by [-+]|in 0(\.0)?% of (the )?heads|\b1 have\b|Median: median"
    r"|\[1\.00, 1\.00\]|\[\+1\.00, \+1\.00\]"
)
"""Wordings of numbers that a template leaves broken."""


def told(written) -> list[str]:
    parts = [one.folded for one in written if one.folded is not None]
    return [sentence for one in [*written, *parts] for sentence in (*one.says, one.shows, one.title)]


def test_sentences_are_whole_whatever_the_numbers_are(drawn, tmp_path):
    alone = build([StudyRunConfig(path=write_model(tmp_path / "m", "m", layers=1, heads=1, points=1))])
    one, _ = write_figures(alone, tmp_path / "figures", workers=1)
    for sentence in told(drawn[1]) + told(one):
        assert not BROKEN.search(sentence), sentence
        assert sentence[0].isupper() or sentence[0].isdigit() or ":" in sentence, sentence


@dataclass(frozen=True)
class AtOneWindow(Study):
    """A study at one window that knows its runs at their own."""

    own: Study | None = None


def windowed(tmp_path: Path) -> AtOneWindow:
    """Two checkpoints at a window of 1,024, whose own windows are 1,024 and 4,096."""
    runs = {name: write_model(tmp_path / name, "m", layers=2, heads=8, window=window, seed=seed)
            for name, window, seed in (("a", 1024, 0), ("b", 4096, 1), ("b-at-1024", 1024, 2))}  # fmt: skip
    fields = {"a": {"phase": "p", "step": 1}, "b": {"phase": "q", "step": 2}}
    entries = {name: [StudyRunConfig(path=runs[path], label=name, window=window, **fields[name])
                      for name, path, window in paths]
               for name, paths in (("one", (("a", "a", 1024), ("b", "b-at-1024", 1024))),
                                   ("own", (("a", "a", 1024), ("b", "b", 4096))))}  # fmt: skip
    one, own = build(entries["one"]), build(entries["own"])
    return AtOneWindow(one.runs, one.tables, own=replace(own, compare_at=None))


def test_figures_of_training_have_a_version_at_own_windows(tmp_path):
    study = windowed(tmp_path)
    written, _ = write_figures(study, tmp_path / "figures", workers=1)
    folded = {one.name: one.folded for one in written if one.folded is not None}
    assert set(folded) == {
        *(f"qk-pca/{name}" for name in ("07_position_signal", "08_taxonomy_evolution", "10_checkpoint_heatmap_rq",
                                        "09_explained_variance_over_training", "11_checkpoint_heatmap_rk",
                                        "12_phase_portraits")),
        "qk-rotation/09_training_trajectory", "qk-rotation/10_bias_decomposition",
    }  # fmt: skip
    for one in written:
        assert one.window == "window of 1,024 tokens"
        assert one.title.endswith("(window of 1,024 tokens)")
        assert one.shows.endswith("Drawn at a window of 1,024 tokens.")
        assert set(pd.read_csv(tmp_path / "figures" / one.name / "data.csv")["window"]) == {1024}
    for name, figure in folded.items():
        assert figure.title.endswith(", each run at its own window (windows of 1,024 to 4,096 tokens)")
        place = tmp_path / "figures" / name
        assert set(pd.read_csv(place / "data-own-windows.csv")["window"]) == {1024, 4096}
        assert (place / "figure-own-windows-dark.png").read_bytes() == figure.dark != figure.png
        readme = (place / "README.md").read_text()
        assert "![](figure-own-windows.png)" in readme
        assert all(sentence in readme for sentence in figure.says)


def test_without_other_windows_there_is_one_version(drawn):
    assert {one.name for one in drawn[1] if one.folded is not None} == {"qk-rotation/08_complement_collage"}


def luminance(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"), dtype=float) / 255


def test_dark_pictures_are_dark_and_show_as_much(drawn):
    """The ground is dark; what stood out from white stands out from it: the same pixels, about as many of them."""
    for one in drawn[1]:
        light, dark = luminance(one.png), luminance(one.dark)
        assert light.shape == dark.shape
        assert np.median(dark[:3]) < 0.12 < 0.9 < np.median(light[:3]), one.name
        shown, still_shown = np.abs(light - 1) > 0.45, np.abs(dark - np.median(dark[:3])) > 0.2
        assert (still_shown & shown).sum() > 0.8 * shown.sum(), one.name


def test_one_model_of_one_head_draws_what_applies(tmp_path):
    study = build([StudyRunConfig(path=write_model(tmp_path / "m", "m", layers=1, heads=1, points=1))])
    written, left_out = write_figures(study, tmp_path / "figures", workers=1)
    assert len(written) == 14
    reasons = {one.reason for one in left_out if one.name.startswith("qk-")}
    assert reasons == {
        "the study has no ordered checkpoints (runs with a phase or a step)",
        "there is one run, so there is nothing to put beside it; its numbers are in the table",
        "there is one model, so no families to compare",
    }


def test_somebody_elses_columns_draw_what_they_allow(tmp_path):
    frame = pd.DataFrame({"model": "m", "layer": [0, 1], "head": 0, "pc": 0, "r_q": [0.5, 0.6], "r_k": [-0.4, 0.2]})
    frame.to_csv(tmp_path / "qk.csv", index=False)
    written, left_out = write_figures(build([StudyRunConfig(path=tmp_path)]), tmp_path / "figures", workers=1)
    assert [one.name for one in written] == [
        "qk-pca/01_pc_roles",
        "qk-pca/02_rq_vs_rk_scatter",
        "qk-pca/03_layer_heatmap_rq",
        "qk-pca/04_layer_heatmap_rk",
    ]
    assert "explained_variance (qk.csv)" in next(one.reason for one in left_out if "05_" in one.name)


@pytest.mark.slow
def test_labels_are_text_however_odd(tmp_path):
    odd = r"$\frac{1}{0}$ <img src=x onerror=alert(1)> " + "x" * 60
    entries = [
        StudyRunConfig(
            path=write_model(tmp_path / str(i), "m", layers=4, heads=8, points=4, seed=i),
            label=f"{odd}{i}",
            family=odd,
            phase=odd if i else None,
        )
        for i in range(3)
    ]
    written, _ = write_figures(build(entries), tmp_path / "figures", workers=1)
    assert len(written) == 25
    assert plain("$") == r"\$"
    assert shortened("x" * 60).endswith("…")


@pytest.mark.parametrize("figure", CATALOGUE, ids=lambda figure: figure.name)
def test_a_figure_that_does_not_apply_says_so(figure):
    with pytest.raises(NotApplicable, match=r"\w"):
        figure.prepare(build_empty())


def build_empty():
    from qkscope.results.study import Study, StudyRun

    return Study((StudyRun("m"),), {})


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_figure_is_saved_by_its_extension(tmp_path, suffix):
    with house_style():
        figure = Figure()
        figure.subplots().plot([0, 1])
        save(figure, tmp_path / "new" / f"x.{suffix}")
    start = (tmp_path / "new" / f"x.{suffix}").read_bytes()[:5]
    assert start.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])


def test_other_extensions_are_refused(tmp_path):
    with pytest.raises(TableError, match=r"ends in .png, .svg or .pdf"):
        save(Figure(), tmp_path / "x.jpg")


def test_labels_are_no_tags_in_a_readme():
    from qkscope.figures.write import WrittenFigure, _readme, _Task

    written = WrittenFigure("a/b", "A figure", "It shows.", ["<script>x</script> is first."], b"", b"", "")
    data = pd.DataFrame({"model": ["<img src=x>"], "x": 1})
    text = _readme(written, _Task("a/b", Path(), data, None, "", {}))
    assert "<script>" not in text
    assert "<img" not in text
    assert "&lt;script>x&lt;/script> is first." in text
