"""Planar rotation model: axis a holds all linear position covariance, axis b the Q–K separation off it.

a = c/‖c‖ with c = Cov(x, t) over queries and keys together, so that every v ⟂ a has Cov(vᵀx, t) = 0.
b = top eigenvector of (I − aaᵀ) C_δ (I − aaᵀ), C_δ = E[(q − k)(q − k)ᵀ], oriented so that mu_q_b ≥ mu_k_b.
bias_strength = mu_q_a · alpha_k > 0 means that later keys score higher for the average query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from qkscope.core.headmoments import DELETE_ONE, BucketMeans
from qkscope.core.linalg import (
    eigh_leading,
    householder,
    off_axis,
    off_axis_matrix,
    ratio,
    unit,
)
from qkscope.core.moments import Moments, Spread
from qkscope.core.near import KnownTop, Times, eigh_near
from qkscope.core.shapes import PerHead, TruthPerHead
from qkscope.core.without import Pooled

Centering = Literal["pooled", "within"]
Pairing = Literal["independent", "token"]

TIE_BREAK = 1e-9
NEIGHBOURS = 10
"""Eigenpairs of C_δ off axis a that are known where models with a group left out start from them."""
NO_DRIFT = 1e-12
"""‖c‖ below this share of √(tr Σ · var t) is rounding, and axis a is undefined."""


@dataclass(frozen=True)
class Rotation:
    """The two axes of each head and every scalar that follows from them."""

    a: Float[np.ndarray, "*batch d"]
    b: Float[np.ndarray, "*batch d"]
    off_a: KnownTop | None
    """C_δ off axis a and its leading eigenpairs, where they were computed; b is the first."""
    position_r: PerHead
    r_q_a: PerHead
    r_k_a: PerHead
    alpha_q: PerHead
    alpha_k: PerHead
    mu_q_a: PerHead
    mu_k_a: PerHead
    mu_q_b: PerHead
    mu_k_b: PerHead
    separation_strength: PerHead
    var_frac_a: PerHead
    var_frac_b: PerHead
    content_var_b: PerHead
    bias_full: PerHead

    @property
    def plane_var_fraction(self) -> PerHead:
        """Share of the pooled variance in the plane of a and b."""
        return self.var_frac_a + self.var_frac_b

    @property
    def bias_strength(self) -> PerHead:
        """mu_q_a · alpha_k, per token: the part of bias_full on axis a."""
        return self.mu_q_a * self.alpha_k

    @property
    def query_term(self) -> PerHead:
        """alpha_q · mu_k_a: coefficient of the query's position."""
        return self.alpha_q * self.mu_k_a

    @property
    def interaction(self) -> PerHead:
        """alpha_q · alpha_k: coefficient of the product of both positions."""
        return self.alpha_q * self.alpha_k

    @property
    def constant(self) -> PerHead:
        """Score of the mean query and the mean key in the plane."""
        return self.mu_q_a * self.mu_k_a + self.mu_q_b * self.mu_k_b


def drift_covariance(q: Moments, k: Moments, centering: Centering = "pooled") -> Float[np.ndarray, "*batch d"]:
    """C = Cov(x, t) over queries and keys: about the common mean, or each class about its own."""
    return centred(q, k, centering).cov_xt


def has_drift(q: Moments, k: Moments, centering: Centering = "pooled") -> TruthPerHead:
    """Whether axis a is defined: c is more than rounding."""
    m = centred(q, k, centering)
    scale = np.sqrt(m.total_variance * m.var_t)
    return np.linalg.norm(m.cov_xt, axis=-1) > NO_DRIFT * scale


def rotation(
    q: Moments,
    k: Moments,
    cross: Moments | None = None,
    centering: Centering = "pooled",
    pooled: Moments | None = None,
    *,
    whole_basis: bool = True,
) -> Rotation:
    """Construct a and b and measure queries and keys along them.

    ``cross`` holds moments of (q, k) at the same token; with it δ pairs them token by token, without it δ runs over
    all pairs. ``pooled``, q and k together, spares merging them. Without ``whole_basis`` only b is computed; nothing
    can start from it then.
    """
    pooled = pooled or q.merge(k)
    a = unit((pooled if centering == "pooled" else centred(q, k, centering)).cov_xt)
    c_delta = difference_moment(q, k) if cross is None else paired_difference_moment(cross)
    trace = np.trace(c_delta, axis1=-2, axis2=-1)
    # A little less than nothing along a keeps the top eigenvector off it even where nothing else varies.
    off = off_axis_matrix(c_delta, a, np.asarray(TIE_BREAK * trace))
    found = eigh_leading(off, min(NEIGHBOURS, off.shape[-1]) if whole_basis else 1)
    b = found.axes[..., 0, :]
    b = unit(off_axis(b, a)) * _sign((b * (q.mean_x - k.mean_x)).sum(-1))
    return _measured(a, b, q, k, ratio(found.values[..., 0], trace), KnownTop(off, found) if whole_basis else None)


def rotation_near(
    pooled: Pooled, near: Rotation, cross: Moments | None = None, centering: Centering = "pooled"
) -> Rotation:
    """The same with each document group left out in turn: one more batch axis, orientation as in the whole.

    ``cross`` are the pairs at the same token, by group.
    """
    assert near.off_a is not None
    q, k = pooled.q, pooled.k
    within = ratio(q.scatter_xt + k.scatter_xt, pooled.n[..., None])
    a = unit(pooled.cov_xt if centering == "pooled" else within)
    a = a * _sign((a * near.a[..., None, :]).sum(-1))
    delta = _independent(pooled) if cross is None else _paired(cross)
    off = _off_axis_times(delta.times, a, TIE_BREAK * delta.trace)
    values, vectors = eigh_near(off, near.off_a, 1, _ceiling(near, a, delta, off), rounds=2)
    b = unit(off_axis(vectors[..., 0, :], a))
    b = b * _sign((b * near.b[..., None, :]).sum(-1))
    return _measured(a, b, q, k, ratio(values[..., 0], delta.trace), None)


def _measured(
    a: Float[np.ndarray, "*batch d"],
    b: Float[np.ndarray, "*batch d"],
    q: Spread,
    k: Spread,
    separation_strength: PerHead,
    off_a: KnownTop | None,
) -> Rotation:
    """What both classes do along the axes."""
    axes = np.stack([a, b], -2)
    on_q, on_k = q.project(axes), k.project(axes)
    on = on_q.merge(on_k)
    total = _pooled_variance(q, k)
    var_frac, var_q, var_k = ratio(on.variances, total[..., None]), on_q.variances, on_k.variances
    return Rotation(
        a=a,
        b=b,
        off_a=off_a,
        position_r=np.abs(on.correlations(total)[..., 0]),
        r_q_a=on_q.correlations(q.total_variance)[..., 0],
        r_k_a=on_k.correlations(k.total_variance)[..., 0],
        alpha_q=on_q.slopes[..., 0],
        alpha_k=on_k.slopes[..., 0],
        mu_q_a=on_q.mean_x[..., 0],
        mu_k_a=on_k.mean_x[..., 0],
        mu_q_b=on_q.mean_x[..., 1],
        mu_k_b=on_k.mean_x[..., 1],
        separation_strength=separation_strength,
        var_frac_a=var_frac[..., 0],
        var_frac_b=var_frac[..., 1],
        content_var_b=(var_q[..., 1] + var_k[..., 1]) / 2,
        bias_full=ratio((q.mean_x * k.cov_xt).sum(-1), k.var_t),
    )


def _pooled_variance(q: Spread, k: Spread) -> Float[np.ndarray, "*batch"]:
    """Trace of the covariance of both classes together."""
    n = np.asarray(q.n + k.n)
    between = ratio(q.n * k.n, n) * ((q.mean_x - k.mean_x) ** 2).sum(-1)
    return ratio(q.n * q.total_variance + k.n * k.total_variance + between, n)


def difference_moment(q: Moments, k: Moments) -> Float[np.ndarray, "*batch d d"]:
    """C_δ = Σ_Q + Σ_K + ΔμΔμᵀ: the exact mean of δδᵀ over all pairs of a query and a key."""
    apart = q.mean_x - k.mean_x
    moment = apart[..., :, None] * apart[..., None, :]
    moment += q.cov_x
    moment += k.cov_x
    return moment


def paired_difference_moment(cross: Moments) -> Float[np.ndarray, "*batch d d"]:
    """C_δ over the query and the key of the same token, from moments of the stacked vector (q, k)."""
    d = cross.d // 2
    delta = cross.project(np.concatenate([np.eye(d), -np.eye(d)], axis=1))
    return delta.cov_x + delta.mean_x[..., :, None] * delta.mean_x[..., None, :]


# ---- with a group left out ----------------------------------------------------------------------


class _Moment(NamedTuple):
    """C_δ: products with it, its trace, and all pairs as a multiple of those that are left."""

    times: Times
    trace: Float[np.ndarray, "*batch g"]
    grown: Float[np.ndarray, "*batch g"]


def _independent(pooled: Pooled) -> _Moment:
    """C_δ over all pairs."""
    q, k = pooled.q, pooled.k
    apart = (q.mean_x - k.mean_x)[..., None, :]
    n_q, n_k = (np.where(kind.n > 0, kind.n, 1.0)[..., None, None] for kind in (q, k))

    def times(vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        product = q.times(vectors) / n_q
        product += k.times(vectors) / n_k
        product += (vectors @ apart.swapaxes(-1, -2)) * apart
        return product

    trace = q.total_variance + k.total_variance + (apart[..., 0, :] ** 2).sum(-1)
    return _Moment(times, trace, ratio(q.whole.n[..., None], q.n) * ratio(k.whole.n[..., None], k.n))


def _paired(cross: Moments) -> _Moment:
    """C_δ over pairs at the same token."""
    c_delta = paired_difference_moment(cross.merged(DELETE_ONE))
    grown = ratio(cross.total.n[..., None], cross.total.n[..., None] - cross.n)
    return _Moment(lambda vectors: vectors @ c_delta, np.trace(c_delta, axis1=-2, axis2=-1), grown)


def _off_axis_times(times: Times, a: Float[np.ndarray, "*batch d"], along: Float[np.ndarray, "*batch"]) -> Times:
    """Products with (I − aaᵀ)M(I − aaᵀ), less ``along``·aaᵀ."""
    axis = a[..., None, :]

    def off(vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        on = np.vecdot(vectors, axis)[..., None]
        product = times(vectors - on * axis)
        product -= (np.vecdot(product, axis)[..., None] + along[..., None, None] * on) * axis
        return product

    return off


def _ceiling(
    near: Rotation, a: Float[np.ndarray, "*batch g d"], delta: _Moment, off: Times
) -> Float[np.ndarray, "*batch g"]:
    """The most that C_δ off a can carry on axes beyond those that are known of the whole.

    C_δ is a mean of squares over pairs, so without some of them it grows by at most their share in any direction. At
    right angles to the a of the whole, the turn of a adds to the length on a factor of C_δ at most its sine times the
    length along a; what lies along the a of the whole comes on top.
    """
    assert near.off_a is not None
    most = delta.grown * near.off_a.beyond[..., None]
    cosine = np.minimum((a * near.a[..., None, :]).sum(-1) ** 2, 1.0)
    along = np.vecdot(delta.times(a[..., None, :]), a[..., None, :])[..., 0]
    before = near.a[..., None, None, :]
    return (np.sqrt(most) + np.sqrt((1.0 - cosine) * along)) ** 2 + np.vecdot(off(before), before)[..., 0]


# ---- what the model leaves out ------------------------------------------------------------------


@dataclass(frozen=True)
class Leftovers:
    """Checks on the model: what a misses within each class, and how straight the drift is."""

    residual_pos_r: PerHead
    residual_r_q: PerHead
    residual_r_k: PerHead
    a_qk_cos: PerHead
    b_centroid_cos: PerHead
    linearity_r2: PerHead


def leftovers(
    q: Moments, k: Moments, k_buckets: BucketMeans, model: Rotation, centering: Centering = "pooled"
) -> Leftovers:
    """Measure what the planar model leaves out."""
    c_q, c_k = q.cov_xt, k.cov_xt
    apart = unit(off_axis(q.mean_x - k.mean_x, model.a))
    return Leftovers(
        residual_pos_r=residual_pos_r(centred(q, k, centering), model.a),
        residual_r_q=_residual_r(q, model.a),
        residual_r_k=_residual_r(k, model.a),
        a_qk_cos=(unit(c_q) * unit(c_k)).sum(-1),
        b_centroid_cos=(model.b * apart).sum(-1),
        linearity_r2=linearity_r2(k_buckets, model.a),
    )


def residual_pos_r(m: Moments, a: Float[np.ndarray, "*batch d"]) -> PerHead:
    """Largest |corr| with t over a Householder basis of a's complement: 0 up to rounding, by the lemma."""
    return np.abs(m.corr_along(householder(a)[..., 1:, :])).max(-1)


def linearity_r2(buckets: BucketMeans, a: Float[np.ndarray, "*batch d"]) -> PerHead:
    """Count-weighted squared correlation of the bucket means of aᵀk with the bucket means of t."""
    weight = ratio(buckets.n, buckets.n.sum(-1, keepdims=True))

    def centred(values: Float[np.ndarray, "*batch buckets"]) -> Float[np.ndarray, "*batch buckets"]:
        return values - (weight * values).sum(-1, keepdims=True)

    on_a = centred(np.einsum("...bd,...d->...b", buckets.mean_x, a))
    t = centred(buckets.mean_t)
    variances = (weight * on_a**2).sum(-1) * (weight * t**2).sum(-1)
    covariance = (weight * on_a * t).sum(-1)
    return ratio(covariance**2, variances)


def _residual_r(m: Moments, a: Float[np.ndarray, "*batch d"]) -> PerHead:
    """|corr| with t along (I − aaᵀ)c: what this class's own drift keeps off axis a; 0 if that is rounding."""
    rest = off_axis(m.cov_xt, a)
    size = np.linalg.norm(rest, axis=-1) > NO_DRIFT * np.linalg.norm(m.cov_xt, axis=-1)
    return np.where(size, np.abs(m.corr_along(unit(rest)[..., None, :])[..., 0]), 0.0)


def centred(q: Moments, k: Moments, centering: Centering) -> Moments:
    """Moments of the pool about its own mean, or with x and t centred within each class."""
    if centering == "pooled":
        return q.merge(k)
    return Moments(np.asarray(q.n + k.n), np.zeros_like(q.mean), q.scatter + k.scatter)


def _sign(value: PerHead) -> Float[np.ndarray, "*batch 1"]:
    return np.where(value < 0, -1.0, 1.0)[..., None]
