"""Sorted eigenpairs, the sign rules, projectors and Householder bases, each batched over leading axes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy import linalg
from scipy.linalg import lapack

PerHead = Float[np.ndarray, "*batch"] | np.float64
"""One number per head of a batch; without a batch axis NumPy returns a scalar instead of an array."""
TruthPerHead = Bool[np.ndarray, "*batch"] | np.bool_
"""One boolean per head of a batch."""
SIGN_ANCHOR = 0.05
"""Below this |r_q| the sign of a component is anchored on r_k instead."""


def ratio(
    part: Float[np.ndarray, "..."] | np.float64, whole: Float[np.ndarray, "..."] | np.float64
) -> Float[np.ndarray, "..."]:
    """Part / whole; 0 where the whole is not positive.

    >>> ratio(np.array([1.0, 0.0]), np.array([4.0, 0.0])).tolist()
    [0.25, 0.0]
    """
    positive = np.greater(whole, 0)
    if positive.all():
        return np.asarray(part / whole)
    return np.asarray(np.where(positive, part, 0.0) / np.where(positive, whole, 1.0))


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
    return Eigen(np.maximum(values[..., ::-1], 0.0), _rows(vectors))


def _rows(vectors: Float[np.ndarray, "*batch d k"]) -> Float[np.ndarray, "*batch k d"]:
    """Transpose to rows in reverse order, contiguous in memory so that products are fast."""
    return np.ascontiguousarray(vectors[..., ::-1].swapaxes(-1, -2))


def eigh_leading(matrix: Float[np.ndarray, "*batch d d"], k: int) -> Eigen:
    """The k leading eigenpairs of a covariance: half the work of a full decomposition if k is small.

    >>> eigh_leading(np.diag([1.0, 4.0, 2.0]), 2).values.tolist()
    [4.0, 2.0]
    """
    d = matrix.shape[-1]
    if 3 * k > d:
        values, axes = eigh_descending(matrix)
        return Eigen(values[..., :k], axes[..., :k, :])
    flat = matrix.reshape(-1, d, d)
    pairs = [linalg.eigh(square, subset_by_index=(d - k, d - 1), check_finite=False) for square in flat]
    values, vectors = np.stack([pair[0] for pair in pairs]), np.stack([pair[1] for pair in pairs])
    batch = matrix.shape[:-2]
    return Eigen(
        np.maximum(values[:, ::-1], 0.0).reshape(*batch, k),
        _rows(vectors).reshape(*batch, k, d),
    )


def inverse(matrix: Float[np.ndarray, "*batch d d"]) -> Float[np.ndarray, "*batch d d"]:
    """Inverse of a positive definite matrix, by Cholesky factorisation: half the work of a general inverse.

    >>> inverse(np.array([[2.0, 0.0], [0.0, 4.0]])).round(12).tolist()
    [[0.5, 0.0], [0.0, 0.25]]
    """
    d = matrix.shape[-1]
    inverses = np.empty((matrix.size // d**2, d, d))
    for square, result in zip(matrix.reshape(-1, d, d), inverses, strict=True):
        factor, failed = lapack.dpotrf(square, lower=1)
        half, failed_inverse = lapack.dpotri(factor, lower=1)
        if failed or failed_inverse:
            raise np.linalg.LinAlgError("matrix is not positive definite")
        lower = np.tril(half)
        result[:] = lower + np.tril(half, -1).T
    return inverses.reshape(matrix.shape)


def is_positive(matrix: Float[np.ndarray, "d d"]) -> bool:
    """True if a symmetric matrix is positive definite, by Cholesky factorisation.

    >>> is_positive(np.diag([1.0, 2.0])), is_positive(np.diag([1.0, -2.0]))
    (True, False)
    """
    return not lapack.dpotrf(matrix, lower=1)[1]


def canonical_signs(r_q: Float[np.ndarray, "*shape"], r_k: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """±1 per component, so that r_q ≥ 0; where |r_q| < 0.05, so that r_k ≥ 0.

    >>> canonical_signs(np.array([-0.9, 0.01]), np.array([0.2, -0.5])).tolist()
    [-1.0, -1.0]
    """
    anchor = np.where(sign_is_anchored_on_k(r_q), r_k, r_q)
    return np.where(anchor < 0, -1.0, 1.0)


def sign_is_anchored_on_k(r_q: Float[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    """True where r_q is too weak to fix the sign: there r_k fixes it, and its own sign means nothing."""
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
    """(I − aaᵀ)M(I − aaᵀ) − ``along``·aaᵀ for a symmetric M and a unit axis a."""
    image = (matrix @ axis[..., None])[..., 0]
    half = image - axis * ((image * axis).sum(-1, keepdims=True) / 2 - np.asarray(along)[..., None] / 2)
    cross = axis[..., :, None] * half[..., None, :]
    result = matrix - cross
    result -= cross.swapaxes(-1, -2)
    return result


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


def fisher_direction(
    within: Float[np.ndarray, "*batch m m"], apart: Float[np.ndarray, "*batch m"]
) -> Float[np.ndarray, "*batch m"]:
    """Fisher's direction W⁺(μ_Q − μ_K) between two classes; μ_Q − μ_K itself if neither varies.

    >>> fisher_direction(np.diag([1.0, 4.0]), np.array([1.0, 1.0])).tolist()
    [1.0, 0.25]
    """
    w = np.einsum("...ij,...j->...i", np.linalg.pinv(within, hermitian=True), apart)
    return np.where(np.trace(within, axis1=-2, axis2=-1)[..., None] > 0, w, apart)
