import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope.core.linalg import (
    canonical_signs,
    eigh_descending,
    eigh_leading,
    householder,
    inverse,
    is_positive,
    off_axis,
    off_axis_matrix,
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
    a, v = unit(rng.standard_normal((4, 5))), rng.standard_normal((4, 5))
    m = rng.standard_normal((4, 5, 5))
    m = m + m.swapaxes(-1, -2)
    projector = np.eye(5) - a[..., :, None] * a[..., None, :]
    np.testing.assert_allclose(np.einsum("bij,bj->bi", projector, v), off_axis(v, a), atol=1e-15)
    np.testing.assert_allclose(off_axis_matrix(m, a), projector @ m @ projector, atol=1e-14)
    assert not unit(np.zeros(3)).any()


def test_the_inverse_of_a_positive_matrix_and_the_refusal_of_another():
    x = np.random.default_rng(3).standard_normal((4, 9, 6))
    m = x.swapaxes(-1, -2) @ x
    np.testing.assert_allclose(inverse(m) @ m, np.broadcast_to(np.eye(6), m.shape), atol=1e-9)
    assert all(is_positive(one) for one in m)
    assert not is_positive(m[0] - 1.01 * eigh_descending(m[0]).values[-1] * np.eye(6))
    with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
        inverse(-m)


def test_leading_eigenpairs_are_those_of_all():
    x = np.random.default_rng(4).standard_normal((2, 60, 40))
    m = x.swapaxes(-1, -2) @ x
    leading, whole = eigh_leading(m, 5), eigh_descending(m)
    np.testing.assert_allclose(leading.values, whole.values[:, :5])
    np.testing.assert_allclose(np.abs((leading.axes * whole.axes[:, :5]).sum(-1)), 1.0)
