"""Reading of files that may be damaged or hostile: regular files only, of limited size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from qkscope.errors import TableError

LARGEST = 1e100
"""No analysis gives a number beyond this one."""
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


def read_json(path: Path) -> Any:
    """The content of a JSON file whose numbers are finite and of 64 bits; errors as of ``read_text``."""
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


def read_frame(path: Path) -> pd.DataFrame:
    """The content of a parquet file; a ``TableError`` says in a few words why it cannot be read."""
    try:
        return pd.read_parquet(path)
    except UNREADABLE as error:
        raise TableError(" ".join(str(error).split())[:200] or type(error).__name__) from None
