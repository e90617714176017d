"""Attention plasticity: whether the order of two keys is fixed or depends on the query.

For two keys that differ by δ, a query prefers one of them by the sign of D = qᵀδ. Over the queries of a position bucket
D ~ N(μ_bᵀδ, δᵀΣ_bδ), so the preference has probability p = Φ(μ_bᵀδ / √(δᵀΣ_bδ)), and the pair's plasticity is
PP = 4p(1 − p): 1 if queries are divided, 0 if all agree. AP is its mean over pairs of earlier keys.
Only variances along single differences δ enter, so the covariance is taken as it is, however few the queries are:
shrinking it towards a sphere would add spread along δ that the queries do not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import ndtr

from qkscope.analyses.uncertainty import constant
from qkscope.core.bucketspread import BucketSpread, drift_basis
from qkscope.core.headmoments import ALL_AND_WITHOUT, N_GROUPS, BucketMeans, bucket_of, bucket_width
from qkscope.core.keypairs import KeyPairs
from qkscope.core.linalg import ratio, unit
from qkscope.core.moments import Moments
from qkscope.core.rope import HeadRotary
from qkscope.core.rows import Rows

MIN_QUERIES = 10
"""Buckets with fewer queries have no row."""


@dataclass(frozen=True)
class Plasticity:
    """AP of a batch of heads that share their keys, bucket by bucket; NaN where a bucket has no row."""

    ap: Float[np.ndarray, "heads buckets"]
    ap_published: Float[np.ndarray, "heads buckets"]
    replicates: Float[np.ndarray, "heads groups buckets"]
    """``ap`` with each document group left out, of queries and of keys; NaN where that leaves no queries."""
    pairs: Float[np.ndarray, "heads buckets pairs"]
    """PP of every pair."""
    pairs_published: Float[np.ndarray, "heads buckets pairs"]


def bucket_plasticity(
    q_buckets: BucketSpread, q_cells: BucketMeans, q_groups: Moments, total_q: Moments, keys: KeyPairs, width: int
) -> Plasticity:
    """AP with the full covariance of each bucket, and with the published model of the queries.

    ``q_groups`` are moments by document group (heads, 8), ``total_q`` those of all documents (heads,).
    Heads whose queries are all equal have none: without random queries no order of keys can depend on the query.
    """
    has_row = (q_buckets.n >= MIN_QUERIES) & (keys.n > 0) & ~constant(total_q)[..., None]
    mean = along(keys.delta, q_buckets.mean_x)
    variance = q_buckets.along_pairs
    exact = reversible(mean, variance)
    published = reversible(*_published(q_buckets, total_q, keys, mean, width))
    replicates = _replicates(q_cells, q_groups, keys, mean, variance)
    return Plasticity(
        ap=np.where(has_row, _over_pairs(exact, keys.weight), np.nan),
        ap_published=np.where(has_row, _over_pairs(published, keys.weight), np.nan),
        replicates=np.where(has_row[:, None], replicates, np.nan),
        pairs=exact,
        pairs_published=published,
    )


@dataclass(frozen=True)
class FixedPlasticity:
    """AP of sampled queries that were turned to the middle of their bucket first (``fixed_queries``)."""

    ap: Float[np.ndarray, "sets buckets"]
    """Of all document groups, then with each left out, of queries and of keys; NaN where a bucket has no row."""
    n: Float[np.ndarray, "sets buckets"]
    """Queries."""


def ap_fixed(queries: Rows, keys: KeyPairs, window: int) -> FixedPlasticity:
    """AP from sums of qᵀδ and (qᵀδ)² by document group and bucket, about the mean of the bucket."""
    n_buckets = len(keys.delta)
    rows = _rows_by_bucket(queries.tokens, window, n_buckets)
    n = ALL_AND_WITHOUT @ rows.of_group.sum(-1).T
    x = queries.x[rows.row]
    centre = (x * rows.real[..., None]).sum(1) / np.maximum(n[0], 1.0)[:, None]
    products = (x - centre[:, None]) @ keys.delta.swapaxes(1, 2)
    count = np.maximum(n, 1.0).T[..., None]
    mean, square = (ALL_AND_WITHOUT @ (rows.of_group @ power) / count for power in (products, products**2))
    pp = reversible(along(keys.delta, centre)[:, None] + mean, square - mean**2)
    left_out = np.vstack([np.full(n_buckets, -1), np.repeat(np.arange(N_GROUPS)[:, None], n_buckets, 1)]).T
    weight = keys.weight[:, None] * (keys.group[:, None] != left_out[..., None])
    weight = np.where(weight.any(-1, keepdims=True), weight, keys.weight[:, None])
    has_row = (n[0] >= MIN_QUERIES) & (keys.n > 0) & (n > 0)
    return FixedPlasticity(np.where(has_row, ratio((pp * weight).sum(-1), weight.sum(-1)).T, np.nan), n)


@dataclass(frozen=True)
class _BucketRows:
    """Rows of the sample by position bucket, padded to equal length."""

    row: Int[np.ndarray, "buckets most"]
    real: Float[np.ndarray, "buckets most"]
    """1 for rows, 0 for padding."""
    of_group: Float[np.ndarray, "buckets 8 most"]
    """1 for the rows of each document group."""


@lru_cache(maxsize=2)
def _rows_by_bucket(tokens: bytes, window: int, n_buckets: int) -> _BucketRows:
    """The rows of each bucket; cached, because heads share their tokens."""
    example_id, position = np.frombuffer(tokens, np.int64).reshape(2, -1)
    bucket = bucket_of(position, window, n_buckets)
    counts = np.bincount(bucket, minlength=n_buckets)
    real = np.arange(counts.max(initial=0)) < counts[:, None]
    row = np.zeros(real.shape, dtype=np.int64)
    row[real] = np.argsort(bucket, kind="stable")
    of_group = (example_id[row] % N_GROUPS)[:, None] == np.arange(N_GROUPS)[:, None]
    return _BucketRows(row, real.astype(float), (of_group & real[:, None]).astype(float))


def fixed_queries(queries: Rows, rotary: HeadRotary, window: int, buckets: int) -> Rows:
    """Queries rotated to the middle of their bucket, so that they differ in content only."""
    rope, width = rotary.rope, bucket_width(window, buckets)
    centre = (bucket_of(queries.position, window, buckets) + 0.5) * width - 0.5
    turned = rope.planes_of(queries.x) * rope.turns(centre - queries.position)
    x = queries.x.astype(np.float64)
    first, second = rope.sides
    x[:, first], x[:, second] = turned.real, turned.imag
    return Rows(x, queries.position, queries.example_id)


def reversible(mean: Float[np.ndarray, "*shape"], variance: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """PP = 4Φ(z)Φ(−z), z = mean/√variance; where the variance is zero, 0, or 1 if the mean is zero too.

    >>> reversible(np.array([0.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0])).tolist()
    [1.0, 0.0, 1.0]
    """
    spread = np.sqrt(np.maximum(variance, 0.0))
    z = np.divide(np.abs(mean), spread, out=np.where(mean == 0, 0.0, np.inf), where=spread > 0)
    other = ndtr(-z)
    return np.asarray(4.0 * other * (1.0 - other))


def along(
    delta: Float[np.ndarray, "*#batch pairs d"], mean: Float[np.ndarray, "*#batch d"]
) -> Float[np.ndarray, "*#batch pairs"]:
    """μᵀδ for every pair."""
    return (delta @ mean[..., None])[..., 0]


def _published(
    q_buckets: BucketSpread,
    total_q: Moments,
    keys: KeyPairs,
    mean: Float[np.ndarray, "heads buckets pairs"],
    width: int,
) -> tuple[Float[np.ndarray, "heads buckets pairs"], Float[np.ndarray, "heads buckets pairs"]]:
    """Mean and variance of D by the published model of queries.

    In the basis whose first axis is the drift β̂_Q, coordinate 1 is α + βτ with one residual variance for all buckets;
    the others keep their bucket means and variances, but no covariances.
    """
    drift = unit(total_q.cov_xt)[:, None]
    basis = drift_basis(total_q)
    beta = total_q.slope_along(drift)
    residual = total_q.var_along(drift) - beta**2 * total_q.var_t[:, None]
    tau = (np.arange(q_buckets.n.shape[-1]) + 0.5) * width - 0.5
    line = total_q.mean_along(drift) + beta * (tau - total_q.mean_t[:, None])
    rotated = keys.delta @ basis[:, None].swapaxes(-1, -2)
    variance = q_buckets.along_axes.copy()
    variance[..., 0] = np.maximum(residual, 0.0)
    on_drift = np.einsum("hbd,hd->hb", q_buckets.mean_x, drift[:, 0])
    return mean + (line - on_drift)[..., None] * rotated[..., 0], np.einsum("hbpi,hbi->hbp", rotated**2, variance)


def _replicates(
    cells: BucketMeans,
    groups: Moments,
    keys: KeyPairs,
    mean: Float[np.ndarray, "heads buckets pairs"],
    variance: Float[np.ndarray, "heads buckets pairs"],
) -> Float[np.ndarray, "heads groups buckets"]:
    """AP with each document group left out.

    The group means give the mean without one group exactly, and the variance between groups. Of the variance within
    groups only the sum is known for each pair; it is divided in proportion to ``_spread_within``.
    """
    away = along(keys.delta[:, None], cells.mean_x.swapaxes(1, 2)).swapaxes(1, 2) - mean[:, None]
    share = ratio(cells.n, cells.n.sum(1, keepdims=True))[..., None]
    weighted, squared = share * away, share * away**2
    centre, square = weighted.sum(1, keepdims=True), squared.sum(1, keepdims=True)
    within = np.maximum(variance - square[:, 0], 0.0)
    spread = share * _spread_within(groups, cells, keys)[..., None]
    relative = ratio(spread, spread.sum(1, keepdims=True))
    rest = ratio(cells.n.sum(1, keepdims=True) - cells.n, cells.n.sum(1, keepdims=True))[..., None]
    without = ratio(centre - weighted, rest)
    between = np.maximum(ratio(square - squared, rest) - without**2, 0.0)
    within_rest = within[:, None] * ratio(relative.sum(1, keepdims=True) - relative, rest)
    pp = reversible(mean[:, None] + without, within_rest + between)
    weight = keys.weight * (keys.group != np.arange(N_GROUPS)[:, None, None])
    weight = np.where(weight.any(-1, keepdims=True), weight, keys.weight)
    return np.where(rest[..., 0] > 0, _over_pairs(pp, weight), np.nan)


def _spread_within(groups: Moments, cells: BucketMeans, keys: KeyPairs) -> Float[np.ndarray, "heads groups buckets"]:
    """Mean square of a group's queries, less the mean of their own bucket, along the pairs of each bucket."""
    away = cells.mean_x - groups.mean_x[:, :, None]
    within = groups.scatter[..., :-1, :-1] - (cells.n[..., None] * away).swapaxes(-1, -2) @ away
    flat = within.reshape(*within.shape[:2], -1) @ keys.square.reshape(len(keys.square), -1).T
    return np.maximum(ratio(flat, groups.n[..., None]), 0.0)


def _over_pairs(
    pp: Float[np.ndarray, "*heads buckets pairs"], weight: Float[np.ndarray, "*#heads buckets pairs"]
) -> Float[np.ndarray, "*heads buckets"]:
    return ratio((pp * weight).sum(-1), np.broadcast_to(weight.sum(-1), pp.shape[:-1]))


# ---- over the window ----------------------------------------------------------------------------


FIFTH = 0.2


@dataclass(frozen=True)
class WindowPlasticity:
    """One value per head; the last axis (buckets) of the input is averaged out."""

    ap_overall: Float[np.ndarray, "*batch"]
    ap_first20: Float[np.ndarray, "*batch"]
    ap_last20: Float[np.ndarray, "*batch"]

    @property
    def ap_drop(self) -> Float[np.ndarray, "*batch"]:
        """First fifth minus last fifth."""
        return np.asarray(self.ap_first20 - self.ap_last20)


def plasticity_over_window(
    ap: Float[np.ndarray, "*batch buckets"], n_queries: Float[np.ndarray, "*#batch buckets"], window: int
) -> WindowPlasticity:
    """Means over buckets, weighted by queries: all buckets, and those with their middle in the first or last fifth."""
    return WindowPlasticity(*(_weighted(ap, n_queries, selected) for selected in parts_of_window(ap.shape[-1], window)))


def parts_of_window(buckets: int, window: int) -> list[Bool[np.ndarray, "buckets"]]:
    """Masks of the buckets in the whole window, its first fifth and its last fifth, by their middles.

    >>> [np.flatnonzero(part).tolist() for part in parts_of_window(16, 4096)]
    [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [0, 1, 2], [13, 14, 15]]
    """
    centre = ((np.arange(buckets) + 0.5) * bucket_width(window, buckets) - 0.5) / window
    return [np.full(buckets, fill_value=True), centre < FIFTH, centre > 1 - FIFTH]


def _weighted(
    ap: Float[np.ndarray, "*batch buckets"], n: Float[np.ndarray, "*#batch buckets"], selected: Bool[np.ndarray, "b"]
) -> Float[np.ndarray, "*batch"]:
    weight = np.where(np.isnan(ap) | ~selected, 0.0, n)
    total = weight.sum(-1)
    return np.where(total > 0, ratio((weight * np.nan_to_num(ap)).sum(-1), total), np.nan)
