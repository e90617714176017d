"""The rotation model with each document group left out in turn.

Axis b is searched near the b of all documents; a bound proves that no larger eigenvalue was missed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from qkscope.analyses.rotationmodel import (
    TIE_BREAK,
    Centering,
    Rotation,
    measured_along,
    paired_difference_moment,
    turn_sign,
)
from qkscope.core.eigenupdate import Times, eigh_near
from qkscope.core.headmoments import DELETE_ONE
from qkscope.core.leaveoneout import PooledLeaveOneOut
from qkscope.core.linalg import off_axis, ratio, unit
from qkscope.core.moments import Moments


def rotation_near(
    pooled: PooledLeaveOneOut, near: Rotation, cross: Moments | None = None, centering: Centering = "pooled"
) -> Rotation:
    """The model with each document group left out: one more batch axis; orientation as in ``near``.

    ``cross``: moments of the pairs at the same token, by group.
    """
    assert near.off_a is not None
    q, k = pooled.q, pooled.k
    within = ratio(q.scatter_xt + k.scatter_xt, pooled.n[..., None])
    a = unit(pooled.cov_xt if centering == "pooled" else within)
    a = a * turn_sign((a * near.a[..., None, :]).sum(-1))
    delta = _independent(pooled) if cross is None else _paired(cross)
    off = _off_axis_times(delta.times, a, TIE_BREAK * delta.trace)
    values, vectors = eigh_near(off, near.off_a, 1, _ceiling(near, a, delta, off), rounds=2)
    b = unit(off_axis(vectors[..., 0, :], a))
    b = b * turn_sign((b * near.b[..., None, :]).sum(-1))
    return measured_along(a, b, q, k, ratio(values[..., 0], delta.trace), None)


class _Moment(NamedTuple):
    """C_δ: products with it, its trace, and the number of all pairs over the number of remaining pairs."""

    times: Times
    trace: Float[np.ndarray, "*batch g"]
    grown: Float[np.ndarray, "*batch g"]


def _independent(pooled: PooledLeaveOneOut) -> _Moment:
    """C_δ over all pairs."""
    q, k = pooled.q, pooled.k
    apart = (q.mean_x - k.mean_x)[..., None, :]
    n_q, n_k = (np.where(kind.n > 0, kind.n, 1.0)[..., None, None] for kind in (q, k))

    def times(vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        product = q.times(vectors) / n_q
        product += k.times(vectors) / n_k
        product += (vectors @ apart.swapaxes(-1, -2)) * apart
        return product

    trace = q.total_variance + k.total_variance + (apart[..., 0, :] ** 2).sum(-1)
    return _Moment(times, trace, ratio(q.whole.n[..., None], q.n) * ratio(k.whole.n[..., None], k.n))


def _paired(cross: Moments) -> _Moment:
    """C_δ over pairs at the same token."""
    c_delta = paired_difference_moment(cross.merged(DELETE_ONE))
    grown = ratio(cross.total.n[..., None], cross.total.n[..., None] - cross.n)
    return _Moment(lambda vectors: vectors @ c_delta, np.trace(c_delta, axis1=-2, axis2=-1), grown)


def _off_axis_times(times: Times, a: Float[np.ndarray, "*batch d"], along: Float[np.ndarray, "*batch"]) -> Times:
    """Products with (I − aaᵀ)M(I − aaᵀ) − ``along``·aaᵀ."""
    axis = a[..., None, :]

    def off(vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        on = np.vecdot(vectors, axis)[..., None]
        product = times(vectors - on * axis)
        product -= (np.vecdot(product, axis)[..., None] + along[..., None, None] * on) * axis
        return product

    return off


def _ceiling(
    near: Rotation, a: Float[np.ndarray, "*batch g d"], delta: _Moment, off: Times
) -> Float[np.ndarray, "*batch g"]:
    """Upper bound of C_δ off a on axes beyond the known eigenpairs of the model of all documents.

    C_δ is a mean of squares over pairs, so without some of them it grows by at most their share in any direction. Write
    C_δ = FᵀF. For a unit vector orthogonal to the a of all documents, the rotation of a adds to the length of its image
    under F at most the sine of the angle times the length of Fa; the part along the a of all documents is added.
    """
    assert near.off_a is not None
    largest = delta.grown * near.off_a.beyond[..., None]
    cosine = np.minimum((a * near.a[..., None, :]).sum(-1) ** 2, 1.0)
    along = np.vecdot(delta.times(a[..., None, :]), a[..., None, :])[..., 0]
    whole_a = near.a[..., None, None, :]
    return (np.sqrt(largest) + np.sqrt((1.0 - cosine) * along)) ** 2 + np.vecdot(off(whole_a), whole_a)[..., 0]
