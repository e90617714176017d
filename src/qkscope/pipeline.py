"""The only wiring: runs → moments → analyses → tables, head group by head group, in one read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pandas as pd

from qkscope.analyses.columns import Tables
from qkscope.analyses.scoretables import SCALARS, with_scalars
from qkscope.analyses.spectrum import chance_coherence, tokens_of
from qkscope.analyses.tabulate import PcaOptions, RotationOptions
from qkscope.analyses.vectortables import PLANE_ROWS, PointOptions, with_active_planes
from qkscope.config import Config
from qkscope.engine import Place, for_each
from qkscope.errors import ConfigError
from qkscope.heads import HeadId
from qkscope.jobs import ANALYSES, Analysis, Failure, Job, Outcome, Selection, Task
from qkscope.run import Run, open_run
from qkscope.store.columns import TABLES
from qkscope.store.tables import arranged
from qkscope.tabulating import do_task, joined, with_notes

HEADS_AT_ONCE = 16
"""Query heads whose tables are made together, at least: a table costs about as much for one head as for many."""
BATCHES_PER_WORKER = 2
"""With fewer than this, starting a worker costs more than it saves."""

OnDone = Callable[[int, int, list[Failure]], None]
"""Called with heads done, heads in all and the failures just found."""


def analyze(
    jobs: Sequence[Job],
    analyses: Iterable[Analysis] = tuple(ANALYSES),
    *,
    place: Place = Place(),  # noqa: B008  frozen
    intervals: bool = True,
    strict: bool = False,
    on_done: OnDone | None = None,
) -> list[Outcome]:
    """Analyse every chosen head of every job; a head that fails is reported and the others go on, unless strict."""
    names = [job.run.model for job in jobs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"several sources are labelled {', '.join(sorted(twice))}; give each a label of its own")
    for job in jobs:
        own = job.run.source.buckets
        if own is not None and job.buckets not in (None, own):
            raise ConfigError(f"{job.run.model} was captured with {own} position buckets; leave out --buckets")
    tasks = [task for job in jobs for task in _tasks(job, tuple(analyses), intervals)]
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
    return [_outcome(job, tasks, results, tuple(analyses)) for job in jobs]


# ---- the same from Python -----------------------------------------------------------------------


def pca(run: Run, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Combined QK PCA of every head: the table ``qk``. A head that fails raises."""
    return _table(Job(run, pca=options or PcaOptions()), "pca", "qk", workers, intervals)


def head_table(
    run: Run, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True
) -> pd.DataFrame:
    """Positional variance, separability and amplification of every head: the table ``heads``."""
    return _table(Job(run, pca=options or PcaOptions()), "pca", "heads", workers, intervals)


def rotation(
    run: Run, options: RotationOptions | None = None, *, workers: int = 1, intervals: bool = True
) -> pd.DataFrame:
    """Planar rotation model of every head: the table ``rotated``. A head that fails raises."""
    return _table(Job(run, rotation=options or RotationOptions()), "rotation", "rotated", workers, intervals)


def planes(run: Run, *, workers: int = 1) -> pd.DataFrame:
    """Planes of the complement of a and b, head by head: the table ``planes``."""
    return _table(Job(run), "planes", "planes", workers, intervals=False)


def distance(run: Run, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The distance curve of every head that knows its rotation: the table ``distance``."""
    return _table(Job(run), "distance", "distance", workers, intervals)


def plasticity(run: Run, *, buckets: int | None = None, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Attention plasticity of every head, bucket by bucket: the table ``plasticity``."""
    return _table(Job(run, buckets=buckets), "plasticity", "plasticity", workers, intervals)


def tables(run: Run, *, points: PointOptions | None = None, workers: int = 1) -> dict[str, pd.DataFrame]:
    """All tables at once, from one read; ``points`` says of which heads vectors are added, for pictures."""
    (outcome,) = analyze([Job(run, points=points)], place=Place(workers), strict=True)
    return {name: frame for name, frame in outcome.tables.frames.items() if name != "axes"}


def job_from_config(config: Config) -> Job:
    """Open the run that a config describes, with its choices."""
    data = config.data
    run = open_run(
        data.dataset,
        data.revision,
        model=config.model,
        family=config.family,
        q_per_kv=data.q_per_kv,
        window=data.window,
        rope=data.rope,
        max_samples=data.max_samples,
        seed=data.seed,
    )
    layers, heads = (None if chosen is None else frozenset(chosen) for chosen in (data.layers, data.heads))
    return Job(
        run,
        Selection(layers, heads, data.sample_heads, data.seed),
        PcaOptions(**config.pca.model_dump()),
        RotationOptions(**config.rotation.model_dump()),
        buckets=data.buckets,
        config=config.model_dump(mode="json"),
    )


def _table(job: Job, analysis: Analysis, name: str, workers: int, intervals: bool) -> pd.DataFrame:
    (outcome,) = analyze([job], [analysis], place=Place(workers), intervals=intervals, strict=True)
    return outcome.tables.frames[name]


# ---- pieces -------------------------------------------------------------------------------------


def _tasks(job: Job, analyses: tuple[Analysis, ...], intervals: bool) -> list[Task]:
    chosen = job.selection.of(job.run)
    by_key = groupby(chosen, lambda head: head.key_head(job.run.source.q_per_kv))
    chance = _chance(job.run, chosen) if "planes" in analyses else None
    return [
        Task(job, groups, analyses, intervals, chance) for groups in _batches([tuple(heads) for _, heads in by_key])
    ]


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
    found = {name: with_notes(job.run, frame, name) for name, frame in whole.frames.items()}
    frames = {}
    for name in (table for analysis in analyses for table in ANALYSES[analysis]):
        empty = pd.DataFrame(columns=[column.name for column in TABLES[name]])
        frames[name] = arranged(name, found[name]) if name in found else empty
    if {"heads", "planes"} <= frames.keys():
        frames["heads"] = with_active_planes(frames["heads"], frames["planes"])
    for name in SCALARS:
        if {"heads", name} <= frames.keys() and len(frames["heads"]):
            frames["heads"] = with_scalars(frames["heads"], frames[name], name)
    frames |= {name: found[name] for name in ("points", "axes") if name in found}
    n_heads = sum(task.n_heads for task in tasks if task.job is job)
    failures = [failure for _, failed in mine for failure in failed]
    return Outcome(job, analyses, n_heads, Tables({**frames}, whole.replicates), failures)


def _chance(run: Run, heads: list[HeadId]) -> float | None:
    """The limit of chance coherence on the tokens of the first head that can be read; None if none of three can."""
    for head in heads[:3]:
        loaded, _ = run.source.load([head], replace(run.reading, sample=PLANE_ROWS))
        vectors = loaded[0].vectors if loaded else None
        if vectors is not None and min(len(np.unique(rows.example_id)) for rows in (vectors.q, vectors.k)) > 1:
            return chance_coherence(*tokens_of(vectors), int(loaded[0].moments.window))
    return None
