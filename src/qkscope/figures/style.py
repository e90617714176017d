"""House style: one palette, one type size, the same frame for every figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from qkscope.analyses.components import CLASSES as CLASSES

Q, K = "#5ba7dd", "#981428"
"""Queries are blue and keys are red, everywhere; without colours queries are the lighter ones."""
KEY_HATCH = "////"
"""Hatch of bars of keys, which so differ from those of queries without colours too."""
INK, FAINT = "#222222", "#8a8a8a"
DRIFT, SEPARATION, REST = "#c98b2b", "#7fa06f", "#d9d9d9"
"""Axis a, axis b, and what is off both."""
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


TURN = LinearSegmentedColormap.from_list(
    "turn", ["#b3332f", "#e0922f", "#8fae3e", "#2f9c8f", "#2f62b3", "#7d3fa0", "#b3332f"]
)
"""Goes round: its ends meet, and no point is so pale that it disappears."""


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


FACE = "_qkscope_face"
"""Attribute of a text that stands on a colour: that colour, from which the text's own follows."""


def write_on(axes: Axes, x: float, y: float, text: str, face: Any, **options: Any) -> Text:
    """A text in the middle of a cell or bar of this colour, dark or white, whichever is easier to read on it."""
    over_hatch = {"facecolor": face, "edgecolor": "none", "pad": 0.8}
    written = axes.text(x, y, text, ha="center", va="center", color=readable_on(face), bbox=over_hatch, **options)
    setattr(written, FACE, face)
    return written


def readable_on(face: Any) -> str:
    """Dark ink or white, whichever has more contrast with this colour.

    >>> readable_on("#1b4965"), readable_on("#f2c14e")
    ('white', '#222222')
    """
    luminance = relative_luminance(face)
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / (relative_luminance(INK) + 0.05) else INK


def relative_luminance(colour: Any) -> float:
    """Relative luminance of a colour, from 0 (black) to 1 (white), as contrast is computed from."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def error_bars(axes: Axes, x: Any, value: Any, low: Any, high: Any, colour: str = INK, **more: Any) -> None:
    """Values with intervals, which need not be symmetric or contain the value."""
    axes.vlines(x, low, high, color=colour, linewidth=1.0, **more)
    axes.plot(x, value, linestyle="none", marker="_", color=colour, markersize=3)


def panels(figure: Figure, rows: int, columns: int, **options: Any) -> np.ndarray:
    """A grid of axes, always two-dimensional."""
    return figure.subplots(rows, columns, squeeze=False, **options)
