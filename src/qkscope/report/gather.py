"""From runs, datasets, results folders or a study file to a study; missing tables are computed."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qkscope.analyses.options import PointOptions
from qkscope.config import StudyRunConfig, load_study_config
from qkscope.engine import Place
from qkscope.errors import ConfigError
from qkscope.heads import choose_heads
from qkscope.pipeline.analyze import OnDone, analyze, write_results
from qkscope.pipeline.job import Job
from qkscope.report.points import COMPLEMENT_AXES, MOST_ROWS
from qkscope.results.reader import is_results
from qkscope.runs.run import Run, open_run
from qkscope.study.study import Entry, Study, build


@dataclass(frozen=True)
class Sources:
    """The sources of a study, in order."""

    items: tuple[StudyRunConfig, ...]
    title: str = ""


def sources(arguments: Sequence[str]) -> Sources:
    """A study file, or the runs themselves."""
    files = [argument for argument in arguments if argument.lower().endswith((".yaml", ".yml"))]
    if files and len(arguments) > 1:
        raise ConfigError(f"give one study file or several runs, not both ({', '.join(arguments)})")
    if not files:
        return Sources(tuple(StudyRunConfig(path=argument) for argument in arguments))
    path = Path(files[0])
    config = load_study_config(path)
    return Sources(tuple(_located(item, path.parent) for item in config.runs), config.title)


def _located(item: StudyRunConfig, folder: Path) -> StudyRunConfig:
    """Paths in a study file are relative to it; a path that does not exist but could be a Hub id is not changed."""
    path = folder / item.path
    is_hub_id = not path.exists() and (item.path.count("/") == 1 or item.path.startswith("hf://"))
    return item if is_hub_id else item.model_copy(update={"path": str(path)})


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
    folders = [Path(item.path) for item in given.items]
    has_tables = [is_results(path) for path in folders]
    runs = {i: _open(item) for i, item in enumerate(given.items) if not has_tables[i]}
    folders_of_runs = {i: folder / _safe(f"{i:02d}-{run.model}") for i, run in runs.items()}
    jobs = {
        i: Job(run, points=run_points(run) if points else None, config={"command": "report"}) for i, run in runs.items()
    }
    started = time.monotonic()
    outcomes = analyze(list(jobs.values()), place=Place(workers), on_done=on_done) if jobs else []
    seconds = time.monotonic() - started
    for i, outcome in zip(jobs, outcomes, strict=True):
        write_results(folders_of_runs[i], [outcome], wall_seconds=seconds)
    entries = [
        _entry(item, folders[i]) if has_tables[i] else replace(_entry(item, folders_of_runs[i]), model=runs[i].model)
        for i, item in enumerate(given.items)
    ]
    return build(entries, given.title)


def _open(item: StudyRunConfig) -> Run:
    return open_run(item.path, item.revision, model=item.label or item.model, family=item.family or "")


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
