"""The distance curve: the mean score at each distance, predicted from means alone and measured on pairs.

Predicted is the mean-field score of meanfield.py. Measured is the mean of q_i·k_j·scaling over pairs of sampled tokens
of one document, the key within sight of the query: earlier and within the layer's sliding window, in encoders also
later, at a negative distance. What is left, measured − predicted, is how far the contents of tokens at that distance
agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from qkscope.analyses.meanfield import MeanField
from qkscope.core.headmoments import ALL_AND_WITHOUT, N_GROUPS
from qkscope.core.linalg import ratio
from qkscope.core.rows import Pair, Rows
from qkscope.core.sight import Sight

_BINS = 24
"""Bins of distance, equal on a logarithmic scale."""
_MIN_PAIRS = 10
"""Bins with fewer pairs are left out."""
MOST_PAIRED_TOKENS = 400
"""Sampled tokens of one document that are paired with each other, at most."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of a query and a key of its document."""

    distance: Int[np.ndarray, "n"]
    """i − j: negative if the key is the later one."""
    document: Int[np.ndarray, "n"]
    score: Float[np.ndarray, "n"]
    query_position: Int[np.ndarray, "n"]


@dataclass(frozen=True)
class DistanceCurve:
    """One value per distance bin, and some per head: from all documents, then with each document group left out."""

    low: Int[np.ndarray, "bins"]
    high: Int[np.ndarray, "bins"]
    n_pairs: Int[np.ndarray, "bins"]
    measured: Float[np.ndarray, "bins"]
    measured_se: Float[np.ndarray, "bins"]
    predicted: Float[np.ndarray, "bins"]
    r2: float
    """1 − SSE/SST over bins; negative where the prediction is worse than a constant."""
    r2_pairs: float
    """The same with each bin weighted by its pairs."""
    log_r2: float
    """R² over bins of a line fitted to the measured curve over log₂ of the distance: what the shape alone reaches."""
    worst: float
    """Largest |measured − predicted| over bins."""
    corr: float
    position_share_of_score: Float[np.ndarray, "9"]
    """Squared correlation of score and prediction over pairs."""
    decay_measured: Float[np.ndarray, "9"]
    """− slope of the measured curve over log₂ of the distance, over the bins within the range of decay."""
    content_offset: Float[np.ndarray, "9"]
    """Mean over bins of measured − predicted."""


def score_pairs(pair: Pair, scaling: float, sight: Sight) -> Pairs:
    """All pairs of sampled tokens of the same document, the key within sight of the query."""
    parts = []
    for document in np.intersect1d(pair.q.example_id, pair.k.example_id).tolist():
        q, k = (rows.of_document(document, MOST_PAIRED_TOKENS) for rows in (pair.q, pair.k))
        parts.append(_of_document(q, k, document, scaling, sight))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0)] * 4
    distance, document, score, position = columns
    return Pairs(distance.astype(np.int64), document.astype(np.int64), score, position.astype(np.int64))


def distance_curve(pairs: Pairs, field: MeanField, sight: Sight, decay_range: int) -> DistanceCurve:
    """Measure and predict in bins of distance; the prediction of a bin is the mean over its own pairs."""
    distances, of_pair = np.unique(pairs.distance, return_inverse=True)
    curves, factors = field.curves(distances), field.factors(pairs.query_position)
    expected = curves[0, of_pair] * factors
    binned = _Binned.of(pairs, sight, distances, curves, _by_distance(pairs, of_pair, factors, len(distances)))
    measured, predicted = binned.measured[0], binned.predicted[0]
    bins, n = np.arange(len(measured)), binned.n[0]
    all_but_one = np.isfinite(binned.measured) & np.isfinite(binned.predicted)
    offset = np.where(all_but_one, binned.measured - binned.predicted, 0.0)
    near = np.maximum(np.abs(binned.low), np.abs(binned.high)) <= decay_range
    return DistanceCurve(
        low=binned.low,
        high=binned.high,
        n_pairs=n.astype(np.int64),
        measured=measured,
        measured_se=_standard_errors(pairs, binned.of_pair, bins, measured, n),
        predicted=predicted,
        r2=_r_squared(measured, predicted),
        r2_pairs=_r_squared(measured, predicted, n),
        log_r2=_log_r2(binned.octave[0], measured),
        worst=float(np.abs(measured - predicted).max(initial=0.0)) if len(bins) else float("nan"),
        corr=_correlation(measured, predicted),
        position_share_of_score=_shares(pairs, expected),
        decay_measured=np.array(
            [-_slope(x, y, near & np.isfinite(y)) for x, y in zip(binned.octave, binned.measured, strict=True)]
        ),
        content_offset=np.where(all_but_one.any(-1), ratio(offset.sum(-1), all_but_one.sum(-1).astype(float)), np.nan),
    )


def bin_edges(reach: int) -> Int[np.ndarray, "edges"]:
    """First distance of each bin, and one past the last.

    >>> bin_edges(16)[:6].tolist()
    [1, 2, 3, 4, 5, 6]
    """
    return np.unique(np.round(np.geomspace(1, max(reach, 2), _BINS + 1)).astype(np.int64))


def distance_bins(sight: Sight) -> tuple[Int[np.ndarray, "bins"], Int[np.ndarray, "bins"]]:
    """Smallest and largest distance of each bin, in order; those of later keys mirror those of earlier ones.

    >>> [ends.tolist() for ends in distance_bins(Sight(4, both=True))]
    [[-3, -2, -1, 1, 2, 3], [-3, -2, -1, 1, 2, 3]]
    """
    edges = bin_edges(sight.reach)
    low, high = edges[:-1], edges[1:] - 1
    return (np.append(-high[::-1], low), np.append(-low[::-1], high)) if sight.both else (low, high)


@dataclass(frozen=True)
class _Binned:
    """Means over the pairs of each bin that has enough: from all documents, then with each group left out."""

    low: Int[np.ndarray, "bins"]
    high: Int[np.ndarray, "bins"]
    of_pair: Int[np.ndarray, "n"]
    """The bin of each pair; −1 where the bin has too few."""
    n: Float[np.ndarray, "sets bins"]
    measured: Float[np.ndarray, "sets bins"]
    """Mean score; NaN where a set has no pair in the bin."""
    predicted: Float[np.ndarray, "sets bins"]
    """Mean of the mean-field score, which leaves out the same documents."""
    octave: Float[np.ndarray, "sets bins"]
    """Mean of log₂ of the distance."""

    @classmethod
    def of(
        cls,
        pairs: Pairs,
        sight: Sight,
        distances: Int[np.ndarray, "u"],
        curves: Float[np.ndarray, "sets u"],
        weights: Float[np.ndarray, "sets u"],
    ) -> _Binned:
        """``curves`` are at the ``distances`` that occur, ``weights`` sum up each set's pairs there."""
        low, high = distance_bins(sight)
        raw = np.searchsorted(low, pairs.distance, side="right") - 1
        kept = np.flatnonzero(np.bincount(raw, minlength=len(low)) >= _MIN_PAIRS)
        number = np.full(len(low), -1)
        number[kept] = np.arange(len(kept))
        of_pair = number[raw]
        inside = of_pair >= 0
        cell = (pairs.document[inside] % N_GROUPS) * len(kept) + of_pair[inside]

        def sums(values: Float[np.ndarray, "m"]) -> Float[np.ndarray, "sets bins"]:
            by_group = np.bincount(cell, values, minlength=N_GROUPS * len(kept)).reshape(N_GROUPS, len(kept))
            return ALL_AND_WITHOUT @ by_group

        n = sums(np.ones(len(cell)))
        missing = np.where(n > 0, 0.0, np.nan)
        expected = weights * curves
        ends = np.searchsorted(distances, [low[kept], high[kept] + 1])
        running = np.pad(np.cumsum(expected, -1), ((0, 0), (1, 0)))
        predicted = running[:, ends[1]] - running[:, ends[0]]
        return cls(
            low[kept],
            high[kept],
            of_pair,
            n,
            ratio(sums(pairs.score[inside]), n) + missing,
            ratio(predicted, n) + missing,
            ratio(sums(np.log2(np.abs(pairs.distance[inside]))), n) + missing,
        )


def _by_distance(
    pairs: Pairs, of_pair: Int[np.ndarray, "n"], factors: Float[np.ndarray, "n"], size: int
) -> Float[np.ndarray, "sets u"]:
    """Sum of the factors of the pairs at each distance: of all documents, then with each group left out."""
    cell = (pairs.document % N_GROUPS) * size + of_pair
    return ALL_AND_WITHOUT @ np.bincount(cell, factors, minlength=N_GROUPS * size).reshape(N_GROUPS, size)


def _of_document(
    q: Rows, k: Rows, document: int, scaling: float, sight: Sight
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    distance = q.position[:, None] - k.position[None]
    seen = sight.sees(distance)
    score = scaling * (q.x.astype(np.float64) @ k.x.astype(np.float64).T)
    query_position = np.broadcast_to(q.position[:, None], distance.shape)
    return distance[seen], np.full(seen.sum(), document), score[seen], query_position[seen]


def _standard_errors(
    pairs: Pairs,
    bin_of_pair: Int[np.ndarray, "n"],
    bins: Int[np.ndarray, "bins"],
    mean: Float[np.ndarray, "bins"],
    n: Float[np.ndarray, "bins"],
) -> Float[np.ndarray, "bins"]:
    """By document: √(D/(D−1) Σ_d (n_d(m_d − m))²) / n; NaN for a single document."""
    inside = bin_of_pair >= 0
    documents, number = np.unique(pairs.document[inside], return_inverse=True)
    shape = len(documents), max(len(bins), 1)
    cell = number * shape[1] + bin_of_pair[inside]
    sums = np.bincount(cell, pairs.score[inside], minlength=shape[0] * shape[1]).reshape(shape)[:, bins]
    counts = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)[:, bins]
    n_documents = (counts > 0).sum(0)
    spread = ((sums - counts * mean) ** 2).sum(0)
    return np.where(n_documents > 1, np.sqrt(ratio(n_documents * spread, (n_documents - 1.0) * n**2)), np.nan)


def _shares(pairs: Pairs, expected: Float[np.ndarray, "n"]) -> Float[np.ndarray, "9"]:
    """Squared correlation of score and prediction: over all pairs, then with each document group left out."""
    if len(expected) < 3:
        return np.full(len(ALL_AND_WITHOUT), np.nan)
    group = pairs.document % N_GROUPS
    s, e = pairs.score - pairs.score.mean(), expected - expected.mean()
    sums = np.stack([np.bincount(group, v, minlength=N_GROUPS) for v in (np.ones_like(s), s, e, s * s, e * e, s * e)])
    n, s1, e1, ss, ee, se = sums @ ALL_AND_WITHOUT.T
    n = np.maximum(n, 1.0)
    variances = np.maximum((ss - s1**2 / n) * (ee - e1**2 / n), 0.0)
    return np.where(variances > 0, ratio((se - s1 * e1 / n) ** 2, variances), np.nan)


def _r_squared(
    measured: Float[np.ndarray, "bins"],
    predicted: Float[np.ndarray, "bins"],
    weight: Float[np.ndarray, "bins"] | None = None,
) -> float:
    """1 − SSE/SST, with each bin counted equally or by its weight."""
    if len(measured) < 2:
        return float("nan")
    weight = np.ones(len(measured)) if weight is None else weight
    away = measured - np.average(measured, weights=weight)
    total = weight @ away**2
    return float(1 - weight @ (measured - predicted) ** 2 / total) if total > 0 else float("nan")


def _log_r2(octave: Float[np.ndarray, "bins"], measured: Float[np.ndarray, "bins"]) -> float:
    return _correlation(octave, measured) ** 2


def _slope(x: Float[np.ndarray, "bins"], y: Float[np.ndarray, "bins"], chosen: Bool[np.ndarray, "bins"]) -> float:
    """Slope of the line through the chosen points; NaN for fewer than three."""
    if chosen.sum() < 3:
        return float("nan")
    away = x[chosen] - x[chosen].mean()
    return float(away @ y[chosen] / (away @ away))


def _correlation(x: Float[np.ndarray, "n"], y: Float[np.ndarray, "n"]) -> float:
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])
