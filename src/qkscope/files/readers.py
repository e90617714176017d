"""Read files that may be damaged or hostile: regular files only, of limited size."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from qkscope.errors import TableError

LARGEST = 1e100
"""Largest absolute value that an analysis may write."""
MOST_GIB = "QKSCOPE_MOST_GIB"
"""Environment variable: the number of GiB that a parquet file may unpack to, instead of the limits below."""
_MOST = 16 * 2**30
_SUSPECT, _DENSE = 2**28, 1000
"""A file is refused if it unpacks to more bytes than the first number and to this many times its size."""
MOST_TEXT = 2**30
"""Largest text file that is read, in bytes."""
UNREADABLE = (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, pa.ArrowException)
"""The errors that pandas and Arrow raise for a damaged file, including damaged pandas metadata."""


def check_regular(path: Path) -> None:
    """Raise an ``OSError`` unless a path is a regular file or a link to one: reading a pipe would never end."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")


def read_text(path: Path) -> str:
    """The text of a regular file; an ``OSError`` or a ``ValueError`` says why it cannot be read."""
    check_regular(path)
    if path.stat().st_size > MOST_TEXT:
        raise ValueError("it exceeds the 1 GiB limit")
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> Any:
    """The content of a JSON file whose numbers are finite and of 64 bits; errors as for ``read_text``."""
    return json.loads(read_text(path), parse_int=_integer, parse_float=_finite, parse_constant=_finite)


def _integer(digits: str) -> int:
    if len(digits) > 19:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:20]}")
    return number


@contextmanager
def parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a parquet file; an ``OSError`` if it would fill the memory, according to its footer."""
    check_regular(path)
    with pq.ParquetFile(path) as file:
        _check_unpacked_size(file.metadata, path.stat().st_size)
        yield file


def _check_unpacked_size(footer: pq.FileMetaData, size: int) -> None:
    """Raise an error if a file unpacks to more than the limit, or to far more than its size suggests."""
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    # Not by column: pyarrow ends the process at some columns' metadata that it raises an error for when it reads them.
    unpacked = sum(max(group.total_byte_size, 8 * group.num_rows * group.num_columns) for group in groups)
    limit = os.environ.get(MOST_GIB, "")
    if limit.isdecimal():
        is_too_large = unpacked > int(limit) * 2**30
    else:
        is_too_large = unpacked > _MOST or (unpacked > _SUSPECT and unpacked > _DENSE * size)
    if is_too_large:
        raise OSError(
            f"it unpacks to {unpacked / 2**30:.1f} GiB from {size:,} bytes; if that is expected, set {MOST_GIB} higher"
        )


def read_frame(path: Path) -> pd.DataFrame:
    """The content of a parquet file; a ``TableError`` says briefly why it cannot be read."""
    try:
        with parquet_file(path) as file:
            return file.read(use_pandas_metadata=True).to_pandas()
    except UNREADABLE as error:
        raise TableError(" ".join(str(error).split())[:200] or type(error).__name__) from None
