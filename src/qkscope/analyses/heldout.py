"""What remains of a result on documents it was not fitted to: correlations on axis a, accuracy of the Q/K line.

Document groups are split into even and odd. Each half is fitted on, the other is scored, and the two are averaged;
tokens of one document are never on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from qkscope.analyses.rotation import Centering, drift_covariance
from qkscope.core.headmoments import DELETE_ONE, N_GROUPS, HeadMoments
from qkscope.core.linalg import unit
from qkscope.core.moments import Moments
from qkscope.core.rows import Pair
from qkscope.core.shapes import PerHead

EVEN = np.arange(N_GROUPS) % 2 == 0
HALVES = ((EVEN, ~EVEN), (~EVEN, EVEN))
"""Groups fitted on, groups scored."""


@dataclass(frozen=True)
class HeldOut:
    """Correlations with position along an axis that other documents chose; NaN where a half has none."""

    r_q_heldout: PerHead
    r_k_heldout: PerHead


def held_out(moments: HeadMoments, centering: Centering = "pooled") -> HeldOut:
    """Axis a from half of the documents, r on the others, both ways."""
    folds = [_fold(moments, fit.astype(float), score.astype(float), centering) for fit, score in HALVES]
    r_q, r_k = (np.mean([fold[i] for fold in folds], axis=0) for i in (0, 1))
    return HeldOut(r_q, r_k)


def _fold(
    moments: HeadMoments, fit: Float[np.ndarray, "8"], score: Float[np.ndarray, "8"], centering: Centering
) -> tuple[PerHead, PerHead]:
    a = unit(drift_covariance(moments.q.merged(fit), moments.k.merged(fit), centering))
    found = []
    for kind in (moments.q, moments.k):
        scored, fitted = kind.merged(score), kind.merged(fit)
        r = scored.corr_along(a[..., None, :])[..., 0]
        found.append(np.where((scored.n > 1) & (fitted.n > 1), r, np.nan))
    return found[0], found[1]


# ---- the line between queries and keys ----------------------------------------------------------


def lda_accuracy(
    q: Moments, k: Moments, pair: Pair, axes: Float[np.ndarray, "m d"]
) -> tuple[float, Float[np.ndarray, "8"]]:
    """Share of vectors on their own side of Fisher's line on one or two axes, and with each document group left out.

    ``q`` and ``k`` are one head's moments by document group: the line is fitted to all tokens of one half of the
    documents, and scored on the sampled vectors of the other.
    """
    on = q.project(axes), k.project(axes)
    rows = [(r.x @ axes.T, r.example_id % N_GROUPS) for r in (pair.q, pair.k)]
    whole = _both_ways(on, rows, np.ones(N_GROUPS))
    return whole, np.array([_both_ways(on, rows, kept) for kept in DELETE_ONE])


Scored = list[tuple[Float[np.ndarray, "_ m"], np.ndarray]]


def _both_ways(on: tuple[Moments, Moments], rows: Scored, kept: Float[np.ndarray, "8"]) -> float:
    folds = [_accuracy(on, rows, fit & (kept > 0), score & (kept > 0)) for fit, score in HALVES]
    return float(np.mean(folds))


def _accuracy(
    on: tuple[Moments, Moments], rows: Scored, fit: Bool[np.ndarray, "8"], score: Bool[np.ndarray, "8"]
) -> float:
    q, k = (m.merged(fit.astype(float)) for m in on)
    if min(float(q.n), float(k.n)) < 2:
        return float("nan")
    apart = q.mean_x - k.mean_x
    within = q.scatter[:-1, :-1] + k.scatter[:-1, :-1]
    w = np.linalg.pinv(within, hermitian=True) @ apart if np.trace(within) > 0 else apart
    threshold = w @ (q.mean_x + k.mean_x) / 2
    chosen = [x[score[group]] for x, group in rows]
    if not min(len(x) for x in chosen):
        return float("nan")
    return float(((chosen[0] @ w > threshold).mean() + (chosen[1] @ w <= threshold).mean()) / 2)
