"""Parquet files as frames, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from qkscope.errors import TableError

UNREADABLE = (OSError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, pa.ArrowException)
"""What pandas and Arrow raise over a file that is not what it seems, down to the notes that pandas leaves in it."""


def read_frame(path: Path) -> pd.DataFrame:
    """The file's content; a ``TableError`` says in a few words why there is none."""
    try:
        return pd.read_parquet(path)
    except UNREADABLE as error:
        raise TableError(" ".join(str(error).split())[:200] or type(error).__name__) from None
