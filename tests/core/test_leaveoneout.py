import numpy as np
import pytest

from qkscope.core.headmoments import DELETE_ONE
from qkscope.core.leaveoneout import LeaveOneOut, PooledLeaveOneOut
from qkscope.core.moments import Moments
from qkscope.core.momentsbatch import MomentsBatch


def by_group(seed: int, sizes: list[int], scale: list[float] | None = None, d: int = 5) -> Moments:
    """Moments of groups of random rows, of these sizes and spreads, far from zero."""
    rng = np.random.default_rng(seed)
    spreads = scale or [1.0] * len(sizes)
    return Moments.stack(
        Moments.from_rows(rng.standard_normal((n, d)) * spread + rng.standard_normal(d) + 30, rng.permutation(n) + 100)
        for n, spread in zip(sizes, spreads, strict=True)
    )


UNLIKE = {
    "alike": ([40] * 8, None),
    "unequal": ([3, 5, 200, 7, 9, 2, 11, 30], None),
    "some empty": ([40, 0, 0, 40, 40, 40, 0, 40], None),
    "one is all": ([500, 0, 0, 0, 0, 0, 0, 0], None),
    "one is nearly all": ([4000, 2, 2, 2, 2, 2, 2, 2], None),
    "one spreads a million times as far": ([40] * 8, [1e6] + [1.0] * 7),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_moments_without_a_group_are_those_of_the_others_merged(kind):
    sizes, scale = UNLIKE[kind]
    groups = by_group(1, sizes, scale)
    found, exact = LeaveOneOut(groups, groups.total), groups.merged(DELETE_ONE)
    axes = np.random.default_rng(2).standard_normal((8, 3, 5))
    np.testing.assert_array_equal(found.n, exact.n)
    for name in ("mean_x", "mean_t", "cov_xt", "var_t", "total_variance"):
        spread = np.abs(getattr(exact, name)).max(axis=tuple(range(1, getattr(exact, name).ndim)), keepdims=True)
        np.testing.assert_allclose(
            getattr(found, name) / np.maximum(spread, 1e-9), getattr(exact, name) / np.maximum(spread, 1e-9), atol=1e-9
        )
    on, on_exact = found.project(axes), exact.project(axes)
    size = np.maximum(np.abs(on_exact.scatter).max((-2, -1), keepdims=True), 1e-9)
    np.testing.assert_allclose(on.scatter / size, on_exact.scatter / size, atol=1e-9)


def test_two_classes_together_are_merged_ones():
    q, k = by_group(3, [40, 30, 20, 50, 40, 30, 20, 10]), by_group(4, [10, 40, 30, 20, 50, 40, 30, 20])
    pooled = PooledLeaveOneOut(LeaveOneOut(q, q.total), LeaveOneOut(k, k.total))
    exact = q.merged(DELETE_ONE).merge(k.merged(DELETE_ONE))
    np.testing.assert_allclose(pooled.cov_xt, exact.cov_xt, atol=1e-9)
    np.testing.assert_allclose(pooled.total_variance, exact.total_variance)
    vectors = np.random.default_rng(5).standard_normal((8, 3, 5))
    np.testing.assert_allclose(pooled.times(vectors), exact.times(vectors), rtol=1e-9)


def test_a_batch_of_heads_is_what_stacking_them_gives():
    first, second = by_group(6, [20] * 8), by_group(7, [30] * 8)
    batch, stacked = MomentsBatch([first, second, second]), Moments.stack([first, second, second])
    vectors = np.random.default_rng(8).standard_normal((3, 8, 2, 5))
    for given in (vectors, vectors[:, :1], vectors[:1], vectors[0, 0]):
        np.testing.assert_allclose(batch.times(given), stacked.times(given))
    for name in ("n", "mean", "scatter", "diagonal", "scatter_xt", "cov_xt", "var_t", "total_variance"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(stacked, name))
    np.testing.assert_allclose(batch.total.scatter, stacked.total.scatter)
    np.testing.assert_allclose(batch.halves.mean, stacked.halves.mean)
    np.testing.assert_array_equal(batch[1:].scatter, stacked[1:].scatter)
    np.testing.assert_array_equal(batch[0].scatter, stacked[0].scatter)
