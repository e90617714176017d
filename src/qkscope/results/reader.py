"""Reading a results folder: tables of qkscope, or of another program with only the columns that a figure needs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.catalogue import DECLARED_TABLES
from qkscope.analyses.tabulate import heads_from
from qkscope.core.linalg import SIGN_ANCHOR
from qkscope.errors import TableError
from qkscope.files.atomic import settle
from qkscope.files.readers import LARGEST, UNREADABLE, read_frame, read_json, read_text
from qkscope.results.frames import PUBLISHED
from qkscope.results.schema import KEYS, MEASURED, TABLES
from qkscope.results.side import PASSAGES, SIDE_TABLES
from qkscope.results.summary import SUMMARY, foreign_rows

TABLES_FOLDER = "tables"
"""Folder of a captured run that keeps its tables, and of a report that keeps those of its runs."""
MOST = 10_000
"""Layers of a model, heads of a layer and other things that are counted, at most, as in a manifest."""
INDICES = tuple(
    dict.fromkeys(column.name for table in DECLARED_TABLES for column in TABLES[table] if column.unit == "index")
)
"""Columns with indices that start at 0."""
TEXT_COLUMNS = frozenset(
    ["kind", *(c.name for table in (*DECLARED_TABLES, *MEASURED) for c in TABLES[table] if c.dtype == "text")]
)
TRUTHS = frozenset(column.name for table in DECLARED_TABLES for column in TABLES[table] if column.unit == "true/false")
_NUMBERS = {True: 1.0, False: 0.0, "True": 1.0, "False": 0.0, "true": 1.0, "false": 0.0}
"""Booleans of parquet and csv files as numbers; anything else is NaN."""


@dataclass(frozen=True)
class Folder:
    """The tables of a results folder."""

    path: Path
    tables: dict[str, pd.DataFrame]
    summary: dict[str, Any]

    @property
    def models(self) -> list[str]:
        """Models in order of appearance."""
        labels = (str(model) for frame in self.tables.values() for model in frame["model"].unique())
        return list(dict.fromkeys(labels))

    def of(self, model: str, label: str) -> Folder:
        """The tables of one model alone, under another label."""
        rows = {name: frame[frame["model"] == model].assign(model=label) for name, frame in self.tables.items()}
        return Folder(self.path, rows, {label: self.summary[model]} if model in self.summary else {})


def is_results(path: Path) -> bool:
    """Return True if a folder contains tables."""
    settle(path)
    return any((path / f"{name}.{suffix}").is_file() for name in DECLARED_TABLES for suffix in ("parquet", "csv"))


def results_folders(path: Path) -> list[Path]:
    """Return the results folders at a path: itself, or those of a report's runs; empty if there are none."""
    if is_results(path):
        return [path]
    inside = path / TABLES_FOLDER
    return [folder for folder in sorted(inside.iterdir()) if is_results(folder)] if inside.is_dir() else []


def read_folder(path: Path) -> Folder:
    """Read all existing tables: the parquet file, or else the csv file."""
    settle(path)
    tables = {name: frame for name in (*DECLARED_TABLES, *MEASURED) if (frame := _read(path, name)) is not None}
    heads = heads_from(tables)
    if "heads" not in tables and heads is not None:
        tables["heads"] = heads
    if not tables:
        raise TableError(
            f"{path} contains none of {', '.join(f'{name}.csv' for name in DECLARED_TABLES)}; analyse a run first"
        )
    tables |= {side.name: frame for side in SIDE_TABLES if (frame := side.read(path)) is not None}
    summary = _summary(path)
    problems = foreign_tables(path, tables, summary)
    if problems:
        raise TableError(problems[0])
    return Folder(path, tables, summary)


def foreign_tables(path: Path, tables: Mapping[str, pd.DataFrame], models: Mapping[str, Any]) -> list[str]:
    """Return a line for each table of interventions or passages with rows that the folder's summary does not record."""
    labels = {
        name: label
        for name in (*MEASURED, PASSAGES.name)
        if name in tables and (label := foreign_rows(models, name, tables[name])) is not None
    }
    return [
        f"{path} has rows of {label} in {name} that {SUMMARY} does not record: they were changed, or copied from "
        f"another folder; move {name} away, or write them again"
        for name, label in labels.items()
    ]


def _read(path: Path, name: str) -> pd.DataFrame | None:
    parquet, csv = path / f"{name}.parquet", path / f"{name}.csv"
    file = parquet if parquet.is_file() else csv
    if not file.is_file():
        return None
    try:
        frame = read_frame(file) if file is parquet else pd.read_csv(io.StringIO(read_text(file)), low_memory=False)
    except (TableError, *UNREADABLE) as error:
        raise TableError(f"{file} cannot be read as a table ({' '.join(str(error).split())})") from None
    required = DECLARED_TABLES[name].required if name in DECLARED_TABLES else KEYS[name]
    missing = [column for column in required if column not in frame]
    if missing:
        raise TableError(f"{file} has no column {', '.join(missing)}, which is required")
    try:
        frame = frame.rename(columns={old: name for name, old in PUBLISHED.items() if name not in frame})
        return _checked(_typed(frame, file, path), name, file) if len(frame) else None
    except TableError:
        raise
    except UNREADABLE as error:  # invalid UTF-8 raises only on access
        raise TableError(f"{file} cannot be read as a table ({' '.join(str(error).split())})") from None


def _checked(frame: pd.DataFrame, name: str, file: Path) -> pd.DataFrame:
    """Check the indices and that each head occurs once; drop impossible numbers; apply the sign rule."""
    for column in [name for name in INDICES if name in frame]:
        outside = [x for x in (frame[column].min(), frame[column].max()) if not 0 <= x < MOST]
        if outside:
            raise TableError(
                f"{file}: column {column} contains {outside[0]}; layers and heads are counted from 0, up to {MOST:,}"
            )
    keys = ["model", *(key for key in KEYS[name] if key in frame)]
    duplicates = frame[frame.duplicated(keys)]
    if len(duplicates):
        row = duplicates.iloc[0]
        head = ", ".join(f"{key} {row[key]}" for key in keys if key in ("model", "layer", "head"))
        raise TableError(f"{file} has {head} more than once")
    absurd = frame.select_dtypes("float64").abs() > LARGEST
    for column in absurd.columns[absurd.any()]:
        frame[column] = frame[column].mask(absurd[column])
    if name == "qk":
        sign = np.where(frame["r_q"] <= -SIGN_ANCHOR, -1.0, 1.0)
        frame = frame.assign(r_q=frame["r_q"] * sign, r_k=frame["r_k"] * sign)
    return frame


def _typed(frame: pd.DataFrame, file: Path, path: Path) -> pd.DataFrame:
    """Labels as text, indices as integers, all other columns as numbers; columns that are not numeric are dropped."""
    frame = frame.assign(model=frame["model"].astype(str) if "model" in frame else path.absolute().name)
    for column in INDICES:
        if column in frame:
            try:
                frame[column] = _integers(pd.to_numeric(frame[column]))
            except (ValueError, TypeError, OverflowError) as error:
                raise TableError(f"{file}: column {column} must contain integers ({error})") from None
    columns = {}
    for column in frame.columns:
        if column in TEXT_COLUMNS or column in INDICES:
            columns[column] = frame[column]
            continue
        if column in TRUTHS:
            columns[column] = frame[column].astype(object).map(_NUMBERS).astype("float64")
            continue
        try:
            columns[column] = pd.to_numeric(frame[column]).astype("float64")
        except (ValueError, TypeError):
            continue  # not numeric, so not a column of qkscope
    return pd.DataFrame(columns)


def _integers(column: pd.Series) -> pd.Series:
    if not (column == column.round()).all():
        raise ValueError(f"got {column[column != column.round()].iloc[0]}")
    return column.astype("int64")


def _summary(path: Path) -> dict[str, Any]:
    try:
        models = read_json(path / SUMMARY)["models"]
        return models if isinstance(models, dict) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}  # a folder of another program has no summary; tables are enough
