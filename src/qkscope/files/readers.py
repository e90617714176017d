"""Files from outside, read with care: regular ones only, of bounded size, and tables whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from qkscope.errors import TableError

MOST_TEXT = 2**30
"""Bytes beyond which a file of text is none of ours."""
UNREADABLE = (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, pa.ArrowException)
"""What pandas and Arrow raise over a file that is not what it seems, down to the notes that pandas leaves in it."""


def check_regular(path: Path) -> None:
    """Raise an ``OSError`` unless there is a regular file, or a link to one: a pipe would be read without end."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")


def read_text(path: Path) -> str:
    """The text of a regular file; an ``OSError`` or a ``ValueError`` says why there is none."""
    check_regular(path)
    if path.stat().st_size > MOST_TEXT:
        raise ValueError("it exceeds the 1 GiB limit")
    return path.read_text(encoding="utf-8")


def read_frame(path: Path) -> pd.DataFrame:
    """The content of a parquet file; a ``TableError`` says in a few words why there is none."""
    try:
        return pd.read_parquet(path)
    except UNREADABLE as error:
        raise TableError(" ".join(str(error).split())[:200] or type(error).__name__) from None
