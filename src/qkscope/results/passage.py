"""passage.parquet: every score of a run's passage in four terms, as analyses/passage.py has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.errors import TableError
from qkscope.heads import TERMS
from qkscope.results.points import read_beside
from qkscope.results.tables import frame_bytes

PASSAGES_FILE = "passage.parquet"
_COLUMNS = ["model", "layer", "head", "q_token", "k_token", "text", "unit", *TERMS]
_LONGEST = 4096
"""Tokens of a passage, at most."""


def read_passages(folder: Path) -> pd.DataFrame | None:
    """The passages of all models of a results folder, or None."""
    path = folder / PASSAGES_FILE
    frame = read_beside(path, _COLUMNS)
    if frame is None:
        return None
    if not np.isfinite(frame[[name for name in _COLUMNS if name not in ("model", "text")]]).all().all():
        raise TableError(f"{path}: expected finite numbers; it was not written by qkscope, move it away")
    tokens = frame[["q_token", "k_token"]]
    if len(frame) and not ((tokens >= 0) & (tokens < _LONGEST)).all().all():
        raise TableError(f"{path}: tokens are counted from 0 and below {_LONGEST}; move it away")
    return frame[_COLUMNS].assign(model=frame["model"].astype(str), text=frame["text"].astype(str))


def passages_bytes(folder: Path, new: pd.DataFrame) -> bytes:
    """The content of the folder's file with the passages of these models replaced or added."""
    old = read_passages(folder)
    kept = [] if old is None else [old[~old["model"].isin(new["model"].unique())]]
    frame = pd.concat([*(rows for rows in kept if len(rows)), new[_COLUMNS].astype({"text": str})], ignore_index=True)
    return frame_bytes(frame)
