import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from qkscope.core import chunksums
from qkscope.core.moments import Moments


def direct(x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and centred scatter in extended precision, the plain way."""
    z = np.concatenate([x, t[:, None]], axis=1).astype(np.longdouble)
    centred = z - z.mean(0)
    return z.mean(0).astype(float), (centred.T @ centred).astype(float)


def assert_same(m: Moments, mean: np.ndarray, scatter: np.ndarray, rtol: float = 1e-10) -> None:
    """Relative to the scale of each pair of coordinates, since an off-diagonal entry may vanish."""
    spread = np.sqrt(np.diag(scatter))
    scale = np.maximum(np.outer(spread, spread), np.finfo(float).tiny)
    assert np.abs((m.scatter - scatter) / scale).max(initial=0) < rtol
    np.testing.assert_allclose(m.mean, mean, rtol=rtol, atol=rtol * np.abs(mean).max(initial=0))


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    n = draw(st.integers(1, 60))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    order = draw(st.permutations(range(len(cuts) + 1)))
    return n, cuts, list(order)


@settings(max_examples=150, deadline=None)
@given(splits(), st.sampled_from([0.0, 1.0, 1000.0]), st.sampled_from([0, 131_000]), st.integers(0, 10_000))
def test_any_split_and_merge_order_gives_the_same_moments(split, offset, first, seed):
    n, cuts, order = split
    rng = np.random.default_rng(seed)
    x = offset + rng.standard_normal((n, 5))
    t = first + rng.integers(0, 72, n)
    pieces = np.split(np.arange(n), cuts)
    parts = [Moments.from_rows(x[p], t[p]) for p in (pieces[i] for i in order)]
    merged = Moments.zeros(5)
    for part in parts:
        merged = merged + part
    mean, scatter = direct(x, t)
    assert merged.n == n
    assert_same(merged, mean, scatter)
    assert_same(Moments.stack(parts).merged(), mean, scatter)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_input_precision_is_widened_before_it_is_summed(dtype):
    x = (1000 + np.random.default_rng(0).standard_normal((4000, 3))).astype(dtype)
    t = np.arange(4000) + 127_000
    assert_same(Moments.from_rows(x, t), *direct(x.astype(float), t))


@pytest.mark.parametrize("mean", [0.0, 1.0, 1000.0])
def test_single_precision_gives_squares_as_exact_as_itself_and_drifts_beyond(mean):
    rng = np.random.default_rng(0)
    x = (mean + rng.standard_normal((4000, 6)) @ rng.standard_normal((6, 6)) * np.geomspace(1e3, 1e-2, 6)).astype("f4")
    t = np.sort(rng.integers(0, 127_000, 4000))
    found, (mean_z, scatter) = Moments.from_rows(x, t), direct(x.astype(float), t)
    spread = np.sqrt(np.diag(scatter))
    np.testing.assert_allclose((found.mean - mean_z) / (spread / np.sqrt(4000)), 0.0, atol=1e-6)
    np.testing.assert_allclose(found.scatter / np.outer(spread, spread), scatter / np.outer(spread, spread), atol=2e-6)
    np.testing.assert_allclose(found.scatter[-1] / spread / spread[-1], scatter[-1] / spread / spread[-1], atol=2e-8)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_single_precision_that_squares_would_leave_is_widened(scale):
    x = (np.random.default_rng(0).standard_normal((3000, 4)) * np.float32(scale)).astype("f4")
    t = np.arange(3000)
    found, (_, scatter) = Moments.from_rows(x, t), direct(x.astype(float), t)
    spread = np.sqrt(np.diag(scatter))
    np.testing.assert_allclose(found.scatter / np.outer(spread, spread), scatter / np.outer(spread, spread), atol=2e-6)


def test_a_drift_of_many_standard_deviations_is_exact_in_single_precision():
    """Rows far from the shift, which is the mean of the first ones."""
    rng = np.random.default_rng(0)
    t = np.arange(20_000)
    x = (rng.standard_normal((20_000, 3)) + 0.005 * t[:, None] * [1, -1, 0]).astype("f4")
    found, (_, scatter) = Moments.from_rows(x, t), direct(x.astype(float), t)
    spread = np.sqrt(np.diag(scatter))
    np.testing.assert_allclose(found.scatter / np.outer(spread, spread), scatter / np.outer(spread, spread), atol=2e-6)
    exact = Moments.from_rows(x.astype(float), t)
    np.testing.assert_allclose(found.corr_along(np.eye(3)), exact.corr_along(np.eye(3)), atol=1e-7)


def test_rows_far_from_the_first_ones_are_as_exact_in_single_precision():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 20))
    x[:1024] += 1e4
    x = x.astype("f4")
    found, exact = (Moments.from_rows(x[1024:].astype(kind), np.arange(2976)) for kind in ("f4", "f8"))
    whole, exactly = (Moments.from_rows(x.astype(kind), np.arange(4000)) for kind in ("f4", "f8"))
    np.testing.assert_allclose(found.scatter, exact.scatter, rtol=1e-4, atol=1e-2)
    values, truth = (np.linalg.eigvalsh(m.cov_x) for m in (whole, exactly))
    np.testing.assert_allclose(values[:5], truth[:5], rtol=1e-3)


def test_rows_that_are_all_the_same_do_not_drift_in_single_precision():
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = np.tile((3 * rng.standard_normal(6)).astype("f4"), (3000, 1))
        found = Moments.from_rows(x, np.sort(rng.integers(0, 100_000, 3000)))
        assert not found.scatter[:-1].any()


def test_symmetry_about_the_middle_is_no_drift_in_single_precision_either():
    x = np.random.default_rng(0).standard_normal((700, 5)).astype("f4") + 3
    there_and_back = np.concatenate([x, x[::-1]])
    moments = Moments.from_rows(there_and_back, np.arange(1400))
    assert np.abs(moments.corr_along(np.eye(5))).max() < 1e-12


def test_chunks_do_not_matter(monkeypatch):
    rng = np.random.default_rng(1)
    x, t = rng.standard_normal((500, 4)), rng.integers(0, 9999, 500)
    whole = Moments.from_rows(x, t)
    monkeypatch.setattr(chunksums, "CHUNK", 37)
    assert_same(Moments.from_rows(x, t), whole.mean, whole.scatter)


def test_batched_equals_one_by_one():
    rng = np.random.default_rng(2)
    x, t = rng.standard_normal((3, 8, 40, 5)), rng.integers(0, 99, (3, 8, 40))
    batch = Moments.from_rows(x, t)
    without = batch.merged(1 - np.eye(8))
    assert batch.n.shape == (3, 8)
    assert without.n.shape == (3, 8)
    for h in range(3):
        for g in range(8):
            assert_same(batch[h, g], *direct(x[h, g], t[h, g]))
            rest = [i for i in range(8) if i != g]
            assert_same(without[h, g], *direct(x[h, rest].reshape(-1, 5), t[h, rest].ravel()))
    assert_same(batch.merged()[1], *direct(x[1].reshape(-1, 5), t[1].ravel()))


def test_empty_parts_change_nothing():
    x, t = 1e6 + np.random.default_rng(3).standard_normal((30, 2)), np.arange(30)
    m = Moments.from_rows(x, t)
    parts = Moments.stack([Moments.zeros(2), m, Moments.zeros(2)])
    assert_same(parts.merged(), m.mean, m.scatter)
    assert_same(Moments.zeros(2) + m, m.mean, m.scatter)
    gone = parts.merged(1 - np.eye(3))[1]
    assert gone.n == 0
    assert not gone.mean.any()
    assert not gone.scatter.any()


def test_directions_agree_with_numpy():
    rng = np.random.default_rng(4)
    t = np.sort(rng.integers(0, 131_072, 300))
    x = rng.standard_normal((300, 6)) + np.outer(t, rng.standard_normal(6)) * 1e-5
    axes = np.linalg.qr(rng.standard_normal((6, 6)))[0][:3]
    m, on = Moments.from_rows(x, t), x @ axes.T
    np.testing.assert_allclose(m.mean_along(axes), on.mean(0), rtol=1e-10)
    np.testing.assert_allclose(m.var_along(axes), on.var(0), rtol=1e-10)
    np.testing.assert_allclose(m.slope_along(axes), [np.polyfit(t, c, 1)[0] for c in on.T], rtol=1e-7)
    np.testing.assert_allclose(m.corr_along(axes), [np.corrcoef(c, t)[0, 1] for c in on.T], atol=1e-12)
    projected = m.project(axes)
    assert_same(projected, *direct(on, t))
    assert_same(m.subset([1, 4]), *direct(x[:, [1, 4]], t))
    assert m.subset([]).d == 0
    np.testing.assert_allclose(m.subset([]).var_t, t.var())


@pytest.mark.parametrize("n", [0, 1, 2])
def test_too_few_rows_give_zeros_not_nan(n):
    m = Moments.from_rows(np.ones((n, 3)), np.full(n, 7))
    axes = np.eye(3)
    for values in (m.cov_x, m.cov_xt, m.corr_along(axes), m.slope_along(axes)):
        assert not values.any()


def test_constant_direction_has_no_correlation():
    t = np.arange(50.0)
    m = Moments.from_rows(np.column_stack([t, np.full(50, 3.0)]), t)
    np.testing.assert_allclose(m.corr_along(np.eye(2)), [1.0, 0.0])


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(4,\)"):
        Moments.from_rows(np.zeros((3, 2)), np.zeros(4))
    with pytest.raises(ValueError, match="2 and 3"):
        Moments.zeros(2).merge(Moments.zeros(3))


def test_shape_annotations_are_checked_in_tests():
    with pytest.raises(TypeCheckError):
        Moments.zeros(2).mean_along("not an array")  # type: ignore[arg-type]
