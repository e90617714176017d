"""A uniform sample of rows that does not depend on their order and can be merged.

The priority of a row is a hash of (seed, example_id, position); the sample consists of the rows with the
lowest priorities. Therefore all heads of a run have the same tokens, for queries and for keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int, UInt64

from qkscope.core.rows import Pair, Rows, row_order


@dataclass(frozen=True)
class Sample:
    """The min(size, n_seen) rows with the lowest priority among n_seen rows."""

    rows: Rows
    size: int
    seed: int
    n_seen: int

    @classmethod
    def from_rows(cls, rows: Rows, size: int, seed: int = 0) -> Sample:
        """Sample ``size`` of these rows, or all if there are fewer."""
        if size < 0:
            raise ValueError(f"expected a sample size of 0 or more, got {size}")
        return cls(_lowest(rows, size, seed), size, seed, len(rows))

    def merge(self, other: Sample) -> Sample:
        """The sample of both sets of rows together; equal to sampling them at once."""
        if (self.size, self.seed) != (other.size, other.seed):
            raise ValueError(
                f"expected samples of equal size and seed, got {(self.size, self.seed)} and {(other.size, other.seed)}"
            )
        rows = _lowest(self.rows.concat(other.rows), self.size, self.seed)
        return Sample(rows, self.size, self.seed, self.n_seen + other.n_seen)


def sample_pair(pair: Pair, size: int, seed: int = 0) -> Pair:
    """At most ``size`` queries and keys, in order; the same tokens in every head."""
    return Pair(*(ordered_sample(rows, size, seed) for rows in (pair.q, pair.k)))


def ordered_sample(rows: Rows, size: int, seed: int = 0) -> Rows:
    """At most ``size`` rows, sorted by (example_id, position); the same tokens in every head."""
    if len(rows) <= size:
        return rows.ordered()
    example_id, position = (column.astype(np.int64).tobytes() for column in (rows.example_id, rows.position))
    chosen = _chosen(example_id, position, size, seed)
    return Sample.from_rows(rows, size, seed).rows.ordered() if chosen is None else rows.take(chosen)


def sampled_rows(
    example_id: Int[np.ndarray, "n"], position: Int[np.ndarray, "n"], size: int, seed: int = 0
) -> Int[np.ndarray, "m"]:
    """Indices of the rows that ``ordered_sample`` would select; each token must occur once."""
    if len(position) <= size:
        return np.lexsort((position, example_id))
    chosen = _chosen(example_id.astype(np.int64).tobytes(), position.astype(np.int64).tobytes(), size, seed)
    assert chosen is not None
    return chosen


@lru_cache(maxsize=8)
def _chosen(example_id: bytes, position: bytes, size: int, seed: int) -> Int[np.ndarray, "size"] | None:
    """Indices of the sampled rows, in order; cached, since heads share tokens. None if a token occurs twice."""
    tokens = np.frombuffer(example_id, np.int64), np.frombuffer(position, np.int64)
    order = np.lexsort((*tokens[::-1], priority(*tokens, seed)))
    repeated = np.ones(len(order) - 1, dtype=bool)
    for key in tokens:
        repeated &= key[order[1:]] == key[order[:-1]]
    if repeated.any():
        return None
    chosen = order[:size]
    return chosen[np.lexsort([key[chosen] for key in tokens[::-1]])]


def priority(example_id: Int[np.ndarray, "n"], position: Int[np.ndarray, "n"], seed: int) -> UInt64[np.ndarray, "n"]:
    """A hash of (seed, example_id, position), uniform over 64 bits."""
    with np.errstate(over="ignore"):
        mixed = _mix(np.full(len(position), seed % 2**64, dtype=np.uint64))
        for values in (example_id, position):
            mixed = _mix(mixed ^ _mix(values.astype(np.int64).astype(np.uint64)))
    return mixed


def _mix(h: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014), after its additive step."""
    h = h + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def _lowest(rows: Rows, size: int, seed: int) -> Rows:
    keys = priority(rows.example_id, rows.position, seed)
    return rows.take(row_order(rows.x, keys, rows.example_id, rows.position)[:size])
