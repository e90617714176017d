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


def test_a_head_that_is_not_there(run):
    with pytest.raises(qkscope.QkscopeError, match="tiny has no head l09h00"):
        qkscope.plot.ab_plane(run, heads=[(9, 0)])
