"""Verification: compare the files of a captured run with their checksums, and tables with the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool

from qkscope.analyses.analysis import Analysis
from qkscope.analyses.catalogue import ANALYSES, DECLARED_TABLES
from qkscope.analyses.options import AnalysisOptions, PcaOptions, RotationOptions
from qkscope.analyses.pca import HEADS_TABLE
from qkscope.analyses.tabulate import with_scalars
from qkscope.engine import ExecutionTarget
from qkscope.errors import DatasetError, HeadError, TableError
from qkscope.files.atomic import settle
from qkscope.files.checksums import CHECKSUMS, compare
from qkscope.files.runfolder import RunFolder
from qkscope.options import from_record
from qkscope.results.analyze import analyze
from qkscope.results.frames import read_table
from qkscope.results.job import Job
from qkscope.results.reader import foreign_tables, results_folders
from qkscope.results.schema import MEASURED
from qkscope.results.side import PASSAGES
from qkscope.results.summary import is_other, read_summary
from qkscope.runs.captured import CapturedSource
from qkscope.runs.run import Run, open_run
from qkscope.runs.selection import Selection
from qkscope.runs.source import WHOLE

_TOLERANCE = 1e-6
"""Largest relative difference between equal numbers: processors round differently."""


def check_run(folder: Path) -> list[str]:
    """One line for each problem with a run's own files."""
    run = RunFolder.open(folder)
    problems = list(_files(folder))
    for layer in run.manifest.layers:
        try:
            run.layer(layer.layer)
        except DatasetError as error:
            problems.append(str(error))
    source = CapturedSource(run)
    for head in sorted({*source.query_heads, *map(source.key_head, source.query_heads)}):
        try:
            source.rows(head, WHOLE)
        except (DatasetError, HeadError) as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def removed_by_push(folder: Path) -> list[str]:
    """The parts of run.json that were removed when the run was pushed to the Hub; empty if it was not pushed."""
    pushed = RunFolder.open(folder).manifest.pushed
    return [] if pushed is None else list(map(str, pushed.left_out))


def _files(folder: Path) -> Iterator[str]:
    differences = compare(folder)
    if differences is None:
        yield f"{folder / CHECKSUMS} is missing, so the files of the run cannot be checked"
        return
    yield from differences


def check_tables(folder: Path, tables: Path, model: str | None = None, workers: int | None = None) -> list[str]:
    """One line for each difference between tables on disk and those computed from the run, with their options.

    ``tables`` is a results folder, or the folder of a report, where those of this run are looked for.
    """
    tables = _tables_of_run(folder, tables)
    settle(tables)
    tables_on_disk = {name: frame for name in DECLARED_TABLES if (frame := read_table(tables, name)) is not None}
    if not tables_on_disk:
        raise TableError(f"{tables} contains no tables")
    label = model or _label(tables_on_disk, folder)
    of_run = {name: frame[frame["model"] == label].reset_index(drop=True) for name, frame in tables_on_disk.items()}
    family = next((str(frame["family"].iloc[0]) for frame in of_run.values() if len(frame) and "family" in frame), "")
    run, recorded = open_run(folder, model=label, family=family), read_summary(tables)["models"].get(label, {})
    if is_other(recorded, run.source.identity(), "digest"):
        return [f"{tables} has tables of {label} from another run than {folder}; give the tables of this run"]
    others = {name: frame for name in MEASURED if (frame := read_table(tables, name)) is not None}
    passages = PASSAGES.read(tables)
    others |= {} if passages is None else {PASSAGES.name: passages}
    problems, derived = _derived(run, of_run, recorded, ExecutionTarget(workers))
    for name in (name for name in of_run if name in derived):
        problems += _differences(name, of_run[name], derived[name])
    problems += foreign_tables(tables, others, read_summary(tables)["models"])
    return list(dict.fromkeys(problems))


def _tables_of_run(run: Path, given: Path) -> Path:
    """The results folder at a path or, of the runs of a report, that of this run."""
    folders = results_folders(given)
    if len(folders) < 2:
        return folders[0] if folders else given
    digest = CapturedSource(RunFolder.open(run)).identity().get("digest")
    own = [
        folder for folder in folders
        if any(entry.get("dataset", {}).get("digest") == digest for entry in read_summary(folder)["models"].values())
    ]  # fmt: skip
    if len(own) != 1:
        raise TableError(f"{given} has {len(own)} tables of {run}; give one of {', '.join(map(str, folders))}")
    return own[0]


def _derived(
    run: Run, of_run: dict[str, pd.DataFrame], recorded: dict[str, Any], target: ExecutionTarget
) -> tuple[list[str], dict[str, pd.DataFrame]]:
    """The failures and tables of a run, each analysis with the options and heads of the tables on disk.

    Analyses of one folder may have different options; ``heads`` has columns and flags of all of them.
    """
    groups: dict[tuple[AnalysisOptions, Selection], list[Analysis]] = {}
    for analysis in ANALYSES:
        if any(len(of_run.get(table.name, ())) for table in analysis.tables):
            groups.setdefault(_options(recorded, analysis, of_run), []).append(analysis)
    problems: list[str] = []
    derived: dict[str, pd.DataFrame] = {}
    for (options, _), analyses in groups.items():
        tables = [table.name for analysis in analyses for table in analysis.tables]
        heads = frozenset((int(a), int(b)) for name in tables if name in of_run for a, b in _heads(of_run[name]))
        job = Job(run, Selection(exactly=heads), options)
        (result,) = analyze([job], [analysis.name for analysis in analyses], target=target)
        problems += [str(failure) for failure in result.failures]
        derived |= {name: result.tables.frames[name] for name in tables}
    if HEADS_TABLE.name in derived:
        derived[HEADS_TABLE.name] = with_scalars(derived[HEADS_TABLE.name], derived)
    return problems, derived


def _options(
    recorded: dict[str, Any], analysis: Analysis, of_run: dict[str, pd.DataFrame]
) -> tuple[AnalysisOptions, Selection]:
    """The options of an analysis, as the summary says; without it, with intervals if there are any."""
    config = recorded.get(analysis.name, {}).get("config", {})
    if config.get("command") in ("analyze", "report"):
        return from_record(AnalysisOptions, config), from_record(Selection, config)
    own = [of_run[table.name] for table in analysis.tables if table.name in of_run and table is not HEADS_TABLE]
    has_intervals = any(frame[c].notna().any() for frame in own for c in frame.columns if c.endswith("_se"))
    pca, rotation = PcaOptions(**config.get("pca", {})), RotationOptions(**config.get("rotation", {}))
    options = AnalysisOptions(intervals=has_intervals, pca=pca, rotation=rotation)
    return options, from_record(Selection, config.get("data", {}))


def _heads(frame: pd.DataFrame) -> Iterator[tuple[int, int]]:
    """The heads in a table; none if it is not about heads."""
    return zip(frame["layer"], frame["head"], strict=True) if "head" in frame else iter(())


def _label(frames: dict[str, pd.DataFrame], folder: Path) -> str:
    labels = sorted({str(label) for frame in frames.values() for label in frame["model"].unique()})
    if folder.absolute().name in labels:
        return folder.absolute().name
    if len(labels) == 1:
        return labels[0]
    raise TableError(f"the tables contain {', '.join(labels)}; use --model to say which of them came from {folder}")


def _differences(name: str, stored: pd.DataFrame, derived: pd.DataFrame) -> list[str]:
    if len(stored) != len(derived):
        return [f"{name}: expected {len(derived)} rows from the run, got {len(stored)}"]
    differences = []
    for column in derived.columns:
        same = _same(stored[column], derived[column])
        if not same.all():
            row = int(np.flatnonzero(~same)[0])
            location = ", ".join(f"{key} {stored[key].iloc[row]}" for key in ("layer", "head", "pc") if key in stored)
            differences.append(
                f"{name}.{column}: {int((~same).sum())} of {len(stored)} rows differ, first at {location}: "
                f"expected {derived[column].iloc[row]} from the run, got {stored[column].iloc[row]}"
            )
    return differences


def _same(stored: pd.Series, derived: pd.Series) -> Bool[np.ndarray, "rows"]:
    """True for equal values: numbers within the tolerance, also relative to the largest; others exactly."""
    if pd.api.types.is_float_dtype(derived) or pd.api.types.is_float_dtype(stored):
        a, b = (values.astype(float).to_numpy() for values in (stored, derived))
        largest = float(np.nanmax(np.abs(b), initial=0.0))
        return np.isclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)
    both_missing = stored.isna().to_numpy() & derived.isna().to_numpy()
    return both_missing | (stored.astype(str).to_numpy() == derived.astype(str).to_numpy())
