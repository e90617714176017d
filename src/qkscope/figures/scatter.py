"""Heads as points: r_q against r_k on component 0, by family (qk-pca 02) and over training (qk-pca 12)."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.figures.figure import Figure, checkpoints, discordant, models, rows, timeline
from qkscope.figures.style import CLASSES, FAINT, canvas, family_look, panels, shortened
from qkscope.results.study import Study, StudyRun

HIGH, _LOW = 0.7, 0.3
PORTRAITS = 6


def prepare_scatter(study: Study) -> pd.DataFrame:
    """Component 0 of every head."""
    frame = rows(study, models(study), "pc0", "r_q", "r_k", "taxonomy")
    return frame[["model", "family", "layer", "head", "r_q", "r_k", "taxonomy"]]


def draw_scatter(data: pd.DataFrame) -> Drawing:
    """One cloud per family; the names of the regions are outside the frame."""
    figure = canvas(6.6, 4.6)
    axes = figure.subplots()
    _regions(axes)
    look = family_look(data["family"].tolist())
    size = 14 if len(data) < 800 else 7
    for family, (colour, marker) in look.items():
        heads = data[data["family"] == family]
        axes.scatter(heads["r_q"], heads["r_k"], s=size, color=colour, marker=marker, alpha=0.65, linewidths=0,
                     label=f"{shortened(family) or 'all'} ({len(heads):,})", rasterized=len(data) > 500)  # fmt: skip
    lowest = min(float(data["r_k"].min()), -0.1) - 0.05
    axes.set_ylim(-1.0 if lowest < -0.5 else lowest, 1.0)  # without discordant heads, no room for them
    for y, left, right in ((0.85, "k-positional", "position-\ndominated"), (0.5, "mixed", "mixed"),
                           (0.0, "content-\nfocused", "q-positional"), (-0.5, "mixed", "mixed"),
                           (-0.85, "k-positional,\ndiscordant", "position-dominated,\ndiscordant")):  # fmt: skip
        if y < axes.get_ylim()[0]:
            continue
        axes.annotate(left, (-0.1, y), ha="right", va="center", fontsize=7, color=FAINT, annotation_clip=False,
                      xytext=(-36, 0), textcoords="offset points")  # fmt: skip
        axes.annotate(right, (1.0, y), ha="left", va="center", fontsize=7, color=FAINT, annotation_clip=False,
                      xytext=(6, 0), textcoords="offset points")  # fmt: skip
    axes.set_xlabel("r_q on PC0")
    axes.set_ylabel("r_k on PC0", labelpad=52)
    figure.legend(loc="outside lower center", ncols=min(4, len(look)), markerscale=1.6)
    return figure


def say_scatter(data: pd.DataFrame) -> list[str]:
    """Classes over all heads, and the centre of each family."""
    shares = data["taxonomy"].value_counts(normalize=True)
    sentences = [
        "Of " + f"{len(data):,} heads, " + ", ".join(f"{share:.1%} are {kind}" for kind, share in shares.items()) + "."
    ]
    sentences.append(
        f"In {discordant(data).mean():.1%} of the heads whose r_q is strong enough to fix the sign, r_k is negative: "
        "keys drift against queries along PC0."
    )
    for family, heads in data.groupby("family", sort=False):
        name = str(family) or "All heads"
        sentences.append(
            f"{name}: mean r_q {heads['r_q'].mean():.2f}, mean r_k {heads['r_k'].mean():+.2f}, "
            f"mean |r_k| {heads['r_k'].abs().mean():.2f}."
        )
    return sentences


def prepare_portraits(study: Study) -> pd.DataFrame:
    """Component 0 of every head at six checkpoints, or at all if there are fewer."""
    runs = six_checkpoints(checkpoints(study))
    frame = rows(study, runs, "pc0", "r_q", "r_k", "taxonomy")
    when = timeline(runs).drop(columns="window")
    return when.merge(frame[["model", "layer", "head", "r_q", "r_k", "taxonomy"]], on="model", sort=False)


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
    for cell, (_, heads) in zip(axes.flat, panel_groups, strict=False):
        _regions(cell)
        for kind, colour in CLASSES.items():
            members = heads[heads["taxonomy"] == kind]
            cell.scatter(members["r_q"], members["r_k"], s=6, color=colour, alpha=0.8, linewidths=0, rasterized=True)
        cell.set_title(f"{shortened(heads['model'].iloc[0])}\n{shortened(heads['phase'].iloc[0])}", fontsize=7.5)
    for cell in list(axes.flat)[len(panel_groups) :]:
        cell.set_visible(False)
    for cell in axes[-1]:
        cell.set_xlabel("r_q on PC0")
    for cell in axes[:, 0]:
        cell.set_ylabel("r_k on PC0")
    marks = [axes[0, 0].scatter([], [], s=14, color=colour, label=kind) for kind, colour in CLASSES.items()]
    figure.legend(handles=marks, loc="outside lower center", ncols=5)
    return figure


def say_portraits(data: pd.DataFrame) -> list[str]:
    """From the first panel to the last."""
    first, last = data[data["order"] == data["order"].min()], data[data["order"] == data["order"].max()]
    return [
        f"{heads['model'].iloc[0]}: mean r_q {heads['r_q'].mean():.2f}, mean r_k {heads['r_k'].mean():+.2f}; "
        f"{(heads['taxonomy'] == 'position-dominated').mean():.0%} position-dominated, spread of r_q "
        f"{heads['r_q'].std(ddof=0):.2f}."
        for heads in (first, last)
    ]


def _regions(axes: Axes) -> None:
    for value in (_LOW, HIGH):
        axes.axvline(value, color="#c8c8c8", linewidth=0.7, linestyle=(0, (4, 3)))
        for sign in (1, -1):
            axes.axhline(sign * value, color="#c8c8c8", linewidth=0.7, linestyle=(0, (4, 3)))
    axes.axhline(0, color="#777777", linewidth=0.8)
    axes.set_xlim(-0.1, 1.0)
    axes.set_ylim(-1.0, 1.0)


SCATTER = Figure(
    "qk-pca/02_rq_vs_rk_scatter",
    "Each head by how its queries and keys follow position on PC0",
    "Every head at its (r_q, r_k) on PC0, by family. Dashed lines stand at 0.3 and 0.7, above and below zero: they "
    "bound the classes named at the sides.",
    prepare_scatter,
    draw_scatter,
    say_scatter,
)
PORTRAITS_FIGURE = Figure(
    "qk-pca/12_phase_portraits",
    "Heads on PC0 at points of training",
    "Every head at its (r_q, r_k) on PC0 at the first checkpoint, an early one, the ends of phases and the last.",
    prepare_portraits,
    draw_portraits,
    say_portraits,
)
