"""Tables as parquet and csv files: written, read, and in the order of the schema."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import csv

from qkscope.errors import TableError
from qkscope.files.atomic import write_together
from qkscope.files.readers import LARGEST, UNREADABLE, read_frame
from qkscope.results.schema import KEYS, TABLES, TEXTS, column_names

PUBLISHED = {"taxonomy_published": "taxonomy"}
"""Columns as qk.csv of the published command lines names them; parquet files have the same names always."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_QUOTED = re.compile(r'[",\r\n]')


def csv_bytes(frame: pd.DataFrame, float_format: str | None = None) -> bytes:
    """The csv file of a table; text that begins like a formula gets an apostrophe in front.

    >>> csv_bytes(pd.DataFrame({"model": ["=1+1", "llama"], "r": [-0.5, 1.0]})).decode().splitlines()
    ['model,r', "'=1+1,-0.5", 'llama,1']
    """
    texts = [name for name in frame if not (pd.api.types.is_numeric_dtype(frame[name]))]
    cells = {name: pd.unique(frame[name]) for name in texts}
    guarded = frame.assign(**{str(name): frame[name].replace(_guarded(cells[name])) for name in texts})
    if float_format is not None or any(_QUOTED.search(str(cell)) for name in texts for cell in (name, *cells[name])):
        return guarded.to_csv(index=False, float_format=float_format).encode()
    buffer = io.BytesIO(f"{','.join(map(str, frame))}\n".encode())
    buffer.seek(0, io.SEEK_END)
    plain = csv.WriteOptions(include_header=False, quoting_style="none")
    csv.write_csv(pa.Table.from_pandas(guarded, preserve_index=False), buffer, plain)
    return buffer.getvalue()


def _guarded(cells: Iterable[object]) -> dict[object, str]:
    """Texts that begin like a formula, with an apostrophe in front."""
    return {cell: f"'{cell}" for cell in cells if isinstance(cell, str) and cell.startswith(_FORMULA)}


def arranged(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with exactly the table's columns in their order, its rows sorted."""
    names = column_names(table)
    if set(frame.columns) != set(names):
        mismatched = sorted(set(frame.columns) ^ set(names))
        further = f" and {len(mismatched) - 3} more" if len(mismatched) > 3 else ""
        raise TableError(f"{table}: unexpected or missing columns: {', '.join(mismatched[:3])}{further}")
    ordered = frame[names].sort_values(["model", *KEYS[table]], kind="stable", ignore_index=True)
    return ordered.astype({column.name: column.dtype for column in TABLES[table] if column.dtype not in ("", "text")})


def empty_table(table: str) -> pd.DataFrame:
    """The table without rows."""
    return arranged(table, pd.DataFrame(columns=column_names(table)))


def read_table(folder: Path, table: str) -> pd.DataFrame | None:
    """A table written earlier, or None if there is none; a table with other columns is an error."""
    path = folder / f"{table}.parquet"
    if not path.exists():
        if (folder / f"{table}.csv").exists():
            reason = f"{folder / table}.csv exists without {path.name}, so it was not written by qkscope"
            raise TableError(f"{reason}; move it away or write elsewhere")
        return None
    try:
        return _numeric(arranged(table, read_frame(path)))
    except (TableError, *UNREADABLE) as error:
        reason = " ".join(str(error).split())
        raise TableError(
            f"{path} was not written by this version ({reason}); move it away or write elsewhere"
        ) from None


def _numeric(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame, if all columns except labels are numeric or boolean."""
    for name in frame.columns.difference(list(TEXTS)):
        if not (pd.api.types.is_numeric_dtype(frame[name]) or frame[name].isna().all()):
            raise TableError(f"column {name} must contain numbers")
        if pd.api.types.is_float_dtype(frame[name]) and (frame[name].abs() > LARGEST).any():
            raise TableError(f"column {name} contains {frame[name].abs().max():.3g}")
    return frame


def frame_bytes(frame: pd.DataFrame) -> bytes:
    """A frame as a parquet file."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False, compression="zstd")
    return buffer.getvalue()


def write_tables(
    folder: Path,
    frames: Mapping[str, pd.DataFrame],
    other_files: Mapping[str, bytes],
    *,
    published: bool = False,
) -> list[Path]:
    """Write each table as parquet and csv, and other files; if killed, either all old or all new files remain.

    With ``published``, qk.csv has the names of the published command lines.
    """
    contents: dict[str, bytes] = {}
    for table, frame in frames.items():
        ordered = arranged(table, frame)
        contents[f"{table}.parquet"] = frame_bytes(ordered)
        contents[f"{table}.csv"] = csv_bytes(
            ordered.rename(columns=PUBLISHED) if published and table == "qk" else ordered
        )
    try:
        write_together(folder, contents | dict(other_files))
    except OSError as error:
        raise TableError(f"cannot write to {folder} ({error.strerror}); free space or choose another folder") from None
    return [folder / name for name in contents if name.endswith(".csv")]
