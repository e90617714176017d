"""The attention of some queries: their weights on all keys summed by distance, and on tokens that come twice.

A document's queries are evenly spaced over its tokens. The weights of a query on its keys are summed in bins of the
distance Δ = i − j, or |i − j| where queries also see later keys. There are two bins per doubling, so every power of two
starts a bin. The first ``skip_first`` keys of a document, the sinks, have a separate sum. Sums are by document group
and are merged by addition.

A second input shows which heads look for what came before: random tokens, and the same tokens again. The queries are
those of the second copy but its last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

_PER_OCTAVE = 2
REACH_COUNTS = ("n", "sink", "gap", "n_gap")
"""Columns before the bins: number of queries, weight on sinks, sum of sink gaps, number of queries that see a sink."""

REPEAT_COUNTS = ("n", "echo", "induction")
"""Sums over draws of repeated tokens: draws, weight on the earlier copy of a query's token, and on the one after it."""
LOWEST = float(np.finfo(np.float32).min)
"""The largest score of no queries."""


def bin_starts(window: int) -> Int[np.ndarray, "bins"]:
    """First distance of each bin; 0 and 1 are separate bins.

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
    """The queries of a document of ``length`` tokens: the middles of ``count`` equal spans, without sinks.

    >>> query_positions(16, 4, 0).tolist()
    [2, 6, 10, 14]
    """
    positions = np.unique(((np.arange(count) + 0.5) * length / max(count, 1)).astype(np.int64))
    return positions[positions >= skip_first]


@dataclass(frozen=True)
class HeadReach:
    """The sums of one query head, and the positions of its queries."""

    sums: Float[np.ndarray, "groups columns"]
    """REACH_COUNTS, then the weight in each bin."""
    starts: Int[np.ndarray, "bins"]
    positions: Int[np.ndarray, "queries"]
    """Position of each query."""
    after: Int[np.ndarray, "queries"]
    """Number of tokens after each query in its document."""
    groups: Int[np.ndarray, "queries"]
    """Document group of each query."""
    skip_first: int
    entropy: Float[np.ndarray, "groups"] | None = None
    """Σ of the entropy of each query's attention, in nats; None in runs that did not sum it."""
    max_logit: float | None = None
    """Largest score of the queries, before the softmax."""
    repeats: Float[np.ndarray, "draws counts"] | None = None
    """REPEAT_COUNTS of each draw of repeated tokens; None in runs that did not read them."""
