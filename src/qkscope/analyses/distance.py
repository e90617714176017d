"""The distance curve: the mean score at each distance, predicted from means alone and measured on pairs.

Predicted is the mean-field score of meanfield.py. Measured is the mean of q_i·k_j·scaling over pairs of sampled tokens
of one document, the query after the key. ``distance`` has one row per head and bin of distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from qkscope.analyses.analysis import Analysis, Column, Found, Scalars, Table, Values
from qkscope.analyses.batch import Batch
from qkscope.analyses.meanfield import MeanField
from qkscope.analyses.uncertainty import Scale
from qkscope.core.headmoments import DELETE_ONE, N_GROUPS
from qkscope.core.linalg import ratio
from qkscope.core.rows import Pair, Rows

_BINS = 24
"""Bins of distance, equal on a logarithmic scale."""
_MIN_PAIRS = 10
"""Bins with fewer pairs are left out."""
MOST_PAIRED_TOKENS = 400
"""Sampled tokens of one document that are paired with each other, at most."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of a query and an earlier key of its document."""

    distance: Int[np.ndarray, "n"]
    document: Int[np.ndarray, "n"]
    score: Float[np.ndarray, "n"]
    query_position: Int[np.ndarray, "n"]


@dataclass(frozen=True)
class DistanceCurve:
    """One value per distance bin, and three per head."""

    low: Int[np.ndarray, "bins"]
    high: Int[np.ndarray, "bins"]
    n_pairs: Int[np.ndarray, "bins"]
    measured: Float[np.ndarray, "bins"]
    measured_se: Float[np.ndarray, "bins"]
    predicted: Float[np.ndarray, "bins"]
    r2: float
    """1 − SSE/SST over bins; negative where the prediction is worse than a constant."""
    corr: float
    position_share_of_score: float
    """Squared correlation of score and prediction over pairs."""
    share_again: Float[np.ndarray, "8"]
    """The same with each document group left out."""


def score_pairs(pair: Pair, scaling: float) -> Pairs:
    """All pairs of sampled tokens of the same document, the query after the key."""
    parts = [
        _of_document(_thin(pair.q, document), _thin(pair.k, document), document, scaling)
        for document in np.intersect1d(pair.q.example_id, pair.k.example_id).tolist()
    ]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0)] * 4
    distance, document, score, position = columns
    return Pairs(distance.astype(np.int64), document.astype(np.int64), score, position.astype(np.int64))


def distance_curve(pairs: Pairs, field: MeanField, window: int) -> DistanceCurve:
    """Measure and predict in bins of distance; the prediction of a bin is the mean over its own pairs."""
    expected = field.predicted(pairs.distance, pairs.query_position)
    edges = bin_edges(window)
    bin_of_pair = np.searchsorted(edges, pairs.distance, side="right") - 1
    n = np.bincount(bin_of_pair, minlength=len(edges) - 1)[: len(edges) - 1]
    bins = np.flatnonzero(n >= _MIN_PAIRS)
    means = [
        np.bincount(bin_of_pair, values, minlength=len(edges) - 1)[bins] / n[bins] for values in (pairs.score, expected)
    ]
    return DistanceCurve(
        low=edges[:-1][bins],
        high=edges[1:][bins] - 1,
        n_pairs=n[bins],
        measured=means[0],
        measured_se=_standard_errors(pairs, bin_of_pair, bins, means[0], n[bins]),
        predicted=means[1],
        r2=_r_squared(means[0], means[1]),
        corr=_correlation(means[0], means[1]),
        position_share_of_score=_correlation(pairs.score, expected) ** 2,
        share_again=_shares_left_out(pairs, expected),
    )


def bin_edges(window: int) -> Int[np.ndarray, "edges"]:
    """First distance of each bin, and one past the last.

    >>> bin_edges(16)[:6].tolist()
    [1, 2, 3, 4, 5, 6]
    """
    return np.unique(np.round(np.geomspace(1, max(window, 2), _BINS + 1)).astype(np.int64))


def _of_document(
    q: Rows, k: Rows, document: int, scaling: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    distance = q.position[:, None] - k.position[None]
    later = distance > 0
    score = scaling * (q.x.astype(np.float64) @ k.x.astype(np.float64).T)
    query_position = np.broadcast_to(q.position[:, None], distance.shape)
    return distance[later], np.full(later.sum(), document), score[later], query_position[later]


def _thin(rows: Rows, document: int) -> Rows:
    """The rows of one document, thinned evenly if there are too many; rows are sorted by document."""
    first, end = np.searchsorted(rows.example_id, [document, document + 1])
    if end - first > MOST_PAIRED_TOKENS:
        return rows.take(np.linspace(first, end - 1, MOST_PAIRED_TOKENS).astype(int))
    return rows.take(np.arange(first, end))


def _standard_errors(
    pairs: Pairs,
    bin_of_pair: Int[np.ndarray, "n"],
    bins: Int[np.ndarray, "bins"],
    mean: Float[np.ndarray, "bins"],
    n: Int[np.ndarray, "bins"],
) -> Float[np.ndarray, "bins"]:
    """By document: √(D/(D−1) Σ_d (n_d(m_d − m))²) / n; NaN for a single document."""
    documents, number = np.unique(pairs.document, return_inverse=True)
    size = int(bin_of_pair.max(initial=-1)) + 1
    cell = number * max(size, 1) + bin_of_pair
    shape = len(documents), max(size, 1)
    sums = np.bincount(cell, pairs.score, minlength=shape[0] * shape[1]).reshape(shape)[:, bins]
    counts = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)[:, bins]
    n_documents = (counts > 0).sum(0)
    spread = ((sums - counts * mean) ** 2).sum(0)
    return np.where(
        n_documents > 1, np.sqrt(ratio(n_documents * spread, (n_documents - 1.0) * n.astype(float) ** 2)), np.nan
    )


def _shares_left_out(pairs: Pairs, expected: Float[np.ndarray, "n"]) -> Float[np.ndarray, "8"]:
    """Squared correlation of score and prediction with each document group left out, from sums by group."""
    if not len(expected):
        return np.full(N_GROUPS, np.nan)
    group = pairs.document % N_GROUPS
    s, e = pairs.score - pairs.score.mean(), expected - expected.mean()
    sums = np.stack([np.bincount(group, v, minlength=N_GROUPS) for v in (np.ones_like(s), s, e, s * s, e * e, s * e)])
    n, s1, e1, ss, ee, se = sums @ DELETE_ONE.T
    n = np.maximum(n, 1.0)
    return ratio((se - s1 * e1 / n) ** 2, np.maximum((ss - s1**2 / n) * (ee - e1**2 / n), 0.0))


def _r_squared(measured: Float[np.ndarray, "bins"], predicted: Float[np.ndarray, "bins"]) -> float:
    total = ((measured - measured.mean()) ** 2).sum() if len(measured) > 1 else 0.0
    return float(1 - ((measured - predicted) ** 2).sum() / total) if total > 0 else float("nan")


def _correlation(x: Float[np.ndarray, "n"], y: Float[np.ndarray, "n"]) -> float:
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


# ---- the table ----------------------------------------------------------------------------------

_SCALARS = (
    Column(
        "distance_r2", "share", "1 − SSE/SST of the curve predicted from means, over bins; empty without rotary", "4",
        headline=True,
    ),
    Column(
        "distance_corr", "correlation", "of the predicted and the measured distance curve over bins", "4", signed=True,
        headline=True,
    ),
    Column(
        "position_share_of_score", "share", "of the variance of scores over pairs that the predicted curve explains",
        "4", Scale.SHARE,
    ),
)  # fmt: skip
DISTANCE_TABLE = Table(
    "distance",
    (
        Column("distance_low", "tokens", "smallest distance of query and key in the bin", "4"),
        Column("distance_high", "tokens", "largest distance in the bin", "4"),
        Column("n_pairs", "pairs", "pairs of sampled tokens of one document in the bin", "4"),
        Column("measured", "logit", "mean of q·k × the model's scaling over these pairs", "4"),
        Column("measured_se", "logit", "its standard error, by document", "4"),
        Column("predicted", "logit", "mean of the mean-field score at the distances of these pairs", "4"),
        *_SCALARS,
    ),
    keys=("distance_low",),
)


def compute_distance(batch: Batch) -> Found:
    """``distance``: the curve of each head whose rotation is known and that has vectors."""
    curves = {i: curve for i in range(len(batch)) if (curve := _curve(batch, i)) is not None}
    if not curves:
        return Found()
    rows = {
        "distance_low": "low",
        "distance_high": "high",
        **{name: name for name in ("n_pairs", "measured", "measured_se", "predicted")},
    }
    columns = {
        name: np.concatenate([getattr(curve, attribute) for curve in curves.values()])
        for name, attribute in rows.items()
    }
    per_head, left_out = np.full((3, len(batch)), np.nan), np.full((len(batch), N_GROUPS), np.nan)
    for i, curve in curves.items():
        per_head[:, i] = curve.r2, curve.corr, curve.position_share_of_score
        left_out[i] = curve.share_again
    scalars = dict(zip((column.name for column in _SCALARS), per_head, strict=True))
    head = np.concatenate([np.full(len(curve.low), i) for i, curve in curves.items()])
    return Found({"distance": Values(columns, {"position_share_of_score": left_out}, scalars, head)})


def _curve(batch: Batch, i: int) -> DistanceCurve | None:
    """The curve of one head; None where there is nothing to predict from, or nothing to measure."""
    field, pair = batch.mean_fields[i], batch.vectors[i]
    if field is None or pair is None:
        return None
    curve = distance_curve(score_pairs(pair.as_double(), field.scaling), field, int(batch.heads[i].moments.window))
    return curve if len(curve.low) else None


DISTANCE = Analysis(
    "distance",
    "the mean score at each distance, measured on pairs and predicted from mean vectors alone",
    (DISTANCE_TABLE,),
    compute_distance,
    Scalars(_SCALARS, "distance", in_runs=("distance_r2", "position_share_of_score")),
    rotary=True,
)
