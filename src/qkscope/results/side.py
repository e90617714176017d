"""Side tables: points, axes, passages and replicates, parquet files beside the tables, for pictures and comparisons."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from qkscope.core.headmoments import N_GROUPS
from qkscope.errors import TableError
from qkscope.files.atomic import finish, locked, write_together
from qkscope.files.readers import read_frame
from qkscope.headids import TERMS
from qkscope.results.frames import frame_bytes

TOKEN = "token"
_TEXTS = ("model", "kind", "axis", "text", "column", TOKEN)
"""Columns that do not contain numbers."""
_LONGEST = 4096
"""Tokens of a passage, at most."""
_NOT_OURS = "it was not written by qkscope, move it away"


@dataclass(frozen=True)
class SideTable:
    """A parquet file of a results folder that has no csv, and the rules for checking, merging and writing it."""

    name: str
    columns: tuple[str, ...]
    """Columns that it must have."""
    replaced_by: tuple[str, ...]
    """New rows replace all rows with the same values of these columns."""
    checked: Callable[[pd.DataFrame, Path], pd.DataFrame]
    """Returns the frame in the form that is used, or raises an error that says what is wrong."""
    encoded: Callable[[pd.DataFrame], bytes]

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{self.name}.parquet"

    def read(self, folder: Path) -> pd.DataFrame | None:
        """Return the rows written earlier, or None if there is no such file."""
        path = folder / self.file
        if not path.exists():
            return None
        try:
            frame = read_frame(path)
        except TableError as error:
            raise TableError(f"{path} cannot be read ({error}); move it away") from None
        missing = [name for name in self.columns if name not in frame]
        if missing:
            raise TableError(f"{path} has no column {', '.join(missing)}; {_NOT_OURS}")
        for name in frame:
            if name not in _TEXTS and not pd.api.types.is_numeric_dtype(frame[name]):
                raise TableError(f"{path}: column {name} must contain numbers; {_NOT_OURS}")
        return self.checked(frame, path)

    def content(self, folder: Path, new: Sequence[pd.DataFrame], changed: Collection[str] = ()) -> bytes:
        """Return the content of the folder's file with these rows replaced or added, and none of ``changed`` models."""
        old, keys, frames = self.read(folder), list(self.replaced_by), list(new)
        if old is not None:
            old = old[~old["model"].isin(list(changed))]
            for rows in new:
                replaced = pd.MultiIndex.from_frame(rows[keys].drop_duplicates())
                old = old[~pd.MultiIndex.from_frame(old[keys]).isin(replaced)]
            frames = [old, *frames]
        nonempty = [rows for rows in frames if len(rows)]
        return self.encoded(pd.concat(nonempty or frames[:1], ignore_index=True))

    def write(self, folder: Path, new: pd.DataFrame) -> None:
        """Replace or add rows of the folder's file."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):
                finish(folder)
                write_together(folder, {self.file: self.content(folder, [new])})
        except OSError as error:
            raise TableError(f"cannot write to {folder} ({error.strerror}); choose another results folder") from None


# ---- points: vectors of some heads on components, on a and b, and in the complement -----------------

_POINT = ("model", "layer", "head", "kind", "example_id", "position")


def _points_bytes(frame: pd.DataFrame) -> bytes:
    """Return the file with coordinates in order and, last, each token as text if it is known."""
    coordinates = sorted((str(name) for name in frame if name not in (*_POINT, TOKEN)), key=_coordinate)
    return frame_bytes(frame[[*_POINT, *coordinates, *([TOKEN] if TOKEN in frame else [])]])


def _coordinate(name: str) -> tuple[int, int, str]:
    """Sort principal components, then a and b, then the complement, each by number."""
    for rank, stem in ((0, "pc"), (2, "svd_")):
        number = name.removeprefix(stem)
        if name.startswith(stem) and number.isdecimal():
            return rank, int(number), ""
    return 1, 0, name


POINTS = SideTable("points", _POINT, ("model", "layer", "head"), lambda frame, _: frame, _points_bytes)

# ---- axes: the principal axes and a, b of every head ------------------------------------------------

_AXES = ("model", "layer", "head", "pc", "axis")


def _checked_axes(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    if not all(isinstance(axis, np.ndarray) and axis.dtype == np.float32 for axis in frame["axis"]):
        raise TableError(f"{path}: column axis must contain lists of numbers; move it away")
    return frame


def _axes_bytes(frame: pd.DataFrame) -> bytes:
    axes = pa.array([np.asarray(axis, dtype=np.float32) for axis in frame["axis"]], pa.list_(pa.float32()))
    table = pa.table({name: pa.array(frame[name]) for name in _AXES[:-1]} | {"axis": axes})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


AXES = SideTable("axes", _AXES, ("model",), _checked_axes, _axes_bytes)

# ---- passage: every score of a short text in four terms ---------------------------------------------

_PASSAGE = ("model", "layer", "head", "q_token", "k_token", "text", "unit", *TERMS)


def _checked_passages(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    if not np.isfinite(frame[[name for name in _PASSAGE if name not in ("model", "text")]]).all().all():
        raise TableError(f"{path}: expected finite numbers; {_NOT_OURS}")
    tokens = frame[["q_token", "k_token"]]
    if len(frame) and not ((tokens >= 0) & (tokens < _LONGEST)).all().all():
        raise TableError(f"{path}: tokens are counted from 0 and below {_LONGEST}; move it away")
    return frame[list(_PASSAGE)].assign(model=frame["model"].astype(str), text=frame["text"].astype(str))


PASSAGES = SideTable(
    "passage", _PASSAGE, ("model",), _checked_passages,
    lambda frame: frame_bytes(frame[list(_PASSAGE)].astype({"text": str})),
)  # fmt: skip

# ---- replicates: numbers per head with each document group left out, for comparing runs ---------------

WITHOUT = tuple(f"without_{group}" for group in range(N_GROUPS))
_REPLICATES = ("model", "layer", "head", "column", *WITHOUT)


def replicate_rows(heads: pd.DataFrame, replicates: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Return one row per head and column: the column's value without each document group (heads × groups)."""
    index = heads[["model", "layer", "head"]].reset_index(drop=True)
    parts = [
        pd.concat([index.assign(column=name), pd.DataFrame(values.astype(np.float32), columns=list(WITHOUT))], axis=1)
        for name, values in replicates.items()
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(_REPLICATES))


REPLICATES = SideTable(
    "replicates", _REPLICATES, ("model", "column"), lambda frame, _: frame[list(_REPLICATES)],
    lambda frame: frame_bytes(frame[list(_REPLICATES)]),
)  # fmt: skip

SIDE_TABLES = (POINTS, AXES, PASSAGES, REPLICATES)
