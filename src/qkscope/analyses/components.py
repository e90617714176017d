"""Principal components of queries and keys pooled, their correlation with position, and a head's numbers from them.

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
"""Below this relative eigengap a component can rotate freely within its eigenspace."""


@dataclass(frozen=True)
class Components:
    """Principal components of pooled queries and keys; arrays end in the component axis c."""

    axes: Float[np.ndarray, "*batch c d"]
    basis: Eigen | None
    """All eigenpairs of the pooled covariance, if they were computed."""
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
        """(mu_q − mu_k)² / (var_q + var_k); 0 where both variances are zero."""
        return ratio(self.separation**2, self.var_q + self.var_k)

    @property
    def concordant(self) -> Bool[np.ndarray, "*batch c"]:
        """True where queries and keys drift in the same direction; meaningless where ``sign_anchored_on_k``."""
        return self.r_k > 0

    @property
    def sign_anchored_on_k(self) -> Bool[np.ndarray, "*batch c"]:
        """True where r_q is too weak to orient the component."""
        return sign_is_anchored_on_k(self.r_q)

    @property
    def degenerate(self) -> Bool[np.ndarray, "*batch c"]:
        """True where a neighbouring eigenvalue is so close that this component's r alone means little."""
        return self.eigengap < DEGENERATE_GAP


def components(
    q: Moments, k: Moments, n_components: int = 10, pooled: Moments | None = None, *, whole_basis: bool = True
) -> Components:
    """The leading components of queries and keys pooled, oriented by the sign rule.

    ``pooled`` (q and k together) saves merging them. Without ``whole_basis`` only the requested components are
    computed, and ``components_near`` cannot start from the result.
    """
    pooled = pooled or q.merge(k)
    n_components = min(n_components, pooled.d)
    eigen = eigh_descending(pooled.cov_x) if whole_basis else eigh_leading(pooled.cov_x, n_components + 1)
    axes = eigen.axes[..., :n_components, :]
    on_q, on_k = q.project(axes), k.project(axes)
    signs = canonical_signs(on_q.correlations(q.total_variance), on_k.correlations(k.total_variance))
    basis = eigen if whole_basis else None
    return _measured(Eigen(eigen.values, axes), signs, (q, on_q), (k, on_k), pooled.total_variance, basis)


def components_near(pooled: PooledLeaveOneOut, all_documents: Components) -> Components:
    """Components with each document group left out: one more batch axis; oriented like those of ``all_documents``."""
    assert all_documents.basis is not None
    n_components, d = all_documents.axes.shape[-2:]
    start = KnownAll(all_documents.basis, min(n_components + NEAR_BLOCK, d))
    # Removing rows lowers a scatter in every direction; the remainder is divided by a smaller count.
    ceiling = start.beyond[..., None] * ratio(pooled.whole_n, pooled.n)
    n = np.where(pooled.n > 0, pooled.n, 1.0)[..., None, None]
    eigen = eigh_near(lambda vectors: pooled.times(vectors) / n, start, n_components, ceiling)
    signs = np.where(np.vecdot(eigen.axes, all_documents.axes[..., None, :, :]) < 0, -1.0, 1.0)
    on_q, on_k = pooled.q.project(eigen.axes), pooled.k.project(eigen.axes)
    return _measured(eigen, signs, (pooled.q, on_q), (pooled.k, on_k), pooled.total_variance, None)


def _measured(
    eigen: Eigen,
    signs: Float[np.ndarray, "*batch c"],
    queries: tuple[Spread, Moments],
    keys: tuple[Spread, Moments],
    total: Float[np.ndarray, "*batch"],
    basis: Eigen | None,
) -> Components:
    """Components with these signs, and both classes measured along them; ``eigen`` may have further eigenvalues."""
    count = eigen.axes.shape[-2]
    (q, on_q), (k, on_k) = ((in_full, on.turned(signs)) for in_full, on in (queries, keys))
    return Components(
        axes=eigen.axes * signs[..., None],
        basis=basis,
        explained_variance=ratio(eigen.values[..., :count], total[..., None]),
        eigengap=_eigengap(eigen.values)[..., :count],
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
CLASSES = dict(zip(TAXONOMY, ("#1b4965", "#62a1c7", "#c8553d", "#f2c14e", "#c9c9c9"), strict=True))
"""The colour of each class, in every picture."""


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


# ---- the head as a whole: positional variance, separability, amplification -------------------


@dataclass(frozen=True)
class HeadVariance:
    """Results for whole heads, one value per head."""

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
    """Compute the numbers of the whole head from its moments and components."""
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
    """Accuracy of Fisher's line between Q and K on two axes (or one) if both were Gaussian; in [0, 1].

    w = S_w⁻¹(μ_Q − μ_K), threshold half-way, mean of the two classes' Φ.
    """
    within = ratio(on_q.scatter[..., :-1, :-1] + on_k.scatter[..., :-1, :-1], (on_q.n + on_k.n)[..., None, None])
    apart = on_q.mean_x - on_k.mean_x
    w = fisher_direction(within, apart)
    half = (w * apart).sum(-1) / 2

    def correct(on: Moments) -> PerHead:
        spread = np.sqrt(on.var_along(w[..., None, :])[..., 0])
        # If a class has no spread along w, all of it lies on the correct side of the threshold.
        return ndtr(np.where(spread > 0, ratio(half, spread), np.where(half > 0, np.inf, 0.0)))

    return (correct(on_q) + correct(on_k)) / 2


def _published(share: Float[np.ndarray, "*batch c"], r: Float[np.ndarray, "*batch c"]) -> tuple[PerHead, PerHead]:
    """Σ EV_i r_i², and the share of it that comes from PC0. Not a fraction of the class's own variance."""
    products = share * r**2
    total = products.sum(-1)
    return total, ratio(products[..., 0], total)


def _linear_variance(m: Spread) -> PerHead:
    """‖c‖² / var t: the variance that a linear function of position explains."""
    return ratio((m.cov_xt**2).sum(-1), m.var_t)
