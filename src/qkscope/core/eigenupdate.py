"""Eigenpairs of matrices close to a known matrix, from products with a few vectors.

A vector u with Mu − λu = r is corrected by (λ − K)⁻¹ r, where K is the known matrix (Davidson's step): the remaining
error is smaller by the ratio of ‖M − K‖ to the distance of λ from the other eigenvalues.
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
"""Rows of vectors (…, g or 1, m, d), each multiplied by its matrix of g."""

NEAR_BLOCK = 8
"""Neighbours beyond the wanted eigenvectors that are treated without approximation."""
NEAR_TIES = 2
"""Eigenpairs beyond the wanted ones that take part in the corrections."""
NEAR_LIMIT = 3e-3
"""Largest residual ‖Mu − λu‖ / λ before the last correction; above it the matrix is decomposed in full."""
NEAR_STEP = 0.02
"""Largest last correction; above it the matrix is decomposed in full."""
ALIKE = 1e-4
"""Eigenvalues that differ by less than this relative amount count as equal."""
TOO_CLOSE = 0.05
"""A correction does not separate eigenvalues whose relative distance is less than this."""


@runtime_checkable
class Known(Protocol):
    """A matrix whose leading eigenpairs are known, and how to solve for the others."""

    @property
    def leading(self) -> Eigen:
        """Eigenpairs that are treated without approximation."""
        ...

    @property
    def beyond(self) -> Float[np.ndarray, "*batch"]:
        """The largest eigenvalue that is not among them."""
        ...

    def solve(
        self, values: Float[np.ndarray, "*batch g m"], residual: Float[np.ndarray, "*batch g m d"]
    ) -> Float[np.ndarray, "*batch g m d"]:
        """(λ − K)⁻¹ r on the axes that are far from λ."""
        ...


@dataclass(frozen=True)
class KnownAll:
    """All eigenpairs are known; the leading ``block`` of them are treated without approximation."""

    all: Eigen
    block: int

    @property
    def leading(self) -> Eigen:
        """The block."""
        return Eigen(self.all.values[..., : self.block], self.all.axes[..., : self.block, :])

    @property
    def beyond(self) -> Float[np.ndarray, "*batch"]:
        """0 if the block contains all eigenpairs."""
        values = self.all.values
        return values[..., self.block] if self.block < values.shape[-1] else np.zeros(values.shape[:-1])

    def solve(
        self, values: Float[np.ndarray, "*batch g m"], residual: Float[np.ndarray, "*batch g m d"]
    ) -> Float[np.ndarray, "*batch g m d"]:
        """Exact, axis by axis."""
        return _axis_by_axis(self.all, values, residual)[1]


@dataclass(frozen=True)
class KnownTop:
    """The matrix and its leading eigenpairs; the last of them only bounds the others. One eigenpair is wanted."""

    matrix: Float[np.ndarray, "*batch d d"]
    top: Eigen

    @property
    def leading(self) -> Eigen:
        """All but the last."""
        return Eigen(self.top.values[..., :-1], self.top.axes[..., :-1, :])

    @property
    def beyond(self) -> Float[np.ndarray, "*batch"]:
        """The last."""
        return self.top.values[..., -1]

    def solve(
        self, values: Float[np.ndarray, "*batch g m"], residual: Float[np.ndarray, "*batch g m d"]
    ) -> Float[np.ndarray, "*batch g m d"]:
        """Axis by axis on the known axes; off them with (λ₁ − K)⁻¹ for the first eigenvalue λ₁."""
        axes = self.leading.axes[..., None, :, :]
        on, step = _axis_by_axis(self.leading, values, residual)
        off = residual - on @ axes
        return step + off @ self._resolvent[..., None, :, :]

    @cached_property
    def _resolvent(self) -> Float[np.ndarray, "*batch d d"]:
        """(λ₁ − K)⁻¹ with the known axes shifted away, and a small shift in case others are as large as λ₁."""
        axes, largest = self.leading.axes, self.top.values[..., 0, None, None]
        lift = np.maximum(largest, ALIKE * np.abs(self.matrix).max((-2, -1), keepdims=True))
        lift = np.where(lift > 0, lift, 1.0)
        return inverse(lift * ((1 + ALIKE) * np.eye(axes.shape[-1]) + axes.swapaxes(-1, -2) @ axes) - self.matrix)


def _axis_by_axis(
    known: Eigen, values: Float[np.ndarray, "*batch g m"], residual: Float[np.ndarray, "*batch g m d"]
) -> tuple[Float[np.ndarray, "*batch g m k"], Float[np.ndarray, "*batch g m d"]]:
    """The residual on known axes, and (λ − K)⁻¹ of it on those whose eigenvalues are far enough from λ."""
    axes = known.axes[..., None, :, :]
    on = residual @ axes.swapaxes(-1, -2)
    distance = values[..., None] - known.values[..., None, None, :]
    far = np.abs(distance) > TOO_CLOSE * values[..., None]
    return on, (np.where(far, on, 0.0) / np.where(far, distance, 1.0)) @ axes


def eigh_near(times: Times, known: Known, k: int, ceiling: Float[np.ndarray, "*batch g"], rounds: int = 1) -> Eigen:
    """The k leading eigenpairs of g positive matrices close to a known one.

    The block of leading axes is decomposed exactly; ``rounds`` times it is corrected and decomposed within the span of
    the corrected axes; then it is corrected once more. The result is accepted only if eigenvalues beyond the block are
    below the k-th eigenvalue and the residual is small; other matrices are decomposed in full. ``ceiling`` is an upper
    bound of the eigenvalues beyond the block; if it is too large to decide, a factorisation decides.
    """
    axes = known.leading.axes[..., None, :, :]
    rows = times(axes)
    onto = axes.swapaxes(-1, -2)
    values, mix = eigh_descending(rows @ onto)
    bounded = _bounded(rows - (rows @ onto) @ axes, mix, values, k, ceiling)
    # A few more than are wanted: before the corrections, the order of near ties is uncertain.
    n_kept = min(k + NEAR_TIES, axes.shape[-2])
    values, mix = values[..., :n_kept], mix[..., :n_kept, :]
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
    """Whether all unwanted eigenvalues are below the k-th eigenvalue of the block.

    Unwanted are the block's further eigenvalues, those beyond the block (at most ``ceiling``), and the coupling of the
    two: ``beyond`` has the block's rows there. The bound is the larger eigenvalue of [[b, c], [cᵀ, ceiling]].
    """
    if k >= values.shape[-1]:
        return np.asarray(ceiling < values[..., k - 1])
    coupled = ((mix[..., k:, :] @ beyond) ** 2).sum((-2, -1))
    next_value = values[..., k]
    largest = (next_value + ceiling) / 2 + np.sqrt(((next_value - ceiling) / 2) ** 2 + coupled)
    return np.asarray(largest < values[..., k - 1] * (1 + ALIKE))


def _none_missed(matrix: Float[np.ndarray, "d d"], eigen: Eigen) -> bool:
    """Whether the matrix minus these eigenpairs is below the last of them: then they are the leading ones."""
    remainder = matrix - (eigen.axes.T * eigen.values) @ eigen.axes
    return is_positive(eigen.values[-1] * (1 + ALIKE) * np.eye(len(matrix)) - remainder)


def _ritz(
    times: Times, span: Float[np.ndarray, "*batch g m d"]
) -> tuple[Float[np.ndarray, "*batch g m"], Float[np.ndarray, "*batch g m d"], Float[np.ndarray, "*batch g m d"]]:
    """Eigenpairs within the span of m rows, and the eigenvectors' products."""
    basis = np.linalg.qr(span.swapaxes(-1, -2))[0].swapaxes(-1, -2)
    product = times(basis)
    values, mix = eigh_descending(product @ basis.swapaxes(-1, -2))
    return values, mix @ basis, mix @ product
