"""The effect of position alone: its share of queries and keys, and the fall of the mean score with distance.

The curve of meanfield.py is close to logarithmic, so its slope against log₂ Δ, in logits per doubling of the distance,
is about the same in every window. A slope against Δ itself is not: a line fitted to a logarithmic curve flattens as
the window grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from qkscope.analyses.analysis import Analysis, AnalysisResult, Column, Scalars, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.positionlocked import shares
from qkscope.analyses.ropeplanes import lock
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import Scale
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import ALL_AND_WITHOUT
from qkscope.core.linalg import ratio
from qkscope.core.moments import Moments
from qkscope.core.rope import Rope

PER_OCTAVE = 16
"""Distances per doubling at which the curve is taken."""


@dataclass(frozen=True)
class Recency:
    """The line through curves over log₂ Δ; one value per curve."""

    decay: Float[np.ndarray, "curves"]
    """− slope: positive if nearer keys score higher."""
    decay_r2: Float[np.ndarray, "curves"]
    curve_range: Float[np.ndarray, "curves"]
    """Largest minus smallest value."""


def distances(end: int) -> Float[np.ndarray, "n"]:
    """Distances from 1 to ``end``, evenly spaced in log₂.

    >>> distances(4)[[0, 16, 32]].tolist()
    [1.0, 2.0, 4.0]
    """
    return 2.0 ** (np.arange(int(np.floor(PER_OCTAVE * np.log2(max(end, 2)) + 1e-9)) + 1) / PER_OCTAVE)


def recency(curves: Float[np.ndarray, "curves n"], distance: Float[np.ndarray, "n"]) -> Recency:
    """Fit a line to each curve over log₂ of the distance."""
    x = np.log2(distance)
    x = x - x.mean()
    y = curves - curves.mean(-1, keepdims=True)
    slope = y @ x / (x @ x)
    r2 = ratio(slope**2 * (x @ x), (y**2).sum(-1))
    return Recency(-slope, r2, np.ptp(curves, -1))


_LOCKS = ("lock_q", "lock_k")
_SHARES = ("position_share_q", "position_share_k", "position_share")
_CURVE = ("decay", "decay_r2", "curve_range", "lean")
POSITION_TABLE = Table(
    "position",
    (
        Column(
            "position_share_q", "share",
            "of the queries' variance (vectors, not scores) that position alone determines; 0 in layers without rotary",
            "4", Scale.AT_MOST_1,
        ),
        Column("position_share_k", "share", "the same for the keys", "4", Scale.AT_MOST_1),
        Column(
            "position_share", "share",
            "the same for queries and keys together (vectors, not scores; part_position is of scores)", "4",
            Scale.AT_MOST_1,
        ),
        Column(
            "lock_q", "share",
            "how firmly queries are locked to the rotation: |mean with it undone| / mean length, over planes by energy",
            "3", Scale.SHARE,
        ),
        Column("lock_k", "share", "the same of keys", "3", Scale.SHARE),
        Column(
            "decay", "logit per doubling",
            "how much the mean score falls when the distance doubles; positive: nearer keys score higher", "4",
            Scale.LINEAR, signed=True,
        ),
        Column("decay_r2", "share", "how straight the mean score is over the log of the distance", "4", Scale.SHARE),
        Column("curve_range", "logit", "largest minus smallest mean score over that range", "4", Scale.POSITIVE),
        Column(
            "lean", "logit",
            "mean score of earlier minus that of later keys, over that range; empty where only earlier ones are seen",
            "4", Scale.LINEAR, signed=True,
        ),
        Column(
            "decay_range", "tokens", "distances from 1 to this one count for decay, decay_r2 and curve_range", "4",
            dtype="Int64",
        ),
    ),
)  # fmt: skip


def compute_position(batch: Batch) -> AnalysisResult:
    """Compute ``position``: the shares and the curve of each head, and with each document group left out."""
    measurable = [i for i, head in enumerate(batch.heads) if head.rotary is not None or head.nope]
    if not measurable:
        return AnalysisResult()
    numbers = {name: np.full((len(batch), len(ALL_AND_WITHOUT)), np.nan) for name in (*_SHARES, *_LOCKS, *_CURVE)}
    ends = np.full(len(batch), np.nan)
    for i in measurable:
        for name, values in (_shares(batch, i) | _locks(batch.heads[i]) | _curve(batch, i)).items():
            numbers[name][i] = values
        if batch.mean_fields[i] is not None:
            ends[i] = curve_end(batch, i)
    per_head = {name: values[:, 0] for name, values in numbers.items()} | {"decay_range": ends}
    replicates = {name: values[:, 1:] for name, values in numbers.items()}
    return AnalysisResult({"position": TableValues({}, replicates, per_head, np.array(measurable))})


def _shares(batch: Batch, i: int) -> Columns:
    locked = batch.locked[i]
    if locked is None:
        return dict.fromkeys(_SHARES, np.zeros(len(ALL_AND_WITHOUT))) if batch.heads[i].nope else {}
    q, k = locked
    return dict(zip(_SHARES, (shares(q), shares(k), shares(q, k)), strict=True))


def _locks(head: HeadData) -> Columns:
    rotary, moments = head.rotary, head.moments
    if rotary is None:
        return dict.fromkeys(_LOCKS, np.zeros(len(ALL_AND_WITHOUT))) if head.nope else {}
    kinds = zip(_LOCKS, (rotary.q, rotary.k), (moments.q, moments.k), strict=True)
    locks = {name: lock(undone, _plane_energy(sums, rotary.rope)) for name, undone, sums in kinds}
    return {name: values for name, values in locks.items() if values is not None}


def _plane_energy(moments: Moments, rope: Rope) -> Float[np.ndarray, "8 planes"]:
    energy = moments.diagonal[..., :-1] + moments.n[:, None] * moments.mean_x**2
    return energy[:, rope.pairs].sum(-1)


def _curve(batch: Batch, i: int) -> Columns:
    field = batch.mean_fields[i]
    if field is None:
        return {}
    distance = distances(curve_end(batch, i))
    earlier = field.curves(distance)
    if not batch.heads[i].both:
        return dict(vars(recency(earlier, distance)))
    later = field.curves(-distance)
    return {**vars(recency((earlier + later) / 2, distance)), "lean": (earlier - later).mean(-1)}


def curve_end(batch: Batch, i: int) -> int:
    """The largest distance that counts for ``decay``: the requested one, or half of what the queries see."""
    reach, requested = int(batch.reach[i]), batch.options.decay_range
    return max(reach // 2 if requested is None else min(requested, reach - 1), 2)


POSITION = Analysis(
    "position",
    "the effect of position alone: its share of queries and keys, and the fall of the mean score with distance",
    (POSITION_TABLE,),
    compute_position,
    Scalars(POSITION_TABLE.columns, "position", in_runs=("position_share_q", "position_share_k", "decay")),
    rotary=True,
)
