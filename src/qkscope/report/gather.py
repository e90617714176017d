"""From runs, datasets, results folders or a study file to a study; missing tables are computed."""

from __future__ import annotations

import glob
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qkscope.analyses.catalogue import ANALYSES_BY_NAME
from qkscope.analyses.options import PointOptions
from qkscope.config import StudyConfig, StudyRunConfig, load_study_config
from qkscope.engine import ExecutionTarget
from qkscope.errors import ConfigError
from qkscope.files.runfolder import MANIFEST
from qkscope.headids import choose_heads
from qkscope.report.explorerdata import COMPLEMENT_AXES, MOST_ROWS
from qkscope.results.analyze import OnDone, analyze, write_results
from qkscope.results.folder import copy_tables
from qkscope.results.job import Job, find_cached_tables, may_keep_tables
from qkscope.results.reader import TABLES_FOLDER, is_results, results_folders
from qkscope.results.study import Study, build
from qkscope.runs.captured import CapturedSource
from qkscope.runs.run import Run, open_run

_log = logging.getLogger("qkscope")


@dataclass(frozen=True)
class _Source:
    """A results folder, or a run that is still to be analysed."""

    entry: StudyRunConfig
    run: Run | None
    """None: it has tables already."""
    other_window: bool = False
    """True if it is the same weights as an earlier source, at another window."""

    @property
    def window(self) -> int | None:
        """The window of the capture, if it is known before its tables are read."""
        return self.entry.window if self.run is None else self.run.source.window


def study_config(arguments: Sequence[str]) -> StudyConfig:
    """Return the study that arguments of a command name: a study file, or the runs themselves."""
    files = [argument for argument in arguments if argument.lower().endswith((".yaml", ".yml"))]
    if files and len(arguments) > 1:
        raise ConfigError(f"give one study file or several runs, not both ({', '.join(arguments)})")
    if not files:
        return StudyConfig(runs=[StudyRunConfig(path=path) for argument in arguments for path in _runs_of(argument)])
    path = Path(files[0])
    config = load_study_config(path)
    return config.model_copy(update={"runs": [_located(entry, path.parent) for entry in config.runs]})


def _runs_of(argument: str) -> list[str]:
    """Return the runs that an argument names: several, if it is the folder of a report."""
    path = Path(argument)
    folders = [] if (path / MANIFEST).is_file() or is_results(path) else results_folders(path)
    return [str(folder) for folder in folders] or [argument]


def _located(entry: StudyRunConfig, folder: Path) -> StudyRunConfig:
    """Return an entry of a study file with paths relative to the file; possible Hub ids are not changed."""
    locations = [entry.path, *entry.also]
    path, *also = (location if _is_hub_id(location, folder) else str(folder / location) for location in locations)
    return entry.model_copy(update={"path": path, "also": also})


def _is_hub_id(location: str, folder: Path) -> bool:
    return not (folder / location).exists() and (location.count("/") == 1 or location.startswith("hf://"))


def gather(
    config: StudyConfig,
    folder: Path,
    *,
    points: bool = True,
    workers: int | None = None,
    on_done: OnDone | None = None,
) -> Study:
    """Read every results folder; analyse every run or dataset into its own subfolder of ``folder``.

    With ``points``, vectors of four heads are kept for the collages, and fewer of every other head for the explorer.
    """
    sources_of_runs = [_sources(entry) for entry in config.runs]
    sources = [source for of_run in sources_of_runs for source in of_run]
    pictured = _pictured(sources_of_runs, config.compare_at)
    folders, jobs, run_folders = {}, {}, {}
    decay_range = _common_range(sources)
    for i, source in enumerate(sources):
        if source.run is not None:
            point_options = run_points(source.run) if points and i in pictured else None
            folders[i] = folder / _safe(f"{i:02d}-{source.run.model}")
            jobs[i] = Job.from_options(source.run, "report", {"decay_range": decay_range}, point_options)
            run_folders[i] = Path(source.entry.path)
    _analyse(jobs, run_folders, folders, ExecutionTarget(workers), on_done)
    entries = [
        source.entry
        if source.run is None
        else source.entry.model_copy(update={"path": str(folders[i]), "model": source.run.model})
        for i, source in enumerate(sources)
    ]
    main = [entry for entry, source in zip(entries, sources, strict=True) if not source.other_window]
    other_windows = [entry for entry, source in zip(entries, sources, strict=True) if source.other_window]
    return build(main, config.title, config.compare_at, [build([entry]) for entry in other_windows])


def _pictured(sources_of_runs: Sequence[Sequence[_Source]], compare_at: int | None) -> set[int]:
    """Return which sources, by number, are shown: of each run the one at the window of comparison, else its own."""
    known = [window for of_run in sources_of_runs if (window := of_run[0].window) is not None]
    shown_at = compare_at or min(known, default=None)
    everywhere = all(shown_at in [source.window for source in of_run] for of_run in sources_of_runs)
    shown, first = set(), 0
    for of_run in sources_of_runs:
        windows = [source.window for source in of_run]
        shown.add(first + (windows.index(shown_at) if everywhere else 0))
        first += len(of_run)
    return shown


def _analyse(
    jobs: dict[int, Job],
    run_folders: dict[int, Path],
    folders: dict[int, Path],
    target: ExecutionTarget,
    on_done: OnDone | None,
) -> None:
    """Write the tables of every job into its folder; cached tables are copied, and only points are added.

    Runs without tables keep a copy for the next command.
    """
    cached = {i: find_cached_tables(job, (run_folders[i] / TABLES_FOLDER, folders[i])) for i, job in jobs.items()}
    cached_tables = {i: tables for i, tables in cached.items() if tables is not None}
    for i, tables in cached_tables.items():
        _log.info("%s is analysed already, in %s", jobs[i].run.model, tables)
        if tables != folders[i]:
            copy_tables(tables, folders[i])
    uncached = {i: job for i, job in jobs.items() if i not in cached_tables}
    pictured = {i: jobs[i] for i in cached_tables if jobs[i].options.points is not None}
    for some_jobs, analyses in ((uncached, list(ANALYSES_BY_NAME)), (pictured, [])):
        started = time.monotonic()
        results = analyze(list(some_jobs.values()), analyses, target=target, on_done=on_done) if some_jobs else []
        seconds = time.monotonic() - started
        if len(results) > 2:  # seconds, after the last head is done
            _log.info("writing the tables of %d runs", len(results))
        for i, result in zip(some_jobs, results, strict=True):
            write_results(folders[i], [result], wall_seconds=seconds)
            if analyses and not result.n_failed and may_keep_tables(jobs[i], run_folders[i]):
                copy_tables(folders[i], run_folders[i] / TABLES_FOLDER)
                _log.info("%s keeps its tables, in %s", jobs[i].run.model, run_folders[i] / TABLES_FOLDER)


def _sources(entry: StudyRunConfig) -> list[_Source]:
    """Return the source of a run, and those of the same weights at other windows."""
    folder = Path(entry.path)
    siblings = sorted(str(path) for path in folder.parent.glob(f"{glob.escape(folder.name)}-at-*") if path.is_dir())
    also = dict.fromkeys(entry.also) | {path: _window_in(path) for path in siblings if path not in entry.also}
    first = _source(entry, entry.label or entry.model)
    label = entry.label or entry.model or (None if first.run is None else first.run.model)
    # Tables are analysed under a label of their own, and shown under that of the run.
    shared = entry.model_copy(update={"label": label, "model": None})
    entries = [shared.model_copy(update={"path": path, "window": window}) for path, window in also.items()]
    others = [_source(other, Path(other.path).name, other_window=True) for other in entries]
    captured = [
        x.run.source for x in (first, *others) if x.run is not None and isinstance(x.run.source, CapturedSource)
    ]
    for source in captured[1:]:
        captured[0].run.check_same_weights(source.run)
    return [first, *others]


def _window_in(path: str) -> int | None:
    """Return N of a folder PATH-at-N: its capture has a smaller window if all documents are shorter."""
    end = path.rsplit("-at-", 1)[1]
    return int(end) if re.fullmatch(r"[1-9]\d{0,7}", end) else None


def _source(entry: StudyRunConfig, label: str | None, *, other_window: bool = False) -> _Source:
    if is_results(Path(entry.path)):
        return _Source(entry, None, other_window)
    return _Source(entry, open_run(entry.path, entry.revision, model=label, family=entry.family or ""), other_window)


def _common_range(sources: Sequence[_Source]) -> int | None:
    """Return half of the smallest window, if windows differ: the range over which decay is compared."""
    windows = {source.run.source.window for source in sources if source.run is not None}
    known_windows = [window for window in windows if window is not None]
    return min(known_windows) // 2 if len(known_windows) > 1 else None


def run_points(run: Run) -> PointOptions:
    """Vectors of four heads for the collages, and fewer of every other head for the explorer."""
    heads = frozenset(choose_heads([(head.layer, head.head) for head in run.heads]))
    return PointOptions(heads, rows=2000, brief_rows=MOST_ROWS, brief_axes=COMPLEMENT_AXES)


def _safe(name: str) -> str:
    """A valid folder name from an arbitrary label."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80].strip(".") or "run"
