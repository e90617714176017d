"""Results on held-out documents: correlations on axis a, accuracy of the Q/K line.

Document groups are split into even and odd. Each half is used for the fit and the other is scored, and the two
scores are averaged; tokens of one document are never on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int

from qkscope.analyses.options import Centering
from qkscope.analyses.rotationmodel import drift_covariance
from qkscope.core.headmoments import ALL_AND_WITHOUT, HALVES, N_GROUPS, HeadMoments
from qkscope.core.linalg import PerHead, fisher_direction, unit
from qkscope.core.moments import Moments
from qkscope.core.rows import Coordinates, Pair, Rows

FOLDS = ((0, 1), (1, 0))
"""(half used for the fit, half that is scored)."""


@dataclass(frozen=True)
class HeldOut:
    """Correlations with position along an axis fitted to other documents; NaN where a half has too few rows."""

    r_q_heldout: PerHead
    r_k_heldout: PerHead


def held_out(moments: HeadMoments, centering: Centering = "pooled") -> HeldOut:
    """Axis a from one half of the documents, r on the other half, averaged over both choices."""
    folds = [_fold(moments, fit, score, centering) for fit, score in FOLDS]
    r_q, r_k = (np.mean([fold[i] for fold in folds], axis=0) for i in (0, 1))
    return HeldOut(r_q, r_k)


def _fold(moments: HeadMoments, fit: int, score: int, centering: Centering) -> tuple[PerHead, PerHead]:
    a = unit(drift_covariance(moments.halves_q.part(fit), moments.halves_k.part(fit), centering))
    correlations = []
    for kind in (moments.halves_q, moments.halves_k):
        scored, fitted = kind.part(score), kind.part(fit)
        r = scored.corr_along(a[..., None, :])[..., 0]
        correlations.append(np.where((scored.n > 1) & (fitted.n > 1), r, np.nan))
    return correlations[0], correlations[1]


# ---- the line between queries and keys ----------------------------------------------------------


def lda_accuracy(
    q: Moments, k: Moments, pair: Pair, axes: Float[np.ndarray, "m d"], on: Coordinates | None = None
) -> tuple[float, Float[np.ndarray, "8"]]:
    """Share of vectors on the correct side of Fisher's line on one or two axes, and with each document group left out.

    ``q`` and ``k`` are one head's moments by document group: the line is fitted to all tokens of one half of the
    documents, and scored on the sampled vectors of the other. ``on`` (the vectors' coordinates on the axes) saves
    computing them.
    """
    lines = _Lines.fitted(q.project(axes), k.project(axes))
    coordinates = on or Coordinates.of(pair, axes)
    correct = [
        _share_correct(coordinates.q, pair.q, lines, above=True),
        _share_correct(coordinates.k, pair.k, lines, above=False),
    ]
    accuracy = np.mean(correct, axis=0).reshape(len(FOLDS), -1).mean(0)
    return float(accuracy[0]), accuracy[1:]


# For each fold a line for the whole half and one without each group; leaving out a group of the other half changes
# which rows are scored.
_FITTED = np.vstack([ALL_AND_WITHOUT * HALVES[fit] for fit, _ in FOLDS])
_SCORED = np.vstack([ALL_AND_WITHOUT * HALVES[score] for _, score in FOLDS])


@dataclass(frozen=True)
class _Lines:
    """Fisher's lines for several selections of groups; NaN where a class has fewer than two rows."""

    w: Float[np.ndarray, "lines m"]
    threshold: Float[np.ndarray, "lines"]

    @classmethod
    def fitted(cls, on_q: Moments, on_k: Moments) -> _Lines:
        q, k = on_q.merged(_FITTED), on_k.merged(_FITTED)
        apart = q.mean_x - k.mean_x
        within = q.scatter[..., :-1, :-1] + k.scatter[..., :-1, :-1]
        w = fisher_direction(within, apart)
        threshold = (w * (q.mean_x + k.mean_x)).sum(-1) / 2
        return cls(w, np.where(np.minimum(q.n, k.n) < 2, np.nan, threshold))


def _share_correct(
    on: Float[np.ndarray, "n m"], rows: Rows, lines: _Lines, *, above: bool
) -> Float[np.ndarray, "lines"]:
    """Share of the scored groups' rows on the correct side of each line; a line without a group is not scored on it."""
    member = rows.once("member", lambda: _member(rows.example_id))
    value = lines.w @ on.T
    correct = value > lines.threshold[:, None] if above else value <= lines.threshold[:, None]
    n_correct, n = correct.astype(np.float32) @ member, _SCORED @ member.sum(0)
    share = np.divide((_SCORED * n_correct).sum(-1), n, out=np.full(len(n), np.nan), where=n > 0)
    return np.where(np.isnan(lines.threshold), np.nan, share)


def _member(example_id: Int[np.ndarray, "n"]) -> Float32[np.ndarray, "n 8"]:
    """1 where a row belongs to a document group, else 0."""
    return (example_id[:, None] % N_GROUPS == np.arange(N_GROUPS)).astype(np.float32)
