"""Collages of vectors of single heads: on components, on a and b, in the complement (qk-pca 06, qk-rotation 01, 08)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import FancyArrowPatch
from matplotlib.patheffects import withStroke

from qkscope.figures.collagedata import (
    MODEL_NUMBERS,
    PC_NUMBERS,
    SCALED,
    by_strength,
    head_title,
    prepare_components,
    prepare_other_planes,
    prepare_plane,
    prepare_strongest,
)
from qkscope.figures.figure import Figure, Folded
from qkscope.figures.style import FAINT, INK, TURN, canvas, panels, position_map, shortened
from qkscope.progress import plural


def draw_components(data: pd.DataFrame) -> Drawing:
    """A panel per head, with its numbers next to it."""

    def note(points: pd.DataFrame) -> str:
        lines = []
        for axis in "xy":
            share, r_q, r_k = (points[f"{name}_{axis}"].iloc[0] for name in PC_NUMBERS)
            lines.append(f"PC{points[f'pc_{axis}'].iloc[0]:.0f}\nshare {share:.1%}\nr_q {r_q:+.2f}\nr_k {r_k:+.2f}")
        return "\n\n".join(lines)

    def short(points: pd.DataFrame) -> str:
        return "r_q {:+.2f}, r_k {:+.2f}".format(*(points[f"{name}_x"].iloc[0] for name in ("r_q", "r_k")))

    first = data.iloc[0]
    return _collage(data, f"PC{first['pc_x']:.0f}", f"PC{first['pc_y']:.0f}", note, short)


def draw_plane(data: pd.DataFrame) -> Drawing:
    """A panel per head; arrows are the drift of each class."""

    def note(points: pd.DataFrame) -> str:
        omega, r_q, r_k, bias, at_edge = (points[name].iloc[0] for name in MODEL_NUMBERS)
        # At the edge of the search ω is a drift, and its value would be that of the grid.
        turns = not math.isnan(omega) and at_edge != 1
        numbers = f"r_q_a {r_q:+.2f}\nr_k_a {r_k:+.2f}\nbias {bias:+.1e}\nper token"
        return (f"ω {omega:.1e}\n" if turns else "") + numbers

    def short(points: pd.DataFrame) -> str:
        return "r_q_a {:+.2f}, r_k_a {:+.2f}".format(*(points[name].iloc[0] for name in ("r_q_a", "r_k_a")))

    return _collage(data, "axis a: drift", "axis b: separation", note, short)


Note = Callable[[pd.DataFrame], str]


def _collage(data: pd.DataFrame, x: str, y: str, note: Note, short: Note) -> Drawing:
    """Two rows of two heads with their numbers beside them; of several models a row each, numbers in the titles."""
    heads = [(key, points) for key, points in data.groupby(["model", "layer", "head"], sort=False)]
    labels = list(dict.fromkeys(key[0] for key, _ in heads))
    several = len(labels) > 1
    columns = max(sum(key[0] == label for key, _ in heads) for label in labels) if several else min(2, len(heads))
    rows = len(labels) if several else -(-len(heads) // columns)
    figure = canvas(*((2.0 * columns + 0.5, 1.85 * rows + 0.7) if several else (4.0 * columns + 0.4, 2.9 * rows + 0.7)))
    axes = panels(figure, rows, columns)
    norm = _shared_norm(data)
    places = {label: iter(row) for label, row in zip(labels, axes, strict=False)} if several else {}
    all_cells = iter(axes.flat)
    for cell in axes.flat:
        cell.set_visible(False)
    for key, points in heads:
        cell = next(places[key[0]]) if several else next(all_cells)
        cell.set_visible(True)
        draw_cloud(cell, points, norm, 5.0 if several else 4.0)
        draw_drifts(cell, points)
        name = f"layer {key[1]}, head {key[2]}"
        if several:
            cell.set_title(f"{name}\n{short(points)}", fontsize=6.8)
            cell.tick_params(labelsize=5.5, length=2)
            cell.locator_params(nbins=3)
            if cell in axes[:, 0]:
                cell.set_ylabel(shortened(str(key[0]), 20), fontsize=8)
            continue
        cell.set_title(name if len(heads) > 1 else f"{shortened(str(key[0]))} · {name}")
        cell.set(xlabel=x, ylabel=y)
        cell.text(1.02, 0.98, note(points), transform=cell.transAxes, va="top", ha="left", fontsize=7, color=INK,
                  linespacing=1.35)  # fmt: skip
    if several:
        for cell in axes[-1]:
            cell.set_xlabel(x)
    elif len(heads) > 1:
        figure.suptitle(shortened(str(labels[0]), 48), fontsize=9, x=0.01, ha="left")
    _colour_bars(figure, axes, norm, data)
    return figure


def draw_complement(data: pd.DataFrame) -> Drawing:
    """The planes that turn most, then the others; axes equal, so that rings are round."""
    planes = [(number, data[data["plane"] == number]) for number in by_strength(data)]
    columns = min(6 if len(planes) > 12 else 4, len(planes))
    rows = -(-len(planes) // columns)
    figure = canvas(1.75 * columns + 0.3, 1.9 * rows + 0.9)
    axes = panels(figure, rows, columns)
    norm = _shared_norm(data)
    for cell, (number, points) in zip(axes.flat, planes, strict=False):
        _draw_turning(cell, points, norm)
        share, angle_r, active = (points[name].iloc[0] for name in ("var_share", "angle_r", "active"))
        numbers = f": {share:.1%}\nangle_r {angle_r:+.2f}" if not math.isnan(share) else ""
        cell.set_title(f"plane {number}{numbers}", fontsize=6.5, color=FAINT if active == 0 else INK)
        cell.set_aspect("equal", adjustable="datalim")
        cell.set_xticks([])
        cell.set_yticks([])
        for side in cell.spines.values():
            side.set_visible(False)
    for cell in list(axes.flat)[len(planes) :]:
        cell.set_visible(False)
    first = data.iloc[0]
    figure.suptitle(
        head_title((first["model"], int(first["layer"]), int(first["head"]))), fontsize=9, x=0.01, ha="left"
    )
    if _turning(data):
        bar = figure.colorbar(ScalarMappable(Normalize(0, 2 * math.pi), TURN), ax=axes, location="bottom",
                              fraction=0.02, pad=0.015, aspect=75)  # fmt: skip
        bar.set_ticks([0, math.pi, 2 * math.pi], labels=["0", "half a turn", "a whole turn"])
        bar.set_label("turn of the plane's own frequency at the position of a query (dot) or key (triangle)")
        bar.outline.set_visible(False)
    else:
        _colour_bars(figure, axes, norm, data)
    return figure


def _turning(points: pd.DataFrame) -> bool:
    return SCALED not in points and bool(points["phase"].notna().any())


def _draw_turning(axes: Axes, points: pd.DataFrame, norm: Normalize) -> None:
    """Queries and keys coloured by the phase ω·t; by position if ω is unknown or scaled positions are requested."""
    if not _turning(points):
        draw_cloud(axes, points, norm, 1.5)
        return
    for kind, marker in (("q", "o"), ("k", "^")):
        of_kind = points[points["kind"] == kind]
        axes.scatter(of_kind["x"], of_kind["y"], c=of_kind["phase"], cmap=TURN, vmin=0, vmax=2 * math.pi, s=3.0,
                     marker=marker, alpha=0.8, linewidths=0, rasterized=True)  # fmt: skip


def draw_cloud(axes: Axes, points: pd.DataFrame, norm: Normalize, size: float) -> None:
    """Queries and keys, early ones light; drawn in random order, so that neither class hides the other."""
    vectors = points[points["kind"].isin(["q", "k"])]
    colours = np.empty((len(vectors), 4))
    kinds, shade = vectors["kind"].to_numpy(), norm(vectors[_coloured_by(points)].to_numpy(float))
    for kind in "qk":
        colours[kinds == kind] = position_map(kind)(shade[kinds == kind])
    order = np.random.default_rng(0).permutation(len(vectors))
    axes.scatter(vectors["x"].to_numpy(float)[order], vectors["y"].to_numpy(float)[order], s=size, c=colours[order],
                 alpha=0.6, linewidths=0, rasterized=True)  # fmt: skip


def draw_drifts(axes: Axes, points: pd.DataFrame) -> None:
    """An arrow from the mean query, and the mean key, at the first position to that at the last."""
    for kind in "qk":
        ends = points.loc[points["kind"] == f"drift {kind}", ["x", "y"]].to_numpy(float)
        if len(ends) == 2:
            arrow = FancyArrowPatch(
                ends[0], ends[1], arrowstyle="-|>", mutation_scale=11, shrinkA=0, shrinkB=0, linewidth=1.6, color=INK,
                path_effects=[withStroke(linewidth=3.4, foreground="white")], zorder=3,
            )  # fmt: skip
            axes.add_patch(arrow)


def _shared_norm(data: pd.DataFrame) -> Normalize:
    """One scale of positions for queries, keys and all panels."""
    return Normalize(0, 1 if SCALED in data else max(int(data["position"].max()), 1))


def _coloured_by(data: pd.DataFrame) -> str:
    return SCALED if SCALED in data else "position"


def _colour_bars(figure: Drawing, axes: Any, norm: Normalize, data: pd.DataFrame) -> None:
    quantity = _coloured_by(data).replace("_", " ")
    for kind, label in (("q", f"queries: {quantity}"), ("k", f"keys: {quantity}")):
        if (data["kind"] == kind).any():
            bar = figure.colorbar(ScalarMappable(norm, position_map(kind)), ax=axes, location="bottom", fraction=0.02,
                                  pad=0.015, aspect=75)  # fmt: skip
            bar.set_label(label, fontsize=7)
            bar.ax.tick_params(labelsize=6.5, length=2)
            bar.outline.set_visible(False)


# ---- sentences ----------------------------------------------------------------------------------


_APART = 2.0
"""Distance of two means, in standard deviations of the two clouds, from which they are called apart."""
_TOLD = 4
"""Heads of which numbers are told, at most."""


def say_components(data: pd.DataFrame) -> list[str]:
    """The number of heads whose clouds are apart on the first component, and the numbers of each head."""
    heads = [points for _, points in data.groupby(["model", "layer", "head"], sort=False)]
    apart = sum(_distance(points) > _APART for points in heads)
    name = f"PC{data['pc_x'].iloc[0]:.0f}"
    sentences = [
        f"Queries and keys lie apart on {name} (their means by more than {_APART:.0f} standard deviations) in {apart} "
        f"of the {plural(len(heads), 'head')} shown."
    ]
    numbers = name + " holds {explained_variance_x:.1%}, r_q {r_q_x:+.2f}, r_k {r_k_x:+.2f}."
    return sentences + _each_head(heads, numbers)


def _each_head(heads: list[pd.DataFrame], numbers: str) -> list[str]:
    """The numbers of each head behind its name; nothing if there are too many heads."""
    rows = [points.iloc[0] for points in heads] if len(heads) <= _TOLD else []
    return [f"{head_title((row['model'], row['layer'], row['head']))}: {numbers.format_map(row)}" for row in rows]


def _distance(points: pd.DataFrame) -> float:
    """Distance of the means of queries and keys along x, in root mean square standard deviations."""
    q, k = (points.loc[points["kind"] == kind, "x"].to_numpy(float) for kind in "qk")
    spread = math.sqrt((q.var() + k.var()) / 2) if len(q) and len(k) else 0.0
    return abs(float(q.mean() - k.mean())) / spread if spread > 0 else 0.0


def say_plane(data: pd.DataFrame) -> list[str]:
    """Which class moves farther along a, and the model's numbers of each head."""
    heads = [points for _, points in data.groupby(["model", "layer", "head"], sort=False)]
    farther = sum(_moved(points, "k") > _moved(points, "q") for points in heads)
    sentences = [
        f"From the first position to the last the mean key moves farther along a than the mean query in {farther} of "
        f"the {plural(len(heads), 'head')} shown."
    ]
    return sentences + _each_head(heads, "r_q_a {r_q_a:+.2f}, r_k_a {r_k_a:+.2f}, bias {bias_strength:+.2e} per token.")


def _moved(points: pd.DataFrame, kind: str) -> float:
    ends = points.loc[points["kind"] == f"drift {kind}", "x"].to_numpy(float)
    return abs(float(ends[1] - ends[0])) if len(ends) == 2 else 0.0


def say_complement(data: pd.DataFrame) -> list[str]:
    """The number of planes that turn with position, of all of the head."""
    first = data.iloc[0]
    name = head_title((first["model"], int(first["layer"]), int(first["head"])))
    if math.isnan(first["n_active"]):
        return [f"{name}: there is no table of its planes, so nothing is said about their frequencies."]
    drawn = data.groupby("plane")["angle_r"].first().abs()
    turn = "planes turns" if first["n_active"] == 1 else "planes turn"
    return [
        f"{name}: {first['turning']:.0%} of the complement's variance turns with position; {first['n_active']:.0f} of "
        f"{first['n_planes']:.0f} {turn} beyond chance, {first['n_close']:.0f} of them closely.",
        f"In the planes shown |angle_r| goes from {drawn.min():.2f} to {drawn.max():.2f}.",
    ]


COMPONENTS = Figure(
    "qk-pca/06_collage_example",
    "Queries and keys of single heads on PC0 and PC1",
    "Sampled queries (blue) and keys (red) of up to four heads of each model, drawn with seed 42; pale is early, "
    "strong is late, on one scale of positions. Signs are canonical: r_q ≥ 0, or r_k ≥ 0 where |r_q| < 0.05.",
    prepare_components,
    draw_components,
    say_components,
)
PLANE = Figure(
    "qk-rotation/01_ab_plane_collage",
    "Queries and keys of single heads in the plane of a and b",
    "Sampled queries (blue) and keys (red) of up to four heads of each model on the drift axis a and the separation "
    "axis b; pale is early, strong is late. Arrows: how the mean query and the mean key move from the first position "
    "to the last.",
    prepare_plane,
    draw_plane,
    say_plane,
)
COMPLEMENT = Figure(
    "qk-rotation/08_complement_collage",
    "The complement of one head, plane by plane",
    "Principal planes of what is left of one head off a and b, the twelve with most variance that turns with position "
    "first; each title gives the plane's share of the complement's variance and angle_r, the resultant of its rotation "
    "with position (pale: not beyond chance). Colours go round with the plane's own frequency times position: a ring "
    "in the order of the colours turns with position.",
    prepare_strongest,
    draw_complement,
    say_complement,
    Folded("other-planes", "the other planes", prepare_other_planes),
)
