"""Moments with each document group left out in turn, without forming their scatters.

The scatter of all rows except those of group g is S − S_g − c δδᵀ, with δ the difference of the two means and
c = n_g (n − n_g) / n. Only its products with a few vectors are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from qkscope.core.linalg import ratio
from qkscope.core.moments import Moments, Spread

CANCELS = 1e-4
"""If less than this share of the spread remains without a group, the other groups are merged instead."""


@dataclass(frozen=True)
class LeaveOneOut(Spread):
    """Moments of all rows except those of one group, for each group (…, groups)."""

    groups: Moments
    """Moments by group (…, groups)."""
    whole: Moments
    """Moments of all groups together (…)."""

    @cached_property
    def n(self) -> Float[np.ndarray, "*batch groups"]:
        """Number of remaining rows."""
        return np.asarray(self.whole.n[..., None] - self.groups.n)

    @cached_property
    def mean(self) -> Float[np.ndarray, "*batch groups z"]:
        """Mean of the remaining rows; 0 where none remain."""
        difference = self.whole.mean[..., None, :] - self.groups.mean
        mean = self.whole.mean[..., None, :] + ratio(self.groups.n, self.n)[..., None] * difference
        return np.where(self.n[..., None] > 0, mean, 0.0)

    @cached_property
    def scatter_xt(self) -> Float[np.ndarray, "*batch groups d"]:
        """Scatter of x with t."""
        if self._merged is not None:
            return self._merged.scatter_xt
        difference = self.whole.scatter_xt[..., None, :] - self.groups.scatter_xt
        return difference - self._root[..., :-1] * self._root[..., -1:]

    @cached_property
    def diagonal(self) -> Float[np.ndarray, "*batch groups z"]:
        """Diagonal of the scatter."""
        return self._diagonal if self._merged is None else self._merged.diagonal

    @property
    def cancels(self) -> bool:
        """True if subtracting a group would leave mostly rounding error, so that the others are merged instead."""
        return self._merged is not None

    def times(self, vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        """Each row of ``vectors`` (…, groups or 1, m, d) multiplied by the scatter of x."""
        if self._merged is not None:
            return self._merged.times(vectors)
        root = self._root[..., None, :-1]
        product = vectors @ self._whole_scatter - self.groups.times(vectors)
        product -= (vectors @ root.swapaxes(-1, -2)) * root
        return product

    @cached_property
    def _whole_scatter(self) -> Float[np.ndarray, "*batch 1 d d"]:
        return np.ascontiguousarray(self.whole.scatter[..., None, :-1, :-1])

    @cached_property
    def _root(self) -> Float[np.ndarray, "*batch groups z"]:
        """√c δ."""
        c = ratio(self.groups.n * self.n, self.whole.n[..., None])
        return np.sqrt(c)[..., None] * (self.groups.mean - self.mean)

    @cached_property
    def _diagonal(self) -> Float[np.ndarray, "*batch groups z"]:
        return self.whole.diagonal[..., None, :] - self.groups.diagonal - self._root**2

    @cached_property
    def _merged(self) -> Moments | None:
        """The remaining groups, merged, if subtracting would leave mostly rounding error; else None."""
        remaining, total = (_spreads(diagonal) for diagonal in (self._diagonal, self.whole.diagonal[..., None, :]))
        if (remaining >= CANCELS * total).all():
            return None
        return self.groups.merged(1.0 - np.eye(self.groups.n.shape[-1]))


def _spreads(diagonal: Float[np.ndarray, "*batch z"]) -> Float[np.ndarray, "2 *batch"]:
    """Total spread of x, and spread of t."""
    return np.stack([diagonal[..., :-1].sum(-1), diagonal[..., -1]])


@dataclass(frozen=True)
class PooledLeaveOneOut:
    """Queries and keys together, with each document group left out."""

    q: LeaveOneOut
    k: LeaveOneOut

    @cached_property
    def n(self) -> Float[np.ndarray, "*batch groups"]:
        """Number of remaining queries and keys."""
        return np.asarray(self.q.n + self.k.n)

    @property
    def whole_n(self) -> Float[np.ndarray, "*batch 1"]:
        """Number of queries and keys with no group left out."""
        return np.asarray(self.q.whole.n + self.k.whole.n)[..., None]

    @cached_property
    def _root(self) -> Float[np.ndarray, "*batch groups z"]:
        """√(n_q n_k / n) (μ_q − μ_k); its outer product is the scatter between the two classes."""
        return np.sqrt(ratio(self.q.n * self.k.n, self.n))[..., None] * (self.q.mean - self.k.mean)

    @property
    def cov_xt(self) -> Float[np.ndarray, "*batch groups d"]:
        """Cov(x, t)."""
        between = self._root[..., :-1] * self._root[..., -1:]
        return ratio(self.q.scatter_xt + self.k.scatter_xt + between, self.n[..., None])

    @cached_property
    def total_variance(self) -> Float[np.ndarray, "*batch groups"]:
        """Trace of the covariance."""
        within = self.q.n * self.q.total_variance + self.k.n * self.k.total_variance
        return ratio(within + (self._root[..., :-1] ** 2).sum(-1), self.n)

    def times(self, vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        """Each row of ``vectors`` multiplied by the scatter of x."""
        root = self._root[..., None, :-1]
        product = self.q.times(vectors) + self.k.times(vectors)
        product += (vectors @ root.swapaxes(-1, -2)) * root
        return product
