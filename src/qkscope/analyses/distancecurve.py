"""The distance curve: the mean score at each distance, predicted from means alone and measured on pairs.

Predicted is the mean-field score of meanfield.py. Measured is the mean of q_i·k_j·scaling over pairs of sampled tokens
of one document, the key visible to the query: earlier and within the layer's sliding window, in encoders also later,
at a negative distance. The remainder, measured − predicted, is how far the contents of tokens at that distance agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int

from qkscope.analyses.meanfield import MeanField
from qkscope.core.headmoments import ALL_AND_WITHOUT, N_GROUPS
from qkscope.core.linalg import ratio
from qkscope.core.rows import Pair, rows_of
from qkscope.core.visible import VisibleKeys


@dataclass(frozen=True)
class ScoredPairs:
    """Scores of pairs of a query and a key of its document."""

    index: PairIndex
    score: Float[np.ndarray, "n"]


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
    """R² over bins of a line fitted to the measured curve over log₂ of the distance: due to the shape alone."""
    worst: float
    """Largest |measured − predicted| over bins."""
    corr: float
    position_share_of_score: Float[np.ndarray, "9"]
    """Squared correlation of score and prediction over pairs."""
    decay_measured: Float[np.ndarray, "9"]
    """− slope of the measured curve over log₂ of the distance, over the bins within the range of decay."""
    content_offset: Float[np.ndarray, "9"]
    """Mean over bins of measured − predicted."""


def score_pairs(pair: Pair, scaling: float, visible_keys: VisibleKeys) -> ScoredPairs:
    """Score all pairs of sampled tokens of the same document, the key visible to the query."""
    index = pair_index(pair, visible_keys)
    q, k = pair.q.x, pair.k.x
    scores = [(q[d.q].astype(np.float64) @ k[d.k].astype(np.float64).T)[d.visible] for d in index.documents]
    return ScoredPairs(index, scaling * np.concatenate([np.zeros(0), *scores]))


def distance_curve(pairs: ScoredPairs, field: MeanField, decay_range: int) -> DistanceCurve:
    """Measure and predict in bins of distance; the prediction of a bin is the mean over its own pairs."""
    index = pairs.index
    curves = field.curves(index.distances)
    expected, weights = curves[0, index.of_pair], index.n_at_distance
    if field.temperature is not None:
        factors = field.factors(index.query_position)
        expected, weights = expected * factors, index.by_distance(factors)
    n, missing = index.n, np.where(index.n > 0, 0.0, np.nan)
    measured = ratio(index.by_set(pairs.score[index.inside]), n) + missing
    predicted = ratio(_in_bins(index, weights * curves), n) + missing
    defined = np.isfinite(measured) & np.isfinite(predicted)
    offset = np.where(defined, measured - predicted, 0.0)
    in_range = np.maximum(np.abs(index.low), np.abs(index.high)) <= decay_range
    return DistanceCurve(
        low=index.low,
        high=index.high,
        n_pairs=n[0].astype(np.int64),
        measured=measured[0],
        measured_se=_standard_errors(pairs, measured[0]),
        predicted=predicted[0],
        r2=_r_squared(measured[0], predicted[0]),
        r2_pairs=_r_squared(measured[0], predicted[0], n[0]),
        log_r2=_correlation(index.octave[0], measured[0]) ** 2,
        worst=float(np.abs(measured[0] - predicted[0]).max()) if len(index.low) else float("nan"),
        corr=_correlation(measured[0], predicted[0]),
        position_share_of_score=_shares(pairs, expected),
        decay_measured=np.array(
            [-_slope(x, y, in_range & np.isfinite(y)) for x, y in zip(index.octave, measured, strict=True)]
        ),
        content_offset=np.where(defined.any(-1), ratio(offset.sum(-1), defined.sum(-1).astype(float)), np.nan),
    )


def _in_bins(index: PairIndex, at_distance: Float[np.ndarray, "sets u"]) -> Float[np.ndarray, "sets bins"]:
    """Sums over the distances of each bin."""
    ends = np.searchsorted(index.distances, [index.low, index.high + 1])
    running = np.pad(np.cumsum(at_distance, -1), ((0, 0), (1, 0)))
    return running[:, ends[1]] - running[:, ends[0]]


def _standard_errors(pairs: ScoredPairs, mean: Float[np.ndarray, "bins"]) -> Float[np.ndarray, "bins"]:
    """By document: √(D/(D−1) Σ_d (n_d(m_d − m))²) / n; NaN for a single document."""
    counts, sums = pairs.index.n_of_document, pairs.index.by_document(pairs.score[pairs.index.inside])
    n_documents = (counts > 0).sum(0)
    spread = ((sums - counts * mean) ** 2).sum(0)
    n = pairs.index.n[0]
    return np.where(n_documents > 1, np.sqrt(ratio(n_documents * spread, (n_documents - 1.0) * n**2)), np.nan)


def _shares(pairs: ScoredPairs, expected: Float[np.ndarray, "n"]) -> Float[np.ndarray, "9"]:
    """Squared correlation of score and prediction: over all pairs, then with each document group left out."""
    if len(expected) < 3:
        return np.full(len(ALL_AND_WITHOUT), np.nan)
    s, e = pairs.score - pairs.score.mean(), expected - expected.mean()
    products = np.stack([np.ones_like(s), s, e])
    sums = np.zeros((N_GROUPS, 3, 3))
    for group, pairs_of_document in pairs.index.document_slices:
        sums[group] += products[:, pairs_of_document] @ products[:, pairs_of_document].T
    (n, s1, e1), (_, ss, se), (_, _, ee) = np.einsum("sg,gij->ijs", ALL_AND_WITHOUT, sums)
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


def _slope(x: Float[np.ndarray, "bins"], y: Float[np.ndarray, "bins"], selected: Bool[np.ndarray, "bins"]) -> float:
    """Slope of the line through the selected points; NaN for fewer than three."""
    if selected.sum() < 3:
        return float("nan")
    away = x[selected] - x[selected].mean()
    return float(away @ y[selected] / (away @ away))


def _correlation(x: Float[np.ndarray, "n"], y: Float[np.ndarray, "n"]) -> float:
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


_BINS = 24
"""Bins of distance, equal on a logarithmic scale."""
_MIN_PAIRS = 10
"""Bins with fewer pairs are left out."""
MOST_PAIRED_TOKENS = 400
"""Sampled tokens of one document that are paired with each other, at most."""


@dataclass(frozen=True)
class DocumentPairs:
    """The tokens of one document that are paired: rows of the sample, and True for visible pairs."""

    document: int
    q: Int[np.ndarray, "n_q"]
    k: Int[np.ndarray, "n_k"]
    visible: Bool[np.ndarray, "n_q n_k"]


@dataclass(frozen=True)
class PairIndex:
    """All pairs of a run's sample, document by document, with their distances and bins."""

    documents: list[DocumentPairs]
    distance: Int[np.ndarray, "n"]
    """i − j; negative if the key is later."""
    query_position: Int[np.ndarray, "n"]
    distances: Int[np.ndarray, "u"]
    """The distances that occur."""
    of_pair: Int[np.ndarray, "n"]
    """Index of each pair's distance in ``distances``."""
    low: Int[np.ndarray, "bins"]
    high: Int[np.ndarray, "bins"]
    inside: Int[np.ndarray, "m"]
    """Indices of the pairs whose bin has enough pairs."""
    bin: Int[np.ndarray, "m"]
    """Bin of each pair of ``inside``."""
    group: Int[np.ndarray, "n"]
    """Document group of each pair."""

    @cached_property
    def n(self) -> Float[np.ndarray, "sets bins"]:
        """Pairs in each bin."""
        return self.by_set(np.ones(len(self.inside)))

    @cached_property
    def octave(self) -> Float[np.ndarray, "sets bins"]:
        """Mean log₂ of the distance in each bin; NaN where a set has no pair in it."""
        octaves = self.by_set(np.log2(np.abs(self.distance[self.inside])))
        return ratio(octaves, self.n) + np.where(self.n > 0, 0.0, np.nan)

    @cached_property
    def n_of_document(self) -> Float[np.ndarray, "documents bins"]:
        """Pairs of each document in each bin."""
        return self.by_document(np.ones(len(self.inside)))

    @cached_property
    def n_at_distance(self) -> Float[np.ndarray, "sets u"]:
        """Pairs at each distance."""
        return self.by_distance(np.ones(len(self.distance)))

    @property
    def document_slices(self) -> Iterator[tuple[int, slice]]:
        """Group of each document, and the slice of its pairs."""
        ends = np.cumsum([int(d.visible.sum()) for d in self.documents]).tolist()
        for document, first, end in zip(self.documents, [0, *ends], ends, strict=False):
            yield document.document % N_GROUPS, slice(first, end)

    @cached_property
    def _of_group(self) -> Int[np.ndarray, "m"]:
        return self.group[self.inside] * len(self.low) + self.bin

    @cached_property
    def _of_document(self) -> Int[np.ndarray, "m"]:
        """Flat index (document, bin) of each pair inside."""
        numbers = np.repeat(np.arange(len(self.documents)), [int(d.visible.sum()) for d in self.documents])
        return numbers[self.inside] * len(self.low) + self.bin

    @cached_property
    def _of_distance(self) -> Int[np.ndarray, "n"]:
        return self.group * len(self.distances) + self.of_pair

    def by_set(self, values: Float[np.ndarray, "m"]) -> Float[np.ndarray, "sets bins"]:
        """Sums in each bin: over all documents, then with each group left out."""
        return ALL_AND_WITHOUT @ _sums(self._of_group, values, N_GROUPS, len(self.low))

    def by_document(self, values: Float[np.ndarray, "m"]) -> Float[np.ndarray, "documents bins"]:
        """Sums in each bin over the pairs of each document."""
        return _sums(self._of_document, values, len(self.documents), len(self.low))

    def by_distance(self, values: Float[np.ndarray, "n"]) -> Float[np.ndarray, "sets u"]:
        """Sums at each distance: over all documents, then with each group left out."""
        return ALL_AND_WITHOUT @ _sums(self._of_distance, values, N_GROUPS, len(self.distances))


def _sums(
    cell: Int[np.ndarray, "n"], values: Float[np.ndarray, "n"], rows: int, columns: int
) -> Float[np.ndarray, "{rows} {columns}"]:
    return np.bincount(cell, values, minlength=rows * columns).reshape(rows, columns).astype(np.float64)


def pair_index(pair: Pair, visible_keys: VisibleKeys) -> PairIndex:
    """The visible pairs of a sample."""
    return _pair_index(pair.q.tokens, pair.k.tokens, visible_keys)


def bin_edges(reach: int) -> Int[np.ndarray, "edges"]:
    """First distance of each bin, and one past the last.

    >>> bin_edges(16)[:6].tolist()
    [1, 2, 3, 4, 5, 6]
    """
    return np.unique(np.round(np.geomspace(1, max(reach, 2), _BINS + 1)).astype(np.int64))


def distance_bins(visible_keys: VisibleKeys) -> tuple[Int[np.ndarray, "bins"], Int[np.ndarray, "bins"]]:
    """Smallest and largest distance of each bin, in order; those of later keys mirror those of earlier ones.

    >>> [ends.tolist() for ends in distance_bins(VisibleKeys(4, both=True))]
    [[-3, -2, -1, 1, 2, 3], [-3, -2, -1, 1, 2, 3]]
    """
    edges = bin_edges(visible_keys.reach)
    low, high = edges[:-1], edges[1:] - 1
    return (np.append(-high[::-1], low), np.append(-low[::-1], high)) if visible_keys.both else (low, high)


@lru_cache(maxsize=4)
def _pair_index(tokens_q: bytes, tokens_k: bytes, visible_keys: VisibleKeys) -> PairIndex:
    (doc_q, position_q), (doc_k, position_k) = (
        np.frombuffer(tokens, np.int64).reshape(2, -1) for tokens in (tokens_q, tokens_k)
    )
    documents = list(paired_documents((doc_q, position_q), (doc_k, position_k), visible_keys, MOST_PAIRED_TOKENS))
    none = np.zeros(0, dtype=np.int64)
    distance = np.concatenate([none, *((position_q[d.q][:, None] - position_k[d.k])[d.visible] for d in documents)])
    document = np.concatenate([none, *(np.full(d.visible.sum(), d.document) for d in documents)])
    query_position = np.concatenate([none, *(np.repeat(position_q[d.q], d.visible.sum(1)) for d in documents)])
    distances, of_pair = np.unique(distance, return_inverse=True)
    low, high = distance_bins(visible_keys)
    bin_of_pair = np.searchsorted(low, distance, side="right") - 1
    large_bins = np.flatnonzero(np.bincount(bin_of_pair, minlength=len(low)) >= _MIN_PAIRS)
    new_number = np.full(len(low), -1)
    new_number[large_bins] = np.arange(len(large_bins))
    inside = np.flatnonzero(new_number[bin_of_pair] >= 0)
    return PairIndex(
        documents, distance, query_position, distances, of_pair, low[large_bins], high[large_bins], inside,
        new_number[bin_of_pair][inside], document % N_GROUPS,
    )  # fmt: skip


def paired_documents(
    q: tuple[Int[np.ndarray, "n_q"], Int[np.ndarray, "n_q"]],
    k: tuple[Int[np.ndarray, "n_k"], Int[np.ndarray, "n_k"]],
    visible_keys: VisibleKeys,
    most: int | None,
) -> Iterator[DocumentPairs]:
    """Pair the tokens of each document, at most ``most`` of each kind, given the document and position of each row."""
    for document in np.intersect1d(q[0], k[0]).tolist():
        rows = [rows_of(of_row, document, most) for of_row in (q[0], k[0])]
        visible = visible_keys.sees(q[1][rows[0]][:, None] - k[1][rows[1]])
        yield DocumentPairs(document, rows[0], rows[1], visible)
