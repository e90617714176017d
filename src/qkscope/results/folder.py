"""A results folder: tables with one set of rows per model, and a summary of how they were computed.

Analysing a model again replaces its rows and leaves those of other models unchanged, so that a study can be
computed model by model into one folder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from qkscope.analyses.catalogue import ANALYSES, DECLARED_TABLES, SCALARS
from qkscope.analyses.pca import HEADS_TABLE
from qkscope.analyses.tabulate import with_scalars
from qkscope.errors import TableError
from qkscope.files.atomic import check_writable, finish, locked, remove_leftovers, settle, write_together
from qkscope.results.derived import derived_tables
from qkscope.results.frames import read_table, write_tables
from qkscope.results.schema import TABLES
from qkscope.results.side import AXES, PASSAGES, REPLICATES, SIDE_TABLES
from qkscope.results.summary import (
    MEASURED_OF,
    SUMMARY,
    ModelResults,
    is_other,
    other_measured,
    read_summary,
    record_rows,
    summary_bytes,
    updated_summary,
)

_OURS = re.compile(
    "|".join(re.escape(name) for table in TABLES for name in (f"{table}.csv", f"{table}.parquet"))
    + "|".join(["", *map(re.escape, (*(side.file for side in SIDE_TABLES), SUMMARY))])
)
"""Names of the files that qkscope writes into a results folder."""


def result_files(folder: Path) -> list[str]:
    """Names of the files in a results folder that qkscope writes; other files are not listed."""
    settle(folder)
    return sorted(path.name for path in folder.iterdir() if path.is_file() and _OURS.fullmatch(path.name))


def check_results_folder(
    folder: Path, runs: Mapping[str, Mapping[str, object]] | None = None, analyses: Collection[str] = ()
) -> None:
    """Raise before the computation if writing would fail after it: a folder or table that must not be replaced.

    ``runs`` are the identities of the runs to analyse, by label, and ``analyses`` what is computed of them.
    """
    check_writable(folder)
    settle(folder)
    for name in TABLES:
        if (folder / f"{name}.csv").is_dir() or (folder / f"{name}.parquet").is_dir():
            raise TableError(f"{folder / name}.csv or .parquet is a folder; move it away or write elsewhere")
        read_table(folder, name)
    for side in SIDE_TABLES:
        side.read(folder)
    tables = {table.name for analysis in ANALYSES if analysis.name in analyses for table in analysis.tables}
    known = read_summary(folder)["models"]
    for label, source in (runs or {}).items():
        if label in known:
            check_one_run(folder, label, source, tables)


def check_one_run(folder: Path, label: str, source: Mapping[str, object], written: Collection[str]) -> None:
    """Raise an error if rows of another run, or of other weights, would remain under this label.

    ``source`` identifies the run; rows of the tables in ``written`` are replaced.
    """
    entry = read_summary(folder)["models"].get(label, {})
    kept = [name for name in DECLARED_TABLES if name not in written] if is_other(entry, source, "digest") else []
    foreign = [name for name in kept if (old := read_table(folder, name)) is not None and label in set(old["model"])]
    foreign += other_measured(entry, source)
    if foreign:
        raise TableError(
            f"{folder} has {', '.join(foreign)} of {label} from another run; write elsewhere, or give one of them "
            "another label"
        )


def write_folder(
    folder: Path, results: Sequence[ModelResults], *, wall_seconds: float, published: bool = False
) -> list[Path]:
    """Write tables and summary.json; returns the csv files. With ``published``, qk.csv has the published names."""
    if not results:
        raise TableError(f"no head could be analysed; {folder} is unchanged")
    names = [name for name in results[0].tables.frames if name in TABLES]
    models = [result.model for result in results]
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        finish(folder)
        remove_leftovers(folder, _OURS)
        frames = {
            name: _with_kept_rows(folder, name, [result.tables.frames[name] for result in results], models)
            for name in names
        }
        before = read_summary(folder)["models"]
        for result in results:
            check_one_run(folder, result.model, result.source, result.tables.frames)
        changed = [r.model for r in results if is_other(before.get(r.model, {}), r.source, "digest")]
        frames = _with_scalars(folder, frames)
        summary = updated_summary(read_summary(folder), results, wall_seconds)
        for result in results:
            entry, passage = summary["models"][result.model], result.tables.frames.get(PASSAGES.name)
            if passage is not None:
                record_rows(entry, PASSAGES.name, passage, result.source)
            elif result.model in changed:
                entry.get(MEASURED_OF, {}).pop(PASSAGES.name, None)
        frames |= derived_tables(_Tables(folder, frames), summary["models"])
        others = {SUMMARY: summary_bytes(summary)} | _side_files(folder, results, changed)
        return write_tables(folder, frames, others, published=published)


def copy_tables(source: Path, target: Path) -> None:
    """Copy the tables, axes and summary of a results folder, without points and passages."""
    names = [f"{table}.{suffix}" for table in TABLES for suffix in ("parquet", "csv")]
    contents = {
        name: (source / name).read_bytes()
        for name in (*names, AXES.file, REPLICATES.file, SUMMARY)
        if (source / name).is_file()
    }
    target.mkdir(parents=True, exist_ok=True)
    with locked(target):
        finish(target)
        remove_leftovers(target, _OURS)
        write_together(target, contents)


class _Tables(Mapping[str, pd.DataFrame]):
    """The tables of a folder: new ones, and existing ones, which are read on access."""

    def __init__(self, folder: Path, new: dict[str, pd.DataFrame]) -> None:
        self.folder, self.tables = folder, new

    def __getitem__(self, name: str) -> pd.DataFrame:
        frame = self.tables[name] if name in self.tables else read_table(self.folder, name)
        if frame is None:
            raise KeyError(name)
        return frame

    def __iter__(self) -> Iterator[str]:
        return iter(TABLES)

    def __len__(self) -> int:
        return len(TABLES)


def _with_scalars(folder: Path, frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Add the scalars of other tables to ``heads``, whichever of them is new."""
    tables = _Tables(folder, frames)
    heads = tables.get(HEADS_TABLE.name)
    flagged = [name for name, table in DECLARED_TABLES.items() if table.flags]
    available = {name: table for name in {*SCALARS, *flagged} if (table := tables.get(name)) is not None}
    if heads is None or not len(heads) or not available:
        return frames
    return frames | {HEADS_TABLE.name: with_scalars(heads, available)}


def _with_kept_rows(folder: Path, name: str, new: list[pd.DataFrame], models: list[str]) -> pd.DataFrame:
    """New rows, and the existing rows of other models in the folder."""
    old = read_table(folder, name)
    other_models = [] if old is None else [old[~old["model"].isin(models)]]
    nonempty = [rows for rows in (*other_models, *new) if len(rows)]
    return pd.concat(nonempty, ignore_index=True) if nonempty else new[0]


def _side_files(folder: Path, results: Sequence[ModelResults], changed: Collection[str]) -> dict[str, bytes]:
    """Return the content of the side tables that change; old rows of ``changed`` models, of other runs, are dropped."""
    new = {
        side: [result.tables.frames[side.name] for result in results if side.name in result.tables.frames]
        for side in SIDE_TABLES
    }
    return {
        side.file: side.content(folder, rows, changed)
        for side, rows in new.items()
        if rows or (changed and (folder / side.file).exists())
    }
