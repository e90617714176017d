"""Readers and bytes of every kind: good inputs with some bytes changed, cut, doubled; and what was found before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import TARGETS, check, seeds

FOUND = sorted((Path(__file__).parent / "found").glob("*/*"))
pytestmark = pytest.mark.filterwarnings("ignore")  # pandas' opinion of a table


@st.composite
def broken(draw: st.DrawFn, target: str) -> bytes:
    """A good input, changed in a few places; or anything at all."""
    data = bytearray(draw(st.sampled_from(seeds(target))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del data[at : at + draw(st.integers(1, 20))]
            case 2:
                data[at:at] = data[at : at + draw(st.integers(1, 20))]
            case 3:
                data[at:at] = draw(
                    st.sampled_from([b"-1", b"1e400", b"null", b"[", b"{", b'"', b"\x00", b"999999999999", b"\xff"])
                )
            case 4:
                data = bytearray(draw(st.binary(max_size=64))) if draw(st.booleans()) else data[:at]
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_whatever_is_read_it_is_an_error_of_ours_or_none(target):
    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=broken(target))
    def reads(data: bytes) -> None:
        check(target, data)

    reads()


@pytest.mark.parametrize("target", TARGETS)
def test_a_good_input_is_read(target):
    for seed in seeds(target):
        check(target, seed)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_before(path):
    check(path.parent.name.replace("_", " "), path.read_bytes())
