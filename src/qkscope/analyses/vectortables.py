"""From vectors of heads to tables: planes of the complement, ω, and the points that pictures are drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Float

from qkscope.analyses.columns import Columns
from qkscope.analyses.pca import Components
from qkscope.analyses.planes import Complement, circles, complement, planes
from qkscope.analyses.ropeplanes import rope_planes
from qkscope.analyses.rotation import Rotation
from qkscope.analyses.spectrum import Circle, chance_coherence, tokens_of
from qkscope.core.moments import Moments
from qkscope.core.rope import HeadRotary
from qkscope.core.rows import Coordinates, Pair
from qkscope.core.sample import sample_pair

PLANE_ROWS = 4096
"""Vectors of each kind that planes and ω are measured on, at most."""
CIRCLES_AT_ONCE = 2
"""Heads whose ω is searched for together: as many as fill one batch of transforms."""
T = TypeVar("T")
MIN_ROWS = 8
"""With fewer vectors of either kind there are no planes and no ω."""


@dataclass(frozen=True)
class HeadVectors:
    """Vectors of one head and the axes of its rotation model."""

    pair: Pair
    a: Float[np.ndarray, "d"]
    b: Float[np.ndarray, "d"]
    window: int
    on: Coordinates | None = None
    """Coordinates of the vectors on a and b, where they are known."""

    @property
    def enough(self) -> bool:
        """Whether there are vectors to speak of, and a complement."""
        return min(len(self.pair.q), len(self.pair.k)) >= MIN_ROWS and len(self.a) >= 4

    def measured(self) -> Pair:
        """The vectors that are measured."""
        return sample_pair(self.pair, PLANE_ROWS)

    def on_plane(self, pair: Pair) -> Coordinates:
        """Coordinates of these vectors of it on a and b."""
        if self.on is not None and pair.q is self.pair.q and pair.k is self.pair.k:
            return self.on
        return Coordinates.of(pair, np.stack([self.a, self.b]))


def of_model(
    model: Rotation,
    pairs: Sequence[Pair | None],
    windows: Sequence[int],
    on: Sequence[Coordinates | None] | None = None,
) -> list[HeadVectors | None]:
    """Each head's vectors beside its axes, and on them where that is known; None where there are none."""
    known = [None] * len(pairs) if on is None else on
    return [
        None if pair is None else HeadVectors(pair, model.a[i], model.b[i], int(window), known[i])
        for i, (pair, window) in enumerate(zip(pairs, windows, strict=True))
    ]


def omega_columns(heads: Sequence[HeadVectors | None]) -> Columns:
    """``omega``, ``omega_r_squared``, ``omega_at_edge`` of each head; empty without vectors."""
    fits: list[Circle | None] = [None] * len(heads)
    known = [(i, head, head.measured()) for i, head in enumerate(heads) if head is not None and head.enough]
    for _, alike in groupby(known, lambda one: (one[2].q.tokens, one[2].k.tokens, one[1].window)):
        for some in batched(list(alike), CIRCLES_AT_ONCE):
            found = circles([head.on_plane(pair) for _, head, pair in some], some[0][2], some[0][1].window)
            for (i, *_), fit in zip(some, found, strict=True):
                fits[i] = fit
    return {
        "omega": np.array([np.nan if fit is None else fit.omega for fit in fits]),
        "omega_r_squared": np.array([np.nan if fit is None else fit.r_squared for fit in fits]),
        "omega_at_edge": np.array([np.nan if fit is None else float(fit.at_edge) for fit in fits]),
    }


def batched(items: list[T], size: int) -> Iterator[list[T]]:
    """Consecutive items, so many at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


def planes_table(index: pd.DataFrame, heads: Sequence[HeadVectors | None], chance: float | None) -> pd.DataFrame:
    """``planes``: one row per head and plane of the complement. Without ``chance`` each head's own tokens set it."""
    known = [(i, head) for i, head in enumerate(heads) if head is not None and head.enough]
    frames = [_plane_rows(index.iloc[[i]], head, chance) for i, head in known]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


KEY = ["model", "layer", "head"]


def with_active_planes(heads: pd.DataFrame, planes: pd.DataFrame) -> pd.DataFrame:
    """The table ``heads`` with ``active_planes`` and ``active_share`` as the table ``planes`` has them."""
    key = KEY
    if planes.empty:
        return heads.assign(active_planes=pd.array([None] * len(heads), dtype="Int64"), active_share=np.nan)
    planes = planes[planes["view"] == "svd"]
    active = planes.assign(active_share=planes["var_share"] * planes["active"].astype(float))
    counted = active.groupby(key, as_index=False).agg(
        active_planes=("active", "sum"), active_share=("active_share", "sum")
    )
    columns = list(heads.columns)
    merged = heads.drop(columns=["active_planes", "active_share"]).merge(counted, on=key, how="left")
    return merged.assign(active_planes=merged["active_planes"].astype("Int64"))[columns]


def _plane_rows(index: pd.DataFrame, head: HeadVectors, chance: float | None) -> pd.DataFrame:
    pair = head.measured().as_double()
    found = planes(pair, complement(pair, head.a, head.b), head.window)
    limit = chance_coherence(*tokens_of(pair), head.window) if chance is None else chance
    n = len(found.share)
    repeated = index.loc[index.index.repeat(n)].reset_index(drop=True)
    return repeated.assign(
        view="svd",
        plane=np.arange(n),
        n_q=len(pair.q),
        n_k=len(pair.k),
        var_share=found.share,
        angle_r=found.angle_r,
        frequency=found.turning.frequency,
        resultant=found.turning.resultant,
        coherence=found.turning.coherence,
        coherence_chance=limit,
        ring=found.ring,
        active=found.active(limit),
        qk_accuracy=found.qk_accuracy,
    )


ROPE_COLUMNS = ("theta", "lock_q", "lock_k", "cycles", "bias_part", "bias_share")
SVD_COLUMNS = ("angle_r", "frequency", "resultant", "coherence", "coherence_chance", "ring", "active", "qk_accuracy")


def rope_table(
    index: pd.DataFrame, rotary: HeadRotary, q: Moments, k: Moments, pair: Pair, window: int
) -> pd.DataFrame:
    """The rope view of one head: one row per plane that RoPE turns, and one for what it leaves alone."""
    measured = sample_pair(pair, PLANE_ROWS).as_double()
    found = rope_planes(rotary, q, k, measured, window)
    n = len(found.theta)
    frame = index.loc[index.index.repeat(n)].reset_index(drop=True)
    values = {name: getattr(found, name) for name in ("var_share", *ROPE_COLUMNS)}
    return frame.assign(view="rope", plane=np.arange(n), n_q=len(measured.q), n_k=len(measured.k), **values)


def both_views(svd: pd.DataFrame, rope: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """``planes``: the columns that a view does not have are empty."""
    parts = [svd.assign(**dict.fromkeys(ROPE_COLUMNS, np.nan))] if len(svd) else []
    parts += [frame.assign(**dict.fromkeys(SVD_COLUMNS, np.nan)) for frame in rope]
    if not parts:
        return pd.DataFrame()
    whole = [part.astype({"active": "boolean"}) for part in parts]
    return pd.concat(whole, ignore_index=True)


@dataclass(frozen=True)
class PointOptions:
    """Which vectors are written out for pictures."""

    heads: frozenset[tuple[int, int]] | None = None
    """(layer, head) of the query heads; None: all."""
    rows: int = 2000
    """Vectors of each kind, at most."""
    axes: int = 60
    """Coordinates in the complement, at most: two per plane."""
    pcs: tuple[int, ...] = (0, 1)
    """Principal components."""
    brief_rows: int = 0
    """Vectors of each kind of every other head, at most."""
    brief_axes: int = 0
    """Coordinates in the complement of those."""

    def of(self, layer: int, head: int) -> tuple[int, int]:
        """How many vectors and coordinates of this head are wanted."""
        if self.heads is None or (layer, head) in self.heads:
            return self.rows, self.axes
        return self.brief_rows, self.brief_axes


def points_table(index: pd.DataFrame, head: HeadVectors, pcs: Components, options: PointOptions) -> pd.DataFrame:
    """Vectors of one head on its principal components, on a and b (not centred), and in its complement (centred)."""
    rows, axes = options.of(int(index["layer"].iloc[0]), int(index["head"].iloc[0]))
    basis = complement(head.measured().as_double(), head.a, head.b)
    shown = sample_pair(head.pair, rows).as_double()
    parts = [_point_rows(index, kind, shown, head, pcs, basis, options.pcs, axes) for kind in "qk"]
    return pd.concat(parts, ignore_index=True)


def _point_rows(
    index: pd.DataFrame,
    kind: str,
    shown: Pair,
    head: HeadVectors,
    pcs: Components,
    basis: Complement,
    kept: tuple[int, ...],
    n_axes: int,
) -> pd.DataFrame:
    rows = shown.q if kind == "q" else shown.k
    axes = pcs.axes[0] if pcs.axes.ndim == 3 else pcs.axes
    columns = {f"pc{pc}": rows.x @ axes[pc] for pc in kept if pc < len(axes)}
    columns |= {"a": rows.x @ head.a, "b": rows.x @ head.b}
    on = basis.project(rows)[:, :n_axes]
    columns |= {f"svd_{i}": on[:, i] for i in range(on.shape[1])}
    frame = pd.DataFrame({name: values.astype(np.float32) for name, values in columns.items()})
    named = {name: index[name].iloc[0] for name in ("model", "layer", "head")}
    frame = frame.assign(**named, kind=kind, example_id=rows.example_id, position=rows.position)
    return frame[[*named, "kind", "example_id", "position", *columns]]
