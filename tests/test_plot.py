import numpy as np
import pytest
from matplotlib.figure import Figure

import qkscope
from tests.helpers import small_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return qkscope.open(small_dataset(tmp_path_factory.mktemp("d") / "tiny"))


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


def test_pictures_of_the_heads_named(run):
    two = qkscope.plot.ab_plane(run, heads=[(0, 1), (1, 3)])
    assert titles(two) == ["layer 0, head 1", "layer 1, head 3"]
    assert two.get_suptitle() == "tiny", "the model once, not above every panel"
    assert titles(qkscope.plot.pc_plane(run, [(1, 0)], pcs=(2, 0))) == ["tiny · layer 1, head 0"]
    assert len(titles(qkscope.plot.complement(run, (0, 0)))) == 3


def test_without_heads_the_published_seed_draws_four(run):
    assert len(titles(qkscope.plot.ab_plane(run))) == 4
    assert qkscope.plot.draw_heads(run) == qkscope.plot.draw_heads(run, seed=42)


def bars(figure: Figure) -> dict[str, tuple[float, float]]:
    """Label and ends of every colour bar."""
    return {axes.get_xlabel(): axes.get_xlim() for axes in figure.axes if "position" in axes.get_xlabel()}


@pytest.mark.parametrize("draw", [qkscope.plot.ab_plane, qkscope.plot.pc_plane])
def test_colour_bars_are_in_tokens_or_from_0_to_1(run, draw):
    in_tokens = bars(draw(run, [(0, 1)]))
    assert list(in_tokens) == ["queries: position", "keys: position"]
    assert all(high > 400 for _, high in in_tokens.values())
    assert bars(draw(run, [(0, 1)], scaled_positions=True)) == {
        "queries: scaled position": (0, 1),
        "keys: scaled position": (0, 1),
    }


def test_colours_are_shares_of_the_window_where_it_is_known(tmp_path):
    run = qkscope.open(small_dataset(tmp_path / "wide", layers=1), window=5120)
    tokens, shares = (
        qkscope.plot.ab_plane(run, [(0, 0)], scaled_positions=scaled).axes[0].collections[0].get_facecolors()
        for scaled in (False, True)
    )
    assert tokens.shape == shares.shape
    assert shares[:, 1].min() > tokens[:, 1].min() + 0.1, "a tenth of the window is light"


def test_the_complement_is_coloured_by_the_turn_of_its_planes_or_by_scaled_positions(run):
    turning = qkscope.plot.complement(run, (0, 0))
    assert any("turn of the plane's own frequency" in axes.get_xlabel() for axes in turning.axes)
    assert set(bars(qkscope.plot.complement(run, (0, 0), scaled_positions=True))) == {
        "queries: scaled position",
        "keys: scaled position",
    }


def test_a_head_that_is_not_there(run):
    with pytest.raises(qkscope.QkscopeError, match="tiny has no head l09h00"):
        qkscope.plot.ab_plane(run, heads=[(9, 0)])


def test_a_map_has_one_cell_per_head(run):
    figure = qkscope.plot.map(run, "posvar_q")
    (image,) = figure.axes[0].images
    heads = qkscope.heads(run, intervals=False).sort_values(["layer", "head"])
    np.testing.assert_allclose(image.get_array().ravel(), heads["posvar_q"])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["0", "1"]
    assert figure.axes[1].get_xlabel() == "posvar_q (share)"
    with pytest.raises(qkscope.QkscopeError, match="heads have no number 'posvarq'; did you mean posvar_q"):
        qkscope.plot.map(run, "posvarq")


def test_curves_of_some_heads_are_those_of_the_table(tmp_path):
    run = qkscope.open(small_dataset(tmp_path / "d", layers=1), rope={"theta": 10_000.0})
    figure = qkscope.plot.distance(run, [(0, 2), (0, 0)])
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == ["layer 0, head 2", "layer 0, head 0"]
    table = qkscope.distance(run).query("head == 2")
    np.testing.assert_allclose(figure.axes[0].lines[-1].get_ydata(), table["predicted"])
    assert len(qkscope.plot.distance(run).axes) == 4
    with pytest.raises(qkscope.QkscopeError, match="d has no distance curve of layer 3, head 1"):
        qkscope.plot.distance(run, [(3, 1)])


def test_a_run_may_be_given_by_its_folder_or_its_results(tmp_path):
    folder = str(small_dataset(tmp_path / "tiny", layers=1))
    qkscope.analyze(qkscope.open(folder, rope={"theta": 10_000.0}), tmp_path / "tables")
    for location in (folder, tmp_path / "tables"):
        assert len(qkscope.plot.map(location, "posvar_q").axes) == 2
        assert isinstance(qkscope.plot.card(location, (0, 1)), Figure)
    assert titles(qkscope.plot.ab_plane(folder, heads=[(0, 1)])) == ["tiny · layer 0, head 1"]
    qkscope.analyze(qkscope.open(folder, model="other"), tmp_path / "tables")
    with pytest.raises(qkscope.QkscopeError, match=r"contains .*, .*; give a folder with the tables of one"):
        qkscope.plot.map(tmp_path / "tables", "posvar_q")


def test_a_notebook_shows_a_figure_that_pyplot_does_not_know(run):
    assert qkscope.plot.ab_plane(run, heads=[(0, 0)])._repr_png_().startswith(b"\x89PNG")
