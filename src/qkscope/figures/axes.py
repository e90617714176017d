"""Axes shared by several figures: checkpoints in time, distances of earlier and of later keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from qkscope.figures.style import FAINT, shortened


def mean_sd(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Mean over heads of each column and its standard deviation ``X_sd``, by run, with ``n_heads``."""
    grouped = frame.groupby("model", sort=False)
    means = grouped[columns].mean().join(grouped[columns].std(ddof=0).add_suffix("_sd"))
    return means.join(grouped.size().rename("n_heads")).reset_index()


def band(
    axes: Axes, data: pd.DataFrame, name: str, colour: str, line: str, label: str, label_y: float, *, band: bool = True
) -> None:
    """A line over the checkpoints, labelled at its end; the band is one standard deviation over heads."""
    x, value = (data[column].to_numpy(float) for column in ("order", name))
    if band:
        sd = data[f"{name}_sd"].to_numpy(float)
        low, high = np.clip([value - sd, value + sd], -1.0, 1.0)  # a correlation, or a share
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.plot(x, value, color=colour, linestyle=line, marker="o", markersize=3)
    axes.annotate(label, (x[-1], label_y), xytext=(6, 0), textcoords="offset points", color=colour, va="center",
                  fontsize=8, annotation_clip=False)  # fmt: skip


def spread(values: list[float], least: float) -> list[float]:
    """Heights for labels near these values, at least ``least`` apart, in the same order.

    >>> [round(x, 2) for x in spread([0.5, 0.52, 0.9], 0.1)]
    [0.46, 0.56, 0.9]
    """
    order = np.argsort(values, kind="stable")
    heights = np.array(values, dtype=float)
    for _ in range(20):
        for low, high in pairwise(order):
            missing = least - (heights[high] - heights[low])
            if missing > 1e-9:
                heights[low] -= missing / 2
                heights[high] += missing / 2
    return [float(height) for height in heights]


def time_axis(axes: Axes, data: pd.DataFrame) -> None:
    """Checkpoints by name; phases separated by lines and named above the frame."""
    ticks(axes, data)
    phases = data["phase"].tolist()
    starts = [0] + [i for i in range(1, len(phases)) if phases[i] != phases[i - 1]] + [len(phases)]
    for start, end in pairwise(starts):
        if start:
            axes.axvline(start - 0.5, color="#9a9a9a", linewidth=0.8, linestyle=(0, (2, 2)))
        narrow = (end - start) <= 1 and len(starts) > 3 and len(phases) > 5
        axes.annotate(shortened(phases[start], 9 if narrow else 18), ((start + end - 1) / 2, 1.0),
                      xycoords=("data", "axes fraction"), xytext=(0, 4), textcoords="offset points", ha="center",
                      fontsize=6.5 if narrow else 7, color=FAINT)  # fmt: skip
    axes.set_xlim(-0.6, len(phases) - 0.4)


def ticks(axes: Axes, data: pd.DataFrame) -> None:
    """One tick per checkpoint, with its step, which phases may count each from its beginning, or else its name."""
    if data["step"].notna().all():
        names = [f"{step:,.0f}" if step < 10_000 else f"{step / 1000:,.0f}k" for step in data["step"]]
        axes.set_xlabel("training step" if data["step"].is_unique else "training step, as each phase counts it")
    else:
        names = [shortened(name, 24) for name in data["model"]]
    axes.set_xticks(data["order"], names, rotation=40, ha="right", rotation_mode="anchor", fontsize=6.5)


@dataclass(frozen=True)
class CurveBranch:
    """The part of a curve for keys on one side of the query, and its style."""

    rows: pd.DataFrame
    later: bool

    @property
    def x(self) -> np.ndarray:
        """The middle of each bin, on a logarithmic scale."""
        return np.sqrt((self.rows["distance_low"] * self.rows["distance_high"]).to_numpy(float))

    @property
    def label_suffix(self) -> str:
        """Text appended to a label."""
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
            label=label and label + self.label_suffix, **style,
        )  # fmt: skip

    def curve(self, axes: Axes, width: float, color: str, label: str) -> None:
        """The predicted curve; that of later keys is broken."""
        axes.plot(
            self.x, self.rows["predicted"], self.line, color=color, linewidth=width, label=label + self.label_suffix
        )


PREDICTED = "#d2691e"
"""Colour of curves predicted from means."""


def draw_branches(axes: Axes, curve: pd.DataFrame, points: float, width: float, color: str) -> None:
    """Measured points and predicted lines of a curve over a logarithmic distance."""
    for branch in branches(curve):
        branch.points(axes, points, color, "measured")
        branch.curve(axes, width, PREDICTED, "predicted from means")
    axes.set_xscale("log")


def branches(curve: pd.DataFrame) -> Iterator[CurveBranch]:
    """The branches of a curve: that of earlier keys, then that of later keys if there is one."""
    for later in (False, True):
        rows = curve[(curve["distance_low"] < 0) == later]
        if len(rows):
            yield CurveBranch(rows, later)
