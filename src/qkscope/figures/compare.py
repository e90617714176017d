"""Two runs compared: the map of differences of a column, and each head before and after (qkscope compare)."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Drawing

from qkscope.figures.style import FAINT, INK, canvas, grid
from qkscope.results.compare import Comparison


def draw_comparison(comparison: Comparison, column: str) -> Drawing:
    """Left: the difference of each head, marked where its interval excludes zero. Right: the heads of both runs."""
    rows = comparison.of_column(column)
    figure = canvas(9.0, 3.8)
    left, right = figure.subplots(1, 2)
    cells = np.full((int(rows["layer"].max()) + 1, int(rows["head"].max()) + 1), np.nan)
    cells[rows["layer"], rows["head"]] = rows["difference"]
    limit = float(np.nanmax(np.abs(cells))) or 1.0
    image = left.imshow(cells, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    changed, still = rows[rows["changed"]], rows[~rows["changed"]]
    left.plot(changed["head"], changed["layer"], "o", color=INK, markersize=2.2)
    left.set(xlabel="head", ylabel="layer", title=f"{column}: {comparison.b} minus {comparison.a}")
    for axis in (left.xaxis, left.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=left, shrink=0.9)
    ends = [float(rows[["a", "b"]].to_numpy().min()), float(rows[["a", "b"]].to_numpy().max())]
    right.plot(ends, ends, color=FAINT, linewidth=0.8)
    for part, colour, label in ((still, FAINT, "interval contains zero"), (changed, INK, "changed")):
        if len(part):
            right.plot(part["a"], part["b"], "o", color=colour, markersize=3, label=label)
    right.set(xlabel=comparison.a, ylabel=comparison.b, title=f"{len(changed)} of {len(rows)} heads changed")
    right.legend(loc="best")
    grid(right, "both")
    return figure
