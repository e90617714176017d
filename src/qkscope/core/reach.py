"""How far attention goes: attention weights of some queries over all their keys, summed by distance.

A document's queries are evenly spaced over its tokens. The weight of a query on its keys is summed in bins of distance
Δ = i − j, or |i − j| where queries also see later keys, two to a doubling, so that every power of two is the first
distance of a bin; the first ``skip_first`` keys of a document, the sinks, are a sum of their own. Sums are kept by
document group and merge by addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

_PER_OCTAVE = 2
REACH_COUNTS = ("n", "sink", "gap", "n_gap")
"""What stands before the bins: queries; their weight on sinks; their sink gaps, and how many see a sink."""


def bin_starts(window: int) -> Int[np.ndarray, "bins"]:
    """First distance of each bin; 0 and 1 are bins of their own.

    >>> bin_starts(20).tolist()
    [0, 1, 2, 4, 5, 8, 11, 16]
    """
    octaves = int(np.ceil(np.log2(max(window, 2)))) + 1
    starts = np.floor(2.0 ** (np.arange(octaves * _PER_OCTAVE) / _PER_OCTAVE) + 1e-9).astype(np.int64)
    return np.unique(np.concatenate([[0], starts[starts < max(window, 2)]]))


def cut_windows(window: int) -> Int[np.ndarray, "windows"]:
    """Windows at which reach is tabulated: 64, 128, … up to half the window (always at least one, a power of two).

    >>> cut_windows(1024).tolist(), cut_windows(100).tolist()
    ([64, 128, 256, 512], [32])
    """
    last = int(np.log2(max(window // 2, 2)))
    return 2 ** np.arange(min(6, last), last + 1)


def query_positions(length: int, count: int, skip_first: int) -> Int[np.ndarray, "n"]:
    """The queries of a document of ``length`` tokens: the middles of ``count`` equal stretches, no sinks.

    >>> query_positions(16, 4, 0).tolist()
    [2, 6, 10, 14]
    """
    positions = np.unique(((np.arange(count) + 0.5) * length / max(count, 1)).astype(np.int64))
    return positions[positions >= skip_first]


@dataclass(frozen=True)
class HeadReach:
    """The sums of one query head, and where its queries were."""

    sums: Float[np.ndarray, "groups columns"]
    """REACH_COUNTS, then the weight in each bin."""
    starts: Int[np.ndarray, "bins"]
    positions: Int[np.ndarray, "queries"]
    """Position of each query."""
    after: Int[np.ndarray, "queries"]
    """Tokens of its document after it."""
    groups: Int[np.ndarray, "queries"]
    """Document group of each query."""
    skip_first: int
