"""Means over heads with their intervals, as the report states them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.analyses.acrossheads import mean_over_heads
from qkscope.study.study import Study

DOCUMENTS, KEY_HEADS = "documents", "key heads"


@dataclass(frozen=True)
class Value:
    """A number, its 95% interval, and what the interval is over."""

    value: float
    low: float = math.nan
    high: float = math.nan
    over: str = ""

    def text(self, percent: bool = False) -> str:
        """The number with its interval.

        >>> Value(0.25, 0.2, 0.3, "documents").text(percent=True)
        '25.0% [20.0%, 30.0%]'
        """
        number = shown(self.value, percent)
        if math.isnan(self.low) or self.low == self.high:
            return number  # if all heads have the same value, a bootstrap over heads has no width
        return f"{number} [{shown(self.low, percent)}, {shown(self.high, percent)}]"

    def marked(self, percent: bool = False) -> str:
        """The same, with a mark where the interval is over documents."""
        return self.text(percent) + ("ᵈ" if self.over == DOCUMENTS else "")


def shown(number: float, percent: bool = False) -> str:
    """Three significant digits, or a percentage with one decimal.

    >>> shown(0.0123456), shown(0.5, percent=True), shown(float("nan")), shown(1234.5), shown(3.4e-5)
    ('0.0123', '50.0%', '–', '1,234', '3.4e-05')
    """
    if not math.isfinite(number):
        return "–"
    if percent:
        return f"{number:.1%}"
    if number != 0 and abs(number) < 1e-3:
        return f"{number:.1e}"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def mean_of(
    study: Study, labels: Sequence[str], frame: pd.DataFrame | None, column: str, key: str = ""
) -> Value | None:
    """Mean of a column over the heads of these runs; None if the table does not have it.

    The interval is over documents if there is one run and its summary has an interval (under ``key`` or the column's
    name), and a bootstrap over key heads otherwise.
    """
    if frame is None or column not in frame:
        return None
    rows = frame[frame["model"].isin(list(labels))].dropna(subset=[column])
    if rows.empty:
        return None
    if len(labels) == 1:
        mean = float(rows[column].astype(float).mean())
        summary = study.run(labels[0]).headline.get(key or column, {})
        if "low" in summary and np.isclose(summary["mean"], mean, rtol=1e-6, atol=1e-12):
            return Value(mean, summary["low"], summary["high"], DOCUMENTS)
    mean_and_ends = mean_over_heads(rows.assign(**{column: rows[column].astype(float)}), [column])
    return Value(mean_and_ends[column], mean_and_ends[f"{column}_low"], mean_and_ends[f"{column}_high"], KEY_HEADS)
