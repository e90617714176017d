"""The map of a run's heads for notebooks: layers by heads, coloured by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape

from qkscope.analyses.components import CLASSES
from qkscope.heads import HeadId

_NONE, _CELL, _MARGIN, _WIDEST = "#ffffff", 14, 34, 900


def head_map(classes: Mapping[HeadId, tuple[str, str]]) -> str:
    """An SVG picture of the heads, given by class and what is said of each, and how many there are of each class."""
    layers = sorted({head.layer for head in classes})
    columns = 1 + max(head.head for head in classes)
    cell = max(3.0, min(_CELL, (_WIDEST - _MARGIN) / columns))
    cells = "".join(
        f'<rect x="{_MARGIN + head.head * cell:g}" y="{layers.index(head.layer) * cell:g}" width="{cell - 1:g}" '
        f'height="{cell - 1:g}" fill="{CLASSES.get(kind, _NONE)}" stroke="#8888" stroke-width="0.5">'
        f"<title>layer {head.layer}, head {head.head}: {escape(said)}</title></rect>"
        for head, (kind, said) in classes.items()
    )
    every = max(1, round(12 / cell))
    names = "".join(
        f'<text x="{_MARGIN - 4}" y="{(row + 0.5) * cell:g}" font-size="9" fill="currentColor" text-anchor="end" '
        f'dominant-baseline="central">{layer}</text>'
        for row, layer in enumerate(layers)
        if row % every == 0
    )
    width, height = _MARGIN + columns * cell, len(layers) * cell
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'aria-label="Map of heads by class">{names}{cells}</svg>'
    )
    return f"<div>{picture}</div><div>{_legend(Counter(kind for kind, _ in classes.values()))}</div>"


def _legend(counts: Counter[str]) -> str:
    square = '<span style="display:inline-block;width:0.8em;height:0.8em;background:{}"></span> {} {}'
    shown = [square.format(CLASSES[kind], counts[kind], kind) for kind in CLASSES if counts[kind]]
    unknown = sum(count for kind, count in counts.items() if kind not in CLASSES)
    return " &nbsp; ".join(shown + ([f"{unknown} without a class"] if unknown else []))
