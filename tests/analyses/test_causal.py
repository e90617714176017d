"""The slope over causal pairs against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from qkscope.analyses.causal import MIN_KEYS, causal_bias
from qkscope.core.rows import Pair, Rows
from qkscope.core.visible import VisibleKeys

ALL = VisibleKeys(10**6)


def rows(rng: np.random.Generator, documents: int, each: int, d: int = 5) -> Rows:
    position = np.concatenate([np.sort(rng.choice(300, each, replace=False)) for _ in range(documents)])
    x = rng.standard_normal((documents * each, d)) + 40.0 + 0.01 * position[:, None]
    return Rows(x, position, np.repeat(np.arange(documents), each))


def by_hand(pair: Pair, sight: VisibleKeys, without: int | None = None, *, equally: bool = False) -> float:
    top = bottom = 0.0
    slopes = []
    for i in range(len(pair.q)):
        if without is not None and pair.q.example_id[i] % 8 == without:
            continue
        gap = pair.q.position[i] - pair.k.position
        near = (np.abs(gap) < sight.reach) & ((gap > 0) | sight.both)  # an encoder sees its own key, too
        seen = (pair.k.example_id == pair.q.example_id[i]) & near
        j = pair.k.position[seen] - pair.k.position[seen].mean() if seen.any() else np.zeros(0)
        own = (pair.k.x[seen] @ pair.q.x[i]) @ j
        top += own
        bottom += j @ j
        if seen.sum() >= MIN_KEYS:
            slopes.append(own / (j @ j))
    return float(np.mean(slopes)) if equally else top / bottom


@pytest.mark.parametrize("sight", [ALL, VisibleKeys(60), VisibleKeys(300, both=True), VisibleKeys(60, both=True)])
def test_running_sums_are_the_pairs_one_by_one(sight: VisibleKeys):
    rng = np.random.default_rng(0)
    pair = Pair(rows(rng, 10, 40), rows(rng, 10, 30))
    found = causal_bias(pair, sight)
    for slopes, equally in ((found.pooled, False), (found.by_query, True)):
        assert slopes[0] == pytest.approx(by_hand(pair, sight, equally=equally), rel=1e-9)
        assert slopes[1 + 3] == pytest.approx(by_hand(pair, sight, without=3, equally=equally), rel=1e-9)


def test_a_head_that_decays_with_distance_is_biased_although_its_means_are_not():
    """q_i·k_j = cos(θ(i − j)): over all pairs the slope on j is zero, over earlier keys it is positive."""
    theta, t = 0.003, np.arange(400)
    turning = np.stack([np.cos(theta * t), np.sin(theta * t)], -1)
    one = Rows(turning, t, np.zeros(400, dtype=int))
    assert causal_bias(Pair(one, one), ALL).pooled[0] > 5e-4


def test_without_pairs_there_is_no_slope():
    empty = Rows(np.zeros((0, 2)), np.zeros(0, dtype=int), np.zeros(0, dtype=int))
    one = Rows(np.ones((2, 2)), np.array([0, 1]), np.zeros(2, dtype=int))
    assert np.isnan(causal_bias(Pair(one, one), ALL).pooled[0])
    assert np.isnan(causal_bias(Pair(one, empty), ALL).pooled).all()


def test_documents_of_two_tokens_have_no_slope():
    """A query with one earlier key: rounding must not count as a spread of positions."""
    rng = np.random.default_rng(0)
    rows = Rows(rng.standard_normal((6, 4)), np.array([7, 1000, 3, 70_001, 5, 6]), np.repeat(np.arange(3), 2))
    found = causal_bias(Pair(rows, rows), ALL)
    assert np.isnan(found.pooled).all()
    assert np.isnan(found.by_query).all()


@pytest.mark.parametrize("sight", [ALL, VisibleKeys(128)])
def test_vectors_in_single_precision_give_the_same_slope(sight: VisibleKeys):
    """Long documents and a short window: what is seen is a small difference of what was before."""
    rng = np.random.default_rng(3)
    t = np.arange(20_000)
    k = rng.standard_normal((20_000, 8)) + 2e-5 * t[:, None]
    q = rng.standard_normal((20_000, 8)) + 1.0
    pairs = [Pair(*(Rows(x.astype(kind), t, t // 10_000) for x in (q, k))) for kind in ("f4", "f8")]
    single, double = (causal_bias(pair, sight).pooled for pair in pairs)
    np.testing.assert_allclose(single, double, rtol=2e-5)
