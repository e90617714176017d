"""A results folder as it is read: our tables, or somebody else's with only the columns that a figure draws."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.catalogue import DECLARED_TABLES
from qkscope.analyses.scalars import heads_from
from qkscope.core.linalg import SIGN_ANCHOR
from qkscope.errors import TableError
from qkscope.files.readers import UNREADABLE, read_frame, read_text
from qkscope.results.axes import read_axes
from qkscope.results.points import read_points
from qkscope.results.schema import KEYS, TABLES, TEXTS
from qkscope.results.summary import SUMMARY

VECTOR_FILES = ("points", "axes")
"""What a results folder may hold beside tables."""
INDICES = frozenset(column.name for table in DECLARED_TABLES for column in TABLES[table] if column.unit == "index")
"""Columns that count something from 0."""
TRUTHS = frozenset(column.name for table in DECLARED_TABLES for column in TABLES[table] if column.unit == "true/false")
_NUMBERS = {True: 1.0, False: 0.0, "True": 1.0, "False": 0.0, "true": 1.0, "false": 0.0}
"""Truth values as numbers, as parquet and csv spell them; anything else is not known."""


@dataclass(frozen=True)
class Folder:
    """The tables of a results folder as they are."""

    path: Path
    tables: dict[str, pd.DataFrame]
    summary: dict[str, Any]

    @property
    def models(self) -> list[str]:
        """Models in order of appearance."""
        seen = (str(model) for frame in self.tables.values() for model in frame["model"].unique())
        return list(dict.fromkeys(seen))


def is_results(path: Path) -> bool:
    """Whether a folder holds tables."""
    return any((path / f"{name}.{suffix}").is_file() for name in DECLARED_TABLES for suffix in ("parquet", "csv"))


def read_folder(path: Path) -> Folder:
    """Read what tables there are: the parquet file, or else the csv."""
    tables = {name: frame for name in DECLARED_TABLES if (frame := _read(path, name)) is not None}
    told = heads_from(tables)
    if "heads" not in tables and told is not None:
        tables["heads"] = told
    if not tables:
        raise TableError(
            f"{path} holds none of {', '.join(f'{name}.csv' for name in DECLARED_TABLES)}; analyse a run first"
        )
    vectors = {"points": read_points(path), "axes": read_axes(path)}
    known = {name: frame for name, frame in vectors.items() if frame is not None}
    return Folder(path, tables | known, _summary(path))


def _read(path: Path, name: str) -> pd.DataFrame | None:
    parquet, csv = path / f"{name}.parquet", path / f"{name}.csv"
    file = parquet if parquet.is_file() else csv
    if not file.is_file():
        return None
    try:
        frame = read_frame(file) if file is parquet else pd.read_csv(file, low_memory=False)
    except (TableError, *UNREADABLE) as error:
        raise TableError(f"{file} cannot be read as a table ({' '.join(str(error).split())})") from None
    missing = [column for column in DECLARED_TABLES[name].required if column not in frame]
    if missing:
        raise TableError(f"{file} has no column {', '.join(missing)}, which a table of heads needs")
    try:
        return _checked(_typed(frame, file, path), name, file) if len(frame) else None
    except TableError:
        raise
    except UNREADABLE as error:  # text that is none shows itself only when it is looked at
        raise TableError(f"{file} cannot be read as a table ({' '.join(str(error).split())})") from None


def _checked(frame: pd.DataFrame, name: str, file: Path) -> pd.DataFrame:
    """Each head once; indices from 0; infinities as what they are, not known; signs as the sign rule has them."""
    for column in INDICES:
        if column in frame and frame[column].min() < 0:
            raise TableError(f"{file}: column {column} holds {frame[column].min()}; layers and heads count from 0")
    keys = ["model", *(key for key in KEYS[name] if key in frame)]
    twice = frame[frame.duplicated(keys)]
    if len(twice):
        row = twice.iloc[0]
        what = ", ".join(f"{key} {row[key]}" for key in keys if key in ("model", "layer", "head"))
        raise TableError(f"{file} has {what} more than once")
    frame = frame.replace([np.inf, -np.inf], np.nan)
    if name == "qk":
        turned = np.where(frame["r_q"] <= -SIGN_ANCHOR, -1.0, 1.0)
        frame = frame.assign(r_q=frame["r_q"] * turned, r_k=frame["r_k"] * turned)
    return frame


def _typed(frame: pd.DataFrame, file: Path, path: Path) -> pd.DataFrame:
    """Labels as text, indices as integers, everything that describes a head as numbers."""
    frame = frame.assign(model=frame["model"].astype(str) if "model" in frame else path.absolute().name)
    for column in INDICES:
        if column in frame:
            try:
                frame[column] = _whole(pd.to_numeric(frame[column]))
            except (ValueError, TypeError, OverflowError) as error:
                raise TableError(f"{file}: column {column} should hold whole numbers ({error})") from None
    kept = {}
    for column in frame.columns:
        if column in TEXTS or column == "kind" or column in INDICES:
            kept[column] = frame[column]
            continue
        if column in TRUTHS:
            kept[column] = frame[column].astype(object).map(_NUMBERS).astype("float64")
            continue
        try:
            kept[column] = pd.to_numeric(frame[column]).astype("float64")
        except (ValueError, TypeError):
            continue  # not a number, so not one of ours
    return pd.DataFrame(kept)


def _whole(column: pd.Series) -> pd.Series:
    if not (column == column.round()).all():
        raise ValueError(f"found {column[column != column.round()].iloc[0]}")
    return column.astype("int64")


def _summary(path: Path) -> dict[str, Any]:
    try:
        models = json.loads(read_text(path / SUMMARY))["models"]
        return models if isinstance(models, dict) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}  # a foreign folder has none, and tables are enough
