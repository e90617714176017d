"""Runs → moments → analyses → tables: a few key heads at a time, each read once, in this process or in workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import HEAD_KEY, Analysis
from qkscope.analyses.catalogue import ANALYSES_BY_NAME, DECLARED_TABLES, analyses_named
from qkscope.analyses.complement import PLANE_ROWS
from qkscope.analyses.pca import HEADS_TABLE
from qkscope.analyses.spectrum import chance_coherence, token_positions
from qkscope.analyses.tables import Columns, Tables, concat_tables, merge_tables
from qkscope.analyses.tabulate import batch_of, tabulate, with_empty_scalars, with_scalars
from qkscope.core.headdata import HeadData
from qkscope.engine import ExecutionTarget, for_each
from qkscope.errors import ConfigError, HeadError, TableError
from qkscope.files.runfolder import MANIFEST
from qkscope.headids import HeadId
from qkscope.options import N_BUCKETS
from qkscope.results.folder import check_results_folder, write_folder
from qkscope.results.frames import arranged, empty_table
from qkscope.results.job import Job, Task, find_cached_tables, with_points
from qkscope.results.reader import TABLES_FOLDER, Folder, read_folder, results_folders
from qkscope.results.side import REPLICATES, replicate_rows
from qkscope.results.summary import Failure, ModelResults, read_summary
from qkscope.runs.run import Run, open_run, with_token_texts
from qkscope.runs.source import LoadSpec


def do_task(task: Task) -> tuple[Tables, list[Failure]]:
    """The rows of a task's heads in every table, and the heads that failed."""
    run, analyses = task.job.run, with_points(tuple(analyses_named(task.names)), task.job)
    spec = _load_spec(task, analyses)
    loaded: list[HeadData] = []
    errors: list[HeadError] = []
    for group in task.groups:
        heads, failed = _load(run, group, spec)
        loaded += heads
        errors += failed
    tables_by_size = []
    for _, same_size in groupby(loaded, lambda head: head.moments.d):  # only neighbours are grouped: rows stay in order
        tables, failed = _tabulate(task, list(same_size), analyses)
        tables_by_size.append(tables)
        errors += failed
    return join_tables(tables_by_size), [Failure(run.model, error) for error in errors]


def _load(run: Run, heads: Sequence[HeadId], spec: LoadSpec) -> tuple[list[HeadData], list[HeadError]]:
    """Load the heads that read one key head; without enough memory only these heads fail."""
    try:
        return run.source.load(heads, spec)
    except MemoryError:
        reason = "cannot be read (out of memory)"
        return [], [HeadError(head, reason, run.source.file(head)) for head in heads]


def _tabulate(task: Task, heads: list[HeadData], analyses: tuple[Analysis, ...]) -> tuple[Tables, list[HeadError]]:
    """All analyses of the heads at once; if a computation fails, head by head, to find the failing head."""
    run = task.job.run
    try:
        tables, not_drifting = tabulate(batch_of(run.model, run.family, heads, analyses, task.job.options), analyses)
        reason = "no linear drift with position at all, so axis a is undefined"
        without_drift = [heads[i].head for i in not_drifting]
        return tables, [HeadError(head, reason, run.source.file(head)) for head in without_drift]
    except (np.linalg.LinAlgError, FloatingPointError, MemoryError) as error:
        if len(heads) == 1:
            head, reason = heads[0].head, "out of memory" if isinstance(error, MemoryError) else str(error)
            return Tables({}), [HeadError(head, f"cannot be analysed ({reason})", run.source.file(head))]
    by_head = [_tabulate(task, [head], analyses) for head in heads]
    return join_tables([tables for tables, _ in by_head]), [error for _, errors in by_head for error in errors]


def _load_spec(task: Task, analyses: tuple[Analysis, ...]) -> LoadSpec:
    """The data that analyses need besides moments: pairs by token, vectors, buckets, means with the rotation undone."""
    options = task.job.options
    return replace(
        task.job.run.reading,
        paired=options.rotation.pairing == "token" and any(analysis.axes for analysis in analyses),
        sample=PLANE_ROWS if options.points is None else max(PLANE_ROWS, options.points.rows),
        buckets=(options.buckets or N_BUCKETS) if any(analysis.buckets for analysis in analyses) else 0,
        rotary=any(analysis.rotary for analysis in analyses),
        passage=options.points is not None,
    )


def join_tables(parts: list[Tables]) -> Tables:
    """Concatenate the tables of several tasks or heads; rows that are not about single heads are merged."""
    if len(parts) == 1:
        return parts[0]
    joined = concat_tables(parts)
    merged = {
        name: merge(frame)
        for name, frame in joined.tables.items()
        if name in DECLARED_TABLES
        and (merge := DECLARED_TABLES[name].merge) is not None
        and isinstance(frame, pd.DataFrame)
    }
    return merge_tables([joined, Tables(merged)])


HEADS_AT_ONCE = 16
"""The least number of query heads that are analysed together: one head takes about as long as many."""
BATCHES_PER_WORKER = 2
"""With fewer batches, starting a worker costs more time than it saves."""

OnDone = Callable[[int, int, list[Failure]], None]
"""Called with the number of heads done, the number of all heads and the new failures."""


def analyze(
    jobs: Sequence[Job],
    analyses: Iterable[str] = tuple(ANALYSES_BY_NAME),
    *,
    target: ExecutionTarget = ExecutionTarget(),  # noqa: B008  frozen
    strict: bool = False,
    on_done: OnDone | None = None,
) -> list[ModelResults]:
    """Analyse every selected head of every job; a failed head is reported, or raises if ``strict``."""
    _check(jobs)
    requested = tuple(analyses_named(analyses))
    by_job = [_tasks(job, requested) for job in jobs]
    tasks = [task for own_tasks in by_job for task in own_tasks]
    total, done = sum(task.n_heads for task in tasks), 0
    results: dict[int, tuple[Tables, list[Failure]]] = {}
    if on_done is not None:
        on_done(0, total, [])
    for index, result in for_each(do_task, tasks, target, BATCHES_PER_WORKER):
        results[index] = result
        done += tasks[index].n_heads
        if strict and result[1]:
            raise result[1][0].error
        if on_done is not None:
            on_done(done, total, result[1])
    in_order = iter([results[index] for index in range(len(tasks))])
    return [
        _model_results(job, requested, sum(task.n_heads for task in own_tasks), [next(in_order) for _ in own_tasks])
        for job, own_tasks in zip(jobs, by_job, strict=True)
    ]


def tables_of(location: str | Path, *, workers: int | None = 1, on_done: OnDone | None = None) -> Folder:
    """The tables of a results folder, or of a captured run, in whose folder they are kept once they are computed."""
    path = Path(location)
    folders = [] if (path / MANIFEST).is_file() else results_folders(path)
    if len(folders) > 1:
        raise TableError(f"{path} has tables of several runs; give one of {', '.join(map(str, folders))}")
    if folders:
        return read_folder(folders[0])
    run = open_run(location)
    if not (path / MANIFEST).is_file():
        raise TableError(f"{location} has no tables yet; run: qkscope analyze {location} -o results, then give results")
    folder = path / TABLES_FOLDER
    kept = label_in(folder, run)
    job = Job.from_options(replace(run, model=kept), "analyze")
    if find_cached_tables(job, [folder]) is None:
        check_results_folder(folder)
        started = time.monotonic()
        results = analyze([job], target=ExecutionTarget(workers), on_done=on_done)
        write_results(folder, results, wall_seconds=time.monotonic() - started)
    return read_folder(folder).of(kept, run.model)


def label_in(folder: Path, run: Run) -> str:
    """The label of a run in its folder's tables: another than its own after the folder was copied or moved."""
    return next(iter(read_summary(folder)["models"]), run.model)


def write_results(
    folder: Path, results: Sequence[ModelResults], *, wall_seconds: float, published: bool = False
) -> list[Path]:
    """Write tables and summary.json; returns the csv files. A model without any successful head changes nothing."""
    successful = [result for result in results if result.n_failed < result.n_heads]
    return write_folder(folder, successful, wall_seconds=wall_seconds, published=published)


def _check(jobs: Sequence[Job]) -> None:
    """Raise if two jobs have the same label, or the requested buckets differ from those of the capture."""
    labels = [job.run.model for job in jobs]
    duplicates = {name for name in labels if labels.count(name) > 1}
    if duplicates:
        raise ConfigError(
            f"several sources have the label {', '.join(sorted(duplicates))}; give each source its own label"
        )
    for job in jobs:
        captured_buckets = job.run.source.buckets
        if captured_buckets is not None and job.options.buckets not in (None, captured_buckets):
            raise ConfigError(f"{job.run.model} was captured with {captured_buckets} position buckets; omit --buckets")


def _tasks(job: Job, analyses: Sequence[Analysis]) -> list[Task]:
    selected = job.selection.of(job.run)
    by_key = groupby(selected, lambda head: head.key_head(job.run.source.q_per_kv))
    names = tuple(analysis.name for analysis in analyses)
    if any(analysis.chance for analysis in analyses):
        job = replace(job, options=replace(job.options, chance=_chance(job.run, selected)))
    return [Task(job, groups, names) for groups in _batches([tuple(heads) for _, heads in by_key])]


def _batches(groups: list[tuple[HeadId, ...]]) -> Iterator[tuple[tuple[HeadId, ...], ...]]:
    """Batches of whole groups; each batch except the last has at least HEADS_AT_ONCE heads."""
    batch: list[tuple[HeadId, ...]] = []
    for group in groups:
        batch.append(group)
        if sum(map(len, batch)) >= HEADS_AT_ONCE:
            yield tuple(batch)
            batch = []
    if batch:
        yield tuple(batch)


def _model_results(
    job: Job, analyses: tuple[Analysis, ...], n_heads: int, task_results: list[tuple[Tables, list[Failure]]]
) -> ModelResults:
    """Combine the results of a job's tasks, in the order of the tasks."""
    tables = join_tables([task_tables for task_tables, _ in task_results])
    computed = dict(tables.frames)
    if HEADS_TABLE.name in computed:
        computed[HEADS_TABLE.name] = with_empty_scalars(computed[HEADS_TABLE.name])
    names = [table.name for analysis in analyses for table in analysis.tables]
    frames = {name: arranged(name, computed[name]) if name in computed else empty_table(name) for name in names}
    if HEADS_TABLE.name in frames:
        frames[HEADS_TABLE.name] = with_scalars(frames[HEADS_TABLE.name], frames)
    frames |= {name: frame for name, frame in computed.items() if name not in frames}
    if "points" in frames:
        frames["points"] = with_token_texts(frames["points"], job.run.source)
    run = job.run
    if job.options.intervals:
        frames[REPLICATES.name] = _replicate_rows(analyses, computed, tables.replicates)
    return ModelResults(
        model=run.model,
        family=run.family,
        source=run.source.identity() | {"q_per_kv": run.source.q_per_kv},
        count_extent=lambda: vars(run.source.extent(job.selection.of(run))),
        config=job.config,
        analyses=analyses,
        n_heads=n_heads,
        failures=[failure for _, failed in task_results for failure in failed],
        tables=Tables({**frames}, tables.replicates),
    )


def _replicate_rows(
    analyses: tuple[Analysis, ...], computed: Mapping[str, pd.DataFrame], replicates: Columns
) -> pd.DataFrame:
    """The replicates of all columns about whole heads, for comparisons with other runs."""
    parts = []
    for table in (table for analysis in analyses for table in analysis.tables if table.name in computed):
        names = [column.name for column in table.columns if column.scale is not None and column.name in replicates]
        if names and table.about_heads:
            heads = computed[table.name].drop_duplicates(HEAD_KEY)
            parts.append(replicate_rows(heads, {name: replicates[name] for name in names}))
    return pd.concat(parts, ignore_index=True) if parts else replicate_rows(pd.DataFrame(columns=HEAD_KEY), {})


def _chance(run: Run, heads: list[HeadId]) -> float | None:
    """Chance coherence on the tokens of the first readable head; None if none of the first three is readable."""
    for head in heads[:3]:
        loaded, _ = run.source.load([head], replace(run.reading, sample=PLANE_ROWS))
        vectors = loaded[0].vectors if loaded else None
        if vectors is not None and min(len(np.unique(rows.example_id)) for rows in (vectors.q, vectors.k)) > 1:
            return chance_coherence(*token_positions(vectors), int(loaded[0].moments.window))
    return None


def analysis_names(listed: str | None) -> list[str]:
    """The analyses of a comma-separated list, in the order of the catalogue; None: all of them."""
    names = list(ANALYSES_BY_NAME) if listed is None else [name.strip() for name in listed.split(",")]
    return [analysis.name for analysis in analyses_named(names)]
