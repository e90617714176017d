"""Tables on their way: columns as arrays, joined from task to task, and frames only at the end.

A frame costs about as much for a few heads as for a thousand.
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
"""One array per column, all of one length; a column of vectors has two axes. Truth values that may be absent are
numbers: 1, 0 and NaN."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Tables:
    """Tables by name, and the delete-one replicates of the columns that summaries average (NaN: no such group)."""

    given: Mapping[str, Columns | pd.DataFrame]
    """Each as columns or as a frame."""
    replicates: dict[str, Float[np.ndarray, "heads groups"]] = field(default_factory=dict)

    @cached_property
    def frames(self) -> dict[str, pd.DataFrame]:
        """Each as a frame."""
        return {name: one if isinstance(one, pd.DataFrame) else frame_of(one) for name, one in self.given.items()}


def frame_of(columns: Columns) -> pd.DataFrame:
    """The columns as a frame."""
    return pd.DataFrame({name: list(one) if one.ndim > 1 else one for name, one in columns.items()})


def together(parts: Sequence[Tables]) -> Tables:
    """Different tables of the same heads."""
    given = {name: table for part in parts for name, table in part.given.items()}
    return Tables(given, {name: values for part in parts for name, values in part.replicates.items()})


def under_each_other(parts: Sequence[Tables]) -> Tables:
    """The same tables of different heads."""
    given = {name: _joined(found) for name, found in _by_name([part.given for part in parts]).items()}
    again = {name: np.concatenate(found) for name, found in _by_name([part.replicates for part in parts]).items()}
    return Tables(given, again)


def _joined(tables: list[Columns | pd.DataFrame]) -> Columns | pd.DataFrame:
    columns = [one for one in tables if not isinstance(one, pd.DataFrame)]
    frames = [one for one in tables if isinstance(one, pd.DataFrame)]
    if frames:  # a table is one or the other
        return pd.concat(frames, ignore_index=True)
    return {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}


def _by_name(parts: Sequence[Mapping[str, _T]]) -> dict[str, list[_T]]:
    """What each name stands for, in the order of the parts."""
    names = {name: None for part in parts for name in part}
    return {name: [part[name] for part in parts if name in part] for name in names}
