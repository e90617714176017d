"""Per-head consequences of the PCA: positional variance, Q/K separability, the amplification of position by μ_Q."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from qkscope.analyses.pca import Components
from qkscope.core.linalg import ratio
from qkscope.core.moments import Moments, Spread
from qkscope.core.shapes import PerHead


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
    still = np.trace(within, axis1=-2, axis2=-1) == 0
    w = np.einsum("...ij,...j->...i", np.linalg.pinv(within, hermitian=True), apart)
    w = np.where(still[..., None], apart, w)
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
