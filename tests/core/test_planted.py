import numpy as np
import pytest

from qkscope.core.headmoments import bucket_moments, cell_means, cross_moments, group_moments
from qkscope.core.linalg import unit
from qkscope.core.moments import Moments
from qkscope.core.planted import Ring, plant
from qkscope.core.rows import Rows


def test_rows_follow_the_law_they_were_drawn_from():
    head = plant(12, n=400_000, documents=100, window=5000, rings=[Ring(0.01, 2.0, 1.0, 0.3, 1.0)], seed=3)
    for rows, law in ((head.q, head.truth.q), (head.k, head.truth.k)):
        drawn = Moments.from_rows(rows.x, rows.position)
        np.testing.assert_allclose(drawn.mean_x, law.mean_x, atol=0.02)
        np.testing.assert_allclose(drawn.cov_x, law.cov_x, atol=0.06)
        np.testing.assert_allclose(drawn.cov_xt, law.cov_xt, atol=0.01 * np.abs(law.cov_xt).max())
        np.testing.assert_allclose(drawn.var_t, law.var_t, rtol=0.01)


def test_what_was_asked_for_is_what_is_planted():
    rng = np.random.default_rng(0)
    a = unit(rng.standard_normal(6))
    b = unit(rng.standard_normal(6))
    b = unit(b - (a @ b) * a)
    truth = plant(6, a=a, b=b, mu_q=(2.0, 3.0), mu_k=(-1.0, -4.0), alpha_q=1e-3, alpha_k=-2e-3).truth
    axes = np.stack([a, b])
    np.testing.assert_allclose(truth.a, a, atol=1e-12)
    np.testing.assert_allclose(truth.q.mean_along(axes), [2, 3], atol=1e-12)
    np.testing.assert_allclose(truth.k.mean_along(axes), [-1, -4], atol=1e-12)
    np.testing.assert_allclose(truth.q.slope_along(axes), [1e-3, 0], atol=1e-15)
    np.testing.assert_allclose(truth.k.slope_along(axes), [-2e-3, 0], atol=1e-15)
    np.testing.assert_allclose(plant(6, b=b).truth.b, b, atol=1e-12)


def test_seed_documents_and_window_are_honoured():
    one, same, other = (plant(8, n=100, documents=10, window=64, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(one.q.x, same.q.x)
    assert (one.q.x != other.q.x).any()
    assert sorted(set(one.k.example_id)) == list(range(10))
    assert one.k.position.max() < 64
    tokens = set(zip(one.q.example_id, one.q.position, strict=True))
    assert len(tokens) == 100


def test_impossible_heads_are_refused():
    with pytest.raises(ValueError, match="d of at least 6"):
        plant(4, rings=[Ring(0.1, 1.0, 1.0)] * 2)
    with pytest.raises(ValueError, match="orthogonal"):
        plant(2, a=np.array([1.0, 0.0]), b=np.array([1.0, 1.0]))
    with pytest.raises(ValueError, match="at most 20 rows"):
        plant(4, n=21, documents=2, window=10)


def test_groups_and_buckets_partition_the_rows():
    k = plant(5, n=999, documents=13, window=777).k
    groups, cells = group_moments(k), cell_means(k, 777)
    buckets = cells.merged()
    whole = Moments.from_rows(k.x, k.position)
    np.testing.assert_allclose(groups.merged().scatter, whole.scatter, rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(bucket_moments(k, 777).merged().scatter, whole.scatter, rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(bucket_moments(k, 777).mean_x, buckets.mean_x, atol=1e-12)
    np.testing.assert_array_equal(cells.n.sum(1), groups.n)
    assert buckets.n.sum() == 999
    np.testing.assert_allclose((buckets.n[:, None] * buckets.mean_x).sum(0) / 999, whole.mean_x, atol=1e-12)
    edges = np.arange(17) * 49  # ⌈777 / 16⌉
    assert ((buckets.mean_t >= edges[:-1]) & (buckets.mean_t <= edges[1:])).all()


def test_cross_moments_use_the_tokens_both_have():
    rng = np.random.default_rng(0)
    q = Rows(rng.standard_normal((6, 2)), np.array([0, 1, 2, 3, 4, 5]), np.zeros(6, dtype=int))
    k = Rows(rng.standard_normal((4, 2)), np.array([5, 3, 1, 9]), np.zeros(4, dtype=int))
    cross = cross_moments(q, k).merged()
    joint = np.column_stack([q.x[[1, 3, 5]], k.x[[2, 1, 0]]])
    assert cross.n == 3
    np.testing.assert_allclose(cross.cov_x, np.cov(joint.T, bias=True), atol=1e-12)
