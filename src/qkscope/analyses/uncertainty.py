"""Intervals that respect documents: the delete-group jackknife, and the flags that qualify a row.

Tokens of a document depend on each other, so no row-wise standard error is valid. Eight groups of documents
are deleted one at a time; the interval is centred at the bias-corrected value G·θ̂ − (G − 1)·θ̄ with Student's t
at G − 1 degrees of freedom, on the Fisher z scale for correlations, and extended to θ̂ if it does not contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import stdtrit

from qkscope.core.headmoments import HeadMoments
from qkscope.core.moments import Moments

_LEVEL = 0.95
MIN_GROUPS = 4
"""With fewer non-empty document groups there is no interval."""
MIN_ROWS_PER_DIMENSION = 5
"""With fewer rows per dimension a row carries the flag ``low_n``."""
_NONE = 1e-13
"""A variance below this share of the mean square is rounding error."""
_EQUAL = 1e-12
"""A standard error of a share below this is rounding error."""


class Scale(Enum):
    """The scale an interval is built on, and the range it is limited to."""

    LINEAR = "linear"
    SHARE = "share"
    CORRELATION = "correlation"
    MAGNITUDE = "magnitude"
    PROPORTION = "proportion"
    """A share of counted rows: arcsine of its square root."""
    POSITIVE = "positive"
    """Anything that cannot be negative: its square root."""
    AT_MOST_1 = "at most 1"
    """A share that noise can make negative."""


@dataclass(frozen=True)
class Interval:
    """Jackknife standard error and 95% interval; NaN where there are too few groups."""

    se: Float[np.ndarray, "*shape"]
    low: Float[np.ndarray, "*shape"]
    high: Float[np.ndarray, "*shape"]


def jackknife(
    estimate: Float[np.ndarray, "heads *rest"],
    replicates: Float[np.ndarray, "heads groups *rest"],
    present: Float[np.ndarray, "heads groups *#rest"],
    scale: Scale = Scale.LINEAR,
    wider: float = 1.0,
) -> Interval:
    """Interval of each head's estimate from its delete-one replicates; groups not ``present`` do not count.

    ``wider`` multiplies the width.
    """
    se = _center_and_se(estimate, replicates, present)[1]
    transform, invert = _TRANSFORMS.get(scale, (_identity, _identity))
    center, spread = _center_and_se(transform(estimate), transform(replicates), present)
    n_groups = _like(present.sum(1), estimate)
    half = wider * stdtrit(np.maximum(n_groups - 1, 1), (1 + _LEVEL) / 2) * spread
    low, high = invert(center - half), invert(center + half)
    least, most = _LIMITS.get(scale, (-np.inf, np.inf))
    # An interval centred at the bias-corrected value is extended to the estimate where it does not contain it.
    low = np.minimum(np.clip(low, least, most), estimate)
    high = np.maximum(np.clip(high, least, most), estimate)
    has_interval = n_groups >= MIN_GROUPS
    return Interval(*(np.where(has_interval, bound, np.nan) for bound in (se, low, high)))


def wilson(
    share: Float[np.ndarray, "*shape"], n: Float[np.ndarray, "*shape"] | Int[np.ndarray, "*shape"]
) -> tuple[Float[np.ndarray, "*shape"], Float[np.ndarray, "*shape"]]:
    """Wilson's 95% interval of a share of n observations.

    >>> [np.round(wilson(np.array(share), np.array(16)), 3).tolist() for share in (1.0, 0.5)]
    [[0.806, 1.0], [0.28, 0.72]]
    """
    z = 1.959964
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return np.asarray(np.clip(centre - half, 0.0, share)), np.asarray(np.clip(centre + half, share, 1.0))


def counted_by_document(
    interval: Interval, share: Float[np.ndarray, "heads"], documents: Int[np.ndarray, "heads"]
) -> Interval:
    """Wilson's interval, each document one observation, where no replicate differs from the others.

    Such replicates do not show how much the tokens of a document depend on each other.
    """
    low, high = wilson(share, np.maximum(documents, 1))
    equal = interval.se <= _EQUAL
    return Interval(interval.se, np.where(equal, low, interval.low), np.where(equal, high, interval.high))


def usable_groups(moments: HeadMoments) -> Float[np.ndarray, "*batch 8"]:
    """1 for each group that the jackknife deletes; 0 for all if either class has too few groups."""
    return moments.groups_present * np.asarray(moments.n_groups >= MIN_GROUPS)[..., None]


def flags(moments: HeadMoments, table_flags: Mapping[str, Bool[np.ndarray, "heads"]] | None = None) -> list[str]:
    """The flags of each head, joined by ``;``: cautions about its numbers; ``table_flags`` are those of the table."""
    n_q, n_k = moments.q.n.sum(-1), moments.k.n.sum(-1)
    counted = {
        "nonfinite_q": moments.dropped_q,
        "nonfinite_k": moments.dropped_k,
        "repeated_q": moments.repeated_q,
        "repeated_k": moments.repeated_k,
    }
    raised = {
        "low_n": np.minimum(n_q, n_k) < MIN_ROWS_PER_DIMENSION * moments.d,
        "few_documents": moments.n_groups < MIN_GROUPS,
        "constant_q": constant(moments.total_q),
        "constant_k": constant(moments.total_k),
        **counted,
        **(table_flags or {}),
    }
    return [
        ";".join(f"{name}={heads[i]}" if name in counted else name for name, heads in raised.items() if heads[i])
        for i in range(len(n_q))
    ]


def constant(moments: Moments) -> Bool[np.ndarray, "*batch"]:
    """True where all vectors are equal, as in a head that was cut: there is no variance to describe."""
    variance = np.trace(moments.cov_x, axis1=-2, axis2=-1)
    return np.asarray(variance <= _NONE * (variance + (moments.mean_x**2).sum(-1)))


def _center_and_se(
    estimate: Float[np.ndarray, "heads *rest"],
    replicates: Float[np.ndarray, "heads groups *rest"],
    present: Float[np.ndarray, "heads groups *#rest"],
) -> tuple[Float[np.ndarray, "heads *rest"], Float[np.ndarray, "heads *rest"]]:
    weight = present.reshape(present.shape + (1,) * (replicates.ndim - present.ndim))
    g = _like(present.sum(1), estimate)
    mean = (weight * replicates).sum(1) / np.maximum(g, 1)
    spread = (weight * (replicates - mean[:, None]) ** 2).sum(1)
    return g * estimate - (g - 1) * mean, np.sqrt((g - 1) / np.maximum(g, 1) * spread)


def _fisher_z(r: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Artanh, finite even for a perfect correlation."""
    limit = 1.0 - 1e-12
    return np.arctanh(np.clip(r, -limit, limit))


def _identity(value: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return value


def _arcsine(share: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Arcsine of the root: on this scale the spread of a counted share does not depend on the share."""
    return np.arcsin(np.sqrt(np.clip(share, 0.0, 1.0)))


def _from_arcsine(angle: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return np.sin(np.clip(angle, 0.0, np.pi / 2)) ** 2


def _root(value: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return np.sqrt(np.maximum(value, 0.0))


def _square(root: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return np.maximum(root, 0.0) ** 2


_LIMITS = {
    Scale.MAGNITUDE: (0.0, 1.0),
    Scale.SHARE: (0.0, 1.0),
    Scale.POSITIVE: (0.0, np.inf),
    Scale.AT_MOST_1: (-np.inf, 1.0),
}
_TRANSFORMS: dict[Scale, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    Scale.CORRELATION: (_fisher_z, np.tanh),
    Scale.MAGNITUDE: (_fisher_z, np.tanh),
    Scale.PROPORTION: (_arcsine, _from_arcsine),
    Scale.POSITIVE: (_root, _square),
}


def _like(
    counts: Float[np.ndarray, "heads ..."], estimate: Float[np.ndarray, "heads *rest"]
) -> Float[np.ndarray, "..."]:
    return counts.reshape(counts.shape + (1,) * (estimate.ndim - counts.ndim))
