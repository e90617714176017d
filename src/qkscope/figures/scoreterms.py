"""The parts of scores: shares of position, key, query and content, layer by layer (cause 01)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import mean_over_heads
from qkscope.analyses.scores import HEAD_CLASSES
from qkscope.figures.figure import Figure, needed
from qkscope.figures.style import canvas, panels, shortened
from qkscope.headids import TERMS
from qkscope.progress import plural
from qkscope.results.study import Study

TERM_COLOURS = {term: HEAD_CLASSES[term] for term in TERMS}
"""Position dark, keys red and queries blue as everywhere, content yellow."""
MOST_RUNS = 6


def share_in_words(share: float) -> str:
    """A part of the variance in words: a covariance with the score may be negative, a share may not.

    >>> share_in_words(0.34), share_in_words(-0.04)
    ('34%', 'under 1%')
    """
    return f"{share:.0%}" if share >= 0.005 else "under 1%"


def chosen_runs(labels: list[str], most: int = MOST_RUNS) -> list[str]:
    """The runs that fit into one figure: evenly spaced over all of them, first and last among them."""
    if len(labels) <= most:
        return labels
    return [labels[i] for i in np.unique(np.linspace(0, len(labels) - 1, most).round().astype(int))]


def prepare_terms(study: Study) -> pd.DataFrame:
    """Mean part of each term over the heads of a layer, which sum to 1; without a layer, over all heads of the run."""
    scores = needed(study.tables.get("scores"), "the terms of the score")
    columns = [f"part_{term}" for term in TERMS]
    scores = scores.dropna(subset=columns)
    scores = needed(scores[scores["model"].isin(chosen_runs(study.labels))], "the terms of the score")
    layers = scores.groupby(["model", "layer"], sort=False, as_index=False)[columns].mean()
    whole = [
        {"model": model, "layer": np.nan, "n_heads": len(heads)} | mean_over_heads(heads, columns)
        for model, heads in scores.groupby("model", sort=False)
    ]
    return pd.concat([layers, pd.DataFrame(whole)], ignore_index=True)


TERM_HATCHES = {"position": None, "key": "////", "query": None, "content": "...."}
"""Hatches by which terms can be told apart without colours."""


def draw_terms(data: pd.DataFrame) -> Drawing:
    """One panel per run, a stack of four parts for each layer; negative ones go below zero."""
    looks = {term: (f"part_{term}", TERM_COLOURS[term], TERM_HATCHES[term]) for term in TERMS}
    return draw_stacks(data.dropna(subset=["layer"]), looks, "part of score variance", dashed=1.0)


Look = tuple[str, str, str | None]
"""A column, its colour and its hatch."""


def draw_stacks(data: pd.DataFrame, looks: Mapping[str, Look], label: str, dashed: float | None = None) -> Drawing:
    """One panel per run, and in it a stack of these columns for each layer; negative values go below zero."""
    runs = list(data["model"].unique())
    columns = len(runs) if len(runs) <= 4 else 3
    rows = -(-len(runs) // columns)
    figure = canvas((2.5 if columns < 4 else 2.05) * columns + 0.7, 2.1 * rows + 0.5)
    cells = panels(figure, rows, columns, sharey=True)
    for cell, run in zip(cells.flat, runs, strict=False):
        of_run = data[data["model"] == run].sort_values("layer")
        above, below = np.zeros(len(of_run)), np.zeros(len(of_run))
        places = np.arange(len(of_run))
        for name, (column, colour, hatch) in looks.items():
            part = of_run[column].to_numpy(float)
            bottom = np.where(part < 0, below, above)
            cell.bar(places, part, 0.86, bottom=bottom, color=colour, label=name, hatch=hatch, edgecolor="white",
                     linewidth=0)  # fmt: skip
            above, below = above + np.maximum(part, 0), below + np.minimum(part, 0)
        if dashed is not None:
            cell.axhline(dashed, color="#777777", linewidth=0.7, linestyle=(0, (4, 3)))
        cell.set_title(shortened(run))
        cell.set_xlabel("layer")
        shown = places[:: -(-len(places) // 8)]
        cell.set_xticks(shown, [f"{layer:.0f}" for layer in of_run["layer"].to_numpy()[shown]])
    for cell in cells.flat[len(runs) :]:
        cell.set_visible(False)
    for row in cells:
        row[0].set_ylabel(label)
    n_columns = len(looks) if len(looks) <= 4 or columns > 1 else 3
    figure.legend(*cells.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=n_columns)
    return figure


def say_terms(data: pd.DataFrame) -> list[str]:
    """The largest term of each run, if the intervals tell, and the parts of all."""
    claims, parts = {}, {}
    for _, run in data[data["layer"].isna()].iterrows():
        first, second = sorted(TERMS, key=lambda term: -run[f"part_{term}"])[:2]
        if run[f"part_{first}_low"] > run[f"part_{second}_high"]:
            claims[run["model"]] = (
                f"most of what varies in scores is the term {first}"
                if (run[f"part_{first}_low"] > 0.5)
                else f"the term {first} has the largest part in what varies in scores"
            )
        else:
            both = " and ".join(term for term in TERMS if term in (first, second))
            claims[run["model"]] = f"the terms {both} have about equal parts in what varies in scores"
        shares = ", ".join(f"{term} {share_in_words(run[f'part_{term}'])}" for term in TERMS)
        parts[run["model"]] = f"{run['model']}: {shares} (means over {plural(int(run['n_heads']), 'head')})."
    told = {claim: [model for model in claims if claims[model] == claim] for claim in dict.fromkeys(claims.values())}
    sentence = "; ".join(f"in {', '.join(models)} {claim}" for claim, models in told.items())
    return [f"{sentence[0].upper()}{sentence[1:]}.", *parts.values()]


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
