"""Readers and bytes of every kind: good inputs with some bytes changed, cut, doubled; and what was found before."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import TARGETS, check, seeds


def noted(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A table whose notes by pandas, which say what its columns are, were changed."""
    table = pq.read_table(io.BytesIO(seeds("table parquet")[0]))
    notes = json.loads(table.schema.metadata[b"pandas"])
    change(notes)
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({b"pandas": json.dumps(notes).encode()}), buffer)
    return buffer.getvalue()


def badly_spelt() -> bytes:
    """A table with a label that is no text."""
    table = pq.read_table(io.BytesIO(seeds("table parquet")[0]))
    words = pa.StringArray.from_buffers(
        2, pa.py_buffer(np.array([0, 2, 4], np.int32)), pa.py_buffer(b"\xff\xfe\xff\xfe")
    )
    buffer = io.BytesIO()
    pq.write_table(table.set_column(table.column_names.index("model"), "model", words), buffer)
    return buffer.getvalue()


FOUND: dict[str, tuple[tuple[str, ...], Callable[[], bytes]]] = {
    "a column's name that is not UTF-8": (
        ("parquet", "table parquet", "own table", "texts parquet"),
        lambda: seeds("parquet")[0].replace(b"example_id", b"ex\x9dmple_id"),
    ),
    "notes without a column's type": (
        ("table parquet", "own table", "points", "axes"),
        lambda: noted(lambda notes: [column.pop("pandas_type") for column in notes["columns"]]),
    ),
    "notes without a column's other type": (
        ("table parquet", "own table", "points", "axes"),
        lambda: noted(lambda notes: [column.pop("numpy_type") for column in notes["columns"]]),
    ),
    "notes of columns without a name": (
        ("table parquet", "own table", "points", "axes"),
        lambda: noted(lambda notes: [column.pop("name") for column in notes["columns"]]),
    ),
    "notes of a type that is none": (
        ("table parquet", "own table", "points", "axes"),
        lambda: noted(lambda notes: notes["column_indexes"][0].update(pandas_type="umicode")),
    ),
    "text that is not UTF-8": (("table parquet", "own table", "points", "axes"), badly_spelt),
    "an index too large for 64 bits": (
        ("table",),
        lambda: b"model,layer,head,r_q_a\nm,99999999999999999999999,1,0.5\n",
    ),
}
"""What atheris and hypothesis found before, and in which readers."""


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


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_before(what):
    targets, made = FOUND[what]
    for target in targets:
        check(target, made())


def test_no_size_that_a_file_claims_takes_more_than_two_gib():
    done = alone("-m", "tests.sizes", "--footers", "40")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" 0 findings") == len(TARGETS)


def test_a_process_that_asks_for_more_gets_an_error():
    code = "import numpy; from tests.sizes import limit_addresses; limit_addresses(0.5); numpy.ones(2**{})"
    assert alone("-c", code.format(20)).returncode == 0
    assert "MemoryError" in alone("-c", code.format(27)).stderr


def alone(*given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *given], capture_output=True, text=True, check=False)
