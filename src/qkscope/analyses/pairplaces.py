"""Pairs of sampled tokens of one document: how far apart they are, and in which bin of distance.

That depends on the tokens and on what queries see, so it is the same for all heads of a layer and made once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int

from qkscope.core.headmoments import ALL_AND_WITHOUT, N_GROUPS
from qkscope.core.linalg import ratio
from qkscope.core.rows import Pair, rows_of
from qkscope.core.sight import Sight

_BINS = 24
"""Bins of distance, equal on a logarithmic scale."""
_MIN_PAIRS = 10
"""Bins with fewer pairs are left out."""
MOST_PAIRED_TOKENS = 400
"""Sampled tokens of one document that are paired with each other, at most."""


@dataclass(frozen=True)
class DocumentPlaces:
    """The tokens of one document that are paired: rows of the sample, and which pairs are in sight."""

    document: int
    q: Int[np.ndarray, "n_q"]
    k: Int[np.ndarray, "n_k"]
    seen: Bool[np.ndarray, "n_q n_k"]


@dataclass(frozen=True)
class PairPlaces:
    """All pairs of a run's sample, document by document."""

    documents: list[DocumentPlaces]
    distance: Int[np.ndarray, "n"]
    """i − j: negative if the key is the later one."""
    query_position: Int[np.ndarray, "n"]
    distances: Int[np.ndarray, "u"]
    """The distances that occur."""
    of_pair: Int[np.ndarray, "n"]
    """Which of these each pair has."""
    low: Int[np.ndarray, "bins"]
    high: Int[np.ndarray, "bins"]
    inside: Int[np.ndarray, "m"]
    """The pairs whose bin has enough of them."""
    bin: Int[np.ndarray, "m"]
    """The bin of each of these."""

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
    def parts(self) -> Iterator[tuple[int, slice]]:
        """For each document its group, and where its pairs are."""
        ends = np.cumsum([int(d.seen.sum()) for d in self.documents]).tolist()
        for document, first, end in zip(self.documents, [0, *ends], ends, strict=False):
            yield document.document % N_GROUPS, slice(first, end)

    @cached_property
    def _of_group(self) -> Int[np.ndarray, "m"]:
        return self.group[self.inside] * len(self.low) + self.bin

    @cached_property
    def _of_document(self) -> Int[np.ndarray, "m"]:
        """Documents without a pair inside count nothing."""
        numbers = np.repeat(np.arange(len(self.documents)), [int(d.seen.sum()) for d in self.documents])
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


def pair_places(pair: Pair, sight: Sight) -> PairPlaces:
    """The pairs of a sample within sight."""
    return _places(pair.q.tokens, pair.k.tokens, sight)


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


@lru_cache(maxsize=4)
def _places(tokens_q: bytes, tokens_k: bytes, sight: Sight) -> PairPlaces:
    (doc_q, at_q), (doc_k, at_k) = (np.frombuffer(tokens, np.int64).reshape(2, -1) for tokens in (tokens_q, tokens_k))
    documents = list(_documents((doc_q, at_q), (doc_k, at_k), sight))
    none = np.zeros(0, dtype=np.int64)
    distance = np.concatenate([none, *((at_q[d.q][:, None] - at_k[d.k])[d.seen] for d in documents)])
    document = np.concatenate([none, *(np.full(d.seen.sum(), d.document) for d in documents)])
    query_position = np.concatenate([none, *(np.repeat(at_q[d.q], d.seen.sum(1)) for d in documents)])
    distances, of_pair = np.unique(distance, return_inverse=True)
    low, high = distance_bins(sight)
    raw = np.searchsorted(low, distance, side="right") - 1
    kept = np.flatnonzero(np.bincount(raw, minlength=len(low)) >= _MIN_PAIRS)
    number = np.full(len(low), -1)
    number[kept] = np.arange(len(kept))
    inside = np.flatnonzero(number[raw] >= 0)
    return PairPlaces(
        documents, distance, query_position, distances, of_pair, low[kept], high[kept], inside,
        number[raw][inside], document % N_GROUPS,
    )  # fmt: skip


def _documents(
    q: tuple[Int[np.ndarray, "n_q"], Int[np.ndarray, "n_q"]],
    k: tuple[Int[np.ndarray, "n_k"], Int[np.ndarray, "n_k"]],
    sight: Sight,
) -> Iterator[DocumentPlaces]:
    """Document by document, given the document and position of each row."""
    for document in np.intersect1d(q[0], k[0]).tolist():
        rows = [rows_of(of_row, document, MOST_PAIRED_TOKENS) for of_row in (q[0], k[0])]
        seen = sight.sees(q[1][rows[0]][:, None] - k[1][rows[1]])
        yield DocumentPlaces(document, rows[0], rows[1], seen)
