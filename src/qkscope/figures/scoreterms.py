"""The parts of scores: shares of position, key, query and content, layer by layer (cause 01)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.scores import HEAD_CLASSES
from qkscope.figures.figure import Figure, needed
from qkscope.figures.style import canvas, panels, shortened
from qkscope.heads import TERMS
from qkscope.results.study import Study

TERM_COLOURS = {term: HEAD_CLASSES[term] for term in TERMS}
"""Position dark, keys red and queries blue as everywhere, content yellow."""
MOST_RUNS = 6


def chosen_runs(labels: list[str], most: int = MOST_RUNS) -> list[str]:
    """The runs that fit into one figure: evenly spaced over all of them, first and last among them."""
    if len(labels) <= most:
        return labels
    return [labels[i] for i in np.unique(np.linspace(0, len(labels) - 1, most).round().astype(int))]


def prepare_terms(study: Study) -> pd.DataFrame:
    """Mean part of each term over the heads of a layer; the four sum to 1."""
    scores = needed(study.tables.get("scores"), "the terms of the score")
    columns = [f"part_{term}" for term in TERMS]
    scores = scores.dropna(subset=columns)
    scores = needed(scores[scores["model"].isin(chosen_runs(study.labels))], "the terms of the score")
    return scores.groupby(["model", "layer"], sort=False, as_index=False)[columns].mean()


def draw_terms(data: pd.DataFrame) -> Drawing:
    """One panel per run, a stack of four parts for each layer; negative ones go below zero."""
    runs = list(data["model"].unique())
    columns = min(len(runs), 3)
    rows = -(-len(runs) // columns)
    figure = canvas(2.5 * columns + 0.7, 2.1 * rows + 0.5)
    cells = panels(figure, rows, columns, sharey=True)
    for cell, run in zip(cells.flat, runs, strict=False):
        of_run = data[data["model"] == run].sort_values("layer")
        above, below = np.zeros(len(of_run)), np.zeros(len(of_run))
        for term in TERMS:
            part = of_run[f"part_{term}"].to_numpy(float)
            bottom = np.where(part < 0, below, above)
            cell.bar(of_run["layer"], part, 0.86, bottom=bottom, color=TERM_COLOURS[term], label=term)
            above, below = above + np.maximum(part, 0), below + np.minimum(part, 0)
        cell.axhline(1, color="#777777", linewidth=0.7, linestyle=(0, (4, 3)))
        cell.set_title(shortened(run))
        cell.set_xlabel("layer")
    for cell in cells.flat[len(runs) :]:
        cell.set_visible(False)
    for row in cells:
        row[0].set_ylabel("share of score variance")
    figure.legend(*cells.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(TERMS))
    return figure


def say_terms(data: pd.DataFrame) -> list[str]:
    """The largest term of each run, and the shares of all terms."""
    columns = [f"part_{term}" for term in TERMS]
    sentences = []
    for run, of_run in data.groupby("model", sort=False):
        means = of_run[columns].mean()
        largest = str(means.idxmax()).removeprefix("part_")
        shares = ", ".join(f"{term} {means[f'part_{term}']:.0%}" for term in TERMS)
        sentences.append(
            f"{run}: the largest part of the variance of scores is {largest} ({shares}; mean over layers)."
        )
    return sentences


SCORE_TERMS = Figure(
    "cause/01_score_terms",
    "What scores are made of",
    "Every score is exactly the sum of four terms: where query and key are, which key it is, which query it is, and "
    "this query with this key. Bars are their parts in the variance of scores over pairs, which sum to 1: means over "
    "the heads of a layer.",
    prepare_terms,
    draw_terms,
    say_terms,
)
