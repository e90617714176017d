"""The recency bias over heads: its distribution, and its correlation with separation (qk-rotation 04, 07)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import correlation
from qkscope.figures.figure import Figure, models, rows, with_window
from qkscope.figures.style import FAINT, canvas, family_look, grid, panels, shortened
from qkscope.results.study import Study

PER = {"bias_strength": "per token", "bias_window": "per window"}


def prepare_histograms(study: Study) -> pd.DataFrame:
    """Bias of every head, per token and per window."""
    frame = with_window(study, rows(study, models(study), "rotated", "bias_strength"))
    return frame[["model", "family", "layer", "head", *PER]]


def draw_histograms(data: pd.DataFrame) -> Drawing:
    """A row per family, a column per unit; families share the bins."""
    look = family_look(data["family"].tolist())
    columns = [name for name in PER if data[name].notna().any()]
    figure = canvas(3.5 * len(columns) + 0.2, 0.6 + 1.15 * len(look))
    axes = panels(figure, len(look), len(columns), sharex="col")
    for column, name in enumerate(columns):
        edges = _edges(data[name].to_numpy(float))
        for cell, (family, (colour, _)) in zip(axes[:, column], look.items(), strict=True):
            biases = data.loc[data["family"] == family, name].to_numpy(float)
            cell.hist(np.clip(biases, edges[0], edges[-1]), bins=edges, color=colour, alpha=0.85)
            cell.axvline(0, color="#333333", linewidth=0.9)
            cell.set_title(
                f"{shortened(family) or 'all heads'}: {np.mean(biases > 0):.1%} positive of {len(biases):,}",
                fontsize=7.5,
            )
            cell.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4), useMathText=True)
            grid(cell)
        axes[-1, column].set_xlabel(f"recency bias {PER[name]} (score)")
    for cell in axes[:, 0]:
        cell.set_ylabel("heads")
    return figure


def say_histograms(data: pd.DataFrame) -> list[str]:
    """Share of heads that favour later keys, and medians."""
    sentences = [
        f"{(data['bias_strength'] > 0).mean():.1%} of {len(data):,} heads have a positive bias (later keys score "
        f"higher); {(data['bias_strength'] < 0).sum():,} have a negative one."
    ]
    for family, heads in data.groupby("family", sort=False):
        window = f", {heads['bias_window'].median():.3g} per window" if heads["bias_window"].notna().any() else ""
        sentences.append(
            f"{str(family) or 'Median'}: median bias {heads['bias_strength'].median():.3g} per token{window}."
        )
    return sentences


def prepare_separation(study: Study) -> pd.DataFrame:
    """Bias and separation of every head."""
    frame = with_window(study, rows(study, models(study), "rotated", "bias_strength", "separation_strength"))
    return frame[["model", "family", "layer", "head", "separation_strength", *PER]]


def draw_separation(data: pd.DataFrame) -> Drawing:
    """A panel per family and one for all, with r in each title; also per window if windows differ."""
    look = family_look(data["family"].tolist())
    names = ["bias_strength", *(["bias_window"] if _units_matter(data) else [])]
    families = [(family, data[data["family"] == family]) for family in look] if len(look) > 1 else []
    across = len(families) + 1
    figure = canvas(max(4.2, 2.35 * across), 0.5 + 2.5 * len(names))
    axes = panels(figure, len(names), across, sharex=True, sharey="row")
    for row, name in zip(axes, names, strict=True):
        for cell, (family, heads) in zip(row, families, strict=False):
            _cloud(cell, heads, name, look)
            cell.set_title(f"{shortened(family, 18) or 'no family'}: r = {_r(heads, name):+.2f}")
        _cloud(row[-1], data, name, look)
        row[-1].set_title(f"all heads: r = {_r(data, name):+.2f}")
        row[0].set_ylabel(f"recency bias {PER[name]}")
    for cell in axes[-1]:
        cell.set_xlabel("separation_strength")
    return figure


def say_separation(data: pd.DataFrame) -> list[str]:
    """The pooled correlation and those within families."""
    name = "bias_strength"
    pooled = _r(data, name)
    within = {str(family): _r(heads, name) for family, heads in data.groupby("family", sort=False)}
    sentences = [f"Over all {len(data):,} heads, r of bias (per token) and separation is {pooled:+.2f}."]
    if len(within) > 1:
        sentences.append("Within families: " + ", ".join(f"{family} {r:+.2f}" for family, r in within.items()) + ".")
        opposite = [family for family, r in within.items() if r * pooled < 0]
        if opposite:
            sentences.append(
                f"The sign is the opposite within {', '.join(opposite)}: the pooled value does not hold there."
            )
    return sentences


def _cloud(axes: Axes, heads: pd.DataFrame, name: str, look: dict[str, tuple[str, str]]) -> None:
    for family, members in heads.groupby("family", sort=False):
        colour, marker = look[str(family)]
        axes.scatter(members["separation_strength"], members[name], s=7, color=colour, marker=marker, alpha=0.6,
                     linewidths=0, rasterized=True)  # fmt: skip
    x, y = heads["separation_strength"].to_numpy(float), heads[name].to_numpy(float)
    if len(x) > 2 and x.std() > 0:
        slope, height = np.polyfit(x, y, 1)
        ends = np.array([x.min(), x.max()])
        axes.plot(ends, slope * ends + height, color="#333333", linewidth=1.0)
    axes.axhline(0, color=FAINT, linewidth=0.7)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
    grid(axes)


def _r(heads: pd.DataFrame, name: str) -> float:
    return correlation(heads["separation_strength"], heads[name])


def _units_matter(data: pd.DataFrame) -> bool:
    """Return True if windows differ, so that biases per token and per window are not proportional."""
    ratio = (data["bias_window"] / data["bias_strength"]).replace([np.inf, -np.inf], np.nan).dropna()
    return len(ratio) > 0 and float(ratio.max() / ratio.min()) > 1.02


def _edges(values: np.ndarray) -> np.ndarray:
    """Edges of forty bins over zero and the middle 98% of values; other values are counted in the outermost bins."""
    low, high = np.nanquantile(values, [0.01, 0.99])
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = -1.0, 1.0
    return np.linspace(low, high, 41)


HISTOGRAMS = Figure(
    "qk-rotation/04_bias_strength",
    "The recency bias of every head",
    "Distribution over heads of mu_q_a · alpha_k, per token as published and over the window, by family. The outermost "
    "bins hold what lies beyond the middle 98% of heads.",
    prepare_histograms,
    draw_histograms,
    say_histograms,
)
SEPARATION = Figure(
    "qk-rotation/07_bias_vs_separation",
    "Bias and separation: together, and family by family",
    "Every head's recency bias against its separation_strength, with a least-squares line, within each family and over "
    "all. A pooled correlation can have the opposite sign of those within (Simpson's paradox).",
    prepare_separation,
    draw_separation,
    say_separation,
)
