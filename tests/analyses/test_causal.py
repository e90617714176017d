"""The slope over causal pairs against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from qkscope.analyses.causal import bias_causal
from qkscope.core.rows import Pair, Rows


def rows(rng: np.random.Generator, documents: int, each: int, d: int = 5) -> Rows:
    position = np.concatenate([np.sort(rng.choice(300, each, replace=False)) for _ in range(documents)])
    x = rng.standard_normal((documents * each, d)) + 40.0 + 0.01 * position[:, None]
    return Rows(x, position, np.repeat(np.arange(documents), each))


def by_hand(pair: Pair, reach: int | None = None, without: int | None = None) -> float:
    top = bottom = 0.0
    for i in range(len(pair.q)):
        if without is not None and pair.q.example_id[i] % 8 == without:
            continue
        gap = pair.q.position[i] - pair.k.position
        seen = (pair.k.example_id == pair.q.example_id[i]) & (gap > 0)
        if reach is not None:
            seen &= gap < reach
        j = pair.k.position[seen] - pair.k.position[seen].mean() if seen.any() else np.zeros(0)
        top += (pair.k.x[seen] @ pair.q.x[i]) @ j
        bottom += j @ j
    return top / bottom


@pytest.mark.parametrize("reach", [None, 60])
def test_running_sums_are_the_pairs_one_by_one(reach: int | None):
    rng = np.random.default_rng(0)
    pair = Pair(rows(rng, 10, 40), rows(rng, 10, 30))
    value, again = bias_causal(pair, reach)
    assert value == pytest.approx(by_hand(pair, reach), rel=1e-9)
    assert again[3] == pytest.approx(by_hand(pair, reach, without=3), rel=1e-9)


def test_a_head_that_decays_with_distance_is_biased_although_its_means_are_not():
    """q_i·k_j = cos(θ(i − j)): over all pairs the slope on j is zero, over earlier keys it is positive."""
    theta, t = 0.003, np.arange(400)
    turning = np.stack([np.cos(theta * t), np.sin(theta * t)], -1)
    one = Rows(turning, t, np.zeros(400, dtype=int))
    assert bias_causal(Pair(one, one))[0] > 5e-4


def test_without_pairs_there_is_no_slope():
    empty = Rows(np.zeros((0, 2)), np.zeros(0, dtype=int), np.zeros(0, dtype=int))
    one = Rows(np.ones((2, 2)), np.array([0, 1]), np.zeros(2, dtype=int))
    assert np.isnan(bias_causal(Pair(one, one))[0])
    assert np.isnan(bias_causal(Pair(one, empty))[0])


def test_documents_of_two_tokens_have_no_slope():
    """One key before a query: rounding must not pass for a spread of positions."""
    rng = np.random.default_rng(0)
    rows = Rows(rng.standard_normal((6, 4)), np.array([7, 1000, 3, 70_001, 5, 6]), np.repeat(np.arange(3), 2))
    value, again = bias_causal(Pair(rows, rows))
    assert np.isnan(value)
    assert np.isnan(again).all()


@pytest.mark.parametrize("reach", [None, 128])
def test_vectors_in_single_precision_give_the_same_slope(reach: int | None):
    """Long documents and a short window: what is seen is a small difference of what was before."""
    rng = np.random.default_rng(3)
    t = np.arange(20_000)
    k = rng.standard_normal((20_000, 8)) + 2e-5 * t[:, None]
    q = rng.standard_normal((20_000, 8)) + 1.0
    pairs = [Pair(*(Rows(x.astype(kind), t, t // 10_000) for x in (q, k))) for kind in ("f4", "f8")]
    single, double = (bias_causal(pair, reach) for pair in pairs)
    assert single[0] == pytest.approx(double[0], rel=2e-5)
    np.testing.assert_allclose(single[1], double[1], rtol=2e-5)
