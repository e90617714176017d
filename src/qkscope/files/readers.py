"""Reading of files that may be damaged or hostile: regular files only, of limited size."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from qkscope.errors import TableError

MOST_TEXT = 2**30
"""Largest text file that is read, in bytes."""
UNREADABLE = (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, pa.ArrowException)
"""What pandas and Arrow raise on a damaged file, including damaged metadata of pandas."""


def check_regular(path: Path) -> None:
    """Raise an ``OSError`` for anything but a regular file or a link to one: reading a pipe would never end."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")


def read_text(path: Path) -> str:
    """The text of a regular file; an ``OSError`` or a ``ValueError`` says why it cannot be read."""
    check_regular(path)
    if path.stat().st_size > MOST_TEXT:
        raise ValueError("it exceeds the 1 GiB limit")
    return path.read_text(encoding="utf-8")


def read_frame(path: Path) -> pd.DataFrame:
    """The content of a parquet file; a ``TableError`` says in a few words why it cannot be read."""
    try:
        return pd.read_parquet(path)
    except UNREADABLE as error:
        raise TableError(" ".join(str(error).split())[:200] or type(error).__name__) from None
