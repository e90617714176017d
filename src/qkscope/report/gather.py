"""From runs, datasets, results folders or a study file to a study; missing tables are computed."""

from __future__ import annotations

import glob
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qkscope.analyses.catalogue import ANALYSES_BY_NAME
from qkscope.analyses.options import PointOptions
from qkscope.config import StudyRunConfig, load_study_config
from qkscope.engine import ExecutionTarget
from qkscope.errors import ConfigError
from qkscope.heads import choose_heads
from qkscope.report.explorerdata import COMPLEMENT_AXES, MOST_ROWS
from qkscope.results.analyze import OnDone, analyze, write_results
from qkscope.results.folder import copy_tables
from qkscope.results.job import Job, find_cached_tables
from qkscope.results.reader import is_results
from qkscope.results.study import Entry, Study, build
from qkscope.runs.run import Run, open_run

RUN_TABLES = "tables"
"""Folder of a run in which its tables are looked for."""
_log = logging.getLogger("qkscope")


@dataclass(frozen=True)
class Sources:
    """The sources of a study, in order, and the window at which they are compared."""

    items: tuple[StudyRunConfig, ...]
    title: str = ""
    compare_at: int | None = None


@dataclass(frozen=True)
class _Opened:
    """One source: a results folder, or a run that is still to be analysed; and which run of the study it belongs to."""

    item: StudyRunConfig
    path: Path
    run: Run | None
    """None: it has tables already."""
    other: bool = False
    """Whether it is the same weights at another window."""

    @property
    def window(self) -> int | None:
        """Context length, if it is known before the analysis."""
        return None if self.run is None else self.run.source.window


def sources(arguments: Sequence[str]) -> Sources:
    """A study file, or the runs themselves."""
    files = [argument for argument in arguments if argument.lower().endswith((".yaml", ".yml"))]
    if files and len(arguments) > 1:
        raise ConfigError(f"give one study file or several runs, not both ({', '.join(arguments)})")
    if not files:
        return Sources(tuple(StudyRunConfig(path=argument) for argument in arguments))
    path = Path(files[0])
    config = load_study_config(path)
    return Sources(tuple(_located(item, path.parent) for item in config.runs), config.title, config.compare_at)


def _located(item: StudyRunConfig, folder: Path) -> StudyRunConfig:
    """Paths in a study file are relative to it; a path that does not exist but could be a Hub id is not changed."""
    places = [item.path, *item.also]
    path, *also = (place if _is_hub_id(place, folder) else str(folder / place) for place in places)
    return item.model_copy(update={"path": path, "also": also})


def _is_hub_id(place: str, folder: Path) -> bool:
    return not (folder / place).exists() and (place.count("/") == 1 or place.startswith("hf://"))


def at_window(path: str, window: int) -> str:
    """Where the same weights at another window are looked for, and written."""
    return f"{path.rstrip('/')}-at-{window}"


def gather(
    given: Sources,
    folder: Path,
    *,
    points: bool = True,
    workers: int | None = None,
    on_done: OnDone | None = None,
) -> Study:
    """Read every results folder; analyse every run or dataset into its own subfolder of ``folder``.

    With ``points``, vectors of four heads are kept for the collages, and fewer of every other head for the explorer.
    """
    opened = [part for item in given.items for part in _opened(item)]
    folders = {i: folder / _safe(_name(i, part)) for i, part in enumerate(opened) if part.run is not None}
    reach = _common_range(opened)
    jobs = {
        i: Job.from_options(
            part.run, "report", {"decay_range": reach}, run_points(part.run) if points and not part.other else None
        )
        for i, part in enumerate(opened)
        if part.run is not None
    }
    _analyse(jobs, {i: opened[i].path / RUN_TABLES for i in jobs}, folders, ExecutionTarget(workers), on_done)
    entries = [
        _entry(part.item, part.path)
        if part.run is None
        else replace(_entry(part.item, folders[i]), model=part.run.model)
        for i, part in enumerate(opened)
    ]
    main = [entry for entry, part in zip(entries, opened, strict=True) if not part.other]
    others = [entry for entry, part in zip(entries, opened, strict=True) if part.other]
    return build(main, given.title, given.compare_at, [build([entry]) for entry in others])


def _analyse(
    jobs: dict[int, Job],
    beside: dict[int, Path],
    folders: dict[int, Path],
    place: ExecutionTarget,
    on_done: OnDone | None,
) -> None:
    """Write the tables of every job into its folder; those that are known are copied, and only points are added."""
    cached = {i: find_cached_tables(job, (beside[i], folders[i])) for i, job in jobs.items()}
    known = {i: tables for i, tables in cached.items() if tables is not None}
    for i, found in known.items():
        _log.info("%s is analysed already, in %s", jobs[i].run.model, found)
        if found != folders[i]:
            copy_tables(found, folders[i])
    unknown = {i: job for i, job in jobs.items() if i not in known}
    pictured = {i: jobs[i] for i in known if jobs[i].options.points is not None}
    for some_jobs, analyses in ((unknown, list(ANALYSES_BY_NAME)), (pictured, [])):
        started = time.monotonic()
        outcomes = analyze(list(some_jobs.values()), analyses, place=place, on_done=on_done) if some_jobs else []
        seconds = time.monotonic() - started
        if len(outcomes) > 2:  # seconds, after the last head is done
            _log.info("writing the tables of %d runs", len(outcomes))
        for i, outcome in zip(some_jobs, outcomes, strict=True):
            write_results(folders[i], [outcome], wall_seconds=seconds)


def _opened(item: StudyRunConfig) -> list[_Opened]:
    """The source of a run, and those of the same weights at other windows."""
    beside = Path(item.path)
    found = sorted(str(path) for path in beside.parent.glob(f"{glob.escape(beside.name)}-at-*") if path.is_dir())
    also = [*item.also, *(path for path in found if path not in item.also)]
    first = _one(item, item.path, item.label or item.model)
    label = item.label or item.model or (None if first.run is None else first.run.model)
    named = item.model_copy(update={"label": label, "model": None, "window": None})
    # Tables are analysed under a label of their own, and shown under that of the run.
    return [first, *(replace(_one(named, place, Path(place).name), other=True) for place in also)]


def _one(item: StudyRunConfig, place: str, label: str | None) -> _Opened:
    path = Path(place)
    if is_results(path):
        return _Opened(item, path, None)
    return _Opened(item, path, open_run(place, item.revision, model=label, family=item.family or ""))


def _common_range(opened: Sequence[_Opened]) -> int | None:
    """Half of the smallest window, if windows differ: the range over which decay is compared."""
    windows = {part.window for part in opened if part.window is not None}
    return min(windows) // 2 if len(windows) > 1 else None


def _name(number: int, part: _Opened) -> str:
    assert part.run is not None
    return f"{number:02d}-{part.run.model}"


def run_points(run: Run) -> PointOptions:
    """Vectors of four heads for the collages, and fewer of every other head for the explorer."""
    shown = frozenset(choose_heads([(head.layer, head.head) for head in run.heads]))
    return PointOptions(shown, rows=2000, brief_rows=MOST_ROWS, brief_axes=COMPLEMENT_AXES)


def _entry(item: StudyRunConfig, folder: Path) -> Entry:
    nope = None if item.nope_layers is None else frozenset(item.nope_layers)
    return Entry(folder, item.model, item.label, item.family, item.phase, item.step, item.window, nope)


def _safe(name: str) -> str:
    """A valid folder name from an arbitrary label."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80].strip(".") or "run"
