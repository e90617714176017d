import numpy as np
import pytest

from qkscope.core.eigenupdate import NEAR_BLOCK, Known, KnownAll, KnownTop, eigh_near
from qkscope.core.linalg import Eigen, eigh_descending, eigh_leading


def spectrum(kind: str, d: int) -> np.ndarray:
    return {
        "steep": np.geomspace(30, 0.01, d),
        "like a head": np.concatenate([[34, 4.9, 4.9, 3.5, 3.5], np.geomspace(2.7, 0.05, d - 5)]),
        "flat": np.ones(d),
        "low rank": np.concatenate([[5.0, 3.0], np.zeros(d - 2)]),
    }[kind]


def whole_of(matrix: np.ndarray, k: int) -> KnownAll:
    return KnownAll(eigh_descending(matrix), min(k + NEAR_BLOCK, len(matrix)))


def top_of(matrix: np.ndarray, known: int = 6) -> KnownTop:
    return KnownTop(matrix, eigh_leading(matrix, known))


def near(matrices: np.ndarray, known: Known, k: int, ceiling: float | None = None, rounds: int = 1) -> Eigen:
    """Call the update like the analyses, with one more axis for heads; without a ceiling, a factorisation decides."""
    most = np.full((1, len(matrices)), np.inf if ceiling is None else ceiling)
    found = eigh_near(lambda vectors: vectors @ matrices[None], _headed(known), k, most, rounds)
    return Eigen(found.values[0], found.axes[0])


def _headed(known: Known) -> Known:
    if isinstance(known, KnownAll):
        return KnownAll(Eigen(*(part[None] for part in known.all)), known.block)
    assert isinstance(known, KnownTop)
    return KnownTop(known.matrix[None], Eigen(*(part[None] for part in known.top)))


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("kind", ["steep", "like a head", "flat", "low rank"])
@pytest.mark.parametrize(("d", "k"), [(64, 10), (128, 10), (64, 1), (5, 5), (20, 10)])
def test_eigenpairs_of_a_nearby_matrix_equal_a_full_decomposition(kind, d, k, bounded):
    """A matrix as close as delete-one covariances are: the same law, an eighth of the rows left out."""
    if kind in ("like a head", "low rank") and d < 10:
        pytest.skip("needs more dimensions than that")
    rng = np.random.default_rng(d + k)
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
    parts = [(rng.standard_normal((500, d)) * np.sqrt(spectrum(kind, d))) @ turn for _ in range(8)]
    scatters = np.stack([x.T @ x for x in parts])
    without = (scatters.sum(0) - scatters) / 3500
    known = whole_of(scatters.sum(0) / 4000, k)
    values, axes = near(without, known, k, 8 / 7 * float(known.beyond) if bounded else None)
    full_values, full_axes = eigh_descending(without)
    np.testing.assert_allclose(values, full_values[:, :k], rtol=1e-4, atol=1e-12)
    residual = without @ axes.swapaxes(-1, -2) - axes.swapaxes(-1, -2) * values[:, None]
    assert np.abs(residual).max() < 0.02 * values.max()
    np.testing.assert_allclose(axes @ axes.swapaxes(-1, -2), np.broadcast_to(np.eye(k), (8, k, k)), atol=1e-3)
    assert (np.abs((axes[:, 0] * full_axes[:, 0]).sum(-1)) > 0.999).all() or kind == "flat"


def test_a_matrix_that_is_not_near_is_decomposed_in_full():
    rng = np.random.default_rng(0)
    m = rng.standard_normal((3, 60, 60))
    m = m @ m.swapaxes(-1, -2)
    values, _ = near(m, whole_of(np.diag(np.arange(1.0, 61)), 4), 4)
    np.testing.assert_allclose(values, eigh_descending(m)[0][:, :4], rtol=1e-12)


@pytest.mark.parametrize("all_known", [True, False])
def test_variance_that_appears_where_none_was_is_not_missed(all_known):
    """A change along an axis of eigenvalue 0, uncoupled to all others, does not show in the leading block."""
    known = np.diag(np.concatenate([np.linspace(10, 5, 40), np.zeros(24)]))
    axis = eigh_descending(known).axes[-1]
    matrices = (known + 50 * np.outer(axis, axis))[None]
    values, axes = near(matrices, whole_of(known, 1) if all_known else top_of(known), 1)
    assert values[0, 0] == pytest.approx(50)
    assert abs(axes[0, 0] @ axis) == pytest.approx(1)


def test_near_ties_at_the_last_wanted_eigenpair_keep_their_order():
    """The 10th and the 11th eigenvalue differ by a thousandth; their neighbours couple to what lies beyond."""
    values = np.concatenate([np.linspace(3, 2, 9), [1.9469, 1.9451], np.linspace(1.8, 0.3, 53)])
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = rng.standard_normal((8, 64, 64)) * 0.01
        matrices = np.diag(values) + noise + noise.swapaxes(-1, -2)
        found = near(matrices, whole_of(np.diag(values), 10), 10).values
        np.testing.assert_allclose(found, eigh_descending(matrices).values[:, :10], rtol=2e-5)


@pytest.mark.parametrize("kind", ["steep", "like a head", "flat", "low rank"])
def test_the_first_eigenvector_from_a_few_known_ones_equals_a_full_decomposition(kind):
    rng = np.random.default_rng(7)
    turn = np.linalg.qr(rng.standard_normal((64, 64)))[0]
    parts = [(rng.standard_normal((500, 64)) * np.sqrt(spectrum(kind, 64))) @ turn for _ in range(8)]
    scatters = np.stack([x.T @ x for x in parts])
    without, known = (scatters.sum(0) - scatters) / 3500, top_of(scatters.sum(0) / 4000)
    full = eigh_descending(without)
    for ceiling in (8 / 7 * float(known.beyond), None):
        found = near(without, known, 1, ceiling, rounds=2)
        np.testing.assert_allclose(found.values, full.values[:, :1], rtol=1e-6)
        if kind != "flat":  # where the first two are as good as equal, either may be taken for the other
            assert (np.abs((found.axes[:, 0] * full.axes[:, 0]).sum(-1)) > 1 - 1e-6).all()


def test_a_ceiling_that_holds_spares_the_factorisation(monkeypatch):
    monkeypatch.setattr("qkscope.core.eigenupdate._none_missed", lambda *_: pytest.fail("was asked"))
    known = np.diag(np.geomspace(10, 0.1, 40))
    values, _ = near((1.01 * known)[None], whole_of(known, 3), 3, ceiling=0.0)
    np.testing.assert_allclose(values[0], 1.01 * np.diag(known)[:3])


@pytest.mark.parametrize("k", [1, 10])
def test_an_axis_of_the_block_that_grows_by_what_lies_beyond_is_not_missed(k):
    """A change below the kept part of the block, coupled to an axis outside of the block: both look small alone."""
    tops = np.linspace(1.02, 0.985, k + NEAR_BLOCK - 1)
    known = np.diag(np.concatenate([tops, [0.6, 0.5], np.linspace(0.5, 0.05, 20)]))
    at = len(tops)
    grown = known.copy()
    grown[at, at + 1] = grown[at + 1, at] = 0.54
    assert eigh_descending(grown).values[0] > 1.08
    values, axes = near(grown[None], whole_of(known, k), k, ceiling=0.6)
    full = eigh_descending(grown)
    np.testing.assert_allclose(values[0], full.values[:k], rtol=1e-4)
    assert abs(axes[0, 0] @ full.axes[0]) > 1 - 1e-4
