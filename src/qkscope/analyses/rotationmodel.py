"""Planar rotation model: axis a holds all linear position covariance, axis b the Q–K separation orthogonal to it.

a = c/‖c‖ with c = Cov(x, t) over queries and keys together, so that every v ⟂ a has Cov(vᵀx, t) = 0.
b = top eigenvector of (I − aaᵀ) C_δ (I − aaᵀ), C_δ = E[(q − k)(q − k)ᵀ], oriented so that mu_q_b ≥ mu_k_b.
bias_strength = mu_q_a · alpha_k > 0 means that later keys score higher for the average query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from qkscope.analyses.options import Centering
from qkscope.core.eigenupdate import KnownTop
from qkscope.core.headmoments import BucketMeans
from qkscope.core.linalg import (
    PerHead,
    TruthPerHead,
    eigh_leading,
    householder,
    off_axis,
    off_axis_matrix,
    ratio,
    unit,
)
from qkscope.core.moments import Moments, Spread

TIE_BREAK = 1e-9
NEIGHBOURS = 10
"""Eigenpairs of C_δ off axis a that models with a group left out start from."""
NO_DRIFT = 1e-12
"""‖c‖ below this share of √(tr Σ · var t) is rounding error, and axis a is undefined."""


@dataclass(frozen=True)
class Rotation:
    """The two axes of each head and every scalar that follows from them."""

    a: Float[np.ndarray, "*batch d"]
    b: Float[np.ndarray, "*batch d"]
    off_a: KnownTop | None
    """C_δ off axis a and its leading eigenpairs, if they were computed; b is the first."""
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
    """Cov(x, t) over queries and keys: about the common mean, or about the mean of each class."""
    return centred(q, k, centering).cov_xt


def has_drift(q: Moments, k: Moments, centering: Centering = "pooled") -> TruthPerHead:
    """True where axis a is defined: c is more than rounding error."""
    m = centred(q, k, centering)
    scale = np.sqrt(m.total_variance * m.var_t)
    return np.linalg.norm(m.cov_xt, axis=-1) > NO_DRIFT * scale


def rotation_model(
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
    all pairs. ``pooled`` (q and k together) saves merging them. Without ``whole_basis`` only b is computed, and
    ``rotation_near`` cannot start from the result.
    """
    pooled = pooled or q.merge(k)
    a = unit((pooled if centering == "pooled" else centred(q, k, centering)).cov_xt)
    c_delta = difference_moment(q, k) if cross is None else paired_difference_moment(cross)
    trace = np.trace(c_delta, axis1=-2, axis2=-1)
    # A small negative eigenvalue along a keeps the top eigenvector off a even where nothing else varies.
    off = off_axis_matrix(c_delta, a, np.asarray(TIE_BREAK * trace))
    eigen = eigh_leading(off, min(NEIGHBOURS, off.shape[-1]) if whole_basis else 1)
    b = eigen.axes[..., 0, :]
    b = unit(off_axis(b, a)) * turn_sign((b * (q.mean_x - k.mean_x)).sum(-1))
    return measured_along(a, b, q, k, ratio(eigen.values[..., 0], trace), KnownTop(off, eigen) if whole_basis else None)


def measured_along(
    a: Float[np.ndarray, "*batch d"],
    b: Float[np.ndarray, "*batch d"],
    q: Spread,
    k: Spread,
    separation_strength: PerHead,
    off_a: KnownTop | None,
) -> Rotation:
    """Both classes measured along the axes."""
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


# ---- checks of the model ------------------------------------------------------------------------


@dataclass(frozen=True)
class Leftovers:
    """Checks of the model: the drift that a misses within each class, and the linearity of the drift."""

    residual_pos_r: PerHead
    residual_r_q: PerHead
    residual_r_k: PerHead
    a_qk_cos: PerHead
    b_centroid_cos: PerHead
    linearity_r2: PerHead


def leftovers(
    q: Moments, k: Moments, k_buckets: BucketMeans, model: Rotation, centering: Centering = "pooled"
) -> Leftovers:
    """Compute the checks of the planar model."""
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
    """|corr| with t along (I − aaᵀ)c, the part of this class's drift off axis a; 0 if that is rounding error."""
    residual = off_axis(m.cov_xt, a)
    size = np.linalg.norm(residual, axis=-1) > NO_DRIFT * np.linalg.norm(m.cov_xt, axis=-1)
    return np.where(size, np.abs(m.corr_along(unit(residual)[..., None, :])[..., 0]), 0.0)


def centred(q: Moments, k: Moments, centering: Centering) -> Moments:
    """Moments of the pool about its own mean, or with x and t centred within each class."""
    if centering == "pooled":
        return q.merge(k)
    return Moments(np.asarray(q.n + k.n), np.zeros_like(q.mean), q.scatter + k.scatter)


def pool_without_drift(q: Moments, k: Moments, centering: Centering) -> Float[np.ndarray, "*batch d d"]:
    """Covariance of the pool after the linear drift of each class with position has been removed."""
    cov = centred(q, k, centering).cov_x
    for m in (q, k):
        weight = ratio(m.n, q.n + k.n) * m.var_t
        cov = cov - weight[..., None, None] * m.slopes[..., :, None] * m.slopes[..., None, :]
    return cov


def turn_sign(value: PerHead) -> Float[np.ndarray, "*batch 1"]:
    """−1 for negative values, else 1; a factor for vectors."""
    return np.where(value < 0, -1.0, 1.0)[..., None]
