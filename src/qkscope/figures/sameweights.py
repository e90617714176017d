"""One model at several windows: the curve that stays, and the lines through it that do not (audit 02)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.figures.axes import branches
from qkscope.figures.figure import Figure, NotApplicable
from qkscope.figures.style import PHASES, canvas, grid, panels
from qkscope.results.study import Study, with_most_windows


def prepare_same_weights(study: Study) -> pd.DataFrame:
    """The mean curve over heads at each window, and means over heads of the bias and of decay."""
    label, windows = with_most_windows(study)
    if len(windows) < 2:
        raise NotApplicable("no run was captured at two windows")
    by_window = []
    for window in windows:
        tables = study.at[window].tables
        curve, heads, rotated = (tables.get(name) for name in ("distance", "heads", "rotated"))
        if curve is None or heads is None or rotated is None or "decay" not in heads:
            raise NotApplicable(f"there is no distance curve of {label} at {window:,}")
        bins = ["distance_low", "distance_high"]
        means = curve[curve["model"] == label].groupby(bins, as_index=False)[["measured", "predicted"]].mean()
        of_run = rotated[rotated["model"] == label]
        by_window.append(
            means.assign(
                model=label,
                window=window,
                bias_strength=of_run["bias_strength"].mean(),
                bias_window=of_run["bias_window"].mean(),
                decay=heads.loc[heads["model"] == label, "decay"].mean(),
            )
        )
    return pd.concat(by_window, ignore_index=True)


def draw_same_weights(data: pd.DataFrame) -> Drawing:
    """Left the curves on one another; right each number relative to the smallest window."""
    figure = canvas(7.4, 3.2)
    left, right = panels(figure, 1, 2, width_ratios=[1.5, 1])[0]
    windows = sorted(data["window"].unique())
    for colour, window in zip(PHASES, windows, strict=False):
        curve = data[data["window"] == window]
        for branch in branches(curve):
            branch.curve(left, 1.6, colour, f"window {window:,}")
    left.set(xscale="log", xlabel="distance (tokens)", ylabel="mean score from means (logit)")
    left.legend()
    first = data[data["window"] == windows[0]].iloc[0]
    names = {"bias_strength": "bias\nper token", "bias_window": "bias\nper window", "decay": "decay"}
    for number, window in enumerate(windows):
        row = data[data["window"] == window].iloc[0]
        x = np.arange(len(names)) + (number - (len(windows) - 1) / 2) * 0.26
        sizes = [row[name] / first[name] for name in names]
        right.bar(x, sizes, width=0.24, color=PHASES[number % len(PHASES)])
        for place, size in zip(x, sizes, strict=True):
            right.annotate(f"{size:.2g}", (place, max(size, 0)), (0, 2), textcoords="offset points", ha="center",
                           fontsize=6.5)  # fmt: skip
    right.axhline(1, color="#777777", linewidth=0.8, linestyle=(0, (4, 3)))
    right.set_xticks(range(len(names)), list(names.values()))
    right.set_ylabel(f"relative to window {windows[0]:,}")
    for cell in (left, right):
        grid(cell)
    return figure


def say_same_weights(data: pd.DataFrame) -> list[str]:
    """The effect of the window alone on each number."""
    by_window = data.drop_duplicates("window").sort_values("window")
    first, last = by_window.iloc[0], by_window.iloc[-1]
    change = {name: last[name] / first[name] - 1 for name in ("bias_strength", "bias_window", "decay")}
    least = min(change, key=lambda name: abs(change[name])) == "decay"
    return [
        f"{first['model']}, the same weights at windows of {first['window']:,} and {last['window']:,} tokens: the "
        f"slope of a line changes by {change['bias_strength']:+.0%} per token and by {change['bias_window']:+.0%} over "
        "the window, the fall per doubling of the distance (decay) by "
        f"{change['decay']:+.0%}{', the least of the three' if least else ''}.",
        "Means over heads at each window: "
        + "; ".join(
            f"{row['window']:,}: {row['bias_strength']:.3g} per token, {row['bias_window']:.3g} over the window, "
            f"decay {row['decay']:.3g}"
            for _, row in by_window.iterrows()
        )
        + ".",
    ]


SAME_WEIGHTS_FIGURE = Figure(
    "audit/02_same_weights",
    "The same weights at several windows",
    "Left, the mean score at each distance, predicted from means and averaged over heads, for one model captured at "
    "several windows. Right, the slope of a line (per token, and times the window) and the fall per doubling of the "
    "distance, relative to the smallest window.",
    prepare_same_weights,
    draw_same_weights,
    say_same_weights,
)
