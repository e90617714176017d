"""Options that change what analyses compute; command line, YAML, Python keywords and records follow from the fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qkscope.errors import ConfigError
from qkscope.options import N_BUCKETS, option, out_of_range

Centering = Literal["pooled", "within"]
Pairing = Literal["independent", "token"]


@dataclass(frozen=True)
class PcaOptions:
    """Options of the combined PCA."""

    n_components: int = option(10, "Components that are kept.", least=1)
    high: float = option(0.7, "Above this |r| a head counts as strongly positional.", least=0, most=1)
    low: float = option(0.3, "Below this |r| a head counts as not positional.", least=0, most=1)

    def __post_init__(self) -> None:
        if self.n_components < 1 or not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"expected n_components of 1 or more and 0 ≤ low ≤ high ≤ 1, got {self}")


@dataclass(frozen=True)
class RotationOptions:
    """Options of the planar rotation model."""

    centering: Centering = option(
        "pooled", "The mean about which Cov(x, t) is taken: of the pool (as published) or of each class.",
        choices=("pooled", "within"),
    )  # fmt: skip
    pairing: Pairing = option(
        "independent", "Which pairs q − k runs over: all of them, or those at the same token.",
        choices=("independent", "token"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        problem = out_of_range(self)
        if problem:
            raise ValueError(problem)


@dataclass(frozen=True)
class PointOptions:
    """The vectors that are written for figures."""

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
    """Coordinates in the complement of every other head, at most."""

    def of(self, layer: int, head: int) -> tuple[int, int]:
        """The numbers of vectors and of coordinates requested of this head."""
        if self.heads is None or (layer, head) in self.heads:
            return self.rows, self.axes
        return self.brief_rows, self.brief_axes


@dataclass(frozen=True)
class AnalysisOptions:
    """Options that change the tables of a run, except the selection of heads and rows."""

    buckets: int | None = option(
        None, f"Position buckets of plasticity, for a dataset ({N_BUCKETS}); a captured run has its own.",
        least=1, most=256,
    )  # fmt: skip
    decay_range: int | None = option(
        None,
        "Distances up to this one count for decay; by default half of what queries see.",
        least=2,
        in_config=False,
    )
    intervals: bool = option(True, "Jackknife intervals; without them, tables are computed faster.", in_config=False)
    pca: PcaOptions = field(default_factory=PcaOptions)
    rotation: RotationOptions = field(default_factory=RotationOptions)
    points: PointOptions | None = None
    """The vectors that are written for figures, if any."""
    chance: float | None = None
    """Coherence below which a plane counts as chance; None: computed from each head's tokens."""

    def __post_init__(self) -> None:
        problem = out_of_range(self)
        if problem:
            raise ConfigError(problem)
