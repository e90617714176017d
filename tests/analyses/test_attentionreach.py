"""The reach of attention: predicted from means, against a softmax by hand; and the table of measured reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qkscope.analyses.meanfield import MeanField
from qkscope.analyses.reach import Curves, curve_area, predicted_beyond
from qkscope.core.reach import REACH_COUNTS, HeadReach, bin_starts, cut_windows, query_positions
from qkscope.core.rope import Rope
from tests.analyses.test_scores import WINDOW, planted
from tests.helpers import tables_of

ROPE = Rope(np.array([0.9, 0.2, 0.01]))


def field(sets: int = 2) -> MeanField:
    rng = np.random.default_rng(0)
    return MeanField(ROPE, rng.normal(size=(sets, 3)) + 1j * rng.normal(size=(sets, 3)), rng.normal(size=sets), 0.7)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 1025])
def test_the_dense_curve_is_the_curve(n):
    assert np.allclose(field().dense(n), field().curves(np.arange(n)))


def test_predicted_beyond_is_a_softmax_over_what_the_query_sees():
    curves, seen, widths = field().dense(60), np.array([5, 33, 60]), np.array([4, 16, 64])
    found = predicted_beyond(earlier(curves), seen, np.array([70, 9, 0]), widths)
    for s in range(2):
        for q, n in enumerate(seen):
            weights = np.exp(curves[s, :n]) / np.exp(curves[s, :n]).sum()
            assert np.allclose(found[s, q], [weights[w:].sum() for w in widths])


def test_of_an_encoder_the_softmax_is_over_both_sides():
    field_, n, widths = field(), 40, np.array([4, 16, 64])
    curves = Curves(field_.dense(n), field_.mirrored.dense(n)[:, 1:])
    seen, after = np.array([5, 33, 40]), np.array([39, 7, 0])
    found = predicted_beyond(curves, seen, after, widths)
    for q in range(3):
        distance = np.arange(-after[q], seen[q])
        weights = np.exp(field_.curves(distance))
        for w, width in enumerate(widths):
            expected = weights[:, np.abs(distance) >= width].sum(-1) / weights.sum(-1)
            assert np.allclose(found[:, q, w], expected)
    both = np.exp(field_.curves(np.arange(n))) + np.exp(field_.curves(-np.arange(n))) * (np.arange(n) > 0)
    assert np.allclose(curve_area(curves), (np.cumsum(both, -1) / both.sum(-1, keepdims=True)).mean(-1))


def earlier(curves: np.ndarray) -> Curves:
    return Curves(curves, curves[:, :0])


def test_the_area_is_one_for_the_nearest_key_alone_and_half_if_all_count_alike():
    near = np.zeros((1, 1000))
    near[0, 0] = 50.0
    assert curve_area(earlier(near))[0] == pytest.approx(1.0)
    assert curve_area(earlier(np.zeros((1, 1000))))[0] == pytest.approx(0.5, abs=1e-3)


def measured(masses: dict[int, float], sink: float) -> HeadReach:
    """Sums of eight documents of four queries each; masses by first distance of their bin."""
    starts = bin_starts(WINDOW)
    sums = np.zeros((8, len(REACH_COUNTS) + len(starts)))
    sums[:, 0], sums[:, 1], sums[:, 2], sums[:, 3] = 4, 4 * sink, -8.0, 4
    for start, mass in masses.items():
        sums[:, len(REACH_COUNTS) + starts.tolist().index(start)] = 4 * mass
    positions = np.tile(query_positions(WINDOW, 4, 4), 8)
    return HeadReach(sums, starts, positions, WINDOW - 1 - positions, np.repeat(np.arange(8), 4), 4)


def test_the_table_says_what_was_measured():
    head = planted(0, 0.5, 0.5)._replace(reach=measured({0: 0.4, 16: 0.2, 64: 0.1, 128: 0.1}, 0.2))
    table = tables_of(head, "reach")["reach"].set_index("w")
    assert table.index.tolist() == cut_windows(WINDOW).tolist() == [64, 128]
    assert table.loc[64, "mass_beyond"] == pytest.approx(0.2)
    assert table.loc[64, "share_beyond"] == pytest.approx(0.25)
    assert table.loc[128, "mass_beyond"] == pytest.approx(0.1)
    assert table.loc[64, "mass_sink"] == pytest.approx(0.2)
    assert 128 < table.loc[64, "reach90"] < 181, "90% of 0.8 lies a fifth into the last bin with weight"
    scores = tables_of(head, "scores")["scores"].iloc[0]
    assert scores["sink_gap"] == pytest.approx(-2.0)


def test_without_sums_reach_is_predicted_at_the_sampled_queries():
    head = planted(0, 0.5, 0.5)
    table = tables_of(head, "reach")["reach"]
    assert table["mass_beyond"].isna().all()
    assert table["predicted_beyond"].between(0, 1).all()
    assert "reach" not in tables_of(head._replace(rotary=None), "reach")


def test_a_sliding_window_bounds_what_is_predicted():
    head = planted(0, 0.5, 0.5)._replace(sliding_window=64)
    assert np.allclose(tables_of(head, "reach")["reach"]["predicted_beyond"], 0.0)


def test_a_layer_without_rotary_is_flat_and_a_far_head_stays_within_its_window():
    head = planted(0, 0.5, 0.5)._replace(rotary=None, nope=True, reach=measured({181: 0.8}, 0.2))
    table = tables_of(head, "reach")["reach"].set_index("w")
    assert table.loc[64, "curve_area"] == pytest.approx(0.5, abs=0.01)
    assert 0 < table.loc[128, "predicted_beyond"] < table.loc[64, "predicted_beyond"] < 1
    assert table.loc[64, "reach90"] <= WINDOW


@pytest.mark.parametrize(
    ("sliding_window", "both", "furthest"), [(None, False, 221), (200, False, 200), (None, True, 224)]
)
def test_reach90_and_its_interval_end_at_the_furthest_key_that_a_followed_query_sees(sliding_window, both, furthest):
    """The last followed query of 256 tokens is at 224, the first key that is no sink at 4, the last key at 255."""
    reach, far = measured({0: 0.01, 181: 0.79}, 0.2), len(REACH_COUNTS) + bin_starts(WINDOW).tolist().index(181)
    reach.sums[:3, far], reach.sums[:3, len(REACH_COUNTS)] = 0.01, 10.0
    head = planted(0, 0.5, 0.5)._replace(reach=reach, sliding_window=sliding_window, both=both)
    row = tables_of(head, "reach")["reach"].iloc[0]
    assert row["reach90_low"] <= row["reach90"] <= row["reach90_high"] == furthest
    all_far = replace(reach, sums=np.where(np.arange(reach.sums.shape[1]) >= len(REACH_COUNTS), 0.0, reach.sums))
    all_far.sums[:, far] = 3.2
    row = tables_of(head._replace(reach=all_far), "reach")["reach"].iloc[0]
    assert row["reach90"] == pytest.approx(181 + 0.9 * (furthest - 181), abs=1e-9)
