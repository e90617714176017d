"""Vectors of single heads from points.parquet: components, a and b, complement (qk-pca 06, qk-rotation 01, 08)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Drawing

from qkscope.figures.figure import Figure, NotApplicable
from qkscope.figures.select import models
from qkscope.figures.style import INK, K, Q, canvas, panels, position_map, shortened
from qkscope.heads import choose_heads
from qkscope.study.study import Study

HeadKey = tuple[str, int, int]
_MOST_PLANES = 30
_NUMBERS = ["explained_variance", "r_q", "r_k"]
MODEL_NUMBERS = ["omega", "position_r", "bias_strength"]
_SCALED = "scaled_position"
"""Column by which points are coloured, if the data has it; otherwise by position."""


def heads_with_points(study: Study) -> list[HeadKey]:
    """The heads that a collage shows: a seeded choice among the heads of the first model with points."""
    points = study.tables.get("points")
    if points is None or points.empty:
        raise NotApplicable(
            "no points.parquet: write one with qkscope analyze --points, or with the …-visualize commands"
        )
    for run in models(study):
        heads = points.loc[points["model"] == run.label, ["layer", "head"]].drop_duplicates()
        if len(heads):
            return [(run.label, *head) for head in choose_heads([(int(a), int(b)) for a, b in heads.to_numpy()])]
    raise NotApplicable("points.parquet holds no head of the models compared")


# ---- data ---------------------------------------------------------------------------------------


def prepare_components(
    study: Study, heads: Sequence[HeadKey] | None = None, pcs: tuple[int, int] = (0, 1)
) -> pd.DataFrame:
    """Points on two components, with each component's numbers."""
    x, y = (f"pc{pc}" for pc in pcs)
    frames = []
    for key in heads or heads_with_points(study):
        points = _points(study, key, x, y)
        for axis, pc in zip("xy", pcs, strict=True):
            numbers = _numbers(study, "qk", key, _NUMBERS, pc=pc)
            points = points.assign(**{f"pc_{axis}": pc}, **{f"{name}_{axis}": value for name, value in numbers.items()})
        frames.append(points)
    return pd.concat(frames, ignore_index=True)


def prepare_plane(study: Study, heads: Sequence[HeadKey] | None = None) -> pd.DataFrame:
    """Points on a and b with the head's numbers, and the regression of b on a in each class as a line of two points."""
    frames = []
    for key in heads or heads_with_points(study):
        points = _points(study, key, "a", "b")
        lines = [_line(points[points["kind"] == kind], kind) for kind in "qk"]
        frames.append(
            pd.concat([points, *lines], ignore_index=True).assign(**_numbers(study, "rotated", key, MODEL_NUMBERS))
        )
    return pd.concat(frames, ignore_index=True)


def prepare_complement(study: Study, head: HeadKey | None = None) -> pd.DataFrame:
    """Points of one head in every plane of its complement: one row per vector and plane."""
    key = head or heads_with_points(study)[0]
    points = study.tables["points"]
    own_points = points[(points["model"] == key[0]) & (points["layer"] == key[1]) & (points["head"] == key[2])]
    axes = [name for name in points if str(name).startswith("svd_") and own_points[name].notna().any()]
    count = min(len(axes) // 2, _MOST_PLANES)
    if not count:
        raise NotApplicable(f"points.parquet holds no coordinates of the complement for {_name(key)}")
    frames = []
    for plane in range(count):
        numbers = _numbers(study, "planes", key, ["var_share", "angle_r", "active"], plane=plane)
        xy = own_points[["kind", "position"]].assign(
            x=own_points[f"svd_{2 * plane}"], y=own_points[f"svd_{2 * plane + 1}"], plane=plane
        )
        frames.append(xy.assign(**numbers))
    return pd.concat(frames, ignore_index=True).assign(model=key[0], layer=key[1], head=key[2])


def scale_positions(study: Study, data: pd.DataFrame) -> pd.DataFrame:
    """The data with positions from 0 to 1, by which its points are then coloured.

    position / (window − 1) of its run, or position / the largest one shown of its run if the window is not known.
    """
    windows = {run.label: run.window for run in study.runs if run.window}
    largest = data.groupby("model")["position"].transform("max")
    last = (data["model"].map(windows).astype(float) - 1).fillna(largest)
    scaled = data["position"] / last.clip(lower=1)
    return data.assign(**{_SCALED: scaled.where(data["kind"].isin(["q", "k"]))})


def _points(study: Study, key: HeadKey, x: str, y: str) -> pd.DataFrame:
    points = study.tables["points"]
    own_points = points[(points["model"] == key[0]) & (points["layer"] == key[1]) & (points["head"] == key[2])]
    if x not in own_points or y not in own_points or own_points[x].isna().all():
        raise NotApplicable(f"points.parquet holds no {x} and {y} of {_name(key)}")
    return (
        own_points[["model", "layer", "head", "kind", "position"]]
        .assign(x=own_points[x], y=own_points[y])
        .reset_index(drop=True)
    )


def _line(points: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Two points on the least-squares line of y on x, over the middle 96% of x."""
    x, y = points["x"].to_numpy(float), points["y"].to_numpy(float)
    if len(x) < 3 or x.std() == 0:
        return points.iloc[:0]
    slope, height = np.polyfit(x, y, 1)
    ends = np.quantile(x, [0.02, 0.98])
    return points.iloc[:2].assign(kind=f"line {kind}", position=-1, x=ends, y=slope * ends + height)


def _numbers(study: Study, table: str, key: HeadKey, names: list[str], **keys: int) -> dict[str, float]:
    """The head's numbers from a table; NaN where they are missing."""
    frame = study.tables.get(table)
    missing = dict.fromkeys(names, math.nan)
    if frame is None:
        return missing
    if table == "planes" and "view" in frame:
        frame = frame[frame["view"] == "svd"]
    where = (frame["model"] == key[0]) & (frame["layer"] == key[1]) & (frame["head"] == key[2])
    for column, value in keys.items():
        where &= frame[column] == value
    rows = frame[where]
    if rows.empty:
        return missing
    return {
        name: float(rows[name].iloc[0]) if name in rows and pd.notna(rows[name].iloc[0]) else math.nan for name in names
    }


# ---- drawing ------------------------------------------------------------------------------------


def draw_components(data: pd.DataFrame) -> Drawing:
    """A panel per head, with its numbers next to it."""

    def note(points: pd.DataFrame) -> str:
        lines = []
        for axis in "xy":
            share, r_q, r_k = (points[f"{name}_{axis}"].iloc[0] for name in _NUMBERS)
            lines.append(f"PC{points[f'pc_{axis}'].iloc[0]:.0f}\nshare {share:.1%}\nr_q {r_q:+.2f}\nr_k {r_k:+.2f}")
        return "\n\n".join(lines)

    first = data.iloc[0]
    return _collage(data, f"PC{first['pc_x']:.0f}", f"PC{first['pc_y']:.0f}", note)


def draw_plane(data: pd.DataFrame) -> Drawing:
    """A panel per head; lines are the regression of b on a in each class."""

    def note(points: pd.DataFrame) -> str:
        omega, position_r, bias = (points[name].iloc[0] for name in MODEL_NUMBERS)
        turn = "–" if math.isnan(omega) else f"{omega:.1e}"
        return f"ω {turn}\nposition_r {position_r:.2f}\nbias {bias:+.1e}\nper token"

    return _collage(data, "axis a: drift", "axis b: separation", note)


def _collage(data: pd.DataFrame, x: str, y: str, note: Any) -> Drawing:
    heads = [(key, points) for key, points in data.groupby(["model", "layer", "head"], sort=False)]
    columns = 1 if len(heads) == 1 else 2
    rows = -(-len(heads) // columns)
    figure = canvas(4.0 * columns + 0.4, 2.9 * rows + 0.7)
    axes = panels(figure, rows, columns)
    norm = _shared_norm(data)
    for cell, (key, points) in zip(axes.flat, heads, strict=False):
        _cloud(cell, points, norm, 4.0)
        for kind, colour in (("q", Q), ("k", K)):
            line = points[points["kind"] == f"line {kind}"]
            cell.plot(line["x"], line["y"], color="white", linewidth=3.0)
            cell.plot(line["x"], line["y"], color=colour, linewidth=1.5)
        cell.set_title(_name((str(key[0]), int(key[1]), int(key[2]))))
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
        _cloud(cell, points, norm, 1.5)
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
    figure.suptitle(_name((first["model"], int(first["layer"]), int(first["head"]))), fontsize=9, x=0.01, ha="left")
    _colour_bars(figure, axes, norm, data)
    return figure


def _cloud(axes: Axes, points: pd.DataFrame, norm: Normalize, size: float) -> None:
    """Queries and keys, early ones light; drawn in random order, so that neither class hides the other."""
    vectors = points[points["kind"].isin(["q", "k"])]
    colours = np.empty((len(vectors), 4))
    kinds, shade = vectors["kind"].to_numpy(), norm(vectors[_coloured_by(points)].to_numpy(float))
    for kind in "qk":
        colours[kinds == kind] = position_map(kind)(shade[kinds == kind])
    order = np.random.default_rng(0).permutation(len(vectors))
    axes.scatter(vectors["x"].to_numpy(float)[order], vectors["y"].to_numpy(float)[order], s=size, c=colours[order],
                 alpha=0.6, linewidths=0, rasterized=True)  # fmt: skip


def _shared_norm(data: pd.DataFrame) -> Normalize:
    """One scale of positions for queries, keys and all panels."""
    return Normalize(0, 1 if _SCALED in data else max(int(data["position"].max()), 1))


def _coloured_by(data: pd.DataFrame) -> str:
    return _SCALED if _SCALED in data else "position"


def _colour_bars(figure: Drawing, axes: Any, norm: Normalize, data: pd.DataFrame) -> None:
    shown = _coloured_by(data).replace("_", " ")
    for kind, label in (("q", f"queries: {shown}"), ("k", f"keys: {shown}")):
        if (data["kind"] == kind).any():
            bar = figure.colorbar(ScalarMappable(norm, position_map(kind)), ax=axes, location="bottom", fraction=0.02,
                                  pad=0.015, aspect=75)  # fmt: skip
            bar.set_label(label, fontsize=7)
            bar.ax.tick_params(labelsize=6.5, length=2)
            bar.outline.set_visible(False)


def _name(key: HeadKey) -> str:
    return f"{shortened(key[0])} · layer {key[1]}, head {key[2]}"


# ---- sentences ----------------------------------------------------------------------------------


def say_components(data: pd.DataFrame) -> list[str]:
    """The heads shown, with PC0's numbers."""
    heads = data.groupby(["model", "layer", "head"], sort=False).first().reset_index()
    return [
        f"{_name((row['model'], row['layer'], row['head']))}: PC{row['pc_x']:.0f} holds "
        f"{row['explained_variance_x']:.1%}, r_q {row['r_q_x']:+.2f}, r_k {row['r_k_x']:+.2f}."
        for _, row in heads.iterrows()
    ]


def say_plane(data: pd.DataFrame) -> list[str]:
    """The heads shown, with what the model says about them."""
    heads = data.groupby(["model", "layer", "head"], sort=False).first().reset_index()
    return [
        f"{_name((row['model'], row['layer'], row['head']))}: position_r {row['position_r']:.2f}, bias "
        f"{row['bias_strength']:+.2e} per token."
        for _, row in heads.iterrows()
    ]


def say_complement(data: pd.DataFrame) -> list[str]:
    """How many of the planes turn with position."""
    planes = data.groupby("plane").first()
    if planes["active"].isna().all():
        return ["There is no table of planes for this head, so nothing is said about its frequencies."]
    active = planes["active"] == 1
    strongest = planes["angle_r"].abs().max()
    first = data.iloc[0]
    return [
        f"{_name((first['model'], int(first['layer']), int(first['head'])))}: {active.sum()} of {len(planes)} planes "
        f"turn with position; they hold {planes.loc[active, 'var_share'].sum():.0%} of the complement's variance. The "
        f"largest |angle_r| is {strongest:.2f}."
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
    "early, dark is late. Lines: regression of b on a within queries and within keys.",
    prepare_plane,
    draw_plane,
    say_plane,
)
COMPLEMENT = Figure(
    "qk-rotation/08_complement_collage",
    "The complement of one head, plane by plane",
    "Principal planes of what is left of one head off a and b, in order of variance; each title gives the plane's "
    "share of the complement's variance and angle_r, the resultant of its rotation with position.",
    prepare_complement,
    draw_complement,
    say_complement,
)
