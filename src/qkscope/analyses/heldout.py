"""What remains of a result on documents it was not fitted to: correlations on axis a, accuracy of the Q/K line.

Document groups are split into even and odd. Each half is fitted on, the other is scored, and the two are averaged;
tokens of one document are never on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from qkscope.analyses.rotation import Centering, drift_covariance
from qkscope.core.headmoments import DELETE_ONE, HALVES, N_GROUPS, HeadMoments
from qkscope.core.linalg import unit
from qkscope.core.moments import Moments
from qkscope.core.rows import Pair
from qkscope.core.shapes import PerHead

FOLDS = ((0, 1), (1, 0))
"""Which half is fitted on, which is scored."""


@dataclass(frozen=True)
class HeldOut:
    """Correlations with position along an axis that other documents chose; NaN where a half has none."""

    r_q_heldout: PerHead
    r_k_heldout: PerHead


def held_out(moments: HeadMoments, centering: Centering = "pooled") -> HeldOut:
    """Axis a from half of the documents, r on the others, both ways."""
    folds = [_fold(moments, fit, score, centering) for fit, score in FOLDS]
    r_q, r_k = (np.mean([fold[i] for fold in folds], axis=0) for i in (0, 1))
    return HeldOut(r_q, r_k)


def _fold(moments: HeadMoments, fit: int, score: int, centering: Centering) -> tuple[PerHead, PerHead]:
    a = unit(drift_covariance(moments.halves_q.part(fit), moments.halves_k.part(fit), centering))
    found = []
    for kind in (moments.halves_q, moments.halves_k):
        scored, fitted = kind.part(score), kind.part(fit)
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
    kinds = [_Projected(m.project(axes), r.along(axes), r.example_id % N_GROUPS) for m, r in ((q, pair.q), (k, pair.k))]
    folds = []
    for fit, score in ((HALVES[fit], HALVES[score] > 0) for fit, score in FOLDS):
        # A line for the whole half, and one without each group; those of the other half change only what is scored.
        lines = _Lines.fitted(kinds[0].on, kinds[1].on, np.vstack([fit, DELETE_ONE * fit]))
        folds.append(
            np.mean([_right(kind, lines, score, above) for kind, above in zip(kinds, (True, False), strict=True)], 0)
        )
    both = np.mean(folds, axis=0)
    return float(both[0]), both[1:]


@dataclass(frozen=True)
class _Projected:
    """One class on the axes: its moments by group, and its rows with their groups."""

    on: Moments
    x: Float[np.ndarray, "n m"]
    group: Int[np.ndarray, "n"]


@dataclass(frozen=True)
class _Lines:
    """Fisher's lines of several choices of groups; NaN where a class has fewer than two rows."""

    w: Float[np.ndarray, "lines m"]
    threshold: Float[np.ndarray, "lines"]

    @classmethod
    def fitted(cls, on_q: Moments, on_k: Moments, chosen: Float[np.ndarray, "lines 8"]) -> _Lines:
        q, k = on_q.merged(chosen), on_k.merged(chosen)
        apart = q.mean_x - k.mean_x
        within = q.scatter[..., :-1, :-1] + k.scatter[..., :-1, :-1]
        w = np.einsum("lij,lj->li", np.linalg.pinv(within, hermitian=True), apart)
        w = np.where(np.trace(within, axis1=-2, axis2=-1)[:, None] > 0, w, apart)
        threshold = (w * (q.mean_x + k.mean_x)).sum(-1) / 2
        return cls(w, np.where(np.minimum(q.n, k.n) < 2, np.nan, threshold))


def _right(kind: _Projected, lines: _Lines, score: Bool[np.ndarray, "8"], above: bool) -> Float[np.ndarray, "lines"]:
    """Share of the scored groups' rows on their side of each line; the line without a group is not scored on it."""
    value = kind.x @ lines.w.T
    right = value > lines.threshold if above else value <= lines.threshold
    membership = kind.group == np.arange(N_GROUPS)[:, None]
    counted = np.vstack([score, DELETE_ONE * score])
    n = counted @ membership.sum(-1)
    share = np.divide(
        (counted.T * (membership.astype(float) @ right)).sum(0), n, out=np.full(len(n), np.nan), where=n > 0
    )
    return np.where(np.isnan(lines.threshold), np.nan, share)
