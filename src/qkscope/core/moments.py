"""Moments of rows z = (x, t): count, mean and centred scatter, in float64, mergeable in any order.

``x`` is a query or key vector (d numbers), ``t`` its position; t is always the last coordinate of z.
All moment-based results of qkscope are functions of these three arrays. Covariances are population
covariances (1/n). Leading axes batch over heads, document groups or position buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Real

from qkscope.core.chunksums import chunk_sums
from qkscope.core.linalg import ratio

ROUNDING = 1e-13
"""Share of the total variance below which variance along a direction is rounding error."""


class Spread(ABC):
    """The interface of a count, a mean and a scatter; the scatter need not be stored as a matrix."""

    if TYPE_CHECKING:

        @property
        def n(self) -> Float[np.ndarray, "*batch"]:
            """Number of rows."""
            raise NotImplementedError

        @property
        def mean(self) -> Float[np.ndarray, "*batch z"]:
            """Mean of the rows."""
            raise NotImplementedError

    @property
    @abstractmethod
    def diagonal(self) -> Float[np.ndarray, "*batch z"]:
        """Diagonal of the scatter."""

    @property
    @abstractmethod
    def scatter_xt(self) -> Float[np.ndarray, "*batch d"]:
        """Scatter of x with t."""

    @abstractmethod
    def times(self, vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        """Each row of ``vectors`` multiplied by the scatter of x."""

    @property
    def mean_x(self) -> Float[np.ndarray, "*batch d"]:
        """Mean vector μ."""
        return self.mean[..., :-1]

    @property
    def mean_t(self) -> Float[np.ndarray, "*batch"]:
        """Mean position."""
        return self.mean[..., -1]

    @cached_property
    def total_variance(self) -> Float[np.ndarray, "*batch"]:
        """Trace of Σ."""
        return self._per_row(np.asarray(self.diagonal[..., :-1].sum(-1)))

    @cached_property
    def cov_xt(self) -> Float[np.ndarray, "*batch d"]:
        """Cov(x, t), the direction in which the mean drifts with position."""
        return self._per_row(self.scatter_xt)

    @cached_property
    def var_t(self) -> Float[np.ndarray, "*batch"]:
        """Variance of the positions."""
        return self._per_row(self.diagonal[..., -1])

    def project(self, axes: Float[np.ndarray, "*#batch m d"]) -> Moments:
        """Moments of (axes·x, t): m coordinates in place of d."""
        m = axes.shape[-2]
        mean, scatter = np.empty((*self.n.shape, m + 1)), np.empty((*self.n.shape, m + 1, m + 1))
        mean[..., :m], mean[..., m] = (axes @ self.mean_x[..., None])[..., 0], self.mean_t
        scatter[..., :m, :m] = self.times(axes) @ axes.swapaxes(-1, -2)
        scatter[..., :m, m] = scatter[..., m, :m] = (axes @ self.scatter_xt[..., None])[..., 0]
        scatter[..., m, m] = self.diagonal[..., -1]
        return Moments(self.n, mean, scatter)

    def _per_row(self, sums: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        n = self.n.reshape(self.n.shape + (1,) * (sums.ndim - self.n.ndim))
        return np.asarray(sums / np.where(n > 0, n, 1.0))


@dataclass(frozen=True)
class Moments(Spread):
    """Count n, mean of z and centred scatter Σ (z − z̄)(z − z̄)ᵀ, with leading batch axes."""

    n: Float[np.ndarray, "*batch"]
    mean: Float[np.ndarray, "*batch z"]
    scatter: Float[np.ndarray, "*batch z z"]

    # ---- constructors -------------------------------------------------------------------------

    @classmethod
    def zeros(cls, d: int, batch: tuple[int, ...] = ()) -> Moments:
        """The moments of no rows: the neutral element of merging."""
        return cls(np.zeros(batch), np.zeros((*batch, d + 1)), np.zeros((*batch, d + 1, d + 1)))

    @classmethod
    def from_rows(cls, x: Real[np.ndarray, "*batch n d"], t: Real[np.ndarray, "..."]) -> Moments:
        """Moments of rows x at positions t, each chunk centred before it is squared.

        >>> m = Moments.from_rows(np.array([[1.0], [3.0]]), np.array([0, 2]))
        >>> m.mean.tolist(), m.scatter.tolist()
        ([2.0, 1.0], [[2.0, 2.0], [2.0, 2.0]])
        """
        if x.shape[:-1] != t.shape:
            raise ValueError(f"expected one position per row, got x {x.shape} and t {t.shape}")
        if not x.shape[-2]:
            return cls.zeros(x.shape[-1], x.shape[:-2])
        return reduce(Moments.merge, (cls(*sums) for sums in chunk_sums(x, t)))

    @classmethod
    def stack(cls, parts: Iterable[Moments]) -> Moments:
        """Put equally shaped moments side by side along a new first batch axis."""
        ns, means, scatters = zip(*((p.n, p.mean, p.scatter) for p in parts), strict=True)
        return cls(np.stack(ns), np.stack(means), np.stack(scatters))

    # ---- combining ----------------------------------------------------------------------------

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets of rows together (Chan, Golub & LeVeque 1979)."""
        if self.d != other.d:
            raise ValueError(f"expected vectors of equal length, got {self.d} and {other.d}")
        n = np.asarray(self.n + other.n)
        share = ratio(other.n, n)
        delta = other.mean - self.mean
        mean = self.mean + share[..., None] * delta
        scatter = ((self.n * share)[..., None] * delta)[..., :, None] * delta[..., None, :]
        scatter += self.scatter
        scatter += other.scatter
        return Moments(n, mean, scatter)

    __add__ = merge

    def add(self, x: Real[np.ndarray, "*batch n d"], t: Real[np.ndarray, "..."]) -> Moments:
        """The moments of these and further rows."""
        return self.merge(Moments.from_rows(x, t))

    def merged(self, weights: Float[np.ndarray, "... parts"] | None = None) -> Moments:
        """Merge along the last batch axis; ``weights`` (…, parts) of 0 and 1 select the parts.

        Two-dimensional weights give one merged set per row: ``merged(1 - np.eye(8))`` are the eight delete-one
        sets of a jackknife, without a subtraction that could cancel.
        """
        if weights is None:
            weights = np.ones(self.n.shape[-1])
        sets = (None,) * (weights.ndim - 1)
        n_parts = self.n[(..., *sets, slice(None))] * weights
        n = np.asarray(n_parts.sum(-1))
        # Deviations from the mean of all parts keep the products small even if that mean is far from zero.
        share = self.n / np.maximum(self.n.sum(-1, keepdims=True), np.finfo(float).tiny)
        shift = np.einsum("...p,...pz->...z", share, self.mean)
        deviation = np.where(self.n[..., None] > 0, self.mean - shift[..., None, :], 0.0)
        mean = np.einsum(
            "...p,...pz->...z", ratio(n_parts, n[..., None]), deviation[(..., *sets, slice(None), slice(None))]
        )
        flat = self.scatter.reshape(*self.scatter.shape[:-2], -1)
        scatter = (weights @ flat).reshape(*n.shape, *self.scatter.shape[-2:])
        centred = deviation[(..., *sets, slice(None), slice(None))] - mean[..., None, :]
        scatter += (centred * n_parts[..., None]).swapaxes(-1, -2) @ centred
        centre = shift[(..., *sets, slice(None))]
        return Moments(n, mean + np.where(n[..., None] > 0, centre, 0.0), scatter)

    @cached_property
    def halves(self) -> Moments:
        """Even and odd parts of the last batch axis, merged (…, 2)."""
        part = np.arange(self.n.shape[-1]) % 2
        return self.merged(np.stack([part == 0, part == 1]).astype(float))

    @cached_property
    def total(self) -> Moments:
        """All parts of the last batch axis, merged via the halves."""
        return self.halves.part(0).merge(self.halves.part(1))

    # ---- access -------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Moments:
        """Index the batch axes."""
        return Moments(*(np.asarray(array[index]) for array in (self.n, self.mean, self.scatter)))

    def part(self, index: int) -> Moments:
        """One part along the last batch axis."""
        return Moments(np.asarray(self.n[..., index]), self.mean[..., index, :], self.scatter[..., index, :, :])

    def subset(self, coordinates: Any) -> Moments:
        """Moments of some coordinates of x, with t; ``subset([])`` has t only."""
        keep = np.append(np.arange(self.d)[coordinates], self.d)
        return Moments(self.n, self.mean[..., keep], self.scatter[..., keep[:, None], keep])

    @property
    def d(self) -> int:
        """Length of the vectors x."""
        return self.mean.shape[-1] - 1

    @cached_property
    def cov_x(self) -> Float[np.ndarray, "*batch d d"]:
        """Covariance Σ of the vectors."""
        return self._per_row(self.scatter[..., :-1, :-1])

    @property
    def diagonal(self) -> Float[np.ndarray, "*batch z"]:
        """Diagonal of the scatter."""
        return np.diagonal(self.scatter, axis1=-2, axis2=-1)

    @property
    def scatter_xt(self) -> Float[np.ndarray, "*batch d"]:
        """Scatter of x with t."""
        return self.scatter[..., :-1, -1]

    def times(self, vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        """Each row of ``vectors`` multiplied by the scatter of x."""
        return vectors @ self.scatter[..., :-1, :-1]

    # ---- along axes; after ``project``, along each coordinate ------------------------------------

    @cached_property
    def variances(self) -> Float[np.ndarray, "*batch d"]:
        """Variance of each coordinate."""
        return np.maximum(self._per_row(self.diagonal[..., :-1]), 0.0)

    @property
    def slopes(self) -> Float[np.ndarray, "*batch d"]:
        """Regression slope of each coordinate on t, per token."""
        return ratio(self.cov_xt, self.var_t[..., None])

    def correlations(self, total: Float[np.ndarray, "*batch"]) -> Float[np.ndarray, "*batch d"]:
        """Pearson correlation of each coordinate with t; 0 where its variance is only rounding error of ``total``."""
        variances = self.variances
        scale = np.sqrt(np.where(variances > ROUNDING * total[..., None], variances, 0.0) * self.var_t[..., None])
        return np.clip(ratio(self.cov_xt, scale), -1.0, 1.0)

    def turned(self, signs: Float[np.ndarray, "*batch d"]) -> Moments:
        """The moments with each coordinate multiplied by its sign."""
        factor = np.concatenate([signs, np.ones((*signs.shape[:-1], 1))], -1)
        return Moments(self.n, self.mean * factor, self.scatter * factor[..., :, None] * factor[..., None, :])

    def mean_along(self, axes: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m"]:
        """Mean of uᵀx for each axis u; not centred."""
        return np.einsum("...md,...d->...m", axes, self.mean_x)

    def var_along(self, axes: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m"]:
        """Variance uᵀΣu for each axis u."""
        squared = np.einsum("...md,...md->...m", axes @ self.scatter[..., :-1, :-1], axes)
        return np.maximum(self._per_row(squared), 0.0)

    def slope_along(self, axes: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m"]:
        """Regression slope of uᵀx on t, per token."""
        return ratio(np.einsum("...md,...d->...m", axes, self.cov_xt), self.var_t[..., None])

    def corr_along(self, axes: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m"]:
        """Pearson correlation of uᵀx with t, in [−1, 1]; 0 where uᵀx varies only by rounding error or t not at all."""
        cov = np.einsum("...md,...d->...m", axes, self.cov_xt)
        variances, total = self.var_along(axes), self.total_variance[..., None]
        scale = np.sqrt(np.where(variances > ROUNDING * total, variances, 0.0) * self.var_t[..., None])
        return np.clip(ratio(cov, scale), -1.0, 1.0)
