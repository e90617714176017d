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
    assert titles(qkscope.plot.ab_plane(run, heads=[(0, 1), (1, 3)])) == [
        "tiny · layer 0, head 1",
        "tiny · layer 1, head 3",
    ]
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
    assert any("frequency has turned" in axes.get_xlabel() for axes in turning.axes)
    assert set(bars(qkscope.plot.complement(run, (0, 0), scaled_positions=True))) == {
        "queries: scaled position",
        "keys: scaled position",
    }


def test_a_head_that_is_not_there(run):
    with pytest.raises(qkscope.QkscopeError, match="tiny has no head l09h00"):
        qkscope.plot.ab_plane(run, heads=[(9, 0)])
