"""Correlation with position and share of variance of each principal component, run by run (qk-pca 01, 05)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import mean_over_heads
from qkscope.figures.eachrun import of_each_run
from qkscope.figures.figure import Figure, models, rows
from qkscope.figures.scoreterms import chosen_runs
from qkscope.figures.style import INK, KEY_HATCH, SEPARATION, K, Q, canvas, error_bars, grid, panels, shortened
from qkscope.progress import plural
from qkscope.results.study import Study

FIRST = 10
"""Number of components shown."""
_MOST_RUNS = 12


def prepare_roles(study: Study) -> pd.DataFrame:
    """Mean r_q, r_k and |r_k| of each component over the heads of a run."""
    frame = rows(study, models(study), "qk", "pc", "r_q", "r_k")
    return _by_component(frame.assign(abs_r_k=frame["r_k"].abs()), ["r_q", "r_k", "abs_r_k"])


def draw_roles(data: pd.DataFrame) -> Drawing:
    """Grouped bars, and |r_k| as a mark: a signed mean can be small because heads disagree."""
    figure, cells = _cells(data, 6.4, 3.0, "mean correlation with position")
    kinds = (("r_q", -0.2, {"color": Q}), ("r_k", 0.2, {"color": K, "hatch": KEY_HATCH, "edgecolor": "white", "lw": 0}))
    marks: list[Any] = []
    for axes, of_run in cells:
        x, marks = np.arange(len(of_run)), []
        for name, offset, look in kinds:
            marks.append(axes.bar(x + offset, of_run[name], width=0.36, **look))
            error_bars(axes, x + offset, of_run[name], of_run[f"{name}_low"], of_run[f"{name}_high"])
        marks += axes.plot(x + 0.2, of_run["abs_r_k"], linestyle="none", marker="D", markersize=4,
                           markerfacecolor="white", color=K)  # fmt: skip
        axes.axhline(0, color="#555555", linewidth=0.7)
        axes.set_ylim(min(0, float(data[["r_k_low", "r_k"]].min().min()) * 1.1), 1)
    figure.legend(marks, ["queries, r_q", "keys, r_k", "keys, |r_k|"], loc="outside upper center", ncols=3)
    return figure


def _cells(
    data: pd.DataFrame, width: float, height: float, label: str
) -> tuple[Drawing, Iterator[tuple[Axes, pd.DataFrame]]]:
    """A panel for each run, with its rows, and ticks for its components; one run has the figure for itself."""
    runs = list(data.groupby("model", sort=False))
    columns = min(len(runs), 3)
    n_rows = -(-len(runs) // columns)
    figure = canvas(max(width, 3.0 * columns), height if n_rows == 1 else 2.1 * n_rows)
    cells = panels(figure, n_rows, columns, sharey=True)
    for cell, (run, of_run) in zip(cells.flat, runs, strict=False):
        names = [f"PC{pc}" if len(runs) == 1 else str(pc) for pc in of_run["pc"]]
        cell.set_xticks(range(len(names)), names)
        cell.set_title(shortened(str(run)))
        cell.set_xlabel("" if len(runs) == 1 else "principal component")
        grid(cell)
    for cell in cells.flat[len(runs) :]:
        cell.set_visible(False)
    for row in cells:
        row[0].set_ylabel(label)
    return figure, zip(cells.flat, (of_run for _, of_run in runs), strict=False)


def say_roles(data: pd.DataFrame) -> list[str]:
    """The component that follows position most, and the signs of keys on PC0."""
    first, further = data.iloc[0], data.iloc[1:]
    numbers = (
        f"On PC0 the mean r_q is {first['r_q']:.2f}, the mean r_k {first['r_k']:+.2f} and the mean |r_k| "
        f"{first['abs_r_k']:.2f}, over {plural(int(first['n_heads']), 'head')}"
    )
    if further.empty:
        return [f"{numbers}."]
    top = further.loc[further["r_q"].idxmax()]
    if first["r_q_low"] > top["r_q_high"]:
        order = "Queries follow position on PC0 more closely than on any other component"
    elif top["r_q_low"] > first["r_q_high"]:
        order = "Queries follow position on another component more closely than on PC0"
    else:
        order = "Whether queries follow position more closely on PC0 or on another component the intervals do not tell"
    return [f"{order}: r_q {first['r_q']:.2f} on PC0, {top['r_q']:.2f} on component {top['pc']:.0f}.", f"{numbers}."]


def prepare_shares(study: Study) -> pd.DataFrame:
    """Mean share of variance of each component, and of it and those before it together."""
    frame = rows(study, models(study), "qk", "pc", "explained_variance")
    data = _by_component(frame, ["explained_variance"])
    return data.assign(cumulative=data.groupby("model", sort=False)["explained_variance"].cumsum())


def draw_shares(data: pd.DataFrame) -> Drawing:
    """Bars, each with its number, and the line of what they hold together."""
    figure, cells = _cells(data, 5.6, 2.8, "mean share of pooled variance")
    one = data["model"].nunique() == 1
    for axes, of_run in cells:
        x, share = np.arange(len(of_run)), of_run["explained_variance"]
        axes.bar(x, share, width=0.7, color=SEPARATION)
        error_bars(axes, x, share, of_run["explained_variance_low"], of_run["explained_variance_high"])
        axes.plot(x, of_run["cumulative"], color=INK, linewidth=1.1, marker="o", markersize=2.5)
        together = of_run["cumulative"].iloc[-1]
        axes.annotate(f"together {together:.0%}", (x[-1], together), (0, 5), textcoords="offset points", ha="right",
                      fontsize=7)  # fmt: skip
        tops = of_run[["explained_variance", "explained_variance_high"]].max(axis=1)
        for position, top, number, line in zip(x, tops, share, of_run["cumulative"], strict=True):
            if position and line - top > 0.11:  # PC0's is where the line begins
                axes.annotate(f"{number:.1%}" if one else f"{number:.0%}", (position, top), xytext=(0, 3),
                              textcoords="offset points", ha="center", fontsize=7)  # fmt: skip
        axes.annotate(f"{share.iloc[0]:.0%}", (0, tops.iloc[0]), (0, 5), textcoords="offset points", ha="center",
                      fontsize=7)  # fmt: skip
        axes.set_ylim(0, min(1.0, float(data["cumulative"].max()) * 1.15))
    return figure


def say_shares(data: pd.DataFrame) -> list[str]:
    """Share of PC0, and the number of components that hold half of the variance."""
    first, together = data.iloc[0], data["cumulative"].iloc[-1]
    half = int((data["cumulative"] < 0.5).sum()) + 1
    course = f"the {len(data)} components shown hold {together:.1%}"
    if together >= 0.5:
        course = "that is half of it or more" if half == 1 else f"{half} components hold half of it"
    return [
        f"PC0 alone holds {first['explained_variance']:.1%} of the variance of queries and keys pooled; {course}.",
        f"The {len(data)} components shown hold {together:.1%} together (means over "
        f"{plural(int(first['n_heads']), 'head')}).",
    ]


def _by_component(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    frame = frame[(frame["pc"] < FIRST) & frame["model"].isin(chosen_runs(list(frame["model"].unique()), _MOST_RUNS))]
    means = [
        {"model": model, "pc": int(str(pc)), "n_heads": len(heads)} | mean_over_heads(heads, columns)
        for model, of_run in frame.groupby("model", sort=False)
        for pc, heads in of_run.groupby("pc", sort=True)
    ]
    return pd.DataFrame(means)


ROLES = Figure(
    "qk-pca/01_pc_roles",
    "What each component has to do with position",
    "Mean correlation with position of each principal component of queries and keys pooled, for queries and for keys. "
    "Diamonds are the mean of |r_k|. Lines are 95% bootstrap intervals over key heads.",
    prepare_roles,
    draw_roles,
    of_each_run(say_roles),
)
SHARES = Figure(
    "qk-pca/05_explained_variance",
    "How much variance each component holds",
    "Mean share of the pooled variance of queries and keys on each component, with 95% bootstrap intervals over key "
    "heads (bars), and of each component and those before it together (line).",
    prepare_shares,
    draw_shares,
    of_each_run(say_shares),
)
