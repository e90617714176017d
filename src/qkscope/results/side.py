"""Files beside the tables: points.parquet, axes.parquet and passage.parquet, which figures and the explorer read.

Columns: model, layer, head, kind (q or k), example_id, position, then float32 coordinates: pc0, pc1 (and others that
were requested), a, b, svd_0 … svd_59 (fewer if the head has fewer dimensions or fewer were requested); last, if it is
known, token: the token as text.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from qkscope.errors import TableError
from qkscope.files.atomic import finish, locked, write_together
from qkscope.files.readers import read_frame
from qkscope.heads import TERMS
from qkscope.results.frames import frame_bytes

POINTS_FILE = "points.parquet"
POINT_KEYS = ["model", "layer", "head"]
TOKEN = "token"
_OTHERS = ("model", "kind", "axis", "text", TOKEN)
"""Columns that do not contain numbers."""
_INDEX = [*POINT_KEYS, "kind", "example_id", "position"]


def read_points(folder: Path) -> pd.DataFrame | None:
    """The points written earlier, or None."""
    return read_beside(folder / POINTS_FILE, _INDEX)


def read_beside(path: Path, columns: list[str]) -> pd.DataFrame | None:
    """A parquet file of a results folder that is not a table, with at least these columns; None if missing."""
    if not path.exists():
        return None
    try:
        frame = read_frame(path)
    except TableError as error:
        raise TableError(f"{path} cannot be read ({error}); move it away") from None
    missing = [name for name in columns if name not in frame]
    if missing:
        raise TableError(f"{path} has no column {', '.join(missing)}; it was not written by qkscope, move it away")
    for name in frame:
        if name not in _OTHERS and not pd.api.types.is_numeric_dtype(frame[name]):
            raise TableError(f"{path}: column {name} must contain numbers; it was not written by qkscope, move it away")
    return frame


def points_bytes(folder: Path, new: pd.DataFrame) -> bytes:
    """The content of the folder's points file with the points of these heads replaced or added."""
    old = read_points(folder)
    frames = [new] if old is None else [_rows_to_keep(old, new), new]
    frame = pd.concat([rows for rows in frames if len(rows)], ignore_index=True)
    coordinates = [str(name) for name in frame if name not in (*_INDEX, TOKEN)]
    last = [TOKEN] if TOKEN in frame else []
    return frame_bytes(frame[[*_INDEX, *sorted(coordinates, key=_order), *last]])


def write_points(folder: Path, new: pd.DataFrame) -> None:
    """Replace or add the points of these heads."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            finish(folder)
            write_together(folder, {POINTS_FILE: points_bytes(folder, new)})
    except OSError as error:
        raise TableError(f"cannot write to {folder} ({error.strerror}); choose another results folder") from None


def _rows_to_keep(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    replaced = pd.MultiIndex.from_frame(new[POINT_KEYS].drop_duplicates())
    return old[~pd.MultiIndex.from_frame(old[POINT_KEYS]).isin(replaced)]


def _order(name: str) -> tuple[int, int, str]:
    """Principal components, then a and b, then the complement, each by number."""
    for rank, stem in ((0, "pc"), (2, "svd_")):
        number = name.removeprefix(stem)
        if name.startswith(stem) and number.isdecimal():
            return rank, int(number), ""
    return 1, 0, name


AXES_FILE = "axes.parquet"
_AXES_COLUMNS = ["model", "layer", "head", "pc", "axis"]


def read_axes(folder: Path) -> pd.DataFrame | None:
    """The axes written earlier, or None."""
    frame = read_beside(folder / AXES_FILE, _AXES_COLUMNS)
    if frame is not None and not all(isinstance(a, np.ndarray) and a.dtype == np.float32 for a in frame["axis"]):
        raise TableError(f"{folder / AXES_FILE}: column axis must contain lists of numbers; move it away")
    return frame


def axes_bytes(folder: Path, new: pd.DataFrame) -> bytes:
    """The content of the folder's axes file with the axes of these models replaced or added."""
    old = read_axes(folder)
    other_models = [] if old is None else [old[~old["model"].isin(new["model"].unique())]]
    frame = pd.concat([rows for rows in (*other_models, new) if len(rows)], ignore_index=True)
    table = pa.table(
        {name: pa.array(frame[name]) for name in _AXES_COLUMNS[:-1]}
        | {"axis": pa.array([np.asarray(axis, dtype=np.float32) for axis in frame["axis"]], pa.list_(pa.float32()))}
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


PASSAGES_FILE = "passage.parquet"
_PASSAGE_COLUMNS = ["model", "layer", "head", "q_token", "k_token", "text", "unit", *TERMS]
_LONGEST = 4096
"""Tokens of a passage, at most."""


def read_passages(folder: Path) -> pd.DataFrame | None:
    """The passages of all models of a results folder, or None."""
    path = folder / PASSAGES_FILE
    frame = read_beside(path, _PASSAGE_COLUMNS)
    if frame is None:
        return None
    if not np.isfinite(frame[[name for name in _PASSAGE_COLUMNS if name not in ("model", "text")]]).all().all():
        raise TableError(f"{path}: expected finite numbers; it was not written by qkscope, move it away")
    tokens = frame[["q_token", "k_token"]]
    if len(frame) and not ((tokens >= 0) & (tokens < _LONGEST)).all().all():
        raise TableError(f"{path}: tokens are counted from 0 and below {_LONGEST}; move it away")
    return frame[_PASSAGE_COLUMNS].assign(model=frame["model"].astype(str), text=frame["text"].astype(str))


def passages_bytes(folder: Path, new: pd.DataFrame) -> bytes:
    """The content of the folder's file with the passages of these models replaced or added."""
    old = read_passages(folder)
    kept = [] if old is None else [old[~old["model"].isin(new["model"].unique())]]
    frame = pd.concat(
        [*(rows for rows in kept if len(rows)), new[_PASSAGE_COLUMNS].astype({"text": str})], ignore_index=True
    )
    return frame_bytes(frame)
