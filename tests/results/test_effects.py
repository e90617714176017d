"""Intervals of interventions, as docs/method.md defines them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from qkscope.results.effects import mean_with_interval


@pytest.mark.parametrize("positive", [False, True])
def test_intervals_are_centred_at_the_estimate_and_not_corrected_for_bias(positive):
    rng = np.random.default_rng(0)
    sums, counts = rng.exponential(50.0, 7), rng.uniform(50, 400, 7)
    without = np.array([np.delete(sums, d).sum() / np.delete(counts, d).sum() for d in range(7)])
    estimate, scale = sums.sum() / counts.sum(), np.sqrt if positive else np.asarray
    half = stats.t.ppf(0.975, 6) * np.sqrt(6 / 7 * ((scale(without) - scale(without).mean()) ** 2).sum())
    ends = np.array([scale(estimate) - half, scale(estimate) + half])
    expected = np.maximum(ends, 0) ** 2 if positive else ends
    padded = mean_with_interval(np.append(sums, 0.0), np.append(counts, 0.0), positive=positive)
    assert padded == pytest.approx((estimate, *expected)), "a document without tokens does not count"


def test_documents_of_one_length_have_the_classical_interval_and_three_have_none():
    sums = np.random.default_rng(1).standard_normal(9)
    low, high = stats.t.interval(0.95, 8, sums.mean() / 10, stats.sem(sums) / 10)
    assert mean_with_interval(sums, np.full(9, 10.0)) == pytest.approx((sums.mean() / 10, low, high))
    assert np.isnan(mean_with_interval(sums[:3], np.full(3, 10.0))[1:]).all()
    assert np.isnan(mean_with_interval(sums[:0], sums[:0])).all()
