"""One run in one row: means, medians and intervals over its heads of the columns that sum it up."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from qkscope.analyses.tabulate import OVER_WINDOW
from qkscope.store.columns import STATISTICS, SUMMED_UP


def run_row(
    frames: Mapping[str, pd.DataFrame], headline: Mapping[str, Mapping[str, float]], window: int | None
) -> dict[str, float]:
    """``X_mean``, ``X_median`` over heads and ``X_low``, ``X_high`` of the mean by document; NaN where not known.

    ``headline`` holds the means with intervals that a summary gives; a bias over the window is its bias per token
    times the window.
    """
    row: dict[str, float] = {}
    for table, columns in SUMMED_UP.items():
        frame = frames.get(table)
        for column in columns:
            row |= {
                f"{column}_{name}": value for name, value in _numbers(frame, table, column, headline, window).items()
            }
    return row


def _numbers(
    frame: pd.DataFrame | None,
    table: str,
    column: str,
    headline: Mapping[str, Mapping[str, float]],
    window: int | None,
) -> dict[str, float]:
    nothing = dict.fromkeys(STATISTICS, float("nan"))
    if frame is None or frame.empty or column not in frame:
        return nothing
    rows = frame[frame["pc"] == 0] if table == "qk" else frame
    values = rows[column].to_numpy(float, na_value=np.nan)
    values = values[np.isfinite(values)]
    if not len(values):
        return nothing
    said = headline.get(OVER_WINDOW.get(column, column), {})
    scale = 1.0 if column not in OVER_WINDOW else float(window or np.nan)
    # Where heads have windows of their own, the mean over the window is not the mean per token times one window.
    same = np.isclose(scale * said.get("mean", np.nan), values.mean(), rtol=1e-6, atol=1e-12)
    ends = {name: scale * said[name] for name in ("low", "high") if name in said and same}
    return nothing | {"mean": float(values.mean()), "median": float(np.median(values))} | ends
