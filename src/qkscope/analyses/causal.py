"""The recency bias over the pairs that attention scores: the slope of the score over the keys' positions.

For each query i the slope of q_i·k_j on j over the keys j < i of its document, in encoders over all keys it sees; the
slopes of all queries are pooled, each weighted by the spread of its keys:
bias_causal = Σ_i Σ_j s_ij (j − j̄_i) / Σ_i Σ_j (j − j̄_i)².
The spread grows with the cube of the number of keys, so late queries count most; bias_causal_by_query is the plain mean
of the slopes of all queries with at least 8 keys.
The numerator is Σ_i q_i·p_i with p_i = Σ_j (j − j̄_i) k_j, which all query heads of a key head share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from qkscope.core.headmoments import ALL_AND_WITHOUT, N_GROUPS
from qkscope.core.linalg import ratio
from qkscope.core.rows import Pair
from qkscope.core.visible import VisibleKeys

BLOCK = 128
"""Keys that are weighted one by one; earlier keys of the document enter as two sums."""


MIN_KEYS = 8
"""A query with fewer earlier keys has no slope of its own: it would be mostly noise."""


@dataclass(frozen=True)
class CausalBias:
    """Slopes per token: from all documents, then with each document group left out; NaN where no query has enough."""

    pooled: Float[np.ndarray, "9"]
    by_query: Float[np.ndarray, "9"]


def causal_bias(pair: Pair, visible_keys: VisibleKeys) -> CausalBias:
    """Mean slope of the score over the keys a query sees: queries weighted by the spread of their keys, and equally."""
    if not len(pair.q) or not len(pair.k):
        return CausalBias(*np.full((2, len(ALL_AND_WITHOUT)), np.nan))
    visible = _visible_keys(pair.q.tokens, pair.k.tokens, visible_keys)
    sums = pair.k.once(("drawn", pair.q.tokens, visible_keys), lambda: _weighted_sums(pair.k.x, visible))
    top = np.where(visible.spread > 0, np.vecdot(pair.q.x, sums), 0.0)
    has_slope = (visible.spread > 0) & (visible.high - visible.low >= MIN_KEYS)
    slopes = np.divide(top, visible.spread, out=np.zeros_like(top), where=has_slope)
    return CausalBias(
        _mean_slopes(visible, top, visible.spread), _mean_slopes(visible, slopes, has_slope.astype(float))
    )


def _mean_slopes(
    visible: _VisibleKeys, top: Float[np.ndarray, "n_q"], bottom: Float[np.ndarray, "n_q"]
) -> Float[np.ndarray, "9"]:
    tops, bottoms = (
        ALL_AND_WITHOUT @ np.bincount(visible.group, values, minlength=N_GROUPS) for values in (top, bottom)
    )
    return np.where(bottoms > 0, ratio(tops, bottoms), np.nan)


@dataclass(frozen=True)
class _VisibleKeys:
    """For each query the range of keys that it sees, and their spread; depends on token positions only."""

    first: Int[np.ndarray, "n_q"]
    """Index of the first key of its document."""
    low: Int[np.ndarray, "n_q"]
    high: Int[np.ndarray, "n_q"]
    """Keys low … high − 1 are visible."""
    mean: Float[np.ndarray, "n_q"]
    """j̄_i, counted from the mean position of all keys."""
    spread: Float[np.ndarray, "n_q"]
    """Σ_j (j − j̄_i)²; 0 where it is only rounding error."""
    group: Int[np.ndarray, "n_q"]
    position: Float[np.ndarray, "n_k"]
    """Positions of the keys, counted from their mean."""
    starts: Int[np.ndarray, "documents"]
    """Index of the first key of each document."""


@lru_cache(maxsize=8)
def _visible_keys(tokens_q: bytes, tokens_k: bytes, visible_keys: VisibleKeys) -> _VisibleKeys:
    (doc_q, position_q), (doc_k, position_k) = (
        np.frombuffer(tokens, np.int64).reshape(2, -1) for tokens in (tokens_q, tokens_k)
    )
    keys = (doc_k << 32) + position_k
    begin = np.maximum(position_q - visible_keys.reach + 1, 0)
    end = position_q + visible_keys.reach if visible_keys.both else position_q
    first, low, high = (
        np.searchsorted(keys, (doc_q << 32) + position) for position in (np.zeros_like(position_q), begin, end)
    )
    j = position_k - position_k.mean()
    n, sum_j, sum_jj = (running[high] - running[low] for running in (_cumulated(v) for v in (np.ones(len(j)), j, j**2)))
    mean = ratio(sum_j, n)
    spread = sum_jj - n * mean**2
    # Positions are integers: two different ones give a spread of at least 0.5, so less is rounding error.
    spread = np.where(spread < 0.25, 0.0, spread)
    starts = np.flatnonzero(np.r_[True, doc_k[1:] != doc_k[:-1]])
    return _VisibleKeys(first, low, high, mean, spread, doc_q % N_GROUPS, j, starts)


def _weighted_sums(k: Float[np.ndarray, "n_k d"], visible: _VisibleKeys) -> Float[np.ndarray, "n_q d"]:
    """p_i = Σ_j (j − j̄_i) k_j over the keys that query i sees."""
    any_hidden = (visible.low > visible.first).any()
    # Hidden keys are subtracted, which needs more than single precision.
    k = k.astype(np.float64) if any_hidden else k
    # A constant added to every key changes no slope; subtracting the mean keeps the sums small.
    k = k - np.ones(len(k), k.dtype) @ k / k.dtype.type(len(k))
    sums = _before(k, visible, visible.high)
    return sums - _before(k, visible, visible.low) if any_hidden else sums


def _before(
    k: Float[np.ndarray, "n_k d"], visible: _VisibleKeys, end: Int[np.ndarray, "n_q"]
) -> Float[np.ndarray, "n_q d"]:
    """Σ_j (j − j̄_i) k_j over the keys of a query's document from the first to the one before its ``end``.

    Ends increase from query to query. Keys are taken in blocks that do not cross documents.
    """
    sums = np.zeros((len(end), k.shape[1]))
    position, mean = visible.position, visible.mean[:, None]
    weights = np.stack([np.ones_like(position), position]).astype(k.dtype)
    for start, stop in zip(visible.starts, np.append(visible.starts[1:], len(k)), strict=True):
        before = np.zeros((2, k.shape[1]))
        edges = np.append(np.arange(start, stop, BLOCK), stop)
        queries = np.searchsorted(end, edges, side="right")
        for low, high, first, last in zip(edges[:-1], edges[1:], queries[:-1], queries[1:], strict=True):
            if first < last:
                block = position[low:high] - mean[first:last]
                block *= np.arange(low, high) < end[first:last, None]
                sums[first:last] = block.astype(k.dtype) @ k[low:high] + (before[1] - mean[first:last] * before[0])
            before += weights[:, low:high] @ k[low:high]
    sums[end <= visible.first] = 0.0
    return sums


def _cumulated(values: Float[np.ndarray, "n"]) -> Float[np.ndarray, "m"]:
    return np.append(0.0, np.cumsum(values))
