"""Heads of one run that are loaded together, and quantities that several analyses need, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from qkscope.analyses.complement import PlaneVectors
from qkscope.analyses.components import Components, components
from qkscope.analyses.fourterms import score_parts
from qkscope.analyses.meanfield import MeanField, mean_field
from qkscope.analyses.options import AnalysisOptions
from qkscope.analyses.positionlocked import LockedSplit, LockedSums, locked_split
from qkscope.analyses.replicates import LeftOutModels, left_out_models
from qkscope.analyses.rotationmodel import Rotation, has_drift, rotation_model
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import usable_groups
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import HeadMoments
from qkscope.core.moments import Moments
from qkscope.core.rows import Coordinates, Pair
from qkscope.core.visible import VisibleKeys


class HeadCoordinates(NamedTuple):
    """A head's vectors on its first two components, and on a and b."""

    pcs: Coordinates | None
    plane: Coordinates | None


@dataclass(frozen=True)
class Batch:
    """Heads of one run; everything is computed at first use and then cached."""

    model: str
    family: str
    heads: tuple[HeadData, ...]
    analyses: frozenset[str]
    """Names of the analyses that will use this batch."""
    axes: bool
    """True if any of them needs the axes a and b, which heads without any drift do not have."""
    options: AnalysisOptions

    def __len__(self) -> int:
        return len(self.heads)

    def select(self, indices: Sequence[int], analyses: frozenset[str], *, axes: bool) -> Batch:
        """A batch of some of the heads, for some of the analyses."""
        return replace(self, heads=tuple(self.heads[i] for i in indices), analyses=analyses, axes=axes)

    @cached_property
    def index(self) -> Columns:
        """The columns that name a head."""
        return {
            "model": np.full(len(self), self.model),
            "family": np.full(len(self), self.family),
            "layer": np.array([head.head.layer for head in self.heads]),
            "head": np.array([head.head.head for head in self.heads]),
            "k_head": np.array([head.key_head.head for head in self.heads]),
        }

    @cached_property
    def moments(self) -> HeadMoments:
        """Moments of all heads, stacked."""
        return HeadMoments.stack([head.moments for head in self.heads])

    @property
    def vectors(self) -> list[Pair | None]:
        """The sampled queries and keys of each head; None where there is no sample."""
        return [head.vectors for head in self.heads]

    @cached_property
    def usable(self) -> Float[np.ndarray, "heads 8"]:
        """1 for each document group that the jackknife deletes."""
        return usable_groups(self.moments)

    @cached_property
    def drifts(self) -> Bool[np.ndarray, "heads"]:
        """True for heads that drift with position at all and therefore have an axis a."""
        return np.asarray(has_drift(self.moments.total_q, self.moments.total_k, self.options.rotation.centering))

    @cached_property
    def components(self) -> Components:
        """Principal components of queries and keys pooled."""
        moments, count = self.moments, self.options.pca.n_components
        return components(
            moments.total_q, moments.total_k, count, pooled=moments.pooled, whole_basis=self.options.intervals
        )

    @cached_property
    def rotation(self) -> Rotation:
        """Axes a and b, and the numbers measured along them."""
        moments, options = self.moments, self.options
        cross = self._cross
        return rotation_model(
            moments.total_q,
            moments.total_k,
            None if cross is None else cross.merged(),
            options.rotation.centering,
            pooled=moments.pooled,
            whole_basis=options.intervals,
        )

    @property
    def _cross(self) -> Moments | None:
        if self.options.rotation.pairing != "token":
            return None
        if self.moments.cross is None:
            raise ValueError("pairing='token' needs moments with cross statistics")
        return self.moments.cross

    @cached_property
    def replicates(self) -> LeftOutModels | None:
        """Components and rotation model with each document group left out, in one pass; None without intervals."""
        if not self.options.intervals:
            return None
        pcs = self.components if "pca" in self.analyses else None
        model = self.rotation if "rotation" in self.analyses else None
        return left_out_models(self.moments, pcs, model, self.options.rotation)

    @cached_property
    def coordinates(self) -> list[HeadCoordinates]:
        """All coordinates of a head in one product; None if only one kind is needed or there are no vectors."""
        needs_all = "pca" in self.analyses and self.axes
        return [
            HeadCoordinates(None, None) if pair is None or not needs_all else self._coordinates(i, pair)
            for i, pair in enumerate(self.vectors)
        ]

    def _coordinates(self, i: int, pair: Pair) -> HeadCoordinates:
        axes = self.components.axes[i, :2]
        on = Coordinates.of(pair, np.vstack([axes, self.rotation.a[i], self.rotation.b[i]]))
        return HeadCoordinates(on.select(slice(len(axes))), on.select(slice(len(axes), None)))

    @cached_property
    def plane_vectors(self) -> list[PlaneVectors | None]:
        """Each head's vectors and its axes a and b; None where there are no vectors."""
        a, b, windows = self.rotation.a, self.rotation.b, self.moments.window.tolist()
        return [
            None if pair is None else PlaneVectors(pair, a[i], b[i], int(windows[i]), self.coordinates[i].plane)
            for i, pair in enumerate(self.vectors)
        ]

    def visible_keys(self, i: int) -> VisibleKeys:
        """The keys that the queries of a head see."""
        return VisibleKeys(int(self.reach[i]), self.heads[i].both)

    @cached_property
    def reach(self) -> Int[np.ndarray, "heads"]:
        """The number of positions back that each head's queries see: the window, or the sliding window if smaller."""
        return np.array([min(int(h.moments.window), h.sliding_window or int(h.moments.window)) for h in self.heads])

    @cached_property
    def locked(self) -> list[tuple[LockedSplit, LockedSplit] | None]:
        """The position-locked split of each head's queries and keys; None where the rotation is not known."""
        return [_locked(head) for head in self.heads]

    @cached_property
    def score_parts(self) -> list[tuple[Float[np.ndarray, "sets 4"], Float[np.ndarray, "sets"]] | None]:
        """The parts of each head's scores and their variance; None without vectors or where no rotation is known."""
        return [score_parts(head, self.visible_keys(i)) for i, head in enumerate(self.heads)]

    @cached_property
    def mean_fields(self) -> list[MeanField | None]:
        """The mean-field score of each head whose rotation is known; None for the others."""
        return [
            None
            if head.rotary is None
            else mean_field(head.rotary, head.moments.q, head.moments.k, float(head.moments.scaling))
            for head in self.heads
        ]


def _locked(head: HeadData) -> tuple[LockedSplit, LockedSplit] | None:
    """Both splits, from sums over all tokens; queries of a layer with a temperature: from their sample."""
    rotary, moments = head.rotary, head.moments
    if rotary is None or (rotary.temperature is not None and head.vectors is None):
        return None
    if rotary.temperature is None or head.vectors is None:
        queries = LockedSums.of_moments(moments.q, rotary.q)
    else:
        sample, n_queries = head.vectors.q.as_double(), float(moments.q.n.sum())
        queries = LockedSums.of_rows(sample, rotary.rope, rotary.temperature, n_queries)
    return locked_split(queries, rotary.rope), locked_split(LockedSums.of_moments(moments.k, rotary.k), rotary.rope)
