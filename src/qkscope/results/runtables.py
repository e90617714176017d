"""The tables of a run, given as an object or by its folder, and what is asked of them for single heads."""

from __future__ import annotations

import glob
import os
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from qkscope.analyses.options import AnalysisOptions, PcaOptions
from qkscope.engine import IN_PROCESS, ExecutionTarget
from qkscope.errors import ConfigError
from qkscope.files.runfolder import MANIFEST, RunFolder
from qkscope.headids import HeadId
from qkscope.results.analyze import OnDone, analyze, label_in, tables_of
from qkscope.results.compare import Comparison, compare_runs, side
from qkscope.results.derived import one_row_per_head, top_heads
from qkscope.results.frames import read_table
from qkscope.results.job import Job, find_cached_tables
from qkscope.results.reader import TABLES_FOLDER, Folder, read_folder
from qkscope.runs.captured import CapturedSource
from qkscope.runs.run import Run, open_run
from qkscope.runs.selection import Selection

AnyRun: TypeAlias = Run | str | os.PathLike[str]
"""A run, or where it is: as ``qkscope.open`` takes it."""


def check_run(run: object) -> None:
    """Raise an error unless this is a run or where one is."""
    if not isinstance(run, Run | str | os.PathLike):
        raise ConfigError(f"expected a run, as qkscope.open(FOLDER), or its folder; got {run!r:.60}")


def opened(run: AnyRun) -> Run:
    """The run, opened if it is a path."""
    check_run(run)
    return run if isinstance(run, Run) else open_run(run)


def kept_tables(run: AnyRun, workers: int | None = 1, on_done: OnDone | None = None) -> Folder:
    """The tables of a captured run, which are kept in its folder once they are computed, or of a results folder."""
    check_run(run)
    if not isinstance(run, Run):
        return tables_of(os.fspath(run), workers=workers, on_done=on_done)
    if not isinstance(run.source, CapturedSource):
        raise ConfigError(
            f"{run.model} is a dataset of vectors; write its tables with qkscope.analyze, and give their folder"
        )
    return tables_of(run.source.run.folder, workers=workers, on_done=on_done)


def stored_tables(job: Job) -> Folder | None:
    """The tables of a job that the folder of its run keeps already; None if it does not."""
    if not isinstance(job.run.source, CapturedSource):
        return None
    folder = job.run.source.run.folder / TABLES_FOLDER
    label = label_in(folder, job.run)
    if find_cached_tables(replace(job, run=replace(job.run, model=label)), [folder]) is None:
        return None
    return read_folder(folder).of(label, job.run.model)


def compared(a: AnyRun, b: AnyRun, workers: int | None = 1, on_done: OnDone | None = None) -> Comparison:
    """Two runs compared at their own window or, if these differ, at the largest that both were captured at."""
    runs: list[AnyRun] = [a, b]
    windows = [_at_windows(run) for run in runs]
    common = windows[0].keys() & windows[1].keys()
    nested = bool(common) and any(next(iter(folders)) != max(common) for folders in windows)
    if nested:
        runs = [folders[max(common)] for folders in windows]
    sides = [side(kept_tables(run, workers, on_done)) for run in runs]
    return replace(compare_runs(*sides), nested=nested)


def captured_at(run: AnyRun, window: int | None) -> AnyRun:
    """A run at one of the windows that it was captured at; by default as it is."""
    if window is None:
        return run
    windows = _at_windows(run)
    if window not in windows:
        known = ", ".join(f"{w:,}" for w in sorted(windows)) or "not known"
        raise ConfigError(f"the windows that the run was captured at: {known}; expected one of them, got {window:,}")
    return windows[window]


def _at_windows(run: AnyRun) -> dict[int, AnyRun]:
    """A run, or its folder, at each window that it was captured at, its own first; a results folder at its window."""
    source = run.source if isinstance(run, Run) else None
    folder = source.run.folder if isinstance(source, CapturedSource) else Path(str(run))
    if not (folder / MANIFEST).is_file():
        window = side(kept_tables(run)).window
        return {} if window is None else {window: run}
    siblings = [path for path in folder.parent.glob(f"{glob.escape(folder.name)}-at-*") if (path / MANIFEST).is_file()]
    own, others = RunFolder.open(folder), [RunFolder.open(path) for path in siblings]
    for other in others:
        own.check_same_weights(other)
    at = {other.manifest.window: other.folder for other in others if other.manifest.window != own.manifest.window}
    return {own.manifest.window: run} | at


def heads_table(run: AnyRun, options: AnalysisOptions, workers: int) -> pd.DataFrame:
    """The table ``heads`` of all analyses: that of the run's folder if these options make it, else computed."""
    run = opened(run)
    job = replace(Job.from_options(run, "analyze", {"intervals": options.intervals}), options=options)
    stored = stored_tables(job) if options.pca == PcaOptions() else None
    if stored is not None and (table := read_table(stored.path, "heads")) is not None:
        return table.assign(model=run.model)
    (result,) = analyze([job], target=ExecutionTarget(workers))
    table = result.tables.frames["heads"]
    known = set(zip(table["layer"], table["head"], strict=True))
    for failure in result.failures:  # a head that only some analyses cannot read is there
        if (failure.error.head.layer, failure.error.head.head) not in known:
            raise failure.error
    return table


def top(run: AnyRun, by: str, n: int, *, lowest: bool, workers: int) -> pd.DataFrame:
    """The heads with the highest (or lowest) values of a column."""
    return top_heads(one_row_per_head(kept_tables(run, workers).tables), by, n, lowest=lowest)


def head_row(run: Run, head: HeadId) -> pd.Series:
    """The row of the table ``heads`` of one head, computed for it alone, with the columns of all analyses."""
    job = Job(run, Selection(exactly=frozenset([(head.layer, head.head)])))
    (result,) = analyze([job], target=IN_PROCESS, strict=True)
    return result.tables.frames["heads"].iloc[0]
