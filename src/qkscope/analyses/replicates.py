"""PCA and rotation model with each document group left out in turn: what intervals are made of.

The eight models of a head start from the one of all documents and keep its orientation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float

from qkscope.analyses.headvariance import head_variance
from qkscope.analyses.pca import Components, components_near
from qkscope.analyses.rotation import Centering, Rotation, linearity_r2, rotation_near
from qkscope.core.headmoments import HeadMoments
from qkscope.core.linalg import Eigen
from qkscope.core.near import KnownTop

HEADS_AT_ONCE = 4
"""More leave the processor's cache."""

Replicates = dict[str, Float[np.ndarray, "heads groups *rest"]]
Again = Callable[[HeadMoments, slice], Replicates]
"""An analysis of some heads of a batch, given their moments and where they stand in it."""
Model = TypeVar("Model", Components, Rotation)


def replicates(moments: HeadMoments, *analyses: Again) -> list[dict[str, np.ndarray]]:
    """What each analysis gives with each group left out; they share the moments of the seven groups that remain."""
    parts = [[again(few, some) for again in analyses] for some, few in _few(moments)]
    return [_joined([part[i] for part in parts]) for i in range(len(analyses))]


def _few(moments: HeadMoments) -> Iterator[tuple[slice, HeadMoments]]:
    """A few heads at a time; those that have to be merged anew one by one, so that none depends on its neighbours."""
    for some, few in moments.few(HEADS_AT_ONCE):
        if few.without_q.cancels or few.without_k.cancels:
            yield from ((slice(some.start + at.start, some.start + at.stop), one) for at, one in few.few(1))
        else:
            yield some, few


def pca_again(pcs: Components, of_pcs: Iterable[str], of_heads: Iterable[str]) -> Again:
    """Columns of each component and of each head."""

    def again(few: HeadMoments, some: slice) -> Replicates:
        found = components_near(few.pooled_without, _at(pcs, some))
        whole = head_variance(few.without_q, few.without_k, found)
        return {name: getattr(found, name) for name in of_pcs} | {name: getattr(whole, name) for name in of_heads}

    return again


def rotation_again(centering: Centering, model: Rotation, names: Iterable[str], *, paired: bool) -> Again:
    """Columns of each head; ``paired``: δ over tokens."""

    def again(few: HeadMoments, some: slice) -> Replicates:
        found = rotation_near(few.pooled_without, _at(model, some), few.cross if paired else None, centering)
        straight = {"linearity_r2": np.asarray(linearity_r2(few.k_buckets_without, found.a))}
        return {name: straight[name] if name in straight else getattr(found, name) for name in names}

    return again


def _at(model: Model, some: slice) -> Model:
    """The model of some heads of a batch."""

    def part(value: Any) -> Any:
        if isinstance(value, Eigen):
            return Eigen(value.values[some], value.axes[some])
        if isinstance(value, KnownTop):
            return KnownTop(value.matrix[some], part(value.top))
        return None if value is None else value[some]

    return replace(model, **{field.name: part(getattr(model, field.name)) for field in fields(model)})


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
