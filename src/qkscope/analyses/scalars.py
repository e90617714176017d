"""Adds what analyses say about whole heads to the table ``heads``; this is done only here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import HEAD_KEY, Column, Scalars, with_ends
from qkscope.analyses.catalogue import SCALARS


def with_empty_scalars(heads: pd.DataFrame) -> pd.DataFrame:
    """The table ``heads`` with empty columns for everything that other analyses may add."""
    columns = [column for scalars in SCALARS.values() for column in with_ends(scalars.columns)]
    return pd.concat([heads, pd.DataFrame(_empty(columns, heads), index=heads.index)], axis=1)


def with_scalars(heads: pd.DataFrame, tables: Mapping[str, pd.DataFrame | None]) -> pd.DataFrame:
    """The table ``heads`` with the scalars of the other tables; the columns of a table that is None stay unchanged."""
    for name, scalars in SCALARS.items():
        table = tables.get(name)
        if table is not None and len(heads):
            heads = _with(heads, table, scalars)
    return heads


def _with(heads: pd.DataFrame, table: pd.DataFrame, scalars: Scalars) -> pd.DataFrame:
    columns = with_ends(scalars.columns)
    names = [column.name for column in columns]
    if table.empty:
        return heads.assign(**_empty(columns, heads))
    merged = heads.drop(columns=names).merge(_whole(table, scalars, names), on=HEAD_KEY, how="left")
    return merged.astype({column.name: column.dtype or "float64" for column in columns})[list(heads.columns)]


def _whole(table: pd.DataFrame, scalars: Scalars, names: list[str]) -> pd.DataFrame:
    """One row per head with these columns."""
    return scalars.of(table) if scalars.of is not None else table.drop_duplicates(HEAD_KEY)[[*HEAD_KEY, *names]]


def heads_from(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame | None:
    """What tables say about whole heads if there is no table ``heads``; None if nothing."""
    heads: pd.DataFrame | None = None
    for name, scalars in SCALARS.items():
        table = tables.get(name)
        if table is None or table.empty or scalars.of is not None:
            continue
        names = [column.name for column in with_ends(scalars.columns)]
        named = [column for column in (*HEAD_KEY, "family", "k_head", *names) if column in table]
        rows = table.drop_duplicates(HEAD_KEY)[named]
        if heads is not None:
            new = [column for column in rows if column not in heads]
            rows = heads.merge(rows[[*HEAD_KEY, *new]], on=HEAD_KEY, how="outer")
        heads = rows
    return heads


def _empty(columns: list[Column], heads: pd.DataFrame) -> dict[str, Any]:
    kinds: dict[str, Any] = {column.name: column.dtype or "float64" for column in columns}
    return {name: pd.Series(np.nan, heads.index).astype(kind) for name, kind in kinds.items()}
