"""Principal components of queries and keys pooled, what each has to do with position, and what follows for a head.

For a component u: r = uᵀc / √(uᵀΣu · var t) with c = Cov(x, t), within queries (r_q) and within keys (r_k).
Signs are canonical: r_q ≥ 0, or r_k ≥ 0 where |r_q| < 0.05.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import ndtr

from qkscope.core.eigenupdate import NEAR_BLOCK, KnownAll, eigh_near
from qkscope.core.leaveoneout import PooledLeaveOneOut
from qkscope.core.linalg import (
    Eigen,
    PerHead,
    canonical_signs,
    eigh_descending,
    eigh_leading,
    fisher_direction,
    ratio,
    sign_is_anchored_on_k,
)
from qkscope.core.moments import Moments, Spread

DEGENERATE_GAP = 0.02
"""Below this relative eigengap a component can turn freely within its eigenspace."""


@dataclass(frozen=True)
class Components:
    """Principal components of pooled queries and keys; arrays end in the component axis c."""

    axes: Float[np.ndarray, "*batch c d"]
    basis: Eigen | None
    """All eigenpairs of the pooled covariance, where they were computed."""
    explained_variance: Float[np.ndarray, "*batch c"]
    eigengap: Float[np.ndarray, "*batch c"]
    r_q: Float[np.ndarray, "*batch c"]
    r_k: Float[np.ndarray, "*batch c"]
    mu_q: Float[np.ndarray, "*batch c"]
    mu_k: Float[np.ndarray, "*batch c"]
    slope_q: Float[np.ndarray, "*batch c"]
    slope_k: Float[np.ndarray, "*batch c"]
    var_q: Float[np.ndarray, "*batch c"]
    var_k: Float[np.ndarray, "*batch c"]
    on_q: Moments
    """Moments of the queries' coordinates."""
    on_k: Moments
    """Moments of the keys' coordinates."""

    @property
    def separation(self) -> Float[np.ndarray, "*batch c"]:
        """|mu_q − mu_k|."""
        return np.abs(self.mu_q - self.mu_k)

    @property
    def fisher(self) -> Float[np.ndarray, "*batch c"]:
        """(mu_q − mu_k)² / (var_q + var_k); 0 where nothing varies."""
        return ratio(self.separation**2, self.var_q + self.var_k)

    @property
    def concordant(self) -> Bool[np.ndarray, "*batch c"]:
        """Whether queries and keys drift the same way; meaningless where ``sign_anchored_on_k``."""
        return self.r_k > 0

    @property
    def sign_anchored_on_k(self) -> Bool[np.ndarray, "*batch c"]:
        """Where r_q is too weak to orient the component."""
        return sign_is_anchored_on_k(self.r_q)

    @property
    def degenerate(self) -> Bool[np.ndarray, "*batch c"]:
        """Where a neighbouring eigenvalue is so close that this component's r means nothing by itself."""
        return self.eigengap < DEGENERATE_GAP


def components(
    q: Moments, k: Moments, n_components: int = 10, pooled: Moments | None = None, *, whole_basis: bool = True
) -> Components:
    """The leading components of queries and keys pooled, oriented by the sign rule.

    ``pooled``, q and k together, spares merging them. Without ``whole_basis`` only the components asked for are
    computed; nothing can start from them then.
    """
    pooled = pooled or q.merge(k)
    n_components = min(n_components, pooled.d)
    found = eigh_descending(pooled.cov_x) if whole_basis else eigh_leading(pooled.cov_x, n_components + 1)
    axes = found.axes[..., :n_components, :]
    on_q, on_k = q.project(axes), k.project(axes)
    signs = canonical_signs(on_q.correlations(q.total_variance), on_k.correlations(k.total_variance))
    basis = found if whole_basis else None
    return _measured(Eigen(found.values, axes), signs, (q, on_q), (k, on_k), pooled.total_variance, basis)


def components_near(pooled: PooledLeaveOneOut, near: Components) -> Components:
    """The same with each document group left out in turn: one more batch axis, orientation as in the whole."""
    assert near.basis is not None
    n_components, d = near.axes.shape[-2:]
    known = KnownAll(near.basis, min(n_components + NEAR_BLOCK, d))
    # Rows taken away lower a scatter in every direction, and what remains is divided by fewer.
    ceiling = known.beyond[..., None] * ratio(pooled.whole_n, pooled.n)
    n = np.where(pooled.n > 0, pooled.n, 1.0)[..., None, None]
    found = eigh_near(lambda vectors: pooled.times(vectors) / n, known, n_components, ceiling)
    signs = np.where(np.vecdot(found.axes, near.axes[..., None, :, :]) < 0, -1.0, 1.0)
    on_q, on_k = pooled.q.project(found.axes), pooled.k.project(found.axes)
    return _measured(found, signs, (pooled.q, on_q), (pooled.k, on_k), pooled.total_variance, None)


def _measured(
    found: Eigen,
    signs: Float[np.ndarray, "*batch c"],
    queries: tuple[Spread, Moments],
    keys: tuple[Spread, Moments],
    total: Float[np.ndarray, "*batch"],
    basis: Eigen | None,
) -> Components:
    """Components with these signs, and what both classes do along them; ``found`` may hold further eigenvalues."""
    count = found.axes.shape[-2]
    (q, on_q), (k, on_k) = ((whole, on.turned(signs)) for whole, on in (queries, keys))
    return Components(
        axes=found.axes * signs[..., None],
        basis=basis,
        explained_variance=ratio(found.values[..., :count], total[..., None]),
        eigengap=_eigengap(found.values)[..., :count],
        r_q=on_q.correlations(q.total_variance),
        r_k=on_k.correlations(k.total_variance),
        mu_q=on_q.mean_x,
        mu_k=on_k.mean_x,
        slope_q=on_q.slopes,
        slope_k=on_k.slopes,
        var_q=on_q.variances,
        var_k=on_k.variances,
        on_q=on_q,
        on_k=on_k,
    )


TAXONOMY = ("position-dominated", "q-positional", "k-positional", "content-focused", "mixed")


def taxonomy(r_q: PerHead, r_k: PerHead, high: float = 0.7, low: float = 0.3) -> Int[np.ndarray, "*batch"]:
    """Index into TAXONOMY of each head, from its PC0; all comparisons are strict.

    >>> [TAXONOMY[i] for i in taxonomy(np.array([0.9, 0.9, 0.1, 0.1, 0.5]), np.array([-0.8, 0.1, 0.8, -0.2, 0.9]))]
    ['position-dominated', 'q-positional', 'k-positional', 'content-focused', 'mixed']
    """
    strong_q, weak_q = r_q > high, r_q < low
    strong_k, weak_k = np.abs(r_k) > high, np.abs(r_k) < low
    classes = [strong_q & strong_k, strong_q & weak_k, weak_q & strong_k, weak_q & weak_k]
    return np.select(classes, range(4), default=4)


def _eigengap(values: Float[np.ndarray, "*batch d"]) -> Float[np.ndarray, "*batch d"]:
    """Relative distance of each eigenvalue to the nearer of its neighbours."""
    steps = values[..., :-1] - values[..., 1:]
    edge = np.full((*values.shape[:-1], 1), np.inf)
    gaps = np.minimum(np.concatenate([edge, steps], -1), np.concatenate([steps, edge], -1))
    return ratio(gaps, values)


# ---- of the head as a whole: positional variance, separability, amplification -------------------


@dataclass(frozen=True)
class HeadVariance:
    """One value per head each."""

    posvar_q_published: PerHead
    posvar_k_published: PerHead
    posvar_q_pc0_share: PerHead
    posvar_k_pc0_share: PerHead
    posvar_q: PerHead
    posvar_k: PerHead
    positional_overhead: PerHead
    amplification: PerHead
    fisher: PerHead
    separation: PerHead
    lda_accuracy_gaussian: PerHead


def head_variance(q: Spread, k: Spread, pcs: Components) -> HeadVariance:
    """Everything a head's moments and components say about it as a whole."""
    published_q, pc0_share_q = _published(pcs.explained_variance, pcs.r_q)
    published_k, pc0_share_k = _published(pcs.explained_variance, pcs.r_k)
    linear_q, total_q = _linear_variance(q), q.total_variance
    linear_k, total_k = _linear_variance(k), k.total_variance
    return HeadVariance(
        posvar_q_published=published_q,
        posvar_k_published=published_k,
        posvar_q_pc0_share=pc0_share_q,
        posvar_k_pc0_share=pc0_share_k,
        posvar_q=ratio(linear_q, total_q),
        posvar_k=ratio(linear_k, total_k),
        positional_overhead=ratio(q.n * linear_q + k.n * linear_k, q.n * total_q + k.n * total_k),
        amplification=pcs.mu_q[..., 0] * pcs.slope_k[..., 0],
        fisher=pcs.fisher[..., 0],
        separation=pcs.separation[..., 0],
        lda_accuracy_gaussian=lda_accuracy_gaussian(pcs.on_q.subset(slice(2)), pcs.on_k.subset(slice(2))),
    )


def lda_accuracy_gaussian(on_q: Moments, on_k: Moments) -> PerHead:
    """Accuracy of Fisher's line between Q and K on two axes (or one), were both Gaussian; in [0, 1].

    w = S_w⁻¹(μ_Q − μ_K), threshold half-way, mean of the two classes' Φ.
    """
    within = ratio(on_q.scatter[..., :-1, :-1] + on_k.scatter[..., :-1, :-1], (on_q.n + on_k.n)[..., None, None])
    apart = on_q.mean_x - on_k.mean_x
    w = fisher_direction(within, apart)
    half = (w * apart).sum(-1) / 2

    def correct(on: Moments) -> PerHead:
        spread = np.sqrt(on.var_along(w[..., None, :])[..., 0])
        # Where a class has no spread along w, all of it lies on its own side of the threshold.
        return ndtr(np.where(spread > 0, ratio(half, spread), np.where(half > 0, np.inf, 0.0)))

    return (correct(on_q) + correct(on_k)) / 2


def _published(share: Float[np.ndarray, "*batch c"], r: Float[np.ndarray, "*batch c"]) -> tuple[PerHead, PerHead]:
    """Σ EV_i r_i², and the part of it that PC0 brings. Not a fraction of the class's own variance."""
    parts = share * r**2
    total = parts.sum(-1)
    return total, ratio(parts[..., 0], total)


def _linear_variance(m: Spread) -> PerHead:
    """‖c‖² / var t: the variance that a linear function of position explains."""
    return ratio((m.cov_xt**2).sum(-1), m.var_t)
