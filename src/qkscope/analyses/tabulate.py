"""From the values of an analysis to tables: columns that name a head, estimates, intervals, notes and flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from qkscope.analyses.analysis import ENDS, Analysis, Column, Table, Values
from qkscope.analyses.batch import Batch
from qkscope.analyses.options import AnalysisOptions
from qkscope.analyses.tables import Columns, Tables, together
from qkscope.analyses.uncertainty import Interval, flags, jackknife
from qkscope.core.headdata import HeadData


def batch_of(
    model: str, family: str, heads: Sequence[HeadData], analyses: Sequence[Analysis], options: AnalysisOptions
) -> Batch:
    """Heads of a model, ready for these analyses."""
    return Batch(model, family, tuple(heads), _names(analyses), any(one.axes for one in analyses), options)


def tabulate(batch: Batch, analyses: Sequence[Analysis]) -> tuple[Tables, list[int]]:
    """The tables of a batch, and which heads do not drift at all: those have no part in what needs axis a."""
    if not batch.axes or batch.drifts.all():
        return _tables(batch, analyses), []
    on_axes, others = ([one for one in analyses if one.axes is which] for which in (True, False))
    drifting = np.flatnonzero(batch.drifts).tolist()
    parts = [_tables(batch.some(range(len(batch)), _names(others), axes=False), others)]
    if drifting:
        parts.append(_tables(batch.some(drifting, _names(on_axes), axes=True), on_axes))
    return together(parts), np.flatnonzero(~batch.drifts).tolist()


def _names(analyses: Sequence[Analysis]) -> frozenset[str]:
    return frozenset(analysis.name for analysis in analyses)


def _tables(batch: Batch, analyses: Sequence[Analysis]) -> Tables:
    parts = []
    for analysis in analyses:
        found = analysis.compute(batch)
        parts += [_table(batch, analysis.table(name), values) for name, values in found.tables.items()]
        parts.append(Tables(found.complete))
    return together(parts)


def _table(batch: Batch, table: Table, values: Values) -> Tables:
    """One table with all its columns, and the replicates that summaries average."""
    values = values if batch.options.intervals else replace(values, left_out={})
    numbers = _with_intervals(batch, table.columns, values)
    head = values.head
    if head is None:
        columns, head = _flattened(numbers, len(batch))
    else:
        columns = {name: part if name in values.columns else part[head] for name, part in numbers.items()}
    columns = {name: part[head] for name, part in _about(batch, table).items()} | columns
    if values.rows is not None and not values.rows.all():
        columns = {name: part[values.rows.reshape(-1)] for name, part in columns.items()}
    return Tables({table.name: columns}, _replicates(batch, values, np.unique(head)))


def _about(batch: Batch, table: Table) -> Columns:
    """Per head: what names it, what kind of layer it is in, what qualifies its rows."""
    about = dict(batch.index)
    if table.notes:
        about["nope"] = _optional([one.nope for one in batch.heads])
        about["sliding_window"] = _optional([one.sliding_window for one in batch.heads])
    if table.flags:
        about["flags"] = np.array(flags(batch.moments))
    return about


def _optional(values: Sequence[int | None]) -> np.ndarray:
    return np.array([np.nan if value is None else float(value) for value in values])


def _with_intervals(batch: Batch, columns: Sequence[Column], values: Values) -> Columns:
    """The values, those that are others times the window, and the ends of all intervals."""
    numbers = values.columns | values.per_head
    for column in columns:
        if column.per_token:
            for end in ("", *ENDS):
                numbers[column.name + end] = np.asarray(numbers[column.per_token + end] * batch.moments.window)
        elif column.scale is not None:
            interval = _interval(batch, column, numbers[column.name], values.left_out)
            numbers |= dict(zip((column.name + end for end in ENDS), vars(interval).values(), strict=True))
    return numbers


def _interval(batch: Batch, column: Column, estimate: np.ndarray, left_out: Mapping[str, np.ndarray]) -> Interval:
    """The interval of a column; groups whose absence says nothing do not count."""
    assert column.scale is not None
    again = left_out.get(column.name)
    if again is None:
        missing = np.full(estimate.shape, np.nan)
        return Interval(missing, missing, missing)
    present = batch.usable
    unknown = np.isnan(again) | np.isnan(estimate)[:, None]
    if unknown.any():
        present = present.reshape(present.shape + (1,) * (again.ndim - 2)) * ~unknown
        again, estimate = np.nan_to_num(again), np.nan_to_num(estimate)
    return jackknife(estimate, again, present, column.scale)


def _flattened(numbers: Columns, n_heads: int) -> tuple[Columns, Int[np.ndarray, "rows"]]:
    """One row per head and whatever else there is; what each head has one of is repeated."""
    rest: tuple[int, ...] = max((part.shape[1:] for part in numbers.values()), key=len)
    times = int(np.prod(rest, dtype=int))
    columns = {
        name: part.reshape(-1) if len(part.shape) > 1 else part.repeat(times, 0) for name, part in numbers.items()
    }
    return columns, np.arange(n_heads).repeat(times)


def _replicates(batch: Batch, values: Values, heads: Int[np.ndarray, "some"]) -> Columns:
    """Replicates of each column, NaN for groups that the jackknife does not delete; of several rows, the first."""
    first = {name: again.reshape(*again.shape[:2], -1)[..., 0] for name, again in values.left_out.items()}
    return {name: np.where(batch.usable > 0, again, np.nan)[heads] for name, again in first.items()}
