"""Rotary encoding as complex numbers: plane m of a vector at position t is z_m = z̃_m · e^{i s θ_m t}.

Plane m consists of the coordinates start + (m, m + planes), or start + (2m, 2m + 1) if they are interleaved; s is +1
if planes turn counter-clockwise with position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Complex, Float, Int

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rope:
    """The rotary encoding of one layer."""

    frequencies: Float[np.ndarray, "planes"]
    """Radians per token."""
    layout: Layout = "half"
    start: int = 0
    """First rotated coordinate."""
    sign: int = 1

    @property
    def planes(self) -> int:
        """Number of rotated planes."""
        return len(self.frequencies)

    @property
    def pairs(self) -> Int[np.ndarray, "planes 2"]:
        """Coordinates of each plane."""
        m = np.arange(self.planes)
        first, second = (m, m + self.planes) if self.layout == "half" else (2 * m, 2 * m + 1)
        return self.start + np.stack([first, second], -1)

    def rest(self, d: int) -> Int[np.ndarray, "rest"]:
        """Coordinates that are not rotated."""
        return np.setdiff1d(np.arange(d), self.pairs)

    def planes_of(self, x: Float[np.ndarray, "*batch d"]) -> Complex[np.ndarray, "*batch planes"]:
        """The rotated coordinates as complex numbers."""
        coordinates = x[..., self.pairs]
        return coordinates[..., 0] + 1j * coordinates[..., 1]

    def unrotated(self, x: Float[np.ndarray, "n d"], position: Int[np.ndarray, "n"]) -> Complex[np.ndarray, "n planes"]:
        """The planes with their rotation undone."""
        return self.planes_of(x) * np.exp(-1j * self.sign * position[:, None] * self.frequencies)


@dataclass(frozen=True)
class UndoneSums:
    """Sums of the rows of each document group with their rotation undone, and the number of rows."""

    total: Complex[np.ndarray, "groups planes"]
    n: Float[np.ndarray, "groups"]
    size: Float[np.ndarray, "groups planes"] | None = None
    """Σ of the lengths |z_m|; None where they were not summed."""

    @cached_property
    def mean(self) -> Complex[np.ndarray, "planes"]:
        """The mean over all rows."""
        return self.total.sum(0) / max(float(self.n.sum()), 1.0)


@dataclass(frozen=True)
class HeadRotary:
    """The rotary encoding of a head, and sums of its queries and keys with the rotation undone."""

    rope: Rope
    q: UndoneSums
    k: UndoneSums
    temperature: Float[np.ndarray, "positions"] | None = None
    """Factor on the queries at each position, if the layer applies one; not included in the sums."""

    @property
    def mean_q(self) -> Complex[np.ndarray, "planes"]:
        """The mean query of each plane."""
        return self.q.mean

    @property
    def mean_k(self) -> Complex[np.ndarray, "planes"]:
        """The mean key of each plane."""
        return self.k.mean
