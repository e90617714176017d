"""The recency bias over pairs that attention really scores: how the score of earlier keys changes with their position.

For each query i the slope of q_i·k_j on j over the keys j < i of its document; the slopes of all queries are pooled,
each weighted by the spread of its keys: bias_causal = Σ_i Σ_j s_ij (j − j̄_i) / Σ_i Σ_j (j − j̄_i)².
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from qkscope.core.headmoments import DELETE_ONE, N_GROUPS
from qkscope.core.linalg import ratio
from qkscope.core.rows import Pair, Rows

BLOCK = 128
"""Keys whose scores are formed one by one; those before them in the document enter as two sums."""


def bias_causal(pair: Pair, sliding_window: int | None = None) -> tuple[float, Float[np.ndarray, "8"]]:
    """The slope per token, and with each document group left out; NaN where no query has two keys before it."""
    if not len(pair.q) or not len(pair.k):
        return float("nan"), np.full(N_GROUPS, np.nan)
    first, low, high = _visible(pair.q, pair.k, sliding_window)
    j = pair.k.position - pair.k.position.mean()
    n, sum_j, sum_jj = (running[high] - running[low] for running in (_running(v) for v in (np.ones(len(j)), j, j**2)))
    mean_j = ratio(sum_j, n)
    # A constant added to every key changes no slope; without their mean, sums stay small.
    q, k = pair.q.as_double().x, pair.k.as_double().x
    k = k - np.ones(len(k)) @ k / len(k)
    weights = np.stack([np.ones(len(j)), j], -1)
    starts = np.flatnonzero(np.r_[True, pair.k.example_id[1:] != pair.k.example_id[:-1]])
    score, score_j = _scores_before(q, k, weights, starts, first, high).T
    if (low > first).any():
        unseen, unseen_j = _scores_before(q, k, weights, starts, first, low).T
        score, score_j = score - unseen, score_j - unseen_j
    top = score_j - mean_j * score
    bottom = sum_jj - n * mean_j**2
    # Positions are whole numbers: two of them spread by a half at least, and less is rounding.
    top, bottom = (np.where(bottom < 0.25, 0.0, part) for part in (top, bottom))
    group = pair.q.example_id % N_GROUPS
    tops, bottoms = (np.bincount(group, part, minlength=N_GROUPS) for part in (top, bottom))
    return _slope(tops.sum(), bottoms.sum()), np.array([_slope(tops @ kept, bottoms @ kept) for kept in DELETE_ONE])


def _scores_before(
    q: Float[np.ndarray, "n_q d"],
    k: Float[np.ndarray, "n_k d"],
    weights: Float[np.ndarray, "n_k w"],
    starts: Int[np.ndarray, "documents"],
    first: Int[np.ndarray, "n_q"],
    end: Int[np.ndarray, "n_q"],
) -> Float[np.ndarray, "n_q w"]:
    """Σ_j weights_j q_i·k_j over the keys of a query's document from its first to before its ``end``.

    Ends rise from query to query. Keys are taken in blocks that do not cross documents.
    """
    found = np.zeros((len(q), weights.shape[1]))
    ends = np.append(starts[1:], len(k))
    for start, stop in zip(starts, ends, strict=True):
        before = np.zeros((weights.shape[1], k.shape[1]))
        edges = np.append(np.arange(start, stop, BLOCK), stop)
        queries = np.searchsorted(end, edges, side="right")
        for low, high, this, last in zip(edges[:-1], edges[1:], queries[:-1], queries[1:], strict=True):
            if this < last:
                some, block = q[this:last], k[low:high]
                scores = some @ block.T
                scores *= np.arange(low, high) < end[this:last, None]
                found[this:last] = scores @ weights[low:high] + some @ before.T
            before += weights[low:high].T @ k[low:high]
    found[end <= first] = 0.0
    return found


def _visible(
    q: Rows, k: Rows, sliding_window: int | None
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """For each query, where the keys of its document begin, and the range of rows that it sees before itself."""
    keys = _token(k.example_id, k.position)
    first, high = (np.searchsorted(keys, _token(q.example_id, at)) for at in (np.zeros_like(q.position), q.position))
    if sliding_window is None:
        return first, first, high
    reach = np.minimum(q.position, sliding_window - 1)
    return first, np.searchsorted(keys, _token(q.example_id, q.position - reach)), high


def _token(example_id: Int[np.ndarray, "n"], position: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    return (example_id.astype(np.int64) << 32) + position


def _running(values: Float[np.ndarray, "n"]) -> Float[np.ndarray, "m"]:
    return np.append(0.0, np.cumsum(values))


def _slope(top: np.float64, bottom: np.float64) -> float:
    return float(top / bottom) if bottom > 0 else float("nan")
