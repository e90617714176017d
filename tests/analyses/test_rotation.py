import numpy as np
import pandas as pd
import pytest
from scipy.stats import linregress, pearsonr

from qkscope.analyses.options import RotationOptions
from qkscope.analyses.rotationmodel import (
    difference_moment,
    has_drift,
    leftovers,
    paired_difference_moment,
    rotation_model,
)
from qkscope.core.headmoments import HeadMoments, cross_moments
from qkscope.core.moments import Moments
from qkscope.core.planted import Ring, plant
from qkscope.core.rows import Rows
from tests.helpers import heads_of, moments_of_rows, one_head, tables_of

INDEX_NAMES = {"model", "family", "layer", "head", "k_head", "n_q", "n_k", "nope", "sliding_window"}
FROM_VECTORS = {
    "bias_causal",
    "bias_causal_window",
    "bias_causal_by_query",
    "omega",
    "omega_r_squared",
    "omega_at_edge",
    "null_r95",
}
"""These have tests of their own."""
HELD_OUT = {"r_q_heldout", "r_k_heldout"}
"""These are computed otherwise; test_heldout.py has them."""


def head(seed: int = 0, d: int = 20, **options: object):
    settings = {"n": 1200, "documents": 16, "sigma": np.geomspace(1.5, 0.3, d), "rings": [Ring(0.03, 1.0, 1.0)]}
    return plant(d, seed=seed, **(settings | options))  # type: ignore[arg-type]


def totals(q: Rows, k: Rows) -> tuple[Moments, Moments]:
    return Moments.from_rows(q.x, q.position), Moments.from_rows(k.x, k.position)


def direct(q: Rows, k: Rows, window: int) -> dict[str, float]:
    """Every column of the table from the vectors themselves."""
    x, t = np.concatenate([q.x, k.x]), np.concatenate([q.position, k.position])
    c = ((x - x.mean(0)) * (t - t.mean())[:, None]).mean(0)
    a = c / np.linalg.norm(c)
    apart = q.x.mean(0) - k.x.mean(0)
    c_delta = np.cov(q.x.T, bias=True) + np.cov(k.x.T, bias=True) + np.outer(apart, apart)
    projector = np.eye(len(a)) - np.outer(a, a)
    values, vectors = np.linalg.eigh(projector @ c_delta @ projector)
    b = vectors[:, -1] * np.sign(vectors[:, -1] @ apart)
    on_q, on_k = linregress(q.position, q.x @ a), linregress(k.position, k.x @ a)
    total = x.var(0).sum()
    c_q, c_k = (((r.x - r.x.mean(0)) * (r.position - r.position.mean())[:, None]).mean(0) for r in (q, k))
    rest_q, rest_k = projector @ c_q, projector @ c_k
    bias_full = q.x.mean(0) @ c_k / k.position.var()
    off = projector @ apart
    bucket = k.position // -(-window // 16)
    means = pd.DataFrame({"bucket": bucket, "a": k.x @ a, "t": k.position}).groupby("bucket").agg(["mean", "size"])
    weighted = np.cov(means["a"]["mean"], means["t"]["mean"], fweights=means["a"]["size"])
    mu = {
        "mu_q_a": (q.x @ a).mean(),
        "mu_k_a": (k.x @ a).mean(),
        "mu_q_b": (q.x @ b).mean(),
        "mu_k_b": (k.x @ b).mean(),
    }
    bias = mu["mu_q_a"] * on_k.slope
    return mu | {
        "position_r": abs(pearsonr(x @ a, t)[0]),
        "r_q_a": on_q.rvalue,
        "r_k_a": on_k.rvalue,
        "alpha_q": on_q.slope,
        "alpha_k": on_k.slope,
        "separation_strength": values[-1] / np.trace(c_delta),
        "var_frac_a": (x @ a).var() / total,
        "var_frac_b": (x @ b).var() / total,
        "plane_var_fraction": ((x @ a).var() + (x @ b).var()) / total,
        "content_var_b": ((q.x @ b).var() + (k.x @ b).var()) / 2,
        "bias_strength": bias,
        "query_term": on_q.slope * mu["mu_k_a"],
        "interaction": on_q.slope * on_k.slope,
        "constant": mu["mu_q_a"] * mu["mu_k_a"] + mu["mu_q_b"] * mu["mu_k_b"],
        "bias_full": bias_full,
        "bias_window": bias * window,
        "alpha_k_window": on_k.slope * window,
        "bias_full_window": bias_full * window,
        "logit_bias_window": bias_full * window / np.sqrt(len(a)),
        "residual_r_q": abs(pearsonr(q.x @ rest_q, q.position)[0]),
        "residual_r_k": abs(pearsonr(k.x @ rest_k, k.position)[0]),
        "a_qk_cos": c_q @ c_k / np.linalg.norm(c_q) / np.linalg.norm(c_k),
        "b_centroid_cos": b @ off / np.linalg.norm(off),
        "linearity_r2": weighted[0, 1] ** 2 / (weighted[0, 0] * weighted[1, 1]),
    }


@pytest.mark.parametrize("seed", range(8))
def test_every_column_equals_a_direct_computation_on_the_vectors(seed):
    planted = head(seed, mu_q=(2.0 - seed, 3.0), alpha_k=(-1) ** seed * 2e-3)
    q, k = planted.q, planted.k
    row = tables_of(one_head(q, k), "rotation")["rotated"].iloc[0]
    expected = direct(q, k, 4096)
    named = [c for c in row.index if not c.endswith(("_se", "_low", "_high"))]
    assert (
        set(named) - set(expected)
        == {*INDEX_NAMES, *FROM_VECTORS, "window", "reach", "residual_pos_r", "flags"} | HELD_OUT
    )
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-8, abs=1e-11), name


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("d", [2, 3, 64, 128])
def test_no_direction_off_a_covaries_with_position(d, offset):
    rng = np.random.default_rng(d)
    q, k = (
        Rows(offset + rng.standard_normal((700, d)) * 3, np.sort(rng.integers(0, 131_072, 700)), np.arange(700) % 9)
        for _ in range(2)
    )
    for centering in ("pooled", "within"):
        row = tables_of(one_head(q, k, 131_072), "rotation", rotation=RotationOptions(centering))["rotated"]
        assert row["residual_pos_r"][0] < 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_planted_truth_is_recovered(seed):
    rng = np.random.default_rng(seed)
    sign = rng.choice([-1.0, 1.0])
    alpha_q, alpha_k = rng.uniform(2e-3, 4e-3, 2)
    planted = plant(
        64, n=20_000, documents=64, window=8192, mu_q=(2.0 * sign, 3.0), alpha_q=alpha_q, alpha_k=alpha_k, seed=seed
    )
    q, k = totals(planted.q, planted.k)
    axis = planted.truth.a[None]
    assert min(q.corr_along(axis)[0], k.corr_along(axis)[0]) >= 0.98
    model = rotation_model(q, k)
    assert np.degrees(np.arccos(model.a @ planted.truth.a)) < 1
    assert model.alpha_q == pytest.approx(alpha_q, rel=0.02)
    assert model.alpha_k == pytest.approx(alpha_k, rel=0.02)
    assert np.sign(model.bias_strength) == sign


def test_positive_bias_means_that_later_keys_score_higher():
    planted = head(1, mu_q=(3.0, 1.0), alpha_k=2e-3)
    late = planted.k.position > 2048
    scores = planted.q.x @ planted.k.x.T
    assert rotation_model(*totals(planted.q, planted.k)).bias_strength > 0
    assert scores[:, late].mean() > scores[:, ~late].mean()


def test_difference_moment_is_the_mean_over_all_pairs():
    planted = head(2, n=60)
    q, k = planted.q.x, planted.k.x
    delta = (q[:, None] - k[None]).reshape(-1, q.shape[1])
    exact = delta.T @ delta / len(delta)
    np.testing.assert_allclose(difference_moment(*totals(planted.q, planted.k)), exact, rtol=1e-12, atol=1e-12)


def test_pairing_by_token_uses_the_difference_at_the_same_token():
    planted = head(3, n=300)
    k = Rows(0.9 * planted.q.x + 0.1 * planted.k.x, planted.q.position, planted.q.example_id)
    delta = planted.q.x - k.x
    cross = cross_moments(planted.q, k)
    np.testing.assert_allclose(paired_difference_moment(cross.merged()), delta.T @ delta / len(delta), atol=1e-12)
    moments = one_head(planted.q, k)
    paired = HeadMoments(**{**vars(moments), "cross": cross})
    by_token = tables_of(paired, "rotation", rotation=RotationOptions(pairing="token"))["rotated"]
    independent = tables_of(paired, "rotation")["rotated"]
    assert by_token["separation_strength"][0] != pytest.approx(independent["separation_strength"][0], rel=0.01)
    with pytest.raises(ValueError, match="cross"):
        tables_of(moments, "rotation", rotation=RotationOptions(pairing="token"))


def test_pooled_centring_leaks_the_centroids_where_positions_differ_and_within_does_not():
    """Classes with different mean positions: the pool sees the centroid difference as drift."""
    rng = np.random.default_rng(0)
    far = np.array([9.0, 0.0, 0.0])
    early, late = np.arange(400), np.arange(400) + 600
    noise = rng.standard_normal((2, 400, 3)) * 0.1
    drift = np.array([0.0, 0.0, 1e-3])
    q = Rows(noise[0] + np.outer(late, drift) + far, late, np.arange(400) % 8)
    k = Rows(noise[1] + np.outer(early, drift) - far, early, np.arange(400) % 8)
    assert abs(rotation_model(*totals(q, k)).a[0]) > 0.99
    assert abs(rotation_model(*totals(q, k), centering="within").a[2]) > 0.99


def test_class_drifts_that_cancel_in_the_pool_show_in_the_residuals():
    rng = np.random.default_rng(1)
    t = np.arange(2000)
    opposed = np.outer(t - t.mean(), [0.0, 1e-3])
    shared = np.outer(t - t.mean(), [1e-4, 0.0])
    noise = 0.1 * rng.standard_normal((2, 2000, 2))
    q, k = (Rows(noise[i] + shared + s * opposed, t, t % 16) for i, s in ((0, 1), (1, -1)))
    moments = moments_of_rows(q, k, 2000)
    model = rotation_model(moments.total_q, moments.total_k)
    left = leftovers(moments.total_q, moments.total_k, moments.k_buckets, model)
    assert left.residual_pos_r < 1e-12
    assert left.residual_r_q > 0.9
    assert left.a_qk_cos < -0.9


def test_a_head_without_drift_is_recognised_not_divided_by_zero():
    x = np.array([[1.0, 2.0], [-1.0, 0.5]] * 10)
    t = np.repeat(np.arange(10), 2)
    still = Rows(x, t, np.arange(20) % 8)
    moving = Rows(x + t[:, None], t, np.arange(20) % 8)
    assert not has_drift(*totals(still, still))
    assert has_drift(*totals(moving, moving))
    assert not has_drift(*totals(still, still), centering="within")


def test_data_without_full_rank_keep_the_axes_at_a_right_angle():
    t = np.arange(60.0)
    line = Rows(np.outer(t, np.ones(5)), t.astype(int), np.arange(60) % 16)

    def point(value: float) -> Rows:
        x = np.full((60, 5), value)
        x[:, 0] += t * 1e-3
        return Rows(x, t.astype(int), np.arange(60) % 16)

    point_q, point_k = point(1.0), point(-1.0)
    for q, k in ((line, line), (point_q, point_k)):
        row = tables_of(one_head(q, k), "rotation")["rotated"].iloc[0]
        assert row["plane_var_fraction"] <= 1 + 1e-9
        assert row["residual_pos_r"] < 1e-12


def test_orthogonal_rotation_changes_no_column():
    heads = [head(s, rings=[]) for s in range(4)]
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((20, 20)))[0]
    turned = [one_head(*(Rows(r.x @ turn, r.position, r.example_id) for r in (h.q, h.k))) for h in heads]
    for options in (RotationOptions(), RotationOptions(centering="within")):
        before = tables_of(heads_of(*heads), "rotation", rotation=options)["rotated"]
        after = tables_of(turned, "rotation", rotation=options)["rotated"]
        pd.testing.assert_frame_equal(before, after, rtol=1e-8, atol=1e-8)


def test_curved_drift_is_less_linear():
    t = np.arange(4096)
    ids = t % 16
    noise = 0.01 * np.random.default_rng(0).standard_normal((4096, 3))
    straight = Rows(noise + np.outer(t / 4096, [1, 0, 0]), t, ids)
    bent = Rows(noise + np.outer((t / 4096) ** 6, [1, 0, 0]), t, ids)
    values = [tables_of(one_head(r, r), "rotation")["rotated"]["linearity_r2"][0] for r in (straight, bent)]
    assert values[0] > 0.999
    assert 0.3 < values[1] < 0.8
