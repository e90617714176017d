"""Correlation with position and share of variance of each principal component (qk-pca 01, 05)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import mean_over_heads
from qkscope.figures.figure import Figure, models, rows
from qkscope.figures.style import K, Q, canvas, error_bars, grid
from qkscope.results.study import Study

FIRST = 10
"""Number of components shown."""


def prepare_roles(study: Study) -> pd.DataFrame:
    """Mean r_q, r_k and |r_k| of each component over heads."""
    frame = rows(study, models(study), "qk", "pc", "r_q", "r_k")
    return _by_component(frame.assign(abs_r_k=frame["r_k"].abs()), ["r_q", "r_k", "abs_r_k"])


def draw_roles(data: pd.DataFrame) -> Drawing:
    """Grouped bars, and |r_k| as a mark: a signed mean can be small because heads disagree."""
    figure = canvas(6.4, 3.0)
    axes = figure.subplots()
    x = np.arange(len(data))
    for offset, name, colour, label in ((-0.2, "r_q", Q, "queries, r_q"), (0.2, "r_k", K, "keys, r_k")):
        axes.bar(x + offset, data[name], width=0.36, color=colour, label=label)
        error_bars(axes, x + offset, data[name], data[f"{name}_low"], data[f"{name}_high"])
    axes.plot(x + 0.2, data["abs_r_k"], linestyle="none", marker="D", markersize=4, markerfacecolor="white",
              color=K, label="keys, |r_k|")  # fmt: skip
    axes.axhline(0, color="#555555", linewidth=0.7)
    axes.set_xticks(x, [f"PC{pc}" for pc in data["pc"]])
    axes.set_ylabel("mean correlation with position")
    axes.set_ylim(min(0, float(data[["r_k_low", "r_k"]].min().min()) * 1.1), 1)
    axes.legend(loc="upper right", ncols=3)
    grid(axes)
    return figure


def say_roles(data: pd.DataFrame) -> list[str]:
    """The leading component against the others."""
    first, further = data.iloc[0], data.iloc[1:]
    sentences = [
        f"On PC0 the mean r_q is {first['r_q']:.2f}, the mean r_k {first['r_k']:+.2f} and the mean |r_k| "
        f"{first['abs_r_k']:.2f}, over {first['n_heads']:,.0f} heads."
    ]
    if len(further):
        top = further.loc[further["r_q"].idxmax()]
        sentences.append(
            f"Of the other components PC{top['pc']:.0f} follows position most, with r_q = {top['r_q']:.2f}."
        )
    return sentences


def prepare_shares(study: Study) -> pd.DataFrame:
    """Mean share of variance of each component."""
    frame = rows(study, models(study), "qk", "pc", "explained_variance")
    return _by_component(frame, ["explained_variance"])


def draw_shares(data: pd.DataFrame) -> Drawing:
    """Bars, each with its number."""
    figure = canvas(5.6, 2.8)
    axes = figure.subplots()
    x = np.arange(len(data))
    axes.bar(x, data["explained_variance"], width=0.7, color="#5b7553")
    error_bars(axes, x, data["explained_variance"], data["explained_variance_low"], data["explained_variance_high"])
    tops = data[["explained_variance", "explained_variance_high"]].max(axis=1)
    for position, top, share in zip(x, tops, data["explained_variance"], strict=True):
        axes.annotate(
            f"{share:.1%}", (position, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=7
        )
    axes.set_xticks(x, [f"PC{pc}" for pc in data["pc"]])
    axes.set_ylabel("mean share of pooled variance")
    axes.set_ylim(0, float(tops.max()) * 1.15)
    grid(axes)
    return figure


def say_shares(data: pd.DataFrame) -> list[str]:
    """Share of PC0, and of all components together."""
    total, first = data["explained_variance"].sum(), data.iloc[0]
    return [
        f"PC0 holds {first['explained_variance']:.1%} of the pooled variance, the {len(data)} components shown "
        f"{total:.1%} together ({first['n_heads']:,.0f} heads)."
    ]


def _by_component(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    frame = frame[frame["pc"] < FIRST]
    means = [
        {"pc": int(str(pc)), "n_heads": len(heads)} | mean_over_heads(heads, columns)
        for pc, heads in frame.groupby("pc", sort=True)
    ]
    return pd.DataFrame(means)


ROLES = Figure(
    "qk-pca/01_pc_roles",
    "What each component has to do with position",
    "Mean correlation with position of each principal component of queries and keys pooled, for queries and for keys. "
    "Marks are the mean of |r_k|. Lines are 95% bootstrap intervals over key heads.",
    prepare_roles,
    draw_roles,
    say_roles,
)
SHARES = Figure(
    "qk-pca/05_explained_variance",
    "How much variance each component holds",
    "Mean share of the pooled variance of queries and keys on each component, with 95% bootstrap intervals over key "
    "heads.",
    prepare_shares,
    draw_shares,
    say_shares,
)
