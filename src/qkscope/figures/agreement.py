"""How far columns rank heads as somebody else's list does: the picture of ``qkscope reach --against``."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.figures.style import FAINT, INK, canvas, grid, panels


def draw_agreement(data: pd.DataFrame) -> Drawing:
    """Left, rank correlations with intervals over layers; right, the chance to rank a head of the top tenth higher."""
    figure = canvas(6.4, 0.3 * len(data) + 1.0)
    left, right = panels(figure, 1, 2, sharey=True)[0]
    y = np.arange(len(data))[::-1]
    left.hlines(y, data["rho_low"], data["rho_high"], color=INK, linewidth=1.4)
    left.plot(data["rho"], y, "o", color=INK, markersize=4)
    left.axvline(0, color=FAINT, linewidth=0.7)
    left.set(xlim=(-1, 1), xlabel="rank correlation with the list")
    left.set_yticks(y, data["column"])
    right.barh(y, data["auc"], 0.5, color=FAINT)
    right.axvline(0.5, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    right.set(xlim=(0, 1), xlabel="AUC of the list's top tenth")
    for cell in (left, right):
        grid(cell, "x")
    return figure
