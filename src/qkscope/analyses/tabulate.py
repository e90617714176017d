"""From the values of an analysis to tables: index columns, estimates, intervals, notes and flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from jaxtyping import Int

from qkscope.analyses.analysis import ENDS, FLAGS, HEAD_KEY, Analysis, Column, Scalars, Table, TableValues, with_ends
from qkscope.analyses.batch import Batch
from qkscope.analyses.catalogue import DECLARED_TABLES, SCALARS
from qkscope.analyses.options import AnalysisOptions
from qkscope.analyses.pca import HEADS_TABLE
from qkscope.analyses.tables import Columns, Tables, merge_tables
from qkscope.analyses.uncertainty import Interval, counted_by_document, flags, jackknife
from qkscope.core.headdata import HeadData


def batch_of(
    model: str, family: str, heads: Sequence[HeadData], analyses: Sequence[Analysis], options: AnalysisOptions
) -> Batch:
    """A batch of a model's heads for these analyses."""
    return Batch(model, family, tuple(heads), _names(analyses), any(analysis.axes for analysis in analyses), options)


def tabulate(batch: Batch, analyses: Sequence[Analysis]) -> tuple[Tables, list[int]]:
    """The tables of a batch, and the indices of heads without drift, which analyses that need axis a leave out."""
    if not batch.axes or batch.drifts.all():
        return _tables(batch, analyses), []
    on_axes, without_axes = (
        [analysis for analysis in analyses if analysis.axes is needs_axes] for needs_axes in (True, False)
    )
    drifting = np.flatnonzero(batch.drifts).tolist()
    parts = [_tables(batch.select(range(len(batch)), _names(without_axes), axes=False), without_axes)]
    if drifting:
        parts.append(_tables(batch.select(drifting, _names(on_axes), axes=True), on_axes))
    return merge_tables(parts), np.flatnonzero(~batch.drifts).tolist()


def _names(analyses: Sequence[Analysis]) -> frozenset[str]:
    return frozenset(analysis.name for analysis in analyses)


def _tables(batch: Batch, analyses: Sequence[Analysis]) -> Tables:
    parts = []
    for analysis in analyses:
        results = analysis.compute(batch)
        parts += [_table(batch, analysis.table(name), values) for name, values in results.tables.items()]
        parts.append(Tables(results.complete))
    return merge_tables(parts)


def _table(batch: Batch, table: Table, values: TableValues) -> Tables:
    """One table with all its columns, and the replicates that summaries average."""
    values = replace(values, replicates=_all_replicates(batch, table, values) if batch.options.intervals else {})
    numbers = _with_intervals(batch, table.columns, values)
    head = values.head
    if head is None:
        columns, head = _flattened(numbers, len(batch))
    else:
        columns = {name: array if name in values.columns else array[head] for name, array in numbers.items()}
    columns = {name: array[head] for name, array in _row_labels(batch, table, numbers).items()} | columns
    if values.rows is not None and not values.rows.all():
        columns = {name: array[values.rows.reshape(-1)] for name, array in columns.items()}
    return Tables({table.name: columns}, _replicates(batch, values, np.unique(head)))


def _all_replicates(batch: Batch, table: Table, values: TableValues) -> Columns:
    """The replicates, also of columns that are another column times the reach."""
    products = {
        column.name: values.replicates[column.per_token] * batch.reach[:, None]
        for column in table.columns
        if column.per_token in values.replicates
    }
    return dict(values.replicates) | products


def _row_labels(batch: Batch, table: Table, numbers: Columns) -> Columns:
    """Columns with one value per head: index, notes about its layer, and the flags of its rows."""
    labels = dict(batch.index)
    if table.notes:
        labels["nope"] = _optional([head.nope for head in batch.heads])
        labels["sliding_window"] = _optional([head.sliding_window for head in batch.heads])
    if table.flags:
        labels["flags"] = np.array(flags(batch.moments, table.raises(batch, numbers) if table.raises else None))
    return labels


def _optional(values: Sequence[int | None]) -> np.ndarray:
    return np.array([np.nan if value is None else float(value) for value in values])


def _with_intervals(batch: Batch, columns: Sequence[Column], values: TableValues) -> Columns:
    """The values, the columns that are another column times the reach, and the ends of all intervals."""
    numbers = values.columns | values.per_head
    for column in columns:
        if column.per_token:
            for end in ("", *ENDS):
                numbers[column.name + end] = np.asarray(numbers[column.per_token + end] * batch.reach)
        elif column.scale is not None:
            interval = _interval(batch, column, numbers[column.name], values)
            numbers |= dict(zip((column.name + end for end in ENDS), vars(interval).values(), strict=True))
    return numbers


def _interval(batch: Batch, column: Column, estimate: np.ndarray, values: TableValues) -> Interval:
    """The interval of a column; groups with a NaN replicate do not count."""
    assert column.scale is not None
    replicates = values.replicates.get(column.name)
    if replicates is None:
        missing = np.full(estimate.shape, np.nan)
        return Interval(missing, missing, missing)
    present = batch.usable
    unknown = np.isnan(replicates) | np.isnan(estimate)[:, None]
    if unknown.any():
        present = present.reshape(present.shape + (1,) * (replicates.ndim - 2)) * ~unknown
        replicates, estimate = np.nan_to_num(replicates), np.nan_to_num(estimate)
    interval = jackknife(estimate, replicates, present, column.scale)
    if column.name in values.documents:
        interval = counted_by_document(interval, estimate, values.documents[column.name])
    if column.name not in values.most:
        return interval
    most = values.most[column.name]
    return replace(interval, high=np.where(np.isnan(most), interval.high, np.minimum(interval.high, most)))


def _flattened(numbers: Columns, n_heads: int) -> tuple[Columns, Int[np.ndarray, "rows"]]:
    """One row per head and element of the further axes; values with one entry per head are repeated."""
    further_axes: tuple[int, ...] = max((values.shape[1:] for values in numbers.values()), key=len)
    n_repeats = int(np.prod(further_axes, dtype=int))
    columns = {
        name: values.reshape(-1) if len(values.shape) > 1 else values.repeat(n_repeats, 0)
        for name, values in numbers.items()
    }
    return columns, np.arange(n_heads).repeat(n_repeats)


def _replicates(batch: Batch, values: TableValues, heads: Int[np.ndarray, "some"]) -> Columns:
    """Replicates of each column, NaN for groups that the jackknife does not delete; the first row of several."""
    first = {
        name: replicates.reshape(*replicates.shape[:2], -1)[..., 0] for name, replicates in values.replicates.items()
    }
    return {name: np.where(batch.usable > 0, replicates, np.nan)[heads] for name, replicates in first.items()}


def with_empty_scalars(heads: pd.DataFrame) -> pd.DataFrame:
    """The table ``heads`` with empty columns for everything that other analyses may add."""
    columns = [column for scalars in SCALARS.values() for column in with_ends(scalars.columns)]
    flags = [name for name in heads.columns if name == FLAGS.name]
    return pd.concat([heads.drop(columns=flags), _empty(columns, heads), heads[flags]], axis=1)


def with_scalars(heads: pd.DataFrame, tables: Mapping[str, pd.DataFrame | None]) -> pd.DataFrame:
    """The table ``heads`` with the scalars of the other tables; the columns of a table that is None stay unchanged."""
    added = [_of_heads(heads, table, of) for name, of in SCALARS.items() if (table := tables.get(name)) is not None]
    if added and len(heads):  # all at once: heads has hundreds of columns, and each step would copy them
        new = pd.concat(added, axis=1)
        heads = pd.concat([heads.drop(columns=list(new.columns)), new], axis=1)[list(heads.columns)]
    return with_flags(heads, tables)


def with_flags(heads: pd.DataFrame, tables: Mapping[str, pd.DataFrame | None]) -> pd.DataFrame:
    """The table ``heads`` with all flags that any table now raises for a head; earlier flags of tables are dropped."""
    if "flags" in heads:
        heads = heads.assign(flags=[_of_every_table(flags) for flags in heads["flags"]])
    for name in DECLARED_TABLES:
        table = tables.get(name)
        if name != HEADS_TABLE.name and table is not None and len(table) and "flags" in table and len(heads):
            raised = table.drop_duplicates(HEAD_KEY)[[*HEAD_KEY, "flags"]].rename(columns={"flags": "more"})
            merged = heads.merge(raised, on=HEAD_KEY, how="left")
            heads = heads.assign(flags=[_union(*pair) for pair in zip(merged["flags"], merged["more"], strict=True)])
    return heads


def _of_every_table(flags: object) -> str:
    """The flags that do not come from a single table."""
    names = flags.split(";") if isinstance(flags, str) else []
    return ";".join(name for name in names if name.startswith(("low_n", "few_documents", "nonfinite_")))


def _union(*flags: object) -> str:
    """Flags joined by ``;``, each once.

    >>> _union("low_n;weak_axis", "weak_axis;nonfinite_q=3", None)
    'low_n;weak_axis;nonfinite_q=3'
    """
    return ";".join(dict.fromkeys(flag for text in flags if isinstance(text, str) for flag in text.split(";") if flag))


def _of_heads(heads: pd.DataFrame, table: pd.DataFrame, scalars: Scalars) -> pd.DataFrame:
    """A table's scalars for each of these heads; empty where it has none."""
    columns = with_ends(scalars.columns)
    if table.empty:
        return _empty(columns, heads)
    names = [column.name for column in columns]
    values = (
        heads[HEAD_KEY].merge(_one_row_per_head(table, scalars, names), on=HEAD_KEY, how="left").reindex(columns=names)
    )
    values = values.astype({column.name: column.stored_as for column in columns}).set_axis(heads.index)
    texts = [column.name for column in columns if column.dtype == "text"]
    values[texts] = values[texts].where(values[texts].notna(), None)
    return values


def _one_row_per_head(table: pd.DataFrame, scalars: Scalars, names: list[str]) -> pd.DataFrame:
    """One row per head with these columns."""
    if scalars.of is not None:
        return scalars.of(table)
    return table.drop_duplicates(HEAD_KEY)[[*HEAD_KEY, *(name for name in names if name in table)]]


def heads_from(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame | None:
    """The scalars of whole heads from other tables, in place of a table ``heads``; None if there are none."""
    heads: pd.DataFrame | None = None
    for name, scalars in SCALARS.items():
        table = tables.get(name)
        if table is None or table.empty or scalars.of is not None:
            continue
        names = [column.name for column in with_ends(scalars.columns)]
        present = [column for column in (*HEAD_KEY, "family", "k_head", *names) if column in table]
        rows = table.drop_duplicates(HEAD_KEY)[present]
        if heads is not None:
            new = [column for column in rows if column not in heads]
            rows = heads.merge(rows[[*HEAD_KEY, *new]], on=HEAD_KEY, how="outer")
        heads = rows
    return heads


def _empty(columns: list[Column], heads: pd.DataFrame) -> pd.DataFrame:
    values = {
        column.name: pd.Series([None if column.dtype == "text" else np.nan] * len(heads), heads.index, column.stored_as)
        for column in columns
    }
    return pd.DataFrame(values, heads.index)
