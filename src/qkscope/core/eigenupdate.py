"""Eigenpairs of matrices close to a known matrix, from products with a few vectors.

A vector u with Mu − λu = r is corrected by (λ − K)⁻¹ r, where K is the known matrix (Davidson's step): the error is
multiplied by the ratio of ‖M − K‖ to the distance of λ from the other eigenvalues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from qkscope.core.linalg import Eigen, eigh_descending, inverse, is_positive

Times = Callable[[Float[np.ndarray, "*#batch m d"]], Float[np.ndarray, "*batch g m d"]]
"""Multiplies rows of vectors (…, g or 1, m, d) by each of g matrices."""

NEAR_BLOCK = 8
"""Eigenpairs beyond the requested ones that are treated exactly."""
NEAR_TIES = 2
"""Eigenpairs beyond the requested ones that are corrected too."""
NEAR_LIMIT = 3e-3
"""Largest residual ‖Mu − λu‖ / λ before the last correction; above it, the matrix is fully decomposed."""
NEAR_STEP = 0.02
"""Largest last correction; above it, the matrix is fully decomposed."""
ALIKE = 1e-4
"""Eigenvalues whose relative difference is less than this count as equal."""
TOO_CLOSE = 0.05
"""A correction does not separate eigenvalues whose relative distance is less than this."""


@runtime_checkable
class Known(Protocol):
    """A matrix K whose leading eigenpairs are known, with an approximate (λ − K)⁻¹."""

    @property
    def leading(self) -> Eigen:
        """Eigenpairs that are treated exactly."""
        ...

    @property
    def beyond(self) -> Float[np.ndarray, "*batch"]:
        """The largest eigenvalue that is not in ``leading``."""
        ...

    def solve(
        self, values: Float[np.ndarray, "*batch g m"], residual: Float[np.ndarray, "*batch g m d"]
    ) -> Float[np.ndarray, "*batch g m d"]:
        """(λ − K)⁻¹ r on the axes whose eigenvalues are far from λ."""
        ...


@dataclass(frozen=True)
class KnownAll:
    """A matrix of which all eigenpairs are known; the first ``block`` of them are treated exactly."""

    all: Eigen
    block: int

    @property
    def leading(self) -> Eigen:
        """The first ``block`` eigenpairs."""
        return Eigen(self.all.values[..., : self.block], self.all.axes[..., : self.block, :])

    @property
    def beyond(self) -> Float[np.ndarray, "*batch"]:
        """The first eigenvalue after the block; 0 if the block contains all."""
        values = self.all.values
        return values[..., self.block] if self.block < values.shape[-1] else np.zeros(values.shape[:-1])

    def solve(
        self, values: Float[np.ndarray, "*batch g m"], residual: Float[np.ndarray, "*batch g m d"]
    ) -> Float[np.ndarray, "*batch g m d"]:
        """(λ − K)⁻¹ r, exactly, axis by axis."""
        return _axis_by_axis(self.all, values, residual)[1]


@dataclass(frozen=True)
class KnownTop:
    """A matrix and its leading eigenpairs, the last of which only bounds the rest; for one requested eigenpair."""

    matrix: Float[np.ndarray, "*batch d d"]
    top: Eigen

    @property
    def leading(self) -> Eigen:
        """All known eigenpairs but the last."""
        return Eigen(self.top.values[..., :-1], self.top.axes[..., :-1, :])

    @property
    def beyond(self) -> Float[np.ndarray, "*batch"]:
        """The last known eigenvalue."""
        return self.top.values[..., -1]

    def solve(
        self, values: Float[np.ndarray, "*batch g m"], residual: Float[np.ndarray, "*batch g m d"]
    ) -> Float[np.ndarray, "*batch g m d"]:
        """(λ − K)⁻¹ r on the known axes, axis by axis; (λ₁ − K)⁻¹ r with the first eigenvalue λ₁ elsewhere."""
        axes = self.leading.axes[..., None, :, :]
        coordinates, step = _axis_by_axis(self.leading, values, residual)
        remainder = residual - coordinates @ axes
        return step + remainder @ self._resolvent[..., None, :, :]

    @cached_property
    def _resolvent(self) -> Float[np.ndarray, "*batch d d"]:
        """(λ₁ − K)⁻¹ with known eigenvalues shifted down, and a small shift in case another one equals λ₁."""
        axes, largest = self.leading.axes, self.top.values[..., 0, None, None]
        lift = np.maximum(largest, ALIKE * np.abs(self.matrix).max((-2, -1), keepdims=True))
        lift = np.where(lift > 0, lift, 1.0)
        return inverse(lift * ((1 + ALIKE) * np.eye(axes.shape[-1]) + axes.swapaxes(-1, -2) @ axes) - self.matrix)


def _axis_by_axis(
    known: Eigen, values: Float[np.ndarray, "*batch g m"], residual: Float[np.ndarray, "*batch g m d"]
) -> tuple[Float[np.ndarray, "*batch g m k"], Float[np.ndarray, "*batch g m d"]]:
    """Coordinates of the residual on known axes, and (λ − K)⁻¹ r on those whose eigenvalues are far enough from λ."""
    axes = known.axes[..., None, :, :]
    coordinates = residual @ axes.swapaxes(-1, -2)
    distance = values[..., None] - known.values[..., None, None, :]
    far = np.abs(distance) > TOO_CLOSE * values[..., None]
    return coordinates, (np.where(far, coordinates, 0.0) / np.where(far, distance, 1.0)) @ axes


def eigh_near(times: Times, known: Known, k: int, ceiling: Float[np.ndarray, "*batch g"], rounds: int = 1) -> Eigen:
    """The k leading eigenpairs of g positive matrices close to a known one.

    The matrix is decomposed within the span of the leading axes; ``rounds`` times the axes are corrected and it is
    decomposed within their new span; then they are corrected once more. The result is accepted only if the eigenvalues
    beyond the block are below the k-th eigenvalue and the residual is small; other matrices are fully decomposed.
    ``ceiling`` is an upper bound of the eigenvalues beyond the block; if it is too large, a factorisation decides.
    """
    axes = known.leading.axes[..., None, :, :]
    rows = times(axes)
    columns = axes.swapaxes(-1, -2)
    values, mix = eigh_descending(rows @ columns)
    bounded = _bounded(rows - (rows @ columns) @ axes, mix, values, k, ceiling)
    # A few more than requested: before the corrections, the order of near ties is uncertain.
    n_corrected = min(k + NEAR_TIES, axes.shape[-2])
    values, mix = values[..., :n_corrected], mix[..., :n_corrected, :]
    vectors, product = mix @ axes, mix @ rows
    for _ in range(rounds):
        residual = product - values[..., None] * vectors
        values, vectors, product = _ritz(times, vectors + known.solve(values, residual))
    span, values, vectors = vectors, values[..., :k], vectors[..., :k, :]
    residual = product[..., :k, :] - values[..., None] * vectors
    step = known.solve(values, residual)
    step -= (step @ span.swapaxes(-1, -2)) @ span  # within the span they are already optimal
    small = np.vecdot(residual, residual) <= np.copysign((NEAR_LIMIT * values) ** 2, NEAR_LIMIT)
    converged = (small & (np.vecdot(step, step) <= NEAR_STEP**2)).all(-1)
    values, vectors = values + np.vecdot(step, residual), vectors + step
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    if not (converged & bounded).all():
        d = axes.shape[-1]
        matrices = np.broadcast_to(times(np.eye(d)), (*converged.shape, d, d))
        for index in zip(*np.nonzero(~(converged & bounded)), strict=True):
            if not (converged[index] and _none_missed(matrices[index], Eigen(values[index], vectors[index]))):
                full = eigh_descending(matrices[index])
                values[index], vectors[index] = full.values[:k], full.axes[:k]
    return Eigen(values, vectors)


def _bounded(
    beyond: Float[np.ndarray, "*batch g block d"],
    mix: Float[np.ndarray, "*batch g block block"],
    values: Float[np.ndarray, "*batch g block"],
    k: int,
    ceiling: Float[np.ndarray, "*batch g"],
) -> Bool[np.ndarray, "*batch g"]:
    """True if all further eigenvalues are below the k-th eigenvalue of the block.

    These are the block's own after the k-th, and those beyond the block (at most ``ceiling``); ``beyond``, the block's
    rows outside its span, couples the two. The bound is the larger eigenvalue of [[b, c], [cᵀ, ceiling]].
    """
    if k >= values.shape[-1]:
        return np.asarray(ceiling < values[..., k - 1])
    coupled = ((mix[..., k:, :] @ beyond) ** 2).sum((-2, -1))
    next_value = values[..., k]
    largest = (next_value + ceiling) / 2 + np.sqrt(((next_value - ceiling) / 2) ** 2 + coupled)
    return np.asarray(largest < values[..., k - 1] * (1 + ALIKE))


def _none_missed(matrix: Float[np.ndarray, "d d"], eigen: Eigen) -> bool:
    """True if the matrix minus these eigenpairs is below the last of them: then they are the leading ones."""
    remainder = matrix - (eigen.axes.T * eigen.values) @ eigen.axes
    return is_positive(eigen.values[-1] * (1 + ALIKE) * np.eye(len(matrix)) - remainder)


def _ritz(
    times: Times, span: Float[np.ndarray, "*batch g m d"]
) -> tuple[Float[np.ndarray, "*batch g m"], Float[np.ndarray, "*batch g m d"], Float[np.ndarray, "*batch g m d"]]:
    """Eigenpairs within the span of m rows, and the matrix times the eigenvectors."""
    basis = np.linalg.qr(span.swapaxes(-1, -2))[0].swapaxes(-1, -2)
    product = times(basis)
    values, mix = eigh_descending(product @ basis.swapaxes(-1, -2))
    return values, mix @ basis, mix @ product
