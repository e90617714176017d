"""Sorted eigenpairs, the sign rules, projectors and Householder bases, each batched over leading axes."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

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


def eigh_descending(
    matrix: Float[np.ndarray, "*batch d d"],
) -> tuple[Float[np.ndarray, "*batch d"], Float[np.ndarray, "*batch d d"]]:
    """Eigenvalues of a covariance, largest first and never below 0, and eigenvectors as rows.

    >>> values, axes = eigh_descending(np.diag([1.0, 4.0]))
    >>> values.tolist(), np.abs(axes).tolist()
    ([4.0, 1.0], [[0.0, 1.0], [1.0, 0.0]])
    """
    values, vectors = np.linalg.eigh(matrix)
    return np.maximum(values[..., ::-1], 0.0), vectors[..., ::-1].swapaxes(-1, -2)


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


def complement_projector(axis: Float[np.ndarray, "*batch d"]) -> Float[np.ndarray, "*batch d d"]:
    """I − aaᵀ for a unit axis a."""
    return np.eye(axis.shape[-1]) - axis[..., :, None] * axis[..., None, :]


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
