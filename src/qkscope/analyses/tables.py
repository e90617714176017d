"""Intermediate tables: columns as arrays, joined from task to task; data frames only at the end.

Creating a data frame takes about as long for a few heads as for a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Float

Columns = dict[str, np.ndarray]
"""One array per column, all of the same length; a column of vectors has two axes. Booleans that may be missing are
stored as 1, 0 and NaN."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Tables:
    """Tables by name, and the delete-one replicates of the columns that summaries average (NaN: no such group)."""

    tables: Mapping[str, Columns | pd.DataFrame]
    """Each table as columns or as a frame."""
    replicates: dict[str, Float[np.ndarray, "heads groups"]] = field(default_factory=dict)

    @cached_property
    def frames(self) -> dict[str, pd.DataFrame]:
        """Each table as a frame."""
        return {
            name: table if isinstance(table, pd.DataFrame) else frame_of(table) for name, table in self.tables.items()
        }


def frame_of(columns: Columns) -> pd.DataFrame:
    """The columns as a frame."""
    return pd.DataFrame({name: list(values) if values.ndim > 1 else values for name, values in columns.items()})


def merge_tables(parts: Sequence[Tables]) -> Tables:
    """Combine different tables of the same heads."""
    tables = {name: table for part in parts for name, table in part.tables.items()}
    return Tables(tables, {name: values for part in parts for name, values in part.replicates.items()})


def concat_tables(parts: Sequence[Tables]) -> Tables:
    """Concatenate the same tables of different heads."""
    tables = {
        name: _joined(parts_of_table) for name, parts_of_table in _by_name([part.tables for part in parts]).items()
    }
    replicates = {
        name: np.concatenate(arrays) for name, arrays in _by_name([part.replicates for part in parts]).items()
    }
    return Tables(tables, replicates)


def _joined(tables: list[Columns | pd.DataFrame]) -> Columns | pd.DataFrame:
    columns = [table for table in tables if not isinstance(table, pd.DataFrame)]
    frames = [table for table in tables if isinstance(table, pd.DataFrame)]
    if frames:  # a table is one or the other
        return pd.concat(frames, ignore_index=True)
    return {name: _concatenated([part[name] for part in columns]) for name in columns[0]}


def _concatenated(arrays: list[np.ndarray]) -> np.ndarray:
    """One column; vectors of heads with different dimensions become one object per row."""
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    rows = [row for array in arrays for row in array]
    column = np.empty(len(rows), dtype=object)
    column[:] = rows
    return column


def _by_name(parts: Sequence[Mapping[str, _T]]) -> dict[str, list[_T]]:
    """The values of each name, in the order of the parts."""
    names = {name: None for part in parts for name in part}
    return {name: [part[name] for part in parts if name in part] for name in names}
