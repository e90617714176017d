"""The distance curve by side: of earlier keys and, in encoders, of later ones, whose distances are negative."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Side:
    """The rows of a curve that are about keys on one side of the query, and how they are drawn."""

    rows: pd.DataFrame
    later: bool

    @property
    def x(self) -> np.ndarray:
        """The middle of each bin, on a logarithmic scale."""
        return np.sqrt((self.rows["distance_low"] * self.rows["distance_high"]).to_numpy(float))

    @property
    def said(self) -> str:
        """What is added to a label."""
        return ", later keys" if self.later else ""

    @property
    def line(self) -> str:
        """Style of a line."""
        return "--" if self.later else "-"

    @property
    def marks(self) -> dict[str, Any]:
        """Style of points."""
        return {"linestyle": "none", "marker": "o", "markersize": 2.8} | ({"fillstyle": "none"} if self.later else {})


def sides(curve: pd.DataFrame) -> Iterator[Side]:
    """The sides that a curve has, earlier keys first."""
    for later in (False, True):
        rows = curve[(curve["distance_low"] < 0) == later]
        if len(rows):
            yield Side(rows, later)
