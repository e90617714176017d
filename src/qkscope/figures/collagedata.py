"""Vectors of single heads from points.parquet, and the numbers shown next to them in a collage."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.analyses.planes import STRONG_R
from qkscope.figures.figure import NotApplicable, models
from qkscope.figures.scoreterms import chosen_runs
from qkscope.figures.style import shortened
from qkscope.headids import choose_heads
from qkscope.results.study import Study

HeadKey = tuple[str, int, int]
_MOST_PLANES = 30
_STRONGEST = 12
_MOST_RUNS, _FEW_POINTS = 12, 350
"""Models with a collage, at most; and points of a kind and head, if there are several models."""
_SMALL_PANEL = 700
"""Points of a kind in a plane of the complement, at most."""
PC_NUMBERS = ["explained_variance", "r_q", "r_k"]
MODEL_NUMBERS = ["omega", "r_q_a", "r_k_a", "bias_strength", "omega_at_edge"]
SCALED = "scaled_position"
"""Column by which points are coloured, if the data has it; otherwise by position."""


def heads_with_points(study: Study) -> list[HeadKey]:
    """The heads that collages show: a seeded choice among the heads with points, for each model."""
    points = study.tables.get("points")
    if points is None or points.empty:
        raise NotApplicable("there are no vectors to draw; qkscope analyze --points writes points.parquet")
    keys: list[HeadKey] = []
    labels = [run.label for run in models(study) if (points["model"] == run.label).any()]
    for label in chosen_runs(labels, _MOST_RUNS):
        heads = points.loc[points["model"] == label, ["layer", "head"]].drop_duplicates()
        keys += [(label, *head) for head in choose_heads([(int(a), int(b)) for a, b in heads.to_numpy()])]
    if not keys:
        raise NotApplicable("points.parquet holds no head of the models compared")
    return keys


def prepare_components(
    study: Study, heads: Sequence[HeadKey] | None = None, pcs: tuple[int, int] = (0, 1)
) -> pd.DataFrame:
    """Points on two components, with each component's numbers."""
    x, y = (f"pc{pc}" for pc in pcs)
    frames, keys = [], list(heads or heads_with_points(study))
    for key in keys:
        points = _points(study, key, x, y, _most_points(keys))
        for axis, pc in zip("xy", pcs, strict=True):
            numbers = _numbers(study, "qk", key, PC_NUMBERS, pc=pc)
            points = points.assign(**{f"pc_{axis}": pc}, **{f"{name}_{axis}": value for name, value in numbers.items()})
        frames.append(points)
    return pd.concat(frames, ignore_index=True)


def prepare_plane(study: Study, heads: Sequence[HeadKey] | None = None) -> pd.DataFrame:
    """Points on a and b with the head's numbers, and the drift of each class's mean with position."""
    frames, keys = [], list(heads or heads_with_points(study))
    for key in keys:
        points = _points(study, key, "a", "b")
        drifts = [drift(points[points["kind"] == kind], kind) for kind in "qk"]
        points = _thinned(points, _most_points(keys))
        numbers = _numbers(study, "rotated", key, MODEL_NUMBERS)
        frames.append(pd.concat([points, *drifts], ignore_index=True).assign(**numbers))
    return pd.concat(frames, ignore_index=True)


def prepare_complement(study: Study, head: HeadKey | None = None, most: int | None = None) -> pd.DataFrame:
    """Points of one head in every plane of its complement: one row per vector and plane."""
    key = head or heads_with_points(study)[0]
    points = study.tables["points"]
    own_points = points[(points["model"] == key[0]) & (points["layer"] == key[1]) & (points["head"] == key[2])]
    own_points = _thinned(own_points, most)
    axes = [name for name in points if str(name).startswith("svd_") and own_points[name].notna().any()]
    count = min(len(axes) // 2, _MOST_PLANES)
    if not count:
        raise NotApplicable(f"points.parquet holds no coordinates of the complement for {head_title(key)}")
    frames = []
    for plane in range(count):
        numbers = _numbers(study, "planes", key, ["var_share", "angle_r", "active", "frequency"], plane=plane)
        xy = own_points[["kind", "position"]].assign(
            x=own_points[f"svd_{2 * plane}"], y=own_points[f"svd_{2 * plane + 1}"], plane=plane
        )
        turned = np.mod(numbers["frequency"] * xy["position"], 2 * np.pi)
        frames.append(xy.assign(**numbers, phase=turned))
    data = pd.concat(frames, ignore_index=True).assign(model=key[0], layer=key[1], head=key[2])
    return data.assign(**_of_all_planes(data))


def _of_all_planes(data: pd.DataFrame) -> dict[str, float]:
    """Counts over all planes of the complement, whichever of them are drawn."""
    planes = data.groupby("plane").first()
    if planes["active"].isna().all():
        return {"n_planes": len(planes), "n_active": math.nan, "n_close": math.nan, "turning": math.nan}
    active, strength = planes["active"] == 1, planes["angle_r"].abs()
    return {
        "n_planes": len(planes),
        "n_active": int(active.sum()),
        "n_close": int((active & (strength >= STRONG_R)).sum()),
        "turning": float((planes["var_share"] * strength**2)[active].sum()),
    }


def prepare_strongest(study: Study) -> pd.DataFrame:
    """The planes of a head's complement with most variance that turns with position."""
    data = prepare_complement(study, most=_SMALL_PANEL)
    return data[data["plane"].isin(by_strength(data)[:_STRONGEST])].reset_index(drop=True)


def prepare_other_planes(study: Study) -> pd.DataFrame:
    """The other planes of it."""
    data = prepare_complement(study, most=_SMALL_PANEL)
    others = data[data["plane"].isin(by_strength(data)[_STRONGEST:])].reset_index(drop=True)
    if others.empty:
        raise NotApplicable("all planes are in the figure")
    return others


def by_strength(data: pd.DataFrame) -> list[int]:
    """The planes in order of the variance in them that turns with position; of unknown ones, by number."""
    planes = data.groupby("plane")[["var_share", "angle_r"]].first()
    strength = (planes["var_share"] * planes["angle_r"] ** 2).fillna(0.0)
    return [int(str(plane)) for plane in strength.sort_values(ascending=False, kind="stable").index]


def scale_positions(study: Study, data: pd.DataFrame) -> pd.DataFrame:
    """The data with positions from 0 to 1, by which its points are then coloured.

    position / (window − 1) of its run, or position / the largest one shown of its run if the window is not known.
    """
    windows = {run.label: run.window for run in study.runs if run.window}
    largest = data.groupby("model")["position"].transform("max")
    last = (data["model"].map(windows).astype(float) - 1).fillna(largest)
    scaled = data["position"] / last.clip(lower=1)
    return data.assign(**{SCALED: scaled.where(data["kind"].isin(["q", "k"]))})


def _most_points(keys: Sequence[HeadKey]) -> int | None:
    return _FEW_POINTS if len({model for model, *_ in keys}) > 1 else None


def _thinned(points: pd.DataFrame, most: int | None) -> pd.DataFrame:
    """At most so many points of a kind, evenly spaced over those there are."""
    if most is None:
        return points
    of_kinds = [rows.iloc[:: -(-len(rows) // most)] for _, rows in points.groupby("kind", sort=False)]
    return pd.concat(of_kinds, ignore_index=True)


def _points(study: Study, key: HeadKey, x: str, y: str, most: int | None = None) -> pd.DataFrame:
    points = study.tables["points"]
    own_points = points[(points["model"] == key[0]) & (points["layer"] == key[1]) & (points["head"] == key[2])]
    if x not in own_points or y not in own_points or own_points[x].isna().all():
        raise NotApplicable(f"points.parquet holds no {x} and {y} of {head_title(key)}")
    columns = own_points[["model", "layer", "head", "kind", "position"]].assign(x=own_points[x], y=own_points[y])
    return _thinned(columns.reset_index(drop=True), most)


def drift(points: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The mean vector at the first and at the last position, by linear regression of x and y on position."""
    t, xy = points["position"].to_numpy(float), points[["x", "y"]].to_numpy(float)
    if len(t) < 3 or t.std() == 0:
        return points.iloc[:0]
    slope, height = np.polyfit(t, xy, 1)
    ends = np.array([t.min(), t.max()])
    along = ends[:, None] * slope + height
    return points.iloc[:2].assign(kind=f"drift {kind}", position=ends.astype(int), x=along[:, 0], y=along[:, 1])


def _numbers(study: Study, table: str, key: HeadKey, names: list[str], **keys: int) -> dict[str, float]:
    """The head's numbers from a table; NaN where they are missing."""
    frame = study.tables.get(table)
    missing = dict.fromkeys(names, math.nan)
    if frame is None:
        return missing
    if table == "planes" and "view" in frame:
        frame = frame[frame["view"] == "svd"]
    selected = (frame["model"] == key[0]) & (frame["layer"] == key[1]) & (frame["head"] == key[2])
    for column, value in keys.items():
        selected &= frame[column] == value
    rows = frame[selected]
    if rows.empty:
        return missing
    return {
        name: float(rows[name].iloc[0]) if name in rows and pd.notna(rows[name].iloc[0]) else math.nan for name in names
    }


def head_title(key: HeadKey) -> str:
    """The title of a head."""
    return f"{shortened(key[0])} · layer {key[1]}, head {key[2]}"
