"""PCA and rotation model with each document group left out in turn: what intervals are made of.

The eight models of a head start from the one of all documents and keep its orientation. Both are made in one pass over
a few heads at a time, which share the moments of the seven groups that remain.
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
from qkscope.analyses.rotationmodel import Rotation, linearity_r2
from qkscope.core.eigenupdate import KnownTop
from qkscope.core.headmoments import HeadMoments
from qkscope.core.linalg import Eigen

HEADS_PER_PASS = 4
"""More leave the processor's cache."""

_Model = TypeVar("_Model", Components, Rotation)


@dataclass(frozen=True)
class LeftOutModels:
    """Results with each document group left out, a few heads at a time; empty where they were not asked for."""

    components: list[Components] = field(default_factory=list)
    variance: list[HeadVariance] = field(default_factory=list)
    rotation: list[Rotation] = field(default_factory=list)
    linearity_r2: list[Float[np.ndarray, "heads groups"]] = field(default_factory=list)

    def of_components(self, name: str) -> Float[np.ndarray, "heads groups c"]:
        """A column of the components."""
        return np.concatenate([getattr(part, name) for part in self.components])

    def of_head(self, name: str) -> Float[np.ndarray, "heads groups"]:
        """A column of what follows from the components for a head."""
        return np.concatenate([getattr(part, name) for part in self.variance])

    def of_rotation(self, name: str) -> Float[np.ndarray, "heads groups"]:
        """A column of the rotation model."""
        if name == "linearity_r2":
            return np.concatenate(self.linearity_r2)
        return np.concatenate([getattr(part, name) for part in self.rotation])


def left_out_models(
    moments: HeadMoments, pcs: Components | None, model: Rotation | None, options: RotationOptions
) -> LeftOutModels:
    """Everything once more with each group left out, of what there is: ``pcs``, ``model`` or both."""
    found = LeftOutModels()
    for some, few in _few(moments):
        if pcs is not None:
            near = components_near(few.pooled_without, _at(pcs, some))
            found.components.append(near)
            found.variance.append(head_variance(few.without_q, few.without_k, near))
        if model is not None:
            cross = few.cross if options.pairing == "token" else None
            turned = rotation_near(few.pooled_without, _at(model, some), cross, options.centering)
            found.rotation.append(turned)
            found.linearity_r2.append(np.asarray(linearity_r2(few.k_buckets_without, turned.a)))
    return found


def _few(moments: HeadMoments) -> Iterator[tuple[slice, HeadMoments]]:
    """A few heads at a time; those that have to be merged anew one by one, so that none depends on its neighbours."""
    for some, few in moments.few(HEADS_PER_PASS):
        if few.without_q.cancels or few.without_k.cancels:
            yield from ((slice(some.start + at.start, some.start + at.stop), one) for at, one in few.few(1))
        else:
            yield some, few


def _at(model: _Model, some: slice) -> _Model:
    """The model of some heads of a batch."""

    def part(value: Any) -> Any:
        if isinstance(value, Eigen):
            return Eigen(value.values[some], value.axes[some])
        if isinstance(value, KnownTop):
            return KnownTop(value.matrix[some], part(value.top))
        return None if value is None else value[some]

    return replace(model, **{f.name: part(getattr(model, f.name)) for f in fields(model)})
