import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope.core.linalg import (
    canonical_signs,
    complement_projector,
    eigh_descending,
    householder,
    off_axis,
    unit,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(0, 10_000), st.sampled_from([-1.0, 1.0, 0.0]))
def test_householder_is_orthogonal_and_starts_with_the_axis(d, seed, first):
    a = np.random.default_rng(seed).standard_normal((3, d))
    a[0, 0] = first * 1e-300
    a[1] = 0.0
    a[1, 0] = first or 1.0
    a = unit(a)
    h = householder(a)
    np.testing.assert_allclose(h @ h.swapaxes(-1, -2), np.broadcast_to(np.eye(d), h.shape), atol=1e-14)
    np.testing.assert_allclose(h[:, 0], a, atol=1e-14)
    np.testing.assert_allclose(h, h.swapaxes(-1, -2), atol=1e-15)


def test_eigenpairs_are_sorted_and_reconstruct():
    m = np.random.default_rng(0).standard_normal((4, 6, 6))
    m = m @ m.swapaxes(-1, -2)
    values, axes = eigh_descending(m)
    assert (np.diff(values) <= 0).all()
    np.testing.assert_allclose((axes.swapaxes(-1, -2) * values[:, None]) @ axes, m, atol=1e-12)


def test_rounding_never_gives_a_negative_variance():
    v = np.random.default_rng(1).standard_normal((1, 7))
    assert eigh_descending(v.T @ v)[0].min() >= 0


@pytest.mark.parametrize(
    ("r_q", "r_k", "sign"),
    [(0.5, -0.9, 1), (-0.5, 0.9, -1), (0.049, -0.3, -1), (-0.049, 0.3, 1), (-0.05, 0.3, -1), (0.0, 0.0, 1)],
)
def test_signs_follow_r_q_unless_it_is_too_weak(r_q, r_k, sign):
    assert canonical_signs(np.array([r_q]), np.array([r_k]))[0] == sign


def test_projectors_remove_the_axis():
    rng = np.random.default_rng(2)
    a, v = unit(rng.standard_normal(5)), rng.standard_normal(5)
    np.testing.assert_allclose(complement_projector(a) @ v, off_axis(v, a), atol=1e-15)
    assert abs(off_axis(v, a) @ a) < 1e-15
    assert not unit(np.zeros(3)).any()
