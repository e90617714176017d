import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkscope.core.linalg import (
    canonical_signs,
    eigh_descending,
    eigh_near,
    householder,
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


def spectrum(kind: str, d: int) -> np.ndarray:
    return {
        "steep": np.geomspace(30, 0.01, d),
        "like a head": np.concatenate([[34, 4.9, 4.9, 3.5, 3.5], np.geomspace(2.7, 0.05, d - 5)]),
        "flat": np.ones(d),
        "low rank": np.concatenate([[5.0, 3.0], np.zeros(d - 2)]),
    }[kind]


@pytest.mark.parametrize("kind", ["steep", "like a head", "flat", "low rank"])
@pytest.mark.parametrize(("d", "k"), [(64, 10), (128, 10), (64, 1), (5, 5), (20, 10)])
def test_eigenpairs_of_a_nearby_matrix_equal_a_full_decomposition(kind, d, k):
    """Nearby as delete-one covariances are: the same law, an eighth of the rows left out."""
    if kind in ("like a head", "low rank") and d < 10:
        pytest.skip("needs more dimensions than that")
    rng = np.random.default_rng(d + k)
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
    parts = [(rng.standard_normal((500, d)) * np.sqrt(spectrum(kind, d))) @ turn for _ in range(8)]
    scatters = np.stack([x.T @ x for x in parts])
    without = (scatters.sum(0) - scatters) / 3500
    values, axes = eigh_near(without, eigh_descending(scatters.sum(0) / 4000), k)
    full_values, full_axes = eigh_descending(without)
    np.testing.assert_allclose(values, full_values[:, :k], rtol=1e-4, atol=1e-12)
    residual = without @ axes.swapaxes(-1, -2) - axes.swapaxes(-1, -2) * values[:, None]
    assert np.abs(residual).max() < 0.02 * values.max()
    np.testing.assert_allclose(axes @ axes.swapaxes(-1, -2), np.broadcast_to(np.eye(k), (8, k, k)), atol=1e-10)
    assert (np.abs((axes[:, 0] * full_axes[:, 0]).sum(-1)) > 0.999).all() or kind == "flat"


def test_a_matrix_that_is_not_near_is_decomposed_in_full():
    rng = np.random.default_rng(0)
    m = rng.standard_normal((3, 60, 60))
    m = m @ m.swapaxes(-1, -2)
    values, _ = eigh_near(m, eigh_descending(np.diag(np.arange(1.0, 61))), 4)
    np.testing.assert_allclose(values, eigh_descending(m)[0][:, :4], rtol=1e-12)


def test_variance_that_appears_where_none_was_is_not_missed():
    """Along an axis of eigenvalue 0, uncoupled to all others: nothing in the leading block tells of it."""
    known = np.diag(np.concatenate([np.linspace(10, 5, 40), np.zeros(24)]))
    axis = eigh_descending(known).axes[-1]
    values, axes = eigh_near((known + 50 * np.outer(axis, axis))[None], eigh_descending(known), 1)
    assert values[0, 0] == pytest.approx(50)
    assert abs(axes[0, 0] @ axis) == pytest.approx(1)


def test_near_ties_at_the_last_wanted_eigenpair_keep_their_order():
    """The 10th and the 11th eigenvalue differ by a thousandth; their neighbours couple to what lies beyond."""
    values = np.concatenate([np.linspace(3, 2, 9), [1.9469, 1.9451], np.linspace(1.8, 0.3, 53)])
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = rng.standard_normal((8, 64, 64)) * 0.01
        near = np.diag(values) + noise + noise.swapaxes(-1, -2)
        found = eigh_near(near, eigh_descending(np.diag(values)), 10).values
        np.testing.assert_allclose(found, eigh_descending(near).values[:, :10], rtol=2e-5)
