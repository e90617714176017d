"""PCA and rotation model with each document group left out: the replicates that intervals are computed from.

The eight models of a head start from the model of all documents and keep its orientation. PCA and rotation model are
computed in one pass over a few heads at a time; both use the same moments of the seven remaining groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from qkscope.analyses.components import Components, HeadVariance, components_near, head_variance
from qkscope.analyses.options import RotationOptions
from qkscope.analyses.rotationleftout import rotation_near
from qkscope.analyses.rotationmodel import Rotation
from qkscope.core.eigenupdate import KnownTop
from qkscope.core.headmoments import HeadMoments
from qkscope.core.linalg import Eigen

HEADS_PER_PASS = 4
"""More do not fit into the processor's cache."""

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
            pcs_left_out = components_near(batch.pooled_without, _model_of(pcs, heads))
            models.components.append(pcs_left_out)
            models.variance.append(head_variance(batch.without_q, batch.without_k, pcs_left_out))
        if model is not None:
            cross = batch.cross if options.pairing == "token" else None
            rotation = rotation_near(batch.pooled_without, _model_of(model, heads), cross, options.centering)
            models.rotation.append(rotation)
    return models


def _few_heads(moments: HeadMoments) -> Iterator[tuple[slice, HeadMoments]]:
    """A few heads at a time; heads that have to be merged again one by one, so that none depends on its neighbours."""
    for heads, batch in moments.few(HEADS_PER_PASS):
        if batch.without_q.cancels or batch.without_k.cancels:
            yield from (
                (slice(heads.start + inner.start, heads.start + inner.stop), head) for inner, head in batch.few(1)
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
