"""One task: read a few key heads and their query heads, and tabulate them all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import Analysis
from qkscope.analyses.catalogue import DECLARED_TABLES, named
from qkscope.analyses.planevectors import PLANE_ROWS
from qkscope.analyses.tables import Tables, together, under_each_other
from qkscope.analyses.tabulate import batch_of, tabulate
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import N_BUCKETS
from qkscope.errors import HeadError
from qkscope.heads import HeadId
from qkscope.pipeline.job import Failure, Task, with_points
from qkscope.runs.run import Run
from qkscope.runs.source import Reading


def do_task(task: Task) -> tuple[Tables, list[Failure]]:
    """The rows of a task's heads in every table, and the heads that failed."""
    run, analyses = task.job.run, with_points(tuple(named(task.names)), task.job)
    reading = _reading(task, analyses)
    loaded: list[HeadData] = []
    errors: list[HeadError] = []
    for group in task.groups:
        heads, failed = _loaded(run, group, reading)
        loaded += heads
        errors += failed
    parts = []
    for _, same_size in groupby(loaded, lambda head: head.moments.d):  # only neighbours are grouped: rows stay in order
        tables, failed = _tabulate(task, list(same_size), analyses)
        parts.append(tables)
        errors += failed
    return joined(parts), [Failure(run.model, error) for error in errors]


def _loaded(run: Run, heads: Sequence[HeadId], reading: Reading) -> tuple[list[HeadData], list[HeadError]]:
    """The heads that read one key head; where memory does not suffice for them, they fail, and no others."""
    try:
        return run.source.load(heads, reading)
    except MemoryError:
        reason = "cannot be read (out of memory)"
        return [], [HeadError(head, reason, run.source.file(head)) for head in heads]


def _tabulate(task: Task, heads: list[HeadData], analyses: tuple[Analysis, ...]) -> tuple[Tables, list[HeadError]]:
    """All analyses of the heads at once; if a computation fails, head by head, to find the failing head."""
    run = task.job.run
    try:
        tables, not_drifting = tabulate(batch_of(run.model, run.family, heads, analyses, task.options), analyses)
        return tables, [_no_drift(run, heads[i].head) for i in not_drifting]
    except (np.linalg.LinAlgError, FloatingPointError, MemoryError) as error:
        if len(heads) == 1:
            head, reason = heads[0].head, "out of memory" if isinstance(error, MemoryError) else str(error)
            return Tables({}), [HeadError(head, f"cannot be analysed ({reason})", run.source.file(head))]
    by_head = [_tabulate(task, [head], analyses) for head in heads]
    return joined([tables for tables, _ in by_head]), [error for _, errors in by_head for error in errors]


def _reading(task: Task, analyses: tuple[Analysis, ...]) -> Reading:
    """What the analyses need besides moments: pairs by token, vectors, buckets, means with the rotation undone."""
    job = task.job
    return replace(
        job.run.reading,
        paired=job.rotation.pairing == "token" and any(analysis.axes for analysis in analyses),
        sample=PLANE_ROWS if job.points is None else max(PLANE_ROWS, job.points.rows),
        buckets=(job.buckets or N_BUCKETS) if any(analysis.buckets for analysis in analyses) else 0,
        rotary=any(analysis.rotary for analysis in analyses),
        passage=job.points is not None,
    )


def joined(parts: list[Tables]) -> Tables:
    """The tables of several tasks or heads concatenated; rows that are not about single heads are merged."""
    if len(parts) == 1:
        return parts[0]
    tables = under_each_other(parts)
    merged = {
        name: merge(frame)
        for name, frame in tables.given.items()
        if name in DECLARED_TABLES
        and (merge := DECLARED_TABLES[name].merge) is not None
        and isinstance(frame, pd.DataFrame)
    }
    return together([tables, Tables(merged)])


def _no_drift(run: Run, head: HeadId) -> HeadError:
    reason = "no linear drift with position at all, so axis a is undefined"
    return HeadError(head, reason, run.source.file(head))
