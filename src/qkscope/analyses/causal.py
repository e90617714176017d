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


def bias_causal(pair: Pair, sliding_window: int | None = None) -> tuple[float, Float[np.ndarray, "8"]]:
    """The slope per token, and with each document group left out; NaN where no query has two keys before it.

    Sums over the keys of a query are differences of running sums, so that no pair is ever formed.
    """
    if not len(pair.q) or not len(pair.k):
        return float("nan"), np.full(N_GROUPS, np.nan)
    low, high = _visible(pair.q, pair.k, sliding_window)
    j = pair.k.position - pair.k.position.mean()
    # A constant added to every key changes no slope; without their mean, running sums stay small.
    k = pair.k.x.astype(np.float64) - pair.k.x.mean(0, dtype=np.float64)
    n, sum_j, sum_jj, sum_k, sum_jk = (
        running[high] - running[low] for running in (_running(v) for v in (np.ones(len(j)), j, j**2, k, j[:, None] * k))
    )
    mean_j = ratio(sum_j, n)
    top = (pair.q.x * (sum_jk - mean_j[:, None] * sum_k)).sum(-1)
    bottom = sum_jj - n * mean_j**2
    group = pair.q.example_id % N_GROUPS
    tops, bottoms = (np.bincount(group, part, minlength=N_GROUPS) for part in (top, np.maximum(bottom, 0.0)))
    return _slope(tops.sum(), bottoms.sum()), np.array([_slope(tops @ kept, bottoms @ kept) for kept in DELETE_ONE])


def _visible(q: Rows, k: Rows, sliding_window: int | None) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """For each query, the range of rows of the keys it sees before itself."""
    keys = _token(k.example_id, k.position)
    reach = q.position if sliding_window is None else np.minimum(q.position, sliding_window - 1)
    return (
        np.searchsorted(keys, _token(q.example_id, q.position - reach)),
        np.searchsorted(keys, _token(q.example_id, q.position)),
    )


def _token(example_id: Int[np.ndarray, "n"], position: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    return (example_id.astype(np.int64) << 32) + position


def _running(values: Float[np.ndarray, "n *rest"]) -> Float[np.ndarray, "m *rest"]:
    return np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, 0)])


def _slope(top: np.float64, bottom: np.float64) -> float:
    return float(top / bottom) if bottom > 0 else float("nan")
