"""Collages of vectors of single heads: on components, on a and b, in the complement (qk-pca 06, qk-rotation 01, 08)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import FancyArrowPatch
from matplotlib.patheffects import withStroke

from qkscope.analyses.planes import STRONG_R
from qkscope.figures.collagedata import (
    MODEL_NUMBERS,
    PC_NUMBERS,
    SCALED,
    head_name,
    prepare_complement,
    prepare_components,
    prepare_plane,
)
from qkscope.figures.figure import Figure
from qkscope.figures.style import INK, canvas, panels, position_map


def draw_components(data: pd.DataFrame) -> Drawing:
    """A panel per head, with its numbers next to it."""

    def note(points: pd.DataFrame) -> str:
        lines = []
        for axis in "xy":
            share, r_q, r_k = (points[f"{name}_{axis}"].iloc[0] for name in PC_NUMBERS)
            lines.append(f"PC{points[f'pc_{axis}'].iloc[0]:.0f}\nshare {share:.1%}\nr_q {r_q:+.2f}\nr_k {r_k:+.2f}")
        return "\n\n".join(lines)

    first = data.iloc[0]
    return _collage(data, f"PC{first['pc_x']:.0f}", f"PC{first['pc_y']:.0f}", note)


def draw_plane(data: pd.DataFrame) -> Drawing:
    """A panel per head; arrows are the drift of each class."""

    def note(points: pd.DataFrame) -> str:
        omega, position_r, bias = (points[name].iloc[0] for name in MODEL_NUMBERS)
        # At the edge of the search ω is a drift, and its value would be that of the grid.
        turns = not math.isnan(omega) and points["omega_at_edge"].iloc[0] != 1
        return (f"ω {omega:.1e}\n" if turns else "") + f"position_r {position_r:.2f}\nbias {bias:+.1e}\nper token"

    return _collage(data, "axis a: drift", "axis b: separation", note)


def _collage(data: pd.DataFrame, x: str, y: str, note: Any) -> Drawing:
    heads = [(key, points) for key, points in data.groupby(["model", "layer", "head"], sort=False)]
    columns = 1 if len(heads) == 1 else 2
    rows = -(-len(heads) // columns)
    figure = canvas(4.0 * columns + 0.4, 2.9 * rows + 0.7)
    axes = panels(figure, rows, columns)
    norm = _shared_norm(data)
    for cell, (key, points) in zip(axes.flat, heads, strict=False):
        draw_cloud(cell, points, norm, 4.0)
        draw_drifts(cell, points)
        cell.set_title(head_name((str(key[0]), int(key[1]), int(key[2]))))
        cell.set_xlabel(x)
        cell.set_ylabel(y)
        cell.text(1.02, 0.98, note(points), transform=cell.transAxes, va="top", ha="left", fontsize=7, color=INK,
                  linespacing=1.35)  # fmt: skip
    for cell in list(axes.flat)[len(heads) :]:
        cell.set_visible(False)
    _colour_bars(figure, axes, norm, data)
    return figure


def draw_complement(data: pd.DataFrame) -> Drawing:
    """Planes in order of variance, five rows of six; axes equal, so that rings are round."""
    planes = list(data.groupby("plane", sort=True))
    columns = min(6, len(planes))
    rows = -(-len(planes) // columns)
    figure = canvas(1.75 * columns + 0.3, 1.9 * rows + 0.9)
    axes = panels(figure, rows, columns)
    norm = _shared_norm(data)
    for cell, (number, points) in zip(axes.flat, planes, strict=False):
        _draw_turning(cell, points, norm)
        share, angle_r, active = (points[name].iloc[0] for name in ("var_share", "angle_r", "active"))
        mark = "" if active == 1 else " · not active"
        numbers = f": {share:.1%}\nangle_r {angle_r:+.2f}{mark}" if not math.isnan(share) else ""
        cell.set_title(f"{number}{numbers}", fontsize=6.5)
        cell.set_aspect("equal", adjustable="datalim")
        cell.set_xticks([])
        cell.set_yticks([])
        for side in cell.spines.values():
            side.set_visible(False)
    for cell in list(axes.flat)[len(planes) :]:
        cell.set_visible(False)
    first = data.iloc[0]
    figure.suptitle(head_name((first["model"], int(first["layer"]), int(first["head"]))), fontsize=9, x=0.01, ha="left")
    if _turning(data):
        bar = figure.colorbar(ScalarMappable(Normalize(0, 2 * math.pi), "twilight"), ax=axes, location="bottom",
                              fraction=0.02, pad=0.015, aspect=75, ticks=[0, math.pi, 2 * math.pi])  # fmt: skip
        bar.ax.set_xticklabels(["0", "half a turn", "a whole turn"])
        bar.set_label("how far the plane's own frequency has turned at the position of a query (dot) or key (triangle)")
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
        axes.scatter(of_kind["x"], of_kind["y"], c=of_kind["phase"], cmap="twilight", vmin=0, vmax=2 * math.pi, s=3.0,
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


def say_components(data: pd.DataFrame) -> list[str]:
    """The heads shown, with PC0's numbers."""
    heads = data.groupby(["model", "layer", "head"], sort=False).first().reset_index()
    return [
        f"{head_name((row['model'], row['layer'], row['head']))}: PC{row['pc_x']:.0f} holds "
        f"{row['explained_variance_x']:.1%}, r_q {row['r_q_x']:+.2f}, r_k {row['r_k_x']:+.2f}."
        for _, row in heads.iterrows()
    ]


def say_plane(data: pd.DataFrame) -> list[str]:
    """The heads shown, with the model's numbers."""
    heads = data.groupby(["model", "layer", "head"], sort=False).first().reset_index()
    return [
        f"{head_name((row['model'], row['layer'], row['head']))}: position_r {row['position_r']:.2f}, bias "
        f"{row['bias_strength']:+.2e} per token."
        for _, row in heads.iterrows()
    ]


def say_complement(data: pd.DataFrame) -> list[str]:
    """The number of planes that turn with position."""
    planes = data.groupby("plane").first()
    if planes["active"].isna().all():
        return ["There is no table of planes for this head, so nothing is said about its frequencies."]
    active, strength = planes["active"] == 1, planes["angle_r"].abs()
    turns = (planes["var_share"] * strength**2)[active].sum()
    first, closely = data.iloc[0], int((active & (strength >= STRONG_R)).sum())
    return [
        f"{head_name((first['model'], int(first['layer']), int(first['head'])))}: {active.sum()} of {len(planes)} "
        f"planes turn with position beyond chance, {closely} of them closely; {turns:.0%} of the complement's variance "
        f"turns. The largest |angle_r| is {strength.max():.2f}."
    ]


COMPONENTS = Figure(
    "qk-pca/06_collage_example",
    "Queries and keys of single heads on PC0 and PC1",
    "Sampled queries (blue) and keys (red) of up to four heads, drawn with seed 42; light is early, dark is late, on "
    "one scale of positions. Signs are canonical: r_q ≥ 0, or r_k ≥ 0 where |r_q| < 0.05.",
    prepare_components,
    draw_components,
    say_components,
)
PLANE = Figure(
    "qk-rotation/01_ab_plane_collage",
    "Queries and keys of single heads in the plane of a and b",
    "Sampled queries (blue) and keys (red) of up to four heads on the drift axis a and the separation axis b; light is "
    "early, dark is late. Arrows: how the mean query and the mean key move from the first position to the last.",
    prepare_plane,
    draw_plane,
    say_plane,
)
COMPLEMENT = Figure(
    "qk-rotation/08_complement_collage",
    "The complement of one head, plane by plane",
    "Principal planes of what is left of one head off a and b, in order of variance; each title gives the plane's "
    "share of the complement's variance and angle_r, the resultant of its rotation with position. Colours go round "
    "with the plane's own frequency times position: a ring in the order of the colours turns with position.",
    prepare_complement,
    draw_complement,
    say_complement,
)
