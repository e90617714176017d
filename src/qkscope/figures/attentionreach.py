"""The reach of attention, and the cost of cutting key heads to a window (cause 04, 05)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import PercentFormatter

from qkscope.figures.axes import PREDICTED
from qkscope.figures.figure import Figure, NotApplicable, needed
from qkscope.figures.scoreterms import chosen_runs
from qkscope.figures.style import FAINT, INK, PHASES, canvas, grid, panels, shortened
from qkscope.results.study import Study

_ORDERS = ("far", "area", "lock", "measured", "reversed")


def prepare_reach(study: Study) -> pd.DataFrame:
    """Median over heads, and quartiles, of the attention beyond each window: measured and predicted."""
    reach = needed(study.tables.get("reach"), "the reach of heads")
    reach = needed(reach[reach["model"].isin(chosen_runs(study.labels))], "the reach of heads")
    quartiles_by_kind = []
    for kind, column in (("measured", "share_beyond"), ("predicted", "predicted_beyond")):
        measured = reach.dropna(subset=[column])
        grouped = measured.groupby(["model", "w"], sort=False)[column]
        quartiles = grouped.quantile(np.array([0.25, 0.5, 0.75])).unstack()
        if len(quartiles):
            quartiles.columns = pd.Index(["low", "median", "high"])
            quartiles_by_kind.append(quartiles.reset_index().assign(kind=kind))
    if not quartiles_by_kind:
        raise NotApplicable("there is no table with the reach of heads")
    return pd.concat(quartiles_by_kind, ignore_index=True)


def draw_reach(data: pd.DataFrame) -> Drawing:
    """A panel per run: measured with quartiles, and predicted."""
    runs = list(data.groupby("model", sort=False))
    columns = len(runs) if len(runs) <= 4 else 3
    n_rows = -(-len(runs) // columns)
    figure = canvas((2.5 if columns < 4 else 2.05) * columns + 0.8, 2.3 * n_rows + 0.5)
    cells = panels(figure, n_rows, columns, sharey=True)
    looks = {"measured": (INK, "-", "o"), "predicted": (PREDICTED, "--", "D")}
    for cell, (run, rows) in zip(cells.flat, runs, strict=False):
        for kind, (colour, line, marker) in looks.items():
            of_kind = rows[rows["kind"] == kind].sort_values("w")
            label = "measured, with quartiles" if kind == "measured" else "predicted from means"
            cell.plot(of_kind["w"], of_kind["median"], line, marker=marker, color=colour, markersize=3, label=label)
            if kind == "measured":
                cell.fill_between(of_kind["w"], of_kind["low"], of_kind["high"], color=colour, alpha=0.15, linewidth=0)
        cell.set(xscale="log", xlabel="tokens back", title=shortened(str(run)), ylim=(0, None))
        widths = sorted(rows["w"].unique())[:: -(-rows["w"].nunique() // 5)]
        cell.set_xticks(widths, [f"{int(w):,}" for w in widths])
        cell.minorticks_off()
        grid(cell)
    for cell in cells.flat[len(runs) :]:
        cell.set_visible(False)
    for row in cells:
        row[0].set_ylabel("attention farther back\n(share without sinks)")
    figure.legend(*cells.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def say_reach(data: pd.DataFrame) -> list[str]:
    """The median head's attention beyond the smallest window."""
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
    # The texts on which cuts were measured need not have the window of the run.
    return cuts[cuts["model"] == last].reset_index(drop=True).assign(window=np.nan)


def draw_cuts(data: pd.DataFrame) -> Drawing:
    """Plain text and the second copy: a line per order from no cut to all heads cut, random choices as dots."""
    figure = canvas(7.0, 2.9)
    cells = panels(figure, 1, 2)[0]
    for cell, text in zip(cells, ("plain", "copy"), strict=True):
        if not (data["text"] == text).any():
            cell.set_visible(False)
            continue
        costs = _costs(data, text)
        random = costs[costs["order"] == "random"]
        cell.plot(random["cache_saved"], random["rise"], "o", color=FAINT, markersize=3, label="random")
        ends = costs[costs["order"].isin(["none", "all"])]
        for number, order in enumerate(order for order in _ORDERS if order in set(costs["order"])):
            line = pd.concat([costs[costs["order"] == order], ends]).sort_values("cache_saved")
            style = (0, (4, 3)) if order == "reversed" else "-"
            colour = PHASES[number % len(PHASES)]
            cell.plot(line["cache_saved"], line["rise"], "o", linestyle=style, color=colour, markersize=3, label=order)
        cell.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        cell.set(xlabel="cache saved", title={"plain": "plain text", "copy": "second copy of a text"}[text])
        grid(cell)
    cells[0].set_ylabel("rise of the loss (nats per token)")
    cells[0].legend()
    return figure


def say_cuts(data: pd.DataFrame) -> list[str]:
    """The cheapest and dearest order for each kind of text, and random choices; at the share with most of those."""
    sentences, partial = [], data[~data["order"].isin(["none", "all"])]
    share = partial.groupby("share_cut").size().idxmax()
    for text, name in (("plain", "On plain text"), ("copy", "On the second copy of a text")):
        if not (data["text"] == text).any():
            continue
        costs = _costs(data, text)
        costs = costs[(costs["share_cut"] == share) & costs["order"].isin(partial["order"])]
        row, random = costs.iloc[0], costs.loc[costs["order"] == "random", "rise"]
        orders = costs[~costs["order"].isin(["random", "reversed"])].set_index("order")["rise"]
        best = orders.idxmin()
        sentences.append(
            f"{name}, cutting {row['share_cut']:.0%} of key heads to {int(row['w']):,} tokens, which saves "
            f"{row['cache_saved']:.0%} of the cache, costs {'least ' if len(orders) > 1 else ''}by {best} "
            f"({orders.min():+.3f} nats per token)"
            + (f" and most by {orders.idxmax()} ({orders.max():+.3f})" if len(orders) > 1 else "")
            + (f"; random choices cost {random.min():+.3f} to {random.max():+.3f}." if len(random) else ".")
        )
    return sentences


def _costs(data: pd.DataFrame, text: str) -> pd.DataFrame:
    """The rows of a kind of text, with the rise of their loss over that without a cut."""
    of_text = data[data["text"] == text]
    return of_text.assign(rise=of_text["nll"] - of_text.loc[of_text["order"] == "none", "nll"].iloc[0])


def _shows_cuts(data: pd.DataFrame) -> str:
    """The description of both kinds of text and of random choices, as far as they were measured."""
    texts = {"plain": "on plain text", "copy": "on the second copy of a repeated text"}
    shown = " and ".join(name for text, name in texts.items() if (data["text"] == text).any())
    random = " Grey dots are random choices of as many heads." if (data["order"] == "random").any() else ""
    return (
        "Rise of the loss when some key heads see a window and the first tokens alone, against the share of the "
        f"key-value cache that this saves, by how they are chosen: {shown}.{random}"
    )


REACH_FIGURE = Figure(
    "cause/04_reach",
    "How far back heads attend",
    "Share of a head's attention, sinks apart, on keys farther back than so many tokens, which a shorter window would "
    "not see: measured on followed queries, and predicted from mean vectors alone. Lines are medians over heads, the "
    "band the middle half of the heads as measured.",
    prepare_reach,
    draw_reach,
    say_reach,
)
CUTS_FIGURE = Figure(
    "cause/05_cut_cost",
    "What it costs to cut key heads to a window",
    _shows_cuts,
    prepare_cuts,
    draw_cuts,
    say_cuts,
)


def draw_agreement(data: pd.DataFrame) -> Drawing:
    """Left, rank correlations with intervals over layers; right, the probability of ranking a top-tenth head higher."""
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
