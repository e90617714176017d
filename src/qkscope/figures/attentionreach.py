"""How far attention goes, and what it costs to cut key heads to a window (cause 04, 05)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.figures.figure import Figure, NotApplicable, needed
from qkscope.figures.scoreterms import chosen_runs
from qkscope.figures.style import FAINT, INK, PHASES, canvas, grid, panels, shortened
from qkscope.study.study import Study

_ORDERS = {"far": "far", "area": "area", "lock": "lock", "measured": "measured", "reversed": "reversed"}


def prepare_reach(study: Study) -> pd.DataFrame:
    """Median over heads, and quartiles, of the attention beyond each window: measured and predicted."""
    reach = needed(study.tables.get("reach"), "the reach of heads")
    reach = needed(reach[reach["model"].isin(chosen_runs(study.labels))], "the reach of heads")
    parts = []
    for kind, column in (("measured", "share_beyond"), ("predicted", "predicted_beyond")):
        known = reach.dropna(subset=[column])
        grouped = known.groupby(["model", "w"], sort=False)[column]
        quartiles = grouped.quantile(np.array([0.25, 0.5, 0.75])).unstack()
        if len(quartiles):
            quartiles.columns = pd.Index(["low", "median", "high"])
            parts.append(quartiles.reset_index().assign(kind=kind))
    if not parts:
        raise NotApplicable("there is no table with the reach of heads")
    return pd.concat(parts, ignore_index=True)


def draw_reach(data: pd.DataFrame) -> Drawing:
    """Left measured, right predicted; one line per run, with quartiles."""
    figure = canvas(6.6, 2.8)
    cells = panels(figure, 1, 2, sharey=True)[0]
    for cell, kind in zip(cells, ("measured", "predicted"), strict=True):
        own = data[data["kind"] == kind]
        for number, (run, rows) in enumerate(own.groupby("model", sort=False)):
            colour = PHASES[number % len(PHASES)]
            cell.plot(rows["w"], rows["median"], "o-", color=colour, markersize=3, label=shortened(str(run)))
            cell.fill_between(rows["w"], rows["low"], rows["high"], color=colour, alpha=0.15, linewidth=0)
        cell.set(xscale="log", xlabel="window (tokens)", title=kind)
        widths = sorted(data["w"].unique())
        cell.set_xticks(widths, [f"{int(w):,}" for w in widths])
        cell.minorticks_off()
        grid(cell)
    cells[0].set_ylabel("attention beyond the window\n(share without sinks)")
    cells[0].set_ylim(0, None)
    cells[1].legend()
    return figure


def say_reach(data: pd.DataFrame) -> list[str]:
    """What the median head has beyond the smallest window."""
    first = data[data["w"] == data["w"].min()]
    sentences = []
    for run, rows in first.groupby("model", sort=False):
        by_kind = rows.set_index("kind")["median"]
        if "measured" in by_kind:
            predicted = f", predicted from means {by_kind['predicted']:.0%}" if "predicted" in by_kind else ""
            sentences.append(
                f"{run}: the median head has {by_kind['measured']:.0%} of its attention, sinks apart, beyond "
                f"{int(rows['w'].iloc[0]):,} tokens{predicted}."
            )
    return sentences


def prepare_cuts(study: Study) -> pd.DataFrame:
    """The loss of every choice of key heads, of the last run that has them."""
    cuts = needed(study.tables.get("cuts"), "cuts; qkscope reach --measure writes it")
    last = [label for label in study.labels if label in set(cuts["model"])][-1]
    return cuts[cuts["model"] == last].reset_index(drop=True)


def draw_cuts(data: pd.DataFrame) -> Drawing:
    """Plain text and the second copy: orders as bars, random choices as dots, none and all as lines."""
    figure = canvas(7.0, 2.9)
    cells = panels(figure, 1, 2)[0]
    for cell, text in zip(cells, ("plain", "copy"), strict=True):
        rises = _rises(data, text)
        orders = [order for order in _ORDERS if order in rises]
        for number, order in enumerate(orders):
            cell.bar(number, rises[order][0], 0.62, color=PHASES[number % len(PHASES)])
        random, everything = rises.get("random", []), rises["all"][0]
        cell.plot(len(orders) + np.linspace(-0.25, 0.25, len(random)), random, "o", color=FAINT, markersize=3)
        cell.axhline(everything, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        cell.text(len(orders) + 0.45, everything, "all heads cut", ha="right", va="bottom")
        cell.set_xticks(range(len(orders) + 1), [*(_ORDERS[order] for order in orders), "random"])
        cell.set_title({"plain": "plain text", "copy": "second copy of a text"}[text])
        grid(cell)
    cells[0].set_ylabel("rise of the loss (nats per token)")
    return figure


def say_cuts(data: pd.DataFrame) -> list[str]:
    """Which order costs least, beside random choices, on each kind of text."""
    sentences = []
    for text, name in (("plain", "On plain text"), ("copy", "On the second copy of a text")):
        rises, row = _rises(data, text), data[data["order"] == "reversed"].iloc[0]
        orders = {order: rises[order][0] for order in _ORDERS if order in rises and order != "reversed"}
        best, worst, random = min(orders, key=orders.__getitem__), max(orders, key=orders.__getitem__), rises["random"]
        sentences.append(
            f"{name}, cutting {row['share_cut']:.0%} of key heads to {int(row['w']):,} tokens costs least by {best} "
            f"({orders[best]:+.3f} nats per token) and most by {worst} ({orders[worst]:+.3f})"
            + (f"; random choices cost {min(random):+.3f} to {max(random):+.3f}." if random else ".")
        )
    return sentences


def _rises(data: pd.DataFrame, text: str) -> dict[str, list[float]]:
    """By how much the loss on a kind of text rises over that without a cut, for each order."""
    own = data[data["text"] == text]
    losses: dict[str, list[float]] = {"random": []}
    for order, loss in zip(own["order"].tolist(), own["nll"].tolist(), strict=True):
        losses.setdefault(order, []).append(loss)
    return {order: [loss - losses["none"][0] for loss in of_order] for order, of_order in losses.items()}


REACH_FIGURE = Figure(
    "cause/04_reach",
    "How far back heads attend",
    "Share of a head's attention, sinks apart, on keys that a window would not see: measured on followed queries "
    "(left) and predicted from mean vectors alone (right). Lines are medians over heads, bands quartiles.",
    prepare_reach,
    draw_reach,
    say_reach,
)
CUTS_FIGURE = Figure(
    "cause/05_cut_cost",
    "What it costs to cut key heads to a window",
    "Rise of the loss when a share of the key heads sees a window and the first tokens alone, by how they are chosen: "
    "on plain text, and on the second copy of a repeated text. Dots are random choices of as many heads.",
    prepare_cuts,
    draw_cuts,
    say_cuts,
)
