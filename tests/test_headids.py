import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkscope.headids import HeadId


@given(st.integers(0, 9_999), st.integers(0, 9_999), st.sampled_from("qk"))
def test_names_round_trip(layer, head, kind):
    assert HeadId.parse(str(HeadId(layer, head, kind))) == HeadId(layer, head, kind)


@pytest.mark.parametrize(
    "name", ["", "l05h13", "l05h13v", "xl05h13q", "l05h13q/", "l-1h00q", "l٣h00q", "../l05h13q", "l12345h00q"]
)
def test_other_names_are_not_heads(name):
    assert HeadId.match(name) is None
    with pytest.raises(ValueError, match="expected a head name"):
        HeadId.parse(name)


def test_heads_sort_by_layer_then_head_as_numbers():
    names = ["l10h02q", "l02h11q", "l02h03q", "l100h00q"]
    assert [str(h) for h in sorted(map(HeadId.parse, names))] == ["l02h03q", "l02h11q", "l10h02q", "l100h00q"]


@pytest.mark.parametrize(("head", "ratio", "key"), [(0, 3, 0), (2, 3, 0), (23, 3, 7), (39, 5, 7), (5, 1, 5)])
def test_query_heads_read_consecutive_key_heads(head, ratio, key):
    assert HeadId(4, head, "q").key_head(ratio) == HeadId(4, key, "k")
