"""House style: one palette, one type size, the same frame for every figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure

from qkscope.analyses.components import CLASSES as CLASSES

Q, K = "#5ba7dd", "#981428"
"""Queries are blue and keys are red, everywhere; without colours queries are the lighter ones."""
INK, FAINT = "#222222", "#8a8a8a"
FAMILIES = ["#e69f00", "#009e73", "#7b5aa6", "#56b4e9", "#8c6d1f", "#cc79a7", "#4d4d4d", "#a6761d"]
FAMILY_MARKERS = ["o", "^", "s", "D", "v", "P", "X", "*"]
PHASES = ["#3c4f76", "#d98c3f", "#4d9078", "#9db4d6", "#a63d1c", "#8a6fb0", "#b9a44c", "#2e5248"]
NOT_THERE = "////"
"""Hatch of a cell without heads."""

RC = {
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "axes.edgecolor": "#555555",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "hatch.linewidth": 0.5,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "qkscope",
    "pdf.fonttype": 42,
    "path.simplify": True,
}


@contextmanager
def house_style() -> Iterator[None]:
    """The settings with which every figure is drawn and saved."""
    with mpl.rc_context(RC):  # type: ignore[arg-type]
        yield


def canvas(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def family_look(families: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each family, in order of first appearance."""
    names = list(dict.fromkeys(families))
    return {
        name: (FAMILIES[i % len(FAMILIES)], FAMILY_MARKERS[i % len(FAMILY_MARKERS)]) for i, name in enumerate(names)
    }


def phase_colours(phases: Sequence[str]) -> dict[str, str]:
    """Colour of each phase, in order of first appearance."""
    return {name: PHASES[i % len(PHASES)] for i, name in enumerate(dict.fromkeys(phases))}


def position_map(kind: str) -> Colormap:
    """Light for early positions, dark for late ones; never so light that a point disappears."""
    base = mpl.colormaps["Blues" if kind == "q" else "Reds"]
    return LinearSegmentedColormap.from_list(f"position_{kind}", base(np.linspace(0.28, 1.0, 256)))


def plain(label: str) -> str:
    """A label with dollar signs escaped, so that they do not start a formula."""
    return str(label).replace("$", r"\$")


def shortened(label: str, most: int = 28) -> str:
    """A label shortened to fit on an axis."""
    text = str(label)
    return plain(text if len(text) <= most else f"{text[: most - 1]}…")


def grid(axes: Axes, which: str = "y") -> None:
    """Faint lines behind the data."""
    axes.grid(True, axis=which, color="#e4e4e4", linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def error_bars(axes: Axes, x: Any, value: Any, low: Any, high: Any, colour: str = INK, **more: Any) -> None:
    """Values with intervals, which need not be symmetric or contain the value."""
    axes.vlines(x, low, high, color=colour, linewidth=1.0, **more)
    axes.plot(x, value, linestyle="none", marker="_", color=colour, markersize=3)


def panels(figure: Figure, rows: int, columns: int, **options: Any) -> np.ndarray:
    """A grid of axes, always two-dimensional."""
    return figure.subplots(rows, columns, squeeze=False, **options)
