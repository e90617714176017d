"""The only wiring: runs → moments → analyses → tables, head group by head group, in one read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from qkscope.analyses.analysis import Analysis
from qkscope.analyses.catalogue import ANALYSES, ANALYSES_BY_NAME, named
from qkscope.analyses.pca import HEADS_TABLE
from qkscope.analyses.planevectors import PLANE_ROWS
from qkscope.analyses.scalars import with_empty_scalars, with_scalars
from qkscope.analyses.spectrum import chance_coherence, token_positions
from qkscope.analyses.tables import Tables
from qkscope.engine import Place, for_each
from qkscope.errors import ConfigError
from qkscope.heads import HeadId
from qkscope.pipeline.job import Failure, Job, Outcome, Task
from qkscope.pipeline.task import do_task, joined
from qkscope.results.folder import write_folder
from qkscope.results.tables import arranged, empty_table
from qkscope.runs.run import Run

HEADS_AT_ONCE = 16
"""Query heads whose tables are made together, at least: a table costs about as much for one head as for many."""
BATCHES_PER_WORKER = 2
"""With fewer than this, starting a worker costs more than it saves."""

OnDone = Callable[[int, int, list[Failure]], None]
"""Called with heads done, heads in all and the failures just found."""


def analyze(
    jobs: Sequence[Job],
    analyses: Iterable[str] = tuple(ANALYSES_BY_NAME),
    *,
    place: Place = Place(),  # noqa: B008  frozen
    intervals: bool = True,
    strict: bool = False,
    on_done: OnDone | None = None,
) -> list[Outcome]:
    """Analyse every chosen head of every job; a head that fails is reported and the others go on, unless strict."""
    _check(jobs)
    wanted = named(analyses)
    tasks = [task for job in jobs for task in _tasks(job, wanted, intervals)]
    total, done = sum(task.n_heads for task in tasks), 0
    results: dict[int, tuple[Tables, list[Failure]]] = {}
    if on_done is not None:
        on_done(0, total, [])
    for index, result in for_each(do_task, tasks, place, BATCHES_PER_WORKER):
        results[index] = result
        done += tasks[index].n_heads
        if strict and result[1]:
            raise result[1][0].error
        if on_done is not None:
            on_done(done, total, result[1])
    return [_outcome(job, tasks, results, tuple(wanted)) for job in jobs]


def write_results(folder: Path, outcomes: Sequence[Outcome], *, wall_seconds: float) -> list[Path]:
    """Write tables and summary.json; returns the csv files. A model of which no head succeeded changes nothing."""
    worth = [outcome.results() for outcome in outcomes if outcome.n_failed < outcome.n_heads]
    return write_folder(folder, worth, wall_seconds=wall_seconds)


def _check(jobs: Sequence[Job]) -> None:
    """Raise what would make the tables of several jobs ambiguous, or cannot be had."""
    names = [job.run.model for job in jobs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"several sources are labelled {', '.join(sorted(twice))}; give each a label of its own")
    for job in jobs:
        own = job.run.source.buckets
        if own is not None and job.buckets not in (None, own):
            raise ConfigError(f"{job.run.model} was captured with {own} position buckets; leave out --buckets")


def _tasks(job: Job, analyses: Sequence[Analysis], intervals: bool) -> list[Task]:
    chosen = job.selection.of(job.run)
    by_key = groupby(chosen, lambda head: head.key_head(job.run.source.q_per_kv))
    names = tuple(analysis.name for analysis in analyses)
    chance = _chance(job.run, chosen) if "planes" in names else None
    return [Task(job, groups, names, intervals, chance) for groups in _batches([tuple(heads) for _, heads in by_key])]


def _batches(groups: list[tuple[HeadId, ...]]) -> Iterator[tuple[tuple[HeadId, ...], ...]]:
    """Whole groups, so many together that each batch but the last has enough heads."""
    batch: list[tuple[HeadId, ...]] = []
    for group in groups:
        batch.append(group)
        if sum(map(len, batch)) >= HEADS_AT_ONCE:
            yield tuple(batch)
            batch = []
    if batch:
        yield tuple(batch)


def _outcome(
    job: Job,
    tasks: list[Task],
    results: dict[int, tuple[Tables, list[Failure]]],
    analyses: tuple[Analysis, ...],
) -> Outcome:
    """Put the results of a job's tasks together, in the order of the tasks."""
    mine = [results[index] for index, task in enumerate(tasks) if task.job is job]
    whole = joined([tables for tables, _ in mine])
    found = dict(whole.frames)
    if HEADS_TABLE.name in found:
        found[HEADS_TABLE.name] = with_empty_scalars(found[HEADS_TABLE.name])
    names = [table.name for analysis in analyses for table in analysis.tables]
    frames = {name: arranged(name, found[name]) if name in found else empty_table(name) for name in names}
    if HEADS_TABLE.name in frames:
        frames[HEADS_TABLE.name] = with_scalars(frames[HEADS_TABLE.name], frames)
    frames |= {name: frame for name, frame in found.items() if name not in frames}
    n_heads = sum(task.n_heads for task in tasks if task.job is job)
    failures = [failure for _, failed in mine for failure in failed]
    return Outcome(job, analyses, n_heads, Tables({**frames}, whole.replicates), failures)


def _chance(run: Run, heads: list[HeadId]) -> float | None:
    """The limit of chance coherence on the tokens of the first head that can be read; None if none of three can."""
    for head in heads[:3]:
        loaded, _ = run.source.load([head], replace(run.reading, sample=PLANE_ROWS))
        vectors = loaded[0].vectors if loaded else None
        if vectors is not None and min(len(np.unique(rows.example_id)) for rows in (vectors.q, vectors.k)) > 1:
            return chance_coherence(*token_positions(vectors), int(loaded[0].moments.window))
    return None


def analysis_names(chosen: str | None) -> list[str]:
    """The analyses of a comma-separated list, in the order of the catalogue; all of them where there is none."""
    names = list(ANALYSES_BY_NAME) if chosen is None else [name.strip() for name in chosen.split(",")]
    unknown = [name for name in names if name not in ANALYSES_BY_NAME]
    if unknown:
        raise ConfigError(f"unknown analysis {unknown[0]!r}; there are {', '.join(ANALYSES_BY_NAME)}")
    return [analysis.name for analysis in ANALYSES if analysis.name in names]
