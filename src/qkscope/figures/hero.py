"""The curve of the first screen: the score by distance, before and after, by model, or of two heads (front 01)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.figures.axes import branches
from qkscope.figures.distance import on_one_grid
from qkscope.figures.figure import Figure, NotApplicable, before_and_after, models, rows
from qkscope.figures.style import PHASES, canvas, grid, shortened
from qkscope.headids import TERMS
from qkscope.results.study import Study

_MOST_RUNS = 4
"""Runs whose curves are drawn beside each other, at most."""
_BINS = ["distance_low", "distance_high"]


def compared_runs(study: Study) -> list[str]:
    """The checkpoints before and after, or the models."""
    try:
        return list(before_and_after(study))
    except NotApplicable:
        return [run.label for run in models(study)]


def heads_of_interest(study: Study) -> dict[str, tuple[int, int]]:
    """The two heads that the first screen shows, of the last run: most position and most content in their scores.

    Flat heads are left out: they attend almost evenly, whatever their parts are.
    """
    heads = study.table("heads", *(f"part_{term}" for term in TERMS))
    of_run = None if heads is None else heads[heads["model"] == compared_runs(study)[-1]]
    if of_run is None:
        return {}
    if "head_class" in of_run:
        of_run = of_run[of_run["head_class"] != "flat"]
    found = {}
    for term in ("position", "content"):
        known = of_run.dropna(subset=[f"part_{term}"])
        if len(known):
            row = known.loc[known[f"part_{term}"].idxmax()]
            found[term] = (int(row["layer"]), int(row["head"]))
    return found if len(set(found.values())) == 2 else {}


def prepare_hero(study: Study) -> pd.DataFrame:
    """Curves of each run averaged over its heads, or of two heads of a single run, in the column ``series``.

    A head's scores are taken relative to their mean over the distances that all curves have, since adding a constant to
    all scores of a query changes no attention; ``low`` and ``high`` are the quartiles over heads of the measured curve.
    """
    labels = compared_runs(study)
    shown = labels if len(labels) <= _MOST_RUNS else [*labels[: _MOST_RUNS - 1], labels[-1]]
    runs = [run for run in study.runs if run.label in shown]
    curves = rows(study, runs, "distance", *_BINS, "measured", "predicted")
    windows = {run.label: run.window or np.nan for run in runs}
    curves = curves.assign(window=curves["model"].map(windows))
    two = heads_of_interest(study) if len(runs) == 1 else {}
    if two:
        curves = curves[[key in two.values() for key in zip(curves["layer"], curves["head"], strict=True)]]
    end = float(curves.groupby(["model", "layer", "head"])["distance_high"].max().min())
    if not two:
        return pd.concat(
            [_mean_curve(of_run, end) for _, of_run in curves.groupby("model", sort=False)], ignore_index=True
        )
    parts = []
    for term, (layer, head) in two.items():
        curve = _relative(curves[(curves["layer"] == layer) & (curves["head"] == head)], end)
        parts.append(curve.assign(series=f"layer {layer}, head {head} (most {term})", n_heads=1))
    return pd.concat(parts, ignore_index=True)[_COLUMNS]


_COLUMNS = ["series", "model", "window", *_BINS, "measured", "predicted", "low", "high", "n_heads"]


def _mean_curve(curves: pd.DataFrame, end: float) -> pd.DataFrame:
    """The mean over the heads of a run of their curves, with quartiles, over the distances that all of them have."""
    on_grid = on_one_grid(curves)
    n_heads = on_grid.groupby(_BINS)["measured"].size()
    everywhere = n_heads[n_heads == n_heads.max()].index
    common = on_grid[pd.MultiIndex.from_frame(on_grid[_BINS]).isin(everywhere)]
    relative = pd.concat([_relative(head, end) for _, head in common.groupby(["layer", "head"], sort=False)])
    grouped = relative.groupby(_BINS, as_index=False)
    mean = grouped[["measured", "predicted"]].mean()
    quartiles = {name: grouped["measured"].quantile(q)["measured"] for name, q in (("low", 0.25), ("high", 0.75))}
    first = curves.iloc[0]
    return mean.assign(series=first["model"], model=first["model"], window=first["window"], **quartiles,
                       n_heads=int(n_heads.max()))[_COLUMNS]  # fmt: skip


def _relative(curve: pd.DataFrame, end: float) -> pd.DataFrame:
    """A head's curves relative to their means over its bins up to a distance."""
    shared = curve[curve[_BINS].abs().max(axis=1) <= end]
    centred = {name: curve[name] - shared[name].mean() for name in ("measured", "predicted")}
    return curve.assign(**centred, low=np.nan, high=np.nan)


def draw_hero(data: pd.DataFrame) -> Drawing:
    """Measured dots, which are not joined, with the band over heads, and the line predicted from means."""
    figure = canvas(5.6, 3.3)
    cell = figure.subplots()
    for number, (series, curve) in enumerate(data.groupby("series", sort=False)):
        colour = PHASES[number % len(PHASES)]
        for branch in branches(curve.reset_index(drop=True)):
            if curve["low"].notna().all():
                low, high = (branch.rows[name] for name in ("low", "high"))
                cell.fill_between(branch.x, low, high, color=colour, alpha=0.14, linewidth=0)
            branch.points(cell, 3.4, colour)
            branch.curve(cell, 1.0, colour, shortened(str(series), 40))
    cell.set(xscale="log", xlabel="distance to the key (tokens)", ylabel="score relative to its mean (logits)")
    cell.legend()
    grid(cell)
    return figure


def say_hero(data: pd.DataFrame) -> list[str]:
    """Each curve's fall from its nearest to its farthest distance."""
    sentences = []
    for series, curve in data.groupby("series", sort=False):
        in_order = curve[curve["distance_low"] >= 0].sort_values("distance_low")
        if len(in_order) < 2:
            continue
        near, far = in_order.iloc[0], in_order.iloc[-1]
        change = far["measured"] - near["measured"]
        heads = f"the mean over {near['n_heads']:,.0f} heads" if near["n_heads"] > 1 else "its mean score"
        sentences.append(
            f"{series}: {heads} {'falls' if change < 0 else 'rises'} by {abs(change):.2g} logits from a distance of "
            f"{_distance(near)} to one of {_distance(far)} tokens."
        )
    return sentences


def _distance(row: pd.Series) -> str:
    """The distances of a bin."""
    return " to ".join(dict.fromkeys(f"{row[name]:,.0f}" for name in _BINS))


def _shows_hero(data: pd.DataFrame) -> str:
    """The description of the curves of two heads, or of the means of runs."""
    means = " Curves are means over heads, and the band holds the middle half of the heads."
    return (
        "How the score of a key falls or rises with its distance from the query, relative to its mean over the "
        "distances that all curves have: dots are measured, lines predicted from the mean query and the mean key alone."
        f"{means if data['n_heads'].max() > 1 else ''}"
    )


HERO = Figure(
    "front/01_hero",
    "The score by distance",
    _shows_hero,
    prepare_hero,
    draw_hero,
    say_hero,
)
