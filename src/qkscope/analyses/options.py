"""Options that change what analyses compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from qkscope.analyses.rotationmodel import Centering, Pairing


@dataclass(frozen=True)
class PcaOptions:
    """Options of the combined PCA."""

    n_components: int = 10
    """How many components are kept."""
    high: float = 0.7
    """Above this |r| a head counts as strongly positional."""
    low: float = 0.3
    """Below this |r| a head counts as not positional."""

    def __post_init__(self) -> None:
        if self.n_components < 1 or not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"expected n_components of 1 or more and 0 ≤ low ≤ high ≤ 1, got {self}")


@dataclass(frozen=True)
class RotationOptions:
    """Options of the planar rotation model."""

    centering: Centering = "pooled"
    """The mean about which Cov(x, t) is taken: of the pool (as published) or of each class."""
    pairing: Pairing = "independent"
    """Which pairs δ = q − k runs over: all of them, or those at the same token."""

    def __post_init__(self) -> None:
        for name, choices in (("centering", get_args(Centering)), ("pairing", get_args(Pairing))):
            if getattr(self, name) not in choices:
                raise ValueError(f"expected {name} to be {' or '.join(choices)}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class PointOptions:
    """Which vectors are written for figures."""

    heads: frozenset[tuple[int, int]] | None = None
    """(layer, head) of the query heads; None: all."""
    rows: int = 2000
    """Vectors of each kind, at most."""
    axes: int = 60
    """Coordinates in the complement, at most: two per plane."""
    pcs: tuple[int, ...] = (0, 1)
    """Principal components."""
    brief_rows: int = 0
    """Vectors of each kind of every other head, at most."""
    brief_axes: int = 0
    """Coordinates in the complement of those."""

    def of(self, layer: int, head: int) -> tuple[int, int]:
        """How many vectors and coordinates of this head are wanted."""
        if self.heads is None or (layer, head) in self.heads:
            return self.rows, self.axes
        return self.brief_rows, self.brief_axes


@dataclass(frozen=True)
class AnalysisOptions:
    """Everything that changes the results of a batch of heads."""

    pca: PcaOptions = field(default_factory=PcaOptions)
    rotation: RotationOptions = field(default_factory=RotationOptions)
    points: PointOptions | None = None
    """Which vectors are written for figures, if any."""
    intervals: bool = True
    """Whether everything is also computed with each document group left out."""
    decay_range: int | None = None
    """Distances up to this one count for decay; None: half of what the queries see."""
    chance: float | None = None
    """Coherence below which a plane counts as chance; None: computed from each head's tokens."""
