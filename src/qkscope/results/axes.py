"""axes.parquet: the principal axes of every head, used to follow them from one checkpoint to the next.

Columns: model, layer, head, pc, axis (a list of float32); one set of rows per model.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from qkscope.errors import TableError
from qkscope.results.points import read_beside

AXES_FILE = "axes.parquet"
_COLUMNS = ["model", "layer", "head", "pc", "axis"]


def read_axes(folder: Path) -> pd.DataFrame | None:
    """The axes written earlier, or None."""
    frame = read_beside(folder / AXES_FILE, _COLUMNS)
    if frame is not None and not all(isinstance(a, np.ndarray) and a.dtype == np.float32 for a in frame["axis"]):
        raise TableError(f"{folder / AXES_FILE}: column axis must contain lists of numbers; move it away")
    return frame


def axes_bytes(folder: Path, new: pd.DataFrame) -> bytes:
    """The content of the folder's axes file with the axes of these models replaced or added."""
    old = read_axes(folder)
    other_models = [] if old is None else [old[~old["model"].isin(new["model"].unique())]]
    frame = pd.concat([rows for rows in (*other_models, new) if len(rows)], ignore_index=True)
    table = pa.table(
        {name: pa.array(frame[name]) for name in _COLUMNS[:-1]}
        | {"axis": pa.array([np.asarray(axis, dtype=np.float32) for axis in frame["axis"]], pa.list_(pa.float32()))}
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
