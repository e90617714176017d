"""Means, medians and correlations over heads."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from qkscope.analyses.acrossheads import correlation, mean_over_heads, median_over_heads, rank_correlation


def test_the_bootstrap_draws_key_heads_not_query_heads():
    rng = np.random.default_rng(0)
    per_key = rng.normal(0, 1, 40)
    frame = pd.DataFrame({"model": "m", "layer": 0, "head": range(400), "k_head": np.repeat(range(40), 10)})
    frame["x"] = np.repeat(per_key, 10)
    found = mean_over_heads(frame, ["x"])
    half = (found["x_high"] - found["x_low"]) / 2
    assert found["x"] == pytest.approx(per_key.mean())
    assert half == pytest.approx(1.96 * per_key.std() / np.sqrt(40), rel=0.15)
    alone = mean_over_heads(frame.drop(columns="k_head"), ["x"])
    assert (alone["x_high"] - alone["x_low"]) / 2 == pytest.approx(half / np.sqrt(10), rel=0.15)


def test_the_median_and_its_interval():
    frame = pd.DataFrame({"model": "m", "layer": 0, "head": range(101), "x": np.arange(101.0)})
    found = median_over_heads(frame, "x")
    assert found["x"] == 50
    assert found["x_low"] < 45 < 55 < found["x_high"]
    assert found["x_low"] > 30


def test_one_head_has_a_mean_and_no_interval():
    found = mean_over_heads(pd.DataFrame({"model": ["m"], "layer": 0, "head": 0, "x": 2.0}), ["x"])
    assert found["x"] == 2
    assert np.isnan(found["x_low"])


def test_a_correlation_needs_three_rows_and_something_that_varies():
    assert np.isnan(correlation(pd.Series([1, 2]), pd.Series([1, 2])))
    assert np.isnan(correlation(pd.Series([1, 1, 1]), pd.Series([1, 2, 3])))
    assert correlation(pd.Series([1, 2, 3]), pd.Series([-1, -2, -3])) == pytest.approx(-1)


def test_ranks_correlate_as_scipy_has_it_and_key_heads_are_drawn():
    rng = np.random.default_rng(1)
    x = np.repeat(rng.normal(size=60), 4)
    frame = pd.DataFrame({"model": "m", "layer": 0, "head": range(240), "k_head": np.repeat(range(60), 4), "x": x})
    frame["y"] = np.exp(x) + 0.8 * rng.normal(size=240)
    found = rank_correlation(frame, "x", "y")
    assert found["rho"] == pytest.approx(spearmanr(frame["x"], frame["y"]).statistic)
    assert found["rho_low"] < found["rho"] < found["rho_high"]
    narrow = rank_correlation(frame.drop(columns="k_head"), "x", "y")
    assert narrow["rho_high"] - narrow["rho_low"] < found["rho_high"] - found["rho_low"]
    assert rank_correlation(frame.assign(y=1.0), "x", "y")["rho"] == 0
