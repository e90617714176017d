import re

import pandas as pd
import pytest
from matplotlib.figure import Figure

from qkscope.config import StudyRunConfig
from qkscope.errors import TableError
from qkscope.figures.catalogue import CATALOGUE, FIGURES_BY_NAME, PUBLISHED
from qkscope.figures.figure import NotApplicable
from qkscope.figures.style import house_style, plain, shortened
from qkscope.figures.write import png_and_svg, save, write_figures
from qkscope.results.study import build
from tests.studies import published_shape, write_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return published_shape(tmp_path_factory.mktemp("study"), heads=60)


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
        "audit/02_same_weights",
    ]
    missing = {one.name for one in left_out}
    assert [one.name for one in written] == [figure.name for figure in CATALOGUE if figure.name not in missing]
    assert counted[0] == (0, 29)
    assert counted[-1] == (29, 29)
    for one in written:
        place = folder / one.name
        assert sorted(p.name for p in place.iterdir()) == ["README.md", "data.csv", "figure.png", "figure.svg"]
        assert (place / "figure.png").read_bytes() == one.png
        assert "<text" in (place / "figure.svg").read_text()
        readme = (place / "README.md").read_text()
        assert all(sentence in readme for sentence in one.says)
        assert one.says
        assert "qkscope report s.yaml" in readme
        assert "qwen3-0.6b (Qwen3)" in readme
        data, prepared = pd.read_csv(place / "data.csv"), FIGURES_BY_NAME[one.name].prepare(whole)
        assert list(data.columns) == list(prepared.columns)
        assert len(data) == len(prepared)


@pytest.mark.parametrize("name", ["qk-pca/02_rq_vs_rk_scatter", "qk-rotation/07_bias_vs_separation"])
def test_drawing_again_gives_the_same_bytes(drawn, whole, name):
    folder, *_ = drawn
    with house_style():
        again = FIGURES_BY_NAME[name].draw(FIGURES_BY_NAME[name].prepare(whole))
        for form, content in zip(("png", "svg"), png_and_svg(again), strict=True):
            assert (folder / name / f"figure.{form}").read_bytes() == content


def test_one_model_of_one_head_draws_what_applies(tmp_path):
    study = build([StudyRunConfig(path=write_model(tmp_path / "m", "m", layers=1, heads=1, points=1))])
    written, left_out = write_figures(study, tmp_path / "figures", workers=1)
    assert len(written) == 16
    reasons = {one.reason for one in left_out if one.name.startswith("qk-")}
    assert reasons == {
        "the study has no ordered checkpoints (runs with a phase or a step)",
        "there is one run, so there is nothing to put beside it; its numbers are in the table",
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
        "front/01_hero",
    ]
    assert "explained_variance (qk.csv)" in next(one.reason for one in left_out if "05_" in one.name)


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
    assert len(written) == 27
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
    from qkscope.figures.write import _readme

    text = _readme("A figure", "It shows.", ["<script>x</script> is first."], "- <img src=x>", pd.DataFrame({"x": [1]}))
    assert "<script>" not in text
    assert "<img" not in text
    assert "&lt;script>x&lt;/script> is first." in text
