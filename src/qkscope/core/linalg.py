"""Sorted eigenpairs, the sign rules, projectors and Householder bases, each batched over leading axes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy import linalg

SIGN_ANCHOR = 0.05
"""Below this |r_q| the sign of a component is anchored on r_k instead."""


def ratio(
    part: Float[np.ndarray, "..."] | np.float64, whole: Float[np.ndarray, "..."] | np.float64
) -> Float[np.ndarray, "..."]:
    """Part / whole, and 0 where the whole is 0: what does not vary explains nothing.

    >>> ratio(np.array([1.0, 0.0]), np.array([4.0, 0.0])).tolist()
    [0.25, 0.0]
    """
    some = np.asarray(whole) > 0
    return np.asarray(np.where(some, part, 0.0) / np.where(some, whole, 1.0))


class Eigen(NamedTuple):
    """Eigenvalues, largest first, and their eigenvectors as rows."""

    values: Float[np.ndarray, "*batch k"]
    axes: Float[np.ndarray, "*batch k d"]


def eigh_descending(matrix: Float[np.ndarray, "*batch d d"]) -> Eigen:
    """All eigenpairs of a covariance; eigenvalues are never below 0.

    >>> values, axes = eigh_descending(np.diag([1.0, 4.0]))
    >>> values.tolist(), np.abs(axes).tolist()
    ([4.0, 1.0], [[0.0, 1.0], [1.0, 0.0]])
    """
    values, vectors = np.linalg.eigh(matrix)
    return Eigen(np.maximum(values[..., ::-1], 0.0), vectors[..., ::-1].swapaxes(-1, -2))


def eigh_leading(matrix: Float[np.ndarray, "*batch d d"], k: int) -> Eigen:
    """The k leading eigenpairs of a covariance alone: half the work where a few are wanted.

    >>> eigh_leading(np.diag([1.0, 4.0, 2.0]), 2).values.tolist()
    [4.0, 2.0]
    """
    d = matrix.shape[-1]
    if 3 * k > d:
        values, axes = eigh_descending(matrix)
        return Eigen(values[..., :k], axes[..., :k, :])
    flat = matrix.reshape(-1, d, d)
    found = [linalg.eigh(one, subset_by_index=(d - k, d - 1), check_finite=False) for one in flat]
    values, vectors = np.stack([pair[0] for pair in found]), np.stack([pair[1] for pair in found])
    batch = matrix.shape[:-2]
    return Eigen(
        np.maximum(values[:, ::-1], 0.0).reshape(*batch, k),
        vectors[:, :, ::-1].swapaxes(-1, -2).reshape(*batch, k, d),
    )


NEAR_BLOCK = 14
"""Neighbours beyond the wanted eigenvectors that ``eigh_near`` treats without approximation."""
NEAR_TIES = 2
"""Eigenpairs beyond the wanted ones that take part in the corrections."""
NEAR_ENOUGH = 3e-5
"""Residual ‖Mu − λu‖ / λ from which on ``eigh_near`` improves no further."""
NEAR_LIMIT = 1e-3
"""Largest residual ‖Mu − λu‖ / λ that ``eigh_near`` lets pass; beyond it the matrix is decomposed in full."""


def eigh_near(matrix: Float[np.ndarray, "*batch g d d"], known: Eigen, k: int) -> Eigen:
    """The k leading eigenpairs of g matrices close to one whose eigenpairs are all known.

    The block of leading axes is decomposed exactly. Two corrections follow, each a Rayleigh–Ritz step: one by what
    couples the block to the remaining axes and, where needed, one by the residual that is left (Davidson's step). A
    matrix is taken to be near only if no remaining axis carries as much as the k-th eigenvalue and the residuals end
    up small; the others are decomposed in full.
    """
    axes, block = known.axes[..., None, :, :], min(matrix.shape[-1], k + NEAR_BLOCK)
    rows = axes[..., :block, :] @ matrix @ axes.swapaxes(-1, -2)
    values, mix = eigh_descending(rows[..., :block])
    # A few more than are wanted: until the corrections are made, near ties stand in no certain order.
    held = min(k + NEAR_TIES, block)
    inside = _nothing_beyond(matrix, rows, known, values[..., k - 1])
    values, mix = values[..., :held], mix[..., :held, :]
    before = known.values[..., None, None, :]
    span = np.concatenate([mix, ratio(mix @ rows[..., block:], values[..., None] - before[..., block:])], -1) @ axes
    values, found = _ritz(matrix, span, held)
    residual = found @ matrix - values[..., None] * found
    if (np.linalg.norm(residual, axis=-1) > NEAR_ENOUGH * values)[..., :k].any():
        on, distance = residual @ axes.swapaxes(-1, -2), values[..., None] - before
        step = np.where(np.abs(distance) > 0.05 * values[..., None], on, 0.0) / np.where(distance == 0, 1.0, distance)
        values, found = _ritz(matrix, np.concatenate([found, step @ axes], -2), k)
        residual = found @ matrix - values[..., None] * found
    values, found, residual = values[..., :k], found[..., :k, :], residual[..., :k, :]
    near = inside & (np.linalg.norm(residual, axis=-1) <= NEAR_LIMIT * values).all(-1)
    if not near.all():
        full = eigh_descending(matrix[~near])
        values[~near], found[~near] = full.values[..., :k], full.axes[..., :k, :]
    return Eigen(values, found)


def _nothing_beyond(
    matrix: Float[np.ndarray, "*batch g d d"],
    rows: Float[np.ndarray, "*batch g block d"],
    known: Eigen,
    least: Float[np.ndarray, "*batch g"],
) -> Bool[np.ndarray, "*batch g"]:
    """Whether the axes beyond the block carry less than ``least``; ``rows`` are the block's, on the known axes.

    By Weyl, they carry at most what they did plus the norm of the change among them, which is what the change of the
    whole leaves when that of the block's rows and columns is taken off. Where that decides nothing, each is tried.
    """
    *_, block, d = rows.shape
    if block == d:
        return np.ones(least.shape, dtype=bool)
    before = (known.axes.swapaxes(-1, -2) * known.values[..., None, :]) @ known.axes
    now, before = (m.reshape(*m.shape[:-2], d * d) for m in (matrix, before[..., None, :, :]))
    changed_rows = rows - known.values[..., None, :block, None] * np.eye(block, d)
    change = np.vecdot(now, now) - 2 * np.vecdot(now, before) + (known.values**2).sum(-1)[..., None]
    change -= 2 * (changed_rows**2).sum((-2, -1)) - (changed_rows[..., :block] ** 2).sum((-2, -1))
    inside = np.asarray(known.values[..., None, block] + np.sqrt(np.maximum(change, 0.0)) < least * (1 - 1e-6))
    if not inside.all():
        beyond = np.broadcast_to(known.axes[..., None, block:, :], (*least.shape, d - block, d))[~inside]
        inside[~inside] = (((beyond @ matrix[~inside]) * beyond).sum(-1) < least[~inside][..., None]).all(-1)
    return inside


def _ritz(matrix: Float[np.ndarray, "*batch d d"], span: Float[np.ndarray, "*batch m d"], k: int) -> Eigen:
    """The k best eigenpairs of a matrix within the span of m rows."""
    basis = np.linalg.qr(span.swapaxes(-1, -2))[0].swapaxes(-1, -2)
    values, mix = eigh_descending(basis @ matrix @ basis.swapaxes(-1, -2))
    return Eigen(values[..., :k], mix[..., :k, :] @ basis)


def canonical_signs(r_q: Float[np.ndarray, "*shape"], r_k: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """±1 per component, so that r_q ≥ 0; where |r_q| < 0.05, so that r_k ≥ 0.

    >>> canonical_signs(np.array([-0.9, 0.01]), np.array([0.2, -0.5])).tolist()
    [-1.0, -1.0]
    """
    anchor = np.where(sign_is_anchored_on_k(r_q), r_k, r_q)
    return np.where(anchor < 0, -1.0, 1.0)


def sign_is_anchored_on_k(r_q: Float[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    """Where r_q is too weak to fix a sign, and the sign of r_k therefore says nothing."""
    return np.abs(r_q) < SIGN_ANCHOR


def unit(vector: Float[np.ndarray, "*batch d"]) -> Float[np.ndarray, "*batch d"]:
    """The vector divided by its length; zero stays zero."""
    length = np.linalg.norm(vector, axis=-1, keepdims=True)
    return np.divide(vector, length, out=np.zeros_like(vector), where=length > 0)


def off_axis(
    vector: Float[np.ndarray, "*#batch d"], axis: Float[np.ndarray, "*#batch d"]
) -> Float[np.ndarray, "*batch d"]:
    """(I − aaᵀ)v for a unit axis a."""
    return vector - (vector * axis).sum(-1, keepdims=True) * axis


def off_axis_matrix(
    matrix: Float[np.ndarray, "*batch d d"],
    axis: Float[np.ndarray, "*batch d"],
    along: Float[np.ndarray, "*#batch"] | float = 0.0,
) -> Float[np.ndarray, "*batch d d"]:
    """(I − aaᵀ)M(I − aaᵀ) for a symmetric M and a unit axis a; less ``along``·aaᵀ."""
    on = (matrix @ axis[..., None])[..., 0]
    half = on - axis * ((on * axis).sum(-1, keepdims=True) / 2 - np.asarray(along)[..., None] / 2)
    cross = axis[..., :, None] * half[..., None, :]
    off = matrix - cross
    off -= cross.swapaxes(-1, -2)
    return off


def householder(axis: Float[np.ndarray, "*batch d"]) -> Float[np.ndarray, "*batch d d"]:
    """Orthogonal and symmetric matrix whose first row (and column) is the unit axis; the rest spans its complement.

    >>> householder(np.array([0.6, 0.8])).round(12).tolist()
    [[0.6, 0.8], [0.8, -0.6]]
    """
    sign = np.where(axis[..., :1] < 0, -1.0, 1.0)
    v = axis.copy()
    v[..., :1] += sign
    reflection = np.eye(axis.shape[-1]) - (2.0 / (v * v).sum(-1))[..., None, None] * v[..., :, None] * v[..., None, :]
    return -sign[..., None] * reflection
