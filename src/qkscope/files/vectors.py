"""One head's vectors on disk: ``l{LL}h{HH}{q|k}/data.parquet``.

Columns: ``bucket``, ``example_id``, ``position`` (int32), ``vector`` (fixed_size_list of float32 or float16),
``sliding_window`` (int32 or null), ``token_str`` (string or null). Only ``example_id``, ``position``, ``vector`` and
the first value of ``sliding_window`` are used.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Int, Real

from qkscope.core.rows import Rows
from qkscope.errors import HeadError
from qkscope.files.atomic import atomic_path
from qkscope.files.readers import parquet_file
from qkscope.headids import HeadId

DATA_FILE = "data.parquet"
INT32 = 2**31
_READ = ("example_id", "position", "vector")
_COLUMNS = ("bucket", "example_id", "position", "vector", "sliding_window", "token_str")


def read_rows(path: Path, head: HeadId) -> Rows:
    """Read a head's rows in the order of the file, directly into one contiguous float32 or float64 array.

    Null vectors become rows of NaN, which are counted and dropped with the other non-finite rows.
    """
    table = _read_table(path, head)
    if table.num_rows == 0:
        raise HeadError(head, "the file has no rows; capture this head again or leave it out", path)
    try:
        return Rows(
            _vectors(table["vector"]),
            _integers(table, "position", lowest=0),
            _integers(table, "example_id", lowest=None),
        )
    except _Malformed as error:
        raise HeadError(head, str(error), path) from None


def read_sliding_window(path: Path) -> int | None:
    """The first value of ``sliding_window``; None if it is null or missing, or if the file cannot be read."""
    try:
        with parquet_file(path) as file:
            if "sliding_window" not in file.schema_arrow.names:
                return None
            batch = next(file.iter_batches(1, columns=["sliding_window"]), None)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return None  # the error is reported when the vectors are read
    value = batch[0][0].as_py() if batch is not None and len(batch) else None
    # pandas stores integers as floats if some are missing.
    return int(value) if isinstance(value, int | float) and 0 < value < INT32 else None


def read_token_texts(path: Path) -> pd.DataFrame:
    """``example_id``, ``position`` and ``token`` of the rows with the text of their token; empty if unreadable."""
    columns = ["example_id", "position", "token_str"]
    try:
        with parquet_file(path) as file:
            if not set(columns) <= set(file.schema_arrow.names):
                return no_token_texts()
            table = file.read(columns=columns, use_threads=False)
        frame = table.filter(table["token_str"].is_valid()).to_pandas().rename(columns={"token_str": "token"})
        texts = frame["token"].map(lambda text: text if isinstance(text, str) else None)
        typed = frame.astype({"example_id": "int64", "position": "int64"}).assign(token=texts)
    except (pa.ArrowException, OSError, UnicodeDecodeError, ValueError, TypeError):
        return no_token_texts()  # the error is reported when the vectors are read
    return typed.dropna().drop_duplicates(["example_id", "position"], ignore_index=True)


def no_token_texts() -> pd.DataFrame:
    """An empty token table."""
    return pd.DataFrame({"example_id": [], "position": [], "token": []}).astype({"example_id": int, "position": int})


def write_rows(
    path: Path,
    rows: Rows,
    *,
    bucket: Int[np.ndarray, "n"] | None = None,
    sliding_window: int | None = None,
    tokens: list[str | None] | None = None,
) -> None:
    """Write a head's rows in the dataset format, atomically; float16 vectors stay float16, others become float32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = token_columns(rows.position, rows.example_id, bucket=bucket, sliding_window=sliding_window, tokens=tokens)
    with atomic_path(path) as temporary:
        write_vectors(temporary, rows.x, columns)


def token_columns(
    position: Int[np.ndarray, "n"],
    example_id: Int[np.ndarray, "n"],
    *,
    bucket: Int[np.ndarray, "n"] | None = None,
    sliding_window: int | None = None,
    tokens: list[str | None] | None = None,
) -> dict[str, pa.Array]:
    """The columns besides the vectors; they are the same for all heads of a layer."""
    for name, numbers in (("position", position), ("example_id", example_id)):
        if len(numbers) and not -INT32 <= numbers.min() <= numbers.max() < INT32:
            raise ValueError(f"expected {name} within 32 bits, got {numbers.min()} to {numbers.max()}")
    n = len(position)
    return {
        "bucket": pa.array(np.zeros(n, np.int32) if bucket is None else bucket.astype(np.int32)),
        "example_id": pa.array(example_id.astype(np.int32)),
        "position": pa.array(position.astype(np.int32)),
        "sliding_window": pa.repeat(pa.scalar(sliding_window, pa.int32()), n),
        "token_str": pa.nulls(n, pa.string()) if tokens is None else pa.array(tokens, pa.string()),
    }


def write_vectors(path: Path, x: Real[np.ndarray, "n d"], columns: dict[str, pa.Array]) -> None:
    """Write vectors and the columns of their tokens, not atomically."""
    values = x if x.dtype == np.float16 else x.astype(np.float32, copy=False)
    vector = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), x.shape[-1])
    _write(path, pa.table({name: vector if name == "vector" else columns[name] for name in _COLUMNS}))


def has_token_texts(path: Path) -> bool:
    """True if the file stores the text of its tokens."""
    with parquet_file(path) as file:
        if "token_str" not in file.schema_arrow.names:
            return False
        return any(batch[0].null_count < len(batch) for batch in file.iter_batches(columns=["token_str"]))


def write_without_texts(source: Path, path: Path) -> None:
    """Write a copy of a file without the text of its tokens; not atomically."""
    with parquet_file(source) as file:
        table = file.read(use_threads=False)
    index = table.column_names.index("token_str")
    _write(path, table.set_column(index, "token_str", pa.nulls(len(table), pa.string())))


def _write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Vectors are split by byte: the first bytes compress well, and the last bytes of former float16 numbers are zero.
    with path.open("wb") as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=1,
            use_dictionary=[name for name in table.column_names if name != "vector"],
            write_statistics=False,
            column_encoding={"vector.list.element": "BYTE_STREAM_SPLIT"},
        )


class _Malformed(Exception):
    """Raised if a file can be read as parquet but its content is not valid."""


def _read_table(path: Path, head: HeadId) -> pa.Table:
    if not path.is_file():
        problem = "the path is not a regular file" if path.exists() else "the file is missing"
        raise HeadError(head, f"{problem}; download or capture it again", path)
    try:
        # A ParquetFile, unlike read_table, does not guess partitions from the folder names.
        with parquet_file(path) as file:
            missing = [name for name in _READ if name not in file.schema_arrow.names]
            repeated = [name for name in _READ if file.schema_arrow.names.count(name) > 1]
            if repeated:
                raise HeadError(head, f"the column {repeated[0]} appears more than once", path)
            if missing:
                columns = ", ".join(file.schema_arrow.names)
                raise HeadError(head, f"expected the columns {', '.join(_READ)}; got {columns}", path)
            return file.read(columns=list(_READ), use_threads=False)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: in column names
        reason = " ".join(str(error).split())
        raise HeadError(
            head, f"the file cannot be read as parquet ({reason}); download or capture it again", path
        ) from None


def _vectors(column: pa.ChunkedArray) -> Float[np.ndarray, "n d"]:
    """The vector column as one (n, d) array without a Python object per row."""
    column_type = column.type
    if not (
        pa.types.is_fixed_size_list(column_type) or pa.types.is_list(column_type) or pa.types.is_large_list(column_type)
    ):
        raise _Malformed(f"expected 'vector' to be a list of floats, got {column_type}")
    if not pa.types.is_floating(column_type.value_type):
        raise _Malformed(f"expected 'vector' to contain floats, got {column_type.value_type}")
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    d = _vector_length(array)
    valid = array.drop_null() if array.null_count else array
    flat = valid.flatten()
    values = flat.to_numpy(zero_copy_only=flat.null_count == 0)
    values = np.asarray(values, dtype=np.float32 if values.dtype == np.float16 else None).reshape(len(valid), d)
    if not array.null_count:
        return values
    full = np.full((len(array), d), np.nan, dtype=values.dtype)
    full[array.is_valid().to_numpy(zero_copy_only=False)] = values
    return full


def _vector_length(array: pa.Array) -> int:
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    lengths = np.unique(array.value_lengths().drop_null().to_numpy())
    if len(lengths) != 1:
        raise _Malformed(
            f"expected all vectors to have the same length, got lengths {', '.join(map(str, lengths[:5])) or 'none'}"
        )
    return int(lengths[0])


def _integers(table: pa.Table, name: str, lowest: int | None) -> Int[np.ndarray, "n"]:
    column = table[name]
    if not pa.types.is_integer(column.type):
        raise _Malformed(f"expected '{name}' to be integers, got {column.type}")
    if column.null_count:
        raise _Malformed(f"expected '{name}' in every row, got {column.null_count} nulls")
    values = column.to_numpy()
    if lowest is not None and values.min() < lowest:
        raise _Malformed(f"expected '{name}' of at least {lowest}, got {values.min()}")
    if not -INT32 <= int(values.min()) <= int(values.max()) < INT32:
        raise _Malformed(f"expected '{name}' within 32 bits, got {values.min()} to {values.max()}")
    return values.astype(np.int64)
