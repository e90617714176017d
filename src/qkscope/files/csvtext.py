"""Tables as csv: numbers as they are, and no text that a spreadsheet would take for a formula."""

from __future__ import annotations

import pandas as pd

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_bytes(frame: pd.DataFrame, float_format: str | None = None) -> bytes:
    """The csv file of a table; text that begins like a formula gets an apostrophe in front.

    >>> csv_bytes(pd.DataFrame({"model": ["=1+1", "llama"], "r": [-0.5, 1.0]})).decode().splitlines()
    ['model,r', "'=1+1,-0.5", 'llama,1.0']
    """
    texts = [name for name in frame if not (pd.api.types.is_numeric_dtype(frame[name]))]
    guarded = frame.assign(**{str(name): frame[name].map(_guarded) for name in texts})
    return guarded.to_csv(index=False, float_format=float_format).encode()


def _guarded(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
