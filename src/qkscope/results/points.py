"""points.parquet: vectors of selected heads on the axes that figures show; one set of rows per model and head.

Columns: model, layer, head, kind (q or k), example_id, position, then float32 coordinates: pc0, pc1 (and others that
were requested), a, b, svd_0 … svd_59 (fewer if the head has fewer dimensions or fewer were requested); last, if it is
known, token: the token as text.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from qkscope.errors import TableError
from qkscope.files.atomic import finish, locked, write_together
from qkscope.files.readers import read_frame
from qkscope.results.tables import frame_bytes

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
