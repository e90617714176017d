import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope.core.rows import Rows
from qkscope.errors import HeadError
from qkscope.files.vectors import read_rows, write_rows
from qkscope.headids import HeadId

HEAD = HeadId(5, 13, "q")


def table(vector: pa.Array, **columns: object) -> pa.Table:
    n = len(vector)
    base = {"example_id": np.arange(n, dtype=np.int32), "position": np.arange(n, dtype=np.int32)}
    return pa.table({**base, "vector": vector, **columns})


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 50), st.integers(1, 9), st.sampled_from([np.float16, np.float32]), st.integers(0, 99))
def test_rows_round_trip(tmp_path_factory, n, d, dtype, seed):
    rng = np.random.default_rng(seed)
    rows = Rows(rng.standard_normal((n, d)).astype(dtype), rng.integers(0, 2**31, n), rng.integers(0, 999, n))
    path = tmp_path_factory.mktemp("rows") / "l05h13q" / "data.parquet"
    write_rows(path, rows, sliding_window=512, tokens=["a"] * n)
    back = read_rows(path, HEAD)
    np.testing.assert_array_equal(back.x, rows.x)
    np.testing.assert_array_equal(back.position, rows.position)
    np.testing.assert_array_equal(back.example_id, rows.example_id)
    assert back.x.dtype == np.float32
    assert [p.name for p in path.parent.iterdir()] == ["data.parquet"]


def test_the_file_has_the_published_columns_and_no_dictionary_on_vectors(tmp_path):
    write_rows(tmp_path / "data.parquet", Rows(np.ones((4, 3)), np.arange(4), np.arange(4)))
    file = pq.ParquetFile(tmp_path / "data.parquet")
    fields = {field.name: str(field.type) for field in file.schema_arrow}
    assert fields == {
        "bucket": "int32",
        "example_id": "int32",
        "position": "int32",
        "vector": "fixed_size_list<element: float>[3]",
        "sliding_window": "int32",
        "token_str": "string",
    }
    assert not any("DICT" in e for e in file.metadata.row_group(0).column(3).encodings)


@pytest.mark.parametrize(
    "column",
    [
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float16)), 2),
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float64)), 2),
        pa.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], pa.list_(pa.float32())),
        pa.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], pa.large_list(pa.float64())),
    ],
)
def test_other_captures_encodings_are_read(tmp_path, column):
    pq.write_table(table(column), tmp_path / "data.parquet")
    np.testing.assert_array_equal(read_rows(tmp_path / "data.parquet", HEAD).x, [[0, 1], [2, 3], [4, 5]])


def test_row_groups_are_joined(tmp_path):
    x = np.arange(200, dtype=np.float32).reshape(100, 2)
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 2)
    pq.write_table(table(column), tmp_path / "data.parquet", row_group_size=7)
    np.testing.assert_array_equal(read_rows(tmp_path / "data.parquet", HEAD).x, x)


def test_null_vectors_become_rows_that_are_not_finite(tmp_path):
    column = pa.array([[0.0, 1.0], None, [4.0, 5.0], [None, 1.0]], pa.list_(pa.float32()))
    pq.write_table(table(column), tmp_path / "data.parquet")
    rows = read_rows(tmp_path / "data.parquet", HEAD)
    np.testing.assert_array_equal(np.isfinite(rows.x).all(1), [True, False, True, False])
    np.testing.assert_array_equal(rows.finite().position, [0, 2])


GOOD = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4, dtype=np.float32)), 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (table(pa.array([[1.0], [1.0, 2.0]])), "expected all vectors to have the same length, got lengths 1, 2"),
        (table(pa.array([[1], [2]], pa.list_(pa.int32()))), "expected 'vector' to contain floats, got int32"),
        (table(pa.array(["a", "b"])), "expected 'vector' to be a list of floats, got string"),
        (table(GOOD, position=pa.array([0, -3])), "expected 'position' of at least 0, got -3"),
        (table(GOOD, position=pa.array([0.0, 1.0])), "expected 'position' to be integers, got double"),
        (table(GOOD, example_id=pa.array([0, None])), "expected 'example_id' in every row, got 1 nulls"),
        (table(GOOD).drop_columns(["position"]), "expected the columns example_id, position, vector; got"),
        (table(GOOD).slice(0, 0), "the file has no rows"),
        (b"PAR1 and then nothing", "the file cannot be read as parquet"),
        (b"", "the file cannot be read as parquet"),
        (None, "the file is missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line_with_head_and_file(tmp_path, content, message):
    path = tmp_path / "l05h13q" / "data.parquet"
    path.parent.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        pq.write_table(content, path)
    with pytest.raises(HeadError) as caught:
        read_rows(path, HEAD)
    text = str(caught.value)
    assert text.startswith(f"l05h13q: {message}")
    assert text.endswith(f"[{path}]")
    assert "\n" not in text
