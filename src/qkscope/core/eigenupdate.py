"""Eigenpairs of matrices close to one that is known, from products with a few vectors.

A vector u with Mu − λu = r is corrected by (λ − K)⁻¹ r, where K is the known matrix (Davidson's step): what is left is
smaller by the ratio of the matrices' distance to the distance of their eigenvalues.
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
"""Largest residual ‖Mu − λu‖ / λ before the last correction; beyond it the matrix is decomposed in full."""
NEAR_STEP = 0.02
"""Longest last correction; likewise."""
ALIKE = 1e-4
"""Eigenvalues that differ by less than this share of themselves may stand for one another."""
TOO_CLOSE = 0.05
"""Eigenvalues nearer than this share of one another are not told apart by a correction."""


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
        """0 where the block is all there is."""
        values = self.all.values
        return values[..., self.block] if self.block < values.shape[-1] else np.zeros(values.shape[:-1])

    def solve(
        self, values: Float[np.ndarray, "*batch g m"], residual: Float[np.ndarray, "*batch g m d"]
    ) -> Float[np.ndarray, "*batch g m d"]:
        """Axis by axis."""
        return _axis_by_axis(self.all, values, residual)[1]


@dataclass(frozen=True)
class KnownTop:
    """The matrix itself and its leading eigenpairs but the last, which says what lies beyond; one is wanted."""

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
        """Axis by axis on those that are known; off them all at the distance from the first eigenvalue."""
        axes = self.leading.axes[..., None, :, :]
        on, step = _axis_by_axis(self.leading, values, residual)
        off = residual - on @ axes
        return step + off @ self._resolvent[..., None, :, :]

    @cached_property
    def _resolvent(self) -> Float[np.ndarray, "*batch d d"]:
        """(λ₁ − K)⁻¹, with what is known lifted out of the way, and a little more where others are as large."""
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

    The block of leading axes is decomposed exactly, corrected and decomposed within the span of the corrected, so many
    ``rounds``, and corrected once more. A matrix is taken to be near only if the axes beyond the block carry less than
    the k-th eigenvalue and the residual ends up small; the others are decomposed in full. ``ceiling`` is the most that
    those axes can carry; where it decides nothing, a factorisation does.
    """
    axes = known.leading.axes[..., None, :, :]
    rows = times(axes)
    onto = axes.swapaxes(-1, -2)
    values, mix = eigh_descending(rows @ onto)
    sure = _sure(rows - (rows @ onto) @ axes, mix, values, k, ceiling)
    # A few more than are wanted: until the corrections are made, near ties stand in no certain order.
    held = min(k + NEAR_TIES, axes.shape[-2])
    values, mix = values[..., :held], mix[..., :held, :]
    found, product = mix @ axes, mix @ rows
    for _ in range(rounds):
        residual = product - values[..., None] * found
        values, found, product = _ritz(times, found + known.solve(values, residual))
    span, values, found = found, values[..., :k], found[..., :k, :]
    residual = product[..., :k, :] - values[..., None] * found
    step = known.solve(values, residual)
    step -= (step @ span.swapaxes(-1, -2)) @ span  # within the span they are as good as can be
    small = np.vecdot(residual, residual) <= np.copysign((NEAR_LIMIT * values) ** 2, NEAR_LIMIT)
    near = (small & (np.vecdot(step, step) <= NEAR_STEP**2)).all(-1)
    values, found = values + np.vecdot(step, residual), found + step
    found /= np.linalg.norm(found, axis=-1, keepdims=True)
    if not (near & sure).all():
        d = axes.shape[-1]
        matrices = np.broadcast_to(times(np.eye(d)), (*near.shape, d, d))
        for at in zip(*np.nonzero(~(near & sure)), strict=True):
            if not (near[at] and _none_missed(matrices[at], Eigen(values[at], found[at]))):
                full = eigh_descending(matrices[at])
                values[at], found[at] = full.values[:k], full.axes[:k]
    return Eigen(values, found)


def _sure(
    beyond: Float[np.ndarray, "*batch g block d"],
    mix: Float[np.ndarray, "*batch g block block"],
    values: Float[np.ndarray, "*batch g block"],
    k: int,
    ceiling: Float[np.ndarray, "*batch g"],
) -> Bool[np.ndarray, "*batch g"]:
    """Whether all that is not wanted stays below the k-th eigenvalue of the block.

    Not wanted are the block's own further eigenvalues, what lies beyond it, at most ``ceiling``, and what couples the
    two: ``beyond`` are the block's rows there. The most of it is the larger eigenvalue of [[b, c], [cᵀ, ceiling]].
    """
    if k >= values.shape[-1]:
        return np.asarray(ceiling < values[..., k - 1])
    coupled = ((mix[..., k:, :] @ beyond) ** 2).sum((-2, -1))
    next_one = values[..., k]
    most = (next_one + ceiling) / 2 + np.sqrt(((next_one - ceiling) / 2) ** 2 + coupled)
    return np.asarray(most < values[..., k - 1] * (1 + ALIKE))


def _none_missed(matrix: Float[np.ndarray, "d d"], found: Eigen) -> bool:
    """Whether the matrix, less the eigenpairs found, is below the last of them: then they are the leading ones."""
    rest = matrix - (found.axes.T * found.values) @ found.axes
    return is_positive(found.values[-1] * (1 + ALIKE) * np.eye(len(matrix)) - rest)


def _ritz(
    times: Times, span: Float[np.ndarray, "*batch g m d"]
) -> tuple[Float[np.ndarray, "*batch g m"], Float[np.ndarray, "*batch g m d"], Float[np.ndarray, "*batch g m d"]]:
    """Eigenpairs within the span of m rows, and the eigenvectors' products."""
    basis = np.linalg.qr(span.swapaxes(-1, -2))[0].swapaxes(-1, -2)
    product = times(basis)
    values, mix = eigh_descending(product @ basis.swapaxes(-1, -2))
    return values, mix @ basis, mix @ product
