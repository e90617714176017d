"""The sampled vectors of one head and the axes a and b of its rotation model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from qkscope.core.rows import Coordinates, Pair
from qkscope.core.sample import sample_pair

PLANE_ROWS = 4096
"""Vectors of each kind that planes and ω are measured on, at most."""
MIN_ROWS = 8
"""With fewer vectors of either kind there are no planes and no ω."""


@dataclass(frozen=True)
class PlaneVectors:
    """Vectors of one head and the axes of its rotation model."""

    pair: Pair
    a: Float[np.ndarray, "d"]
    b: Float[np.ndarray, "d"]
    window: int
    coordinates: Coordinates | None = None
    """Coordinates of the vectors on a and b, if already computed."""

    @property
    def enough(self) -> bool:
        """Whether there are enough vectors, and a complement."""
        return min(len(self.pair.q), len(self.pair.k)) >= MIN_ROWS and len(self.a) >= 4

    def measured(self) -> Pair:
        """The vectors that are measured: at most PLANE_ROWS of each kind."""
        return sample_pair(self.pair, PLANE_ROWS)

    def on_plane(self, pair: Pair) -> Coordinates:
        """Coordinates of these vectors of the head on a and b."""
        if self.coordinates is not None and pair.q is self.pair.q and pair.k is self.pair.k:
            return self.coordinates
        return Coordinates.of(pair, np.stack([self.a, self.b]))
