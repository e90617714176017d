"""PCA and rotation model with each document group left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from qkscope.analyses.components import Components, HeadVariance, components_near, head_variance
from qkscope.analyses.options import Centering, RotationOptions
from qkscope.analyses.rotationmodel import (
    TIE_BREAK,
    Rotation,
    measured_along,
    paired_difference_moment,
    turn_sign,
)
from qkscope.core.eigenupdate import KnownTop, Times, eigh_near
from qkscope.core.headmoments import DELETE_ONE, HeadMoments
from qkscope.core.leaveoneout import PooledLeaveOneOut
from qkscope.core.linalg import Eigen, off_axis, ratio, unit
from qkscope.core.moments import Moments


def rotation_near(
    pooled: PooledLeaveOneOut, all_documents: Rotation, cross: Moments | None = None, centering: Centering = "pooled"
) -> Rotation:
    """The model with each document group left out: one more batch axis; oriented like ``all_documents``.

    ``cross``: moments of the pairs at the same token, by group.
    """
    assert all_documents.off_a is not None
    q, k = pooled.q, pooled.k
    within = ratio(q.scatter_xt + k.scatter_xt, pooled.n[..., None])
    a = unit(pooled.cov_xt if centering == "pooled" else within)
    a = a * turn_sign((a * all_documents.a[..., None, :]).sum(-1))
    delta = _independent(pooled) if cross is None else _paired(cross)
    off = _off_axis_times(delta.times, a, TIE_BREAK * delta.trace)
    values, vectors = eigh_near(off, all_documents.off_a, 1, _ceiling(all_documents, a, delta, off), rounds=2)
    b = unit(off_axis(vectors[..., 0, :], a))
    b = b * turn_sign((b * all_documents.b[..., None, :]).sum(-1))
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
    all_documents: Rotation, a: Float[np.ndarray, "*batch g d"], delta: _Moment, off: Times
) -> Float[np.ndarray, "*batch g"]:
    """Upper bound of C_δ off a on axes beyond the known eigenpairs of the model of all documents.

    C_δ is a mean of squares over pairs, so without some of them it grows by at most the factor ``grown`` in any
    direction. Write C_δ = FᵀF. For a unit vector orthogonal to the a of all documents, the rotation of a adds to the
    length of its image under F at most the sine of the angle times the length of Fa; the part along the a of all
    documents is added.
    """
    assert all_documents.off_a is not None
    largest = delta.grown * all_documents.off_a.beyond[..., None]
    cosine = np.minimum((a * all_documents.a[..., None, :]).sum(-1) ** 2, 1.0)
    along = np.vecdot(delta.times(a[..., None, :]), a[..., None, :])[..., 0]
    a_all_documents = all_documents.a[..., None, None, :]
    return (np.sqrt(largest) + np.sqrt((1.0 - cosine) * along)) ** 2 + np.vecdot(off(a_all_documents), a_all_documents)[
        ..., 0
    ]


HEADS_PER_PASS = 4
"""Heads that are updated together; more do not fit into the processor's cache."""

_Model = TypeVar("_Model", Components, Rotation)


@dataclass(frozen=True)
class LeftOutModels:
    """Results with each document group left out, a few heads at a time; empty if not requested."""

    components: list[Components] = field(default_factory=list)
    variance: list[HeadVariance] = field(default_factory=list)
    rotation: list[Rotation] = field(default_factory=list)

    def of_components(self, name: str) -> Float[np.ndarray, "heads groups c"]:
        """A column of the components."""
        return np.concatenate([getattr(batch, name) for batch in self.components])

    def of_head(self, name: str) -> Float[np.ndarray, "heads groups"]:
        """A column of the results for whole heads that follow from the components."""
        return np.concatenate([getattr(batch, name) for batch in self.variance])

    def of_rotation(self, name: str) -> Float[np.ndarray, "heads groups"]:
        """A column of the rotation model."""
        return np.concatenate([getattr(batch, name) for batch in self.rotation])


def left_out_models(
    moments: HeadMoments, pcs: Components | None, model: Rotation | None, options: RotationOptions
) -> LeftOutModels:
    """``pcs``, ``model`` or both with each document group left out."""
    models = LeftOutModels()
    for heads, batch in _few_heads(moments):
        if pcs is not None:
            pcs_left_out = components_near(batch.pooled_leave_one_out, _model_of(pcs, heads))
            models.components.append(pcs_left_out)
            models.variance.append(head_variance(batch.leave_one_out_q, batch.leave_one_out_k, pcs_left_out))
        if model is not None:
            cross = batch.cross if options.pairing == "token" else None
            rotation = rotation_near(batch.pooled_leave_one_out, _model_of(model, heads), cross, options.centering)
            models.rotation.append(rotation)
    return models


def _few_heads(moments: HeadMoments) -> Iterator[tuple[slice, HeadMoments]]:
    """A few heads at a time; heads that must be merged again come singly, so that none depends on its neighbours."""
    for heads, batch in moments.batches(HEADS_PER_PASS):
        if batch.leave_one_out_q.cancels or batch.leave_one_out_k.cancels:
            yield from (
                (slice(heads.start + inner.start, heads.start + inner.stop), head) for inner, head in batch.batches(1)
            )
        else:
            yield heads, batch


def _model_of(model: _Model, heads: slice) -> _Model:
    """The model of some heads of a batch."""

    def selected(value: Any) -> Any:
        if isinstance(value, Eigen):
            return Eigen(value.values[heads], value.axes[heads])
        if isinstance(value, KnownTop):
            return KnownTop(value.matrix[heads], selected(value.top))
        return None if value is None else value[heads]

    return replace(model, **{f.name: selected(getattr(model, f.name)) for f in fields(model)})
