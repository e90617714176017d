"""A map of the heads of one run: layers × heads, coloured by a column."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from qkscope.analyses.catalogue import DECLARED_TABLES, table_columns
from qkscope.figures.style import canvas, shortened
from qkscope.results.derived import number_of_heads
from qkscope.results.study import Study

_TICKS = 16
"""Ticks of an axis, at most."""


def prepare_map(study: Study, column: str) -> pd.DataFrame:
    """One row per head of a study of one run: the column's value, and its title."""
    heads = number_of_heads(study.tables, column)
    unit = next((c.unit for name in DECLARED_TABLES for c in table_columns(name) if c.name == column), "")
    title = f"{column} ({unit})" if unit else column
    return heads[["model", "layer", "head"]].assign(value=heads[column].to_numpy(float), column=column, title=title)


def draw_map(data: pd.DataFrame) -> Drawing:
    """One cell per head; heads without a value are white. Colours have two sides where values have both signs."""
    values = data.pivot(index="layer", columns="head", values="value")
    figure = canvas(min(2.2 + 0.22 * values.shape[1], 11.0), min(1.6 + 0.2 * values.shape[0], 11.0))
    cell = figure.subplots()
    signed = bool((data["value"] < 0).any())
    largest = float(data["value"].abs().max()) or 1.0
    colours, least = ("PuOr_r", -largest) if signed else ("YlOrBr", 0.0)
    image = cell.imshow(values, cmap=colours, vmin=least, vmax=largest, aspect="auto")
    cell.set(title=shortened(str(data["model"].iloc[0]), 22), xlabel="head", ylabel="layer")
    cell.spines[:].set_visible(False)
    _number_ticks(cell, values.columns, values.index)
    # Ticks of the bar have no common factor, which would stand in its label.
    bar = figure.colorbar(image, ax=cell, location="bottom", aspect=20, pad=0.02, ticks=MaxNLocator(4),
                          format=lambda value, _: f"{value:.3g}")  # fmt: skip
    bar.set_label(str(data["title"].iloc[0]), fontsize=7)
    return figure


def _number_ticks(cell: Axes, heads: Iterable[Any], layers: Iterable[Any]) -> None:
    """At most so many ticks on each axis, with the numbers of heads and layers, which may have gaps."""
    for ticks, numbers in ((cell.set_xticks, list(heads)), (cell.set_yticks, list(layers))):
        places = range(0, len(numbers), -(-len(numbers) // _TICKS))
        ticks(places, [f"{numbers[place]:.0f}" for place in places])
