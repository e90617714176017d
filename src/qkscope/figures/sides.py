"""The distance curve by side: of earlier keys and, in encoders, of later ones, whose distances are negative."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes


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

    def points(self, axes: Axes, size: float, color: str, label: str = "", **style: Any) -> None:
        """The measured curve, with its standard errors if it has any; later keys have open marks."""
        axes.errorbar(
            self.x, self.rows["measured"], yerr=self.rows.get("measured_se"), linestyle="none", marker="o",
            markersize=size, color=color, fillstyle="none" if self.later else "full", elinewidth=0.8,
            label=label and label + self.said, **style,
        )  # fmt: skip

    def curve(self, axes: Axes, width: float, color: str, label: str) -> None:
        """The predicted curve; that of later keys is broken."""
        axes.plot(self.x, self.rows["predicted"], self.line, color=color, linewidth=width, label=label + self.said)


PREDICTED = "#d2691e"
"""Colour of what means predict."""


def draw_sides(axes: Axes, curve: pd.DataFrame, points: float, width: float, color: str) -> None:
    """Measured points and predicted lines of a curve over a logarithmic distance."""
    for side in sides(curve):
        side.points(axes, points, color, "measured")
        side.curve(axes, width, PREDICTED, "predicted from means")
    axes.set_xscale("log")


def sides(curve: pd.DataFrame) -> Iterator[Side]:
    """The sides that a curve has, earlier keys first."""
    for later in (False, True):
        rows = curve[(curve["distance_low"] < 0) == later]
        if len(rows):
            yield Side(rows, later)
