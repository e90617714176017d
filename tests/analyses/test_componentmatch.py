"""Components followed from checkpoint to checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ortho_group

from qkscope.figures.componenttracks import follow, match


def test_swapped_components_are_followed_by_direction_not_by_index():
    axes = ortho_group.rvs(8, random_state=0)[:4]
    steps = follow([axes, axes[[1, 0, 2, 3]], axes[[1, 2, 0, 3]]], [np.array([4.0, 3, 2, 1])] * 3)
    assert steps[1].pc.tolist() == [1, 0, 2, 3]
    assert steps[2].pc.tolist() == [2, 0, 1, 3]
    np.testing.assert_allclose(steps[2].cos, 1)
    np.testing.assert_allclose(steps[2].angle, 0, atol=1e-4)


def test_the_sign_of_an_axis_does_not_matter():
    axes = ortho_group.rvs(6, random_state=1)
    found = match(axes, -axes[::-1], np.geomspace(6, 1, 6))
    assert found.pc.tolist() == [5, 4, 3, 2, 1, 0]


def test_turning_within_a_degenerate_pair_is_no_turn():
    """Two components of equal variance: their axes are arbitrary, their plane is not."""
    axes = np.eye(6)[:3]
    turned = axes.copy()
    turned[1:] = [[0, 0.8, 0.6, 0, 0, 0], [0, -0.6, 0.8, 0, 0, 0]]
    equal = match(axes, turned, np.array([5.0, 2.0, 1.99]))
    assert equal.cos[1] == pytest.approx(0.8)
    assert equal.angle[1] == pytest.approx(0, abs=1e-4)
    apart = match(axes, turned, np.array([5.0, 2.0, 1.0]))
    assert apart.angle[1] == pytest.approx(np.degrees(np.arccos(0.8)))


def test_fewer_components_leave_some_without_a_successor():
    axes = ortho_group.rvs(6, random_state=2)
    found = match(axes[:4], axes[:2], np.array([2.0, 1.0]))
    assert sorted(found.pc.tolist()) == [-1, -1, 0, 1]
    steps = follow([axes[:4], axes[:2], axes[:4]], [np.ones(4), np.array([2.0, 1.0]), np.geomspace(4, 1, 4)])
    assert steps[2].pc[steps[1].pc < 0].tolist() == [-1, -1]
