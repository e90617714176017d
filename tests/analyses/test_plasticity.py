"""Attention plasticity against Monte Carlo, scikit-learn's shrinkage, brute force, and its own invariances."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ortho_group

from qkscope.analyses.pairplasticity import (
    MIN_QUERIES,
    ap_fixed,
    bucket_plasticity,
    fixed_queries,
    parts_of_window,
    plasticity_over_window,
    reversible,
)
from qkscope.core.bucketspread import BucketSpread
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import BucketMeans, bucket_moments, cell_means, group_moments, undone_sums
from qkscope.core.keypairs import key_pairs
from qkscope.core.moments import Moments
from qkscope.core.rope import HeadRotary, Rope
from qkscope.core.rows import Pair, Rows
from tests.helpers import head_data, one_head, tables_of

BUCKETS, WINDOW = 16, 512
WIDTH = WINDOW // BUCKETS


def some_keys(rng: np.random.Generator, d: int = 6, documents: int = 8, each: int = 60) -> Rows:
    position = np.concatenate([np.sort(rng.choice(WINDOW, each, replace=False)) for _ in range(documents)])
    return Rows(rng.standard_normal((documents * each, d)), position, np.repeat(np.arange(documents), each))


def law(mean: np.ndarray, cov: np.ndarray, position: float) -> Moments:
    """Moments of weight 10⁶ of queries that are exactly Gaussian, at one position."""
    d = len(mean)
    scatter = np.zeros((d + 1, d + 1))
    scatter[:d, :d] = cov * 1e6
    scatter[d, d] = 1e6
    return Moments(np.asarray(1e6), np.append(mean, position), scatter)


def head_of(q: Rows, k: Rows) -> HeadData:
    """A head as a dataset has it."""
    return head_data(one_head(q, k, WINDOW), vectors=Pair(q, k), q_buckets=bucket_moments(q, WINDOW))


def no_cells(d: int, heads: int = 1) -> BucketMeans:
    return BucketMeans(np.zeros((heads, 8, BUCKETS)), np.zeros((heads, 8, BUCKETS, d)), np.zeros((heads, 8, BUCKETS)))


def of_rows(q: Rows, keys: Rows):
    pairs = key_pairs(keys, WINDOW, BUCKETS)
    buckets, cells = bucket_moments(q, WINDOW), cell_means(q, WINDOW)
    total = Moments.from_rows(q.x, q.position)
    spread = BucketSpread.of(Moments.stack([buckets]), Moments.stack([total]), pairs.delta)
    groups = Moments.stack([group_moments(q)])
    return bucket_plasticity(spread, BucketMeans.stack([cells]), groups, Moments.stack([total]), pairs, WIDTH), pairs


def test_monte_carlo_agrees_on_fifty_planted_heads():
    """PP̂ = 4p̂(1 − p̂)·M/(M − 1) of M drawn queries is unbiased; its mean over pairs has a known standard error."""
    draws, z = 2000, []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        d = int(rng.integers(2, 9))
        keys = key_pairs(some_keys(rng, d), WINDOW, BUCKETS, most=64)
        half = rng.standard_normal((BUCKETS, d, d))
        mean, cov = 1.5 * rng.standard_normal((BUCKETS, d)), half @ half.swapaxes(-1, -2)
        laws = Moments.stack([law(mean[b], cov[b], b) for b in range(BUCKETS)])
        total = laws.merged()[None]
        spread = BucketSpread.of(laws[None], total, keys.delta)
        found = bucket_plasticity(spread, no_cells(d), Moments.zeros(d, (1, 8)), total, keys, WIDTH)
        b = int(rng.integers(1, BUCKETS))
        # A batch of queries of its own for each repetition, so that the repetitions are independent.
        means = []
        for _ in range(30):
            queries = mean[b] + rng.standard_normal((draws, d)) @ half[b].T
            p = (queries @ keys.delta[b][keys.weight[b] > 0].T > 0).mean(0)
            means.append((4 * p * (1 - p) * draws / (draws - 1)).mean())
        se = np.std(means, ddof=1) / 30**0.5
        z.append((np.mean(means) - found.ap[0, b]) / max(se, 1e-12))
    # Of fifty honest z with 29 degrees of freedom, 95% are within 2, and their mean square is 29/27.
    assert np.mean(np.abs(z) < 2) >= 0.88
    assert abs(np.mean(z)) * 50**0.5 < 3
    assert np.mean(np.square(z)) < 1.8


def test_the_published_variant_misses_correlations():
    """Queries vary all coordinates together, keys differ in none of that: the diagonal takes it for a divided vote."""
    rng = np.random.default_rng(3)
    d, n = 8, 6000
    apart = 2 * (np.eye(d)[2] - np.eye(d)[3])
    position, document = np.tile(np.arange(WINDOW), 12)[:n], np.repeat(np.arange(12), WINDOW)[:n]
    common = rng.standard_normal((n, 1)) * np.ones(d)
    q = Rows(common + 0.1 * rng.standard_normal((n, d)) + apart, position, document)
    keys = some_keys(rng, d)
    keys = Rows(keys.x - keys.x.mean(-1, keepdims=True), keys.position, keys.example_id)
    found, _ = of_rows(q, keys)
    assert np.nanmean(found.ap_published) > np.nanmean(found.ap) + 0.15
    free = Rows(rng.standard_normal((n, d)) + apart, position, document)
    found, _ = of_rows(free, keys)
    assert np.nanmean(np.abs(found.ap - found.ap_published)) < 0.02


def test_the_published_variant_follows_its_formula():
    """Coordinate by coordinate in the turned basis, as the description reads."""
    rng = np.random.default_rng(4)
    q = some_keys(rng, 5, documents=16, each=200)
    q = Rows(q.x + 0.004 * q.position[:, None] * np.array([1.0, -2, 0, 1, 0]), q.position, q.example_id)
    found, pairs = of_rows(q, some_keys(rng, 5))
    drift = np.array([np.cov(q.x[:, i], q.position)[0, 1] for i in range(5)])
    u = drift / np.linalg.norm(drift)
    v = u - np.eye(5)[0]
    basis = np.eye(5) - 2 * np.outer(v, v) / (v @ v)
    y, b = q.x @ basis.T, 9
    inside = q.position // WIDTH == b
    slope, start = np.polyfit(q.position, y[:, 0], 1)
    residual = (y[:, 0] - start - slope * q.position).var()
    mean = np.append(start + slope * ((b + 0.5) * WIDTH - 0.5), y[inside][:, 1:].mean(0))
    variance = np.append(residual, y[inside][:, 1:].var(0))
    delta = pairs.delta[b] @ basis.T
    expected = reversible(delta @ mean, (delta**2) @ variance)
    np.testing.assert_allclose(found.pairs_published[0, b], expected, atol=1e-9)


def test_a_turn_of_the_space_changes_nothing():
    rng = np.random.default_rng(5)
    q, keys = some_keys(rng, 6, 16, 200), some_keys(rng, 6)
    turn = ortho_group.rvs(6, random_state=1)
    one, _ = of_rows(q, keys)
    two, _ = of_rows(Rows(q.x @ turn, q.position, q.example_id), Rows(keys.x @ turn, keys.position, keys.example_id))
    np.testing.assert_allclose(one.ap, two.ap, atol=1e-10)
    np.testing.assert_allclose(one.replicates, two.replicates, atol=1e-10)


def test_pairs_stand_before_their_bucket_and_in_one_document():
    keys = some_keys(np.random.default_rng(6), 3)
    pairs = key_pairs(keys, WINDOW, BUCKETS)
    assert pairs.n[0] == 0
    assert (pairs.n[3:] == 256).all()
    start = np.arange(BUCKETS) * WIDTH
    real = pairs.weight > 0
    assert (pairs.inter_key[real] > 0).all()
    later = (start + (WIDTH - 1) // 2)[:, None] - pairs.key_to_query
    assert (later < start[:, None])[real].all()
    again = key_pairs(keys, WINDOW, BUCKETS)
    np.testing.assert_array_equal(pairs.delta, again.delta)
    assert not np.array_equal(pairs.delta, key_pairs(keys, WINDOW, BUCKETS, seed=99).delta)


def test_pairs_of_a_small_document_are_all_of_them_once():
    keys = Rows(np.arange(5.0)[:, None] ** 2, np.arange(5) * 3, np.zeros(5, dtype=int))
    pairs = key_pairs(keys, 32, 2)
    found = sorted(pairs.delta[1, pairs.weight[1] > 0, 0])
    assert found == sorted(b * b - a * a for b in range(5) for a in range(b))


def test_a_sliding_window_leaves_keys_out_of_reach_out():
    keys = some_keys(np.random.default_rng(7), 3, each=200)
    pairs = key_pairs(keys, WINDOW, BUCKETS, sliding_window=100)
    last = (np.arange(BUCKETS) + 1) * WIDTH - 1
    earlier = last[:, None] - WIDTH // 2 - pairs.key_to_query - pairs.inter_key
    real = pairs.weight > 0
    assert real.any()
    assert (last[:, None] - earlier < 100)[real].all()
    for narrow in (1, WIDTH // 2, WIDTH):
        assert (key_pairs(keys, WINDOW, BUCKETS, sliding_window=narrow).n == 0).all()


def test_a_fifth_of_the_window_is_one_of_its_tokens():
    """16 buckets of 2 positions on a window of 20: the last ones are empty, and the last fifth is not."""
    whole, first, last = parts_of_window(16, 20)
    assert whole.all()
    assert np.flatnonzero(first).tolist() == [0, 1]
    assert np.flatnonzero(last)[:2].tolist() == [8, 9]


def test_equal_keys_are_no_pair_and_few_queries_no_row():
    keys = Rows(np.ones((40, 3)), np.arange(40), np.zeros(40, dtype=int))
    assert (key_pairs(keys, 64, 4).n == 0).all()
    rng = np.random.default_rng(8)
    q = some_keys(rng, 3, documents=2, each=MIN_QUERIES // 2)
    found, _ = of_rows(q, some_keys(rng, 3))
    assert np.isnan(found.ap).all()
    empty = Rows(np.zeros((0, 3)), np.zeros(0, dtype=int), np.zeros(0, dtype=int))
    assert key_pairs(empty, 64, 4).delta.shape == (4, 0, 3)


def test_few_queries_in_many_dimensions_give_what_counting_gives():
    """256 dimensions and 135 queries per bucket: variances along single differences need no covariance of full rank."""
    rng = np.random.default_rng(4)
    d, n, documents = 256, 135 * BUCKETS, 8
    scales = np.linspace(0.2, 2.0, d)
    position = np.concatenate([np.sort(rng.choice(WINDOW, n // documents, replace=False)) for _ in range(documents)])
    example = np.repeat(np.arange(documents), n // documents)
    mean = rng.standard_normal(d)
    q = Rows(mean + scales * rng.standard_normal((len(position), d)), position, example)
    k = Rows(rng.standard_normal((len(position), d)), position, example)
    found = tables_of(head_of(q, k), "plasticity")["plasticity"]
    bucket = found[found["q_bucket"] == 8].iloc[0]
    delta = key_pairs(k, WINDOW, BUCKETS).delta[8]
    fresh = mean + scales * rng.standard_normal((20_000, d))
    p = (fresh @ delta.T > 0).mean(0)
    assert bucket["n_queries"] < d
    assert bucket["ap"] == pytest.approx(float((4 * p * (1 - p)).mean()), abs=0.03)


def test_queries_turned_to_the_middle_differ_in_content_alone():
    """One content, turned by its position: AP counts the motion as randomness, ap_fixed does not."""
    rng = np.random.default_rng(9)
    rope = Rope(np.array([0.9, 0.1, 0.01]))
    position, document = np.tile(np.arange(WINDOW), 8), np.repeat(np.arange(8), WINDOW)
    content = np.array([1.0, 0.5, -1.0]) + 0.01 * (rng.standard_normal((len(position), 3)))
    z = content * np.exp(1j * position[:, None] * rope.frequencies)
    q = Rows(np.concatenate([z.real, z.imag], -1), position, document)
    keys = key_pairs(some_keys(rng, 6), WINDOW, BUCKETS)
    rotary = HeadRotary(rope, undone_sums(q, rope), undone_sums(q, rope))
    still = fixed_queries(q, rotary, WINDOW, BUCKETS)
    assert np.trace(bucket_moments(still, WINDOW).cov_x[5]) == pytest.approx(3 * 1e-4, rel=0.1)
    moving = ap_fixed(q, keys, WINDOW)
    assert np.nanmean(ap_fixed(still, keys, WINDOW).ap[0]) < 0.05 < 0.3 < np.nanmean(moving.ap[0])


def test_fixed_plasticity_and_its_replicates_are_those_of_plain_moments():
    """An oracle by covariances: 4Φ(z)Φ(−z) of each pair, without the group's queries and pairs of keys."""
    rng = np.random.default_rng(10)
    position, document = np.tile(np.arange(WINDOW), 8), np.repeat(np.arange(8), WINDOW)
    q = Rows(1.0 + rng.standard_normal((len(position), 6)), position, document)
    keys = key_pairs(some_keys(rng, 6), WINDOW, BUCKETS)
    fixed = ap_fixed(q, keys, WINDOW)
    for row, group in ((0, None), (1, 0), (6, 5)):
        kept = q.take(np.flatnonzero(q.example_id % 8 != group)) if group is not None else q
        moments = bucket_moments(kept, WINDOW, BUCKETS)
        delta = keys.delta[7]
        variance = np.einsum("pi,ij,pj->p", delta, moments.cov_x[7], delta)
        pp = reversible(delta @ moments.mean_x[7], variance)
        weight = keys.weight[7] * (keys.group[7] != group)
        assert fixed.ap[row, 7] == pytest.approx((pp * weight).sum() / weight.sum(), rel=1e-9)
        assert fixed.n[row, 7] == moments.n[7]


def test_over_the_window_counts_buckets_by_their_middle():
    ap = np.linspace(1.0, 0.0, BUCKETS)
    ap[0] = np.nan
    n = np.arange(1.0, BUCKETS + 1)
    found = plasticity_over_window(ap, n, WINDOW)
    assert found.ap_overall == pytest.approx(np.average(ap[1:], weights=n[1:]))
    assert found.ap_first20 == pytest.approx(np.average(ap[1:3], weights=n[1:3]))
    assert found.ap_last20 == pytest.approx(np.average(ap[13:], weights=n[13:]))
    assert found.ap_drop == pytest.approx(found.ap_first20 - found.ap_last20)
    assert np.isnan(plasticity_over_window(np.full(4, np.nan), np.ones(4), 64).ap_overall)


def test_leaving_out_a_group_is_leaving_out_its_rows():
    """If every group has the same covariance within itself, the replicates are those of fewer rows."""
    rng = np.random.default_rng(10)
    position = np.tile(np.arange(WINDOW), 32)
    document = np.repeat(np.arange(32), WINDOW)
    effect = rng.standard_normal((32, 4)) + np.array([2.0, 0, 0, 0]) * (np.arange(32) % 8 == 3)[:, None]
    q = Rows(rng.standard_normal((len(position), 4)) + effect[document], position, document)
    keys = some_keys(rng, 4, documents=16)
    found, pairs = of_rows(q, keys)
    kept = np.flatnonzero(document % 8 != 3)
    exact = bucket_moments(q.take(kept), WINDOW)
    weight = pairs.weight * (pairs.group != 3)
    pp = reversible(
        (pairs.delta @ exact.mean_x[..., None])[..., 0],
        np.einsum("bpd,bde,bpe->bp", pairs.delta, exact.cov_x, pairs.delta),
    )
    expected = (pp * weight).sum(-1)[1:] / weight.sum(-1)[1:]
    np.testing.assert_allclose(found.replicates[0, 3, 1:], expected, atol=0.01)
    assert np.abs(found.replicates[0, 3, 1:] - expected).max() < 0.3 * np.abs(found.ap[0, 1:] - expected).max()


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_the_standard_error_is_close_to_that_of_the_jackknife_of_all_rows(spread):
    """Documents differ in their mean and, by a log-normal law, in their spread."""
    rng, documents = np.random.default_rng(1), 32
    position, document = np.tile(np.arange(WINDOW), documents), np.repeat(np.arange(documents), WINDOW)
    effect, scale = 0.5 * rng.standard_normal((documents, 4)), np.exp(spread * rng.standard_normal(documents))
    noise = rng.standard_normal((len(position), 4))
    q = Rows(0.7 + effect[document] + scale[document][:, None] * noise, position, document)
    keys = some_keys(rng, 4, documents=documents)
    table, pairs = tables_of(head_of(q, keys), "plasticity")["plasticity"], key_pairs(keys, WINDOW, BUCKETS)
    again = []
    for g in range(8):
        left = bucket_moments(q.take(np.flatnonzero(document % 8 != g)), WINDOW)
        mean = (pairs.delta @ left.mean_x[..., None])[..., 0]
        pp = reversible(mean, np.einsum("bpd,bde,bpe->bp", pairs.delta, left.cov_x, pairs.delta))
        weight = pairs.weight * (pairs.group != g)
        again.append((pp * weight).sum(-1)[1:] / weight.sum(-1)[1:])
    exact = np.sqrt(7 / 8 * ((np.array(again) - np.mean(again, 0)) ** 2).sum(0))
    ratio = table["ap_se"] / exact
    assert 0.9 < np.median(ratio) < 1.1
    assert ratio.between(0.75, 1.25).all()


def uneven(lengths: list[int], seed: int = 0) -> HeadData:
    """Documents of different length, one group each, of queries whose preference grows with position."""
    rng = np.random.default_rng(seed)
    position = np.concatenate([np.arange(n) for n in lengths])
    document = np.repeat(np.arange(len(lengths)), lengths)
    q = Rows(rng.standard_normal((len(position), 4)) + np.outer(position / 128, [1.0, 0, 0, 0]), position, document)
    keys = Rows(rng.standard_normal((len(position), 4)), position, document)
    return head_of(q, keys)


def test_replicates_weigh_buckets_by_the_queries_that_are_left():
    one = uneven([100, 130, 200, 512] * 8)
    row = tables_of(one, "plasticity")["plasticity"].iloc[0]
    pair = one.vectors
    assert pair is not None
    again = []
    for g in range(8):
        kept = [rows.take(np.flatnonzero(rows.example_id % 8 != g)) for rows in (pair.q, pair.k)]
        again.append(tables_of(head_of(*kept), "plasticity")["plasticity"]["ap_overall"].iloc[0])
    by_hand = np.sqrt(7 / 8 * ((np.array(again) - np.mean(again)) ** 2).sum())
    assert row["ap_overall_se"] == pytest.approx(by_hand, rel=0.35)


def test_what_one_group_alone_tells_has_no_interval():
    one = uneven([512] + [200] * 15)
    row = tables_of(one, "plasticity")["plasticity"].iloc[-1]
    assert row["ap_last20"] > 0
    assert np.isnan(row["ap_last20_low"])
    assert np.isnan(row["ap_drop_low"])
    assert np.isfinite(row["ap_first20_low"])
    assert np.isnan(row["ap_se"])
