"""Adds what analyses say about whole heads to the table ``heads``; this is done only here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import FLAGS, HEAD_KEY, Column, Scalars, with_ends
from qkscope.analyses.catalogue import DECLARED_TABLES, SCALARS
from qkscope.analyses.pca import HEADS_TABLE


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
    """The table ``heads`` with the flags that any table raises for a head, and none that it no longer raises."""
    if "flags" in heads:
        heads = heads.assign(flags=[_of_every_table(flags) for flags in heads["flags"]])
    for name in DECLARED_TABLES:
        table = tables.get(name)
        if name != HEADS_TABLE.name and table is not None and len(table) and "flags" in table and len(heads):
            raised = table.drop_duplicates(HEAD_KEY)[[*HEAD_KEY, "flags"]].rename(columns={"flags": "more"})
            merged = heads.merge(raised, on=HEAD_KEY, how="left")
            heads = heads.assign(flags=[_union(*both) for both in zip(merged["flags"], merged["more"], strict=True)])
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
    """What a table says about each of these heads; empty where it says nothing."""
    columns = with_ends(scalars.columns)
    if table.empty:
        return _empty(columns, heads)
    names = [column.name for column in columns]
    found = heads[HEAD_KEY].merge(_whole(table, scalars, names), on=HEAD_KEY, how="left").reindex(columns=names)
    return found.astype({column.name: column.dtype or "float64" for column in columns}).set_axis(heads.index)


def _whole(table: pd.DataFrame, scalars: Scalars, names: list[str]) -> pd.DataFrame:
    """One row per head with these columns."""
    if scalars.of is not None:
        return scalars.of(table)
    return table.drop_duplicates(HEAD_KEY)[[*HEAD_KEY, *(name for name in names if name in table)]]


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


def _empty(columns: list[Column], heads: pd.DataFrame) -> pd.DataFrame:
    kinds: dict[str, Any] = {column.name: column.dtype or "float64" for column in columns}
    return pd.DataFrame(
        {name: pd.Series(np.nan, heads.index).astype(kind) for name, kind in kinds.items()}, heads.index
    )
