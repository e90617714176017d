"""Heads as points: r_q against r_k on component 0, by family (qk-pca 02) and over training (qk-pca 12)."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.components import TAXONOMY
from qkscope.figures.eachrun import of_each_run
from qkscope.figures.figure import Figure, at_own_windows, checkpoints, discordant, models, rows, timeline
from qkscope.figures.style import CLASSES, FAINT, canvas, family_look, panels, shortened
from qkscope.progress import plural
from qkscope.results.study import Study, StudyRun

HIGH, _LOW = 0.7, 0.3
PORTRAITS = 6
_MARKERS = dict(zip(CLASSES, ("o", "^", "v", "s", "o"), strict=True))


def prepare_scatter(study: Study) -> pd.DataFrame:
    """Component 0 of every head."""
    frame = rows(study, models(study), "pc0", "r_q", "r_k", "taxonomy_published")
    return frame[["model", "family", "layer", "head", "r_q", "r_k", "taxonomy_published"]]


def draw_scatter(data: pd.DataFrame) -> Drawing:
    """One cloud per family, or per run of one family; the names of the regions are outside the frame."""
    figure = canvas(6.6, 4.6)
    axes = figure.subplots()
    _regions(axes, data)
    group = "family" if data["family"].nunique() > 1 else "model"
    look = family_look(data[group].tolist())
    size = 26 if len(data) < 300 else 14 if len(data) < 1000 else 9
    for family, (colour, marker) in look.items():
        heads = data[data[group] == family]
        axes.scatter(heads["r_q"], heads["r_k"], s=size, color=colour, marker=marker, alpha=0.7, linewidths=0,
                     label=f"{shortened(family)} ({len(heads):,})", rasterized=len(data) > 500)  # fmt: skip
    names = {0.85: ("k-positional", "position-\ndominated"), 0.5: ("", "mixed: all\nbetween lines"),
             0.0: ("content-\nfocused", "q-positional"), -0.85: ("k-positional", "position-\ndominated")}  # fmt: skip
    for y, (left, right) in names.items():
        if y >= axes.get_ylim()[0]:
            for text, x, side, shift in ((left, axes.get_xlim()[0], "right", -36), (right, 1.0, "left", 6)):
                axes.annotate(text, (x, y), ha=side, va="center", fontsize=7, color=FAINT, annotation_clip=False,
                              xytext=(shift, 0), textcoords="offset points")  # fmt: skip
    axes.set_xlabel("r_q on PC0")
    axes.set_ylabel("r_k on PC0", labelpad=52)
    figure.legend(loc="outside lower center", ncols=min(4, len(look)), markerscale=1.2)
    return figure


def say_scatter(data: pd.DataFrame) -> list[str]:
    """The published classes of a run's heads, and their centre."""
    shares = data["taxonomy_published"].value_counts(normalize=True)
    classes = ", ".join(f"{kind} {shares.get(kind, 0.0):.0%}" for kind in TAXONOMY)
    against = discordant(data).mean()
    if math.isnan(against):
        discords = "In no head r_q is strong enough to fix the sign of r_k."
    elif against == 0:
        discords = "In no head do keys drift against queries along PC0."
    else:
        discords = f"In {against:.1%} of the heads whose r_q is strong enough to fix the sign, r_k is negative: keys "
        discords += "drift against queries along PC0."
    return [
        f"By the published classes {shares.iloc[0]:.1%} of {plural(len(data), 'head')} are {shares.index[0]}.",
        f"Shares of the classes: {classes}.",
        discords,
        f"Mean r_q {data['r_q'].mean():.2f}, mean r_k {data['r_k'].mean():+.2f}, mean |r_k| "
        f"{data['r_k'].abs().mean():.2f}.",
    ]


def prepare_portraits(study: Study) -> pd.DataFrame:
    """Component 0 of every head at six checkpoints, or at all if there are fewer."""
    runs = six_checkpoints(checkpoints(study))
    frame = rows(study, runs, "pc0", "r_q", "r_k", "taxonomy_published")
    when = timeline(runs).drop(columns="window")
    return when.merge(frame[["model", "layer", "head", "r_q", "r_k", "taxonomy_published"]], on="model", sort=False)


def six_checkpoints(runs: list[StudyRun]) -> list[StudyRun]:
    """The first, an early one, the end of each phase and the last; if these are too many, the latest phases."""
    ends = [i for i, run in enumerate(runs) if i + 1 == len(runs) or runs[i + 1].phase != run.phase]
    candidates = [0, len(runs) - 1, min(1, len(runs) - 1), *reversed(ends), *range(len(runs))]
    indices = list(dict.fromkeys(candidates))[:PORTRAITS]
    return [runs[i] for i in sorted(indices)]


def draw_portraits(data: pd.DataFrame) -> Drawing:
    """One panel per checkpoint, coloured by class."""
    panel_groups = list(data.groupby("order", sort=True))
    n_rows = 2 if len(panel_groups) > 3 else 1
    columns = -(-len(panel_groups) // n_rows)
    figure = canvas(7.2, 2.5 * n_rows + 0.5)
    axes = panels(figure, n_rows, columns, sharex=True, sharey=True)
    size = 12 if len(data) < 100 * len(panel_groups) else 6
    for cell, (_, heads) in zip(axes.flat, panel_groups, strict=False):
        _regions(cell, data)
        for kind, colour in CLASSES.items():
            members = heads[heads["taxonomy_published"] == kind]
            cell.scatter(members["r_q"], members["r_k"], s=size, color=colour, marker=_MARKERS[kind], alpha=0.8,
                         linewidths=0, rasterized=True)  # fmt: skip
        cell.set_title(f"{shortened(heads['model'].iloc[0])}\n{shortened(heads['phase'].iloc[0])}", fontsize=7.5)
    for cell in list(axes.flat)[len(panel_groups) :]:
        cell.set_visible(False)
    for cell in axes[-1]:
        cell.set_xlabel("r_q on PC0")
    for cell in axes[:, 0]:
        cell.set_ylabel("r_k on PC0")
    marks = [
        axes[0, 0].scatter([], [], s=14, color=colour, marker=_MARKERS[kind], label=kind)
        for kind, colour in CLASSES.items()
        if (data["taxonomy_published"] == kind).any()
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=5)
    return figure


def say_portraits(data: pd.DataFrame) -> list[str]:
    """From the first panel to the last."""
    first, last = data[data["order"] == data["order"].min()], data[data["order"] == data["order"].max()]
    ends = [(heads["taxonomy_published"] == "position-dominated").mean() for heads in (first, last)]
    return [
        f"From {first['model'].iloc[0]} to {last['model'].iloc[0]} the share of position-dominated heads (r_q and "
        f"|r_k| above {HIGH}) goes {ends[0]:.0%} → {ends[1]:.0%}.",
        *(
            f"{heads['model'].iloc[0]}: mean r_q {heads['r_q'].mean():.2f}, mean r_k {heads['r_k'].mean():+.2f}, "
            f"spread of r_q {heads['r_q'].std(ddof=0):.2f}, over {plural(len(heads), 'head')}."
            for heads in (first, last)
        ),
    ]


def _regions(axes: Axes, data: pd.DataFrame) -> None:
    """The lines between the classes; without discordant heads there is no room for them."""
    for value in (_LOW, HIGH):
        axes.axvline(value, color="#c8c8c8", linewidth=0.7, linestyle=(0, (4, 3)))
        for sign in (1, -1):
            axes.axhline(sign * value, color="#c8c8c8", linewidth=0.7, linestyle=(0, (4, 3)))
    axes.axhline(0, color="#777777", linewidth=0.8)
    axes.set_xlim(min(float(data["r_q"].min()) - 0.03, 0.2), 1.0)
    lowest = min(float(data["r_k"].min()), -0.1) - 0.05
    axes.set_ylim(max(-1.0, lowest), 1.0)


SCATTER = Figure(
    "qk-pca/02_rq_vs_rk_scatter",
    "Each head by how its queries and keys follow position on PC0",
    "Every head at its (r_q, r_k) on PC0, by family, or by run if there is one family. Dashed lines stand at 0.3 and "
    "0.7, above and below zero: they bound the published classes named at the sides; below zero keys drift against "
    "queries.",
    prepare_scatter,
    draw_scatter,
    of_each_run(say_scatter),
)
PORTRAITS_FIGURE = Figure(
    "qk-pca/12_phase_portraits",
    "Heads on PC0 at points of training",
    "Every head at its (r_q, r_k) on PC0 at the first checkpoint, an early one, the ends of phases and the last.",
    prepare_portraits,
    draw_portraits,
    say_portraits,
    at_own_windows(prepare_portraits),
)
