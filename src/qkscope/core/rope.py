"""Rotary encoding as complex numbers: plane m of a vector at position t is z_m = z̃_m · e^{i s θ_m t}.

Plane m consists of the coordinates start + (m, m + planes), or start + (2m, 2m + 1) if they are interleaved; s is +1
if planes turn counter-clockwise with position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from jaxtyping import Complex, Float, Int, Real

Layout = Literal["half", "interleaved"]
_SAME_BASE = 1e-4
"""Largest relative error of frequencies that count as powers of one base."""


def base_of(frequencies: Sequence[float]) -> float | None:
    """The base θ of frequencies θ^(−m/planes); None if they are not powers of one base, as in scaled encodings.

    >>> base_of([1.0, 0.1, 0.01, 0.001]), base_of([1.0, 0.1, 0.01, 0.0])
    (10000.0, None)
    """
    planes, values = len(frequencies), np.asarray(frequencies, dtype=float)
    if planes < 2 or (values <= 0).any():
        return None
    base = float(values[-1] ** (-planes / (planes - 1)))
    powers = base ** (-np.arange(planes) / planes)
    return float(f"{base:.6g}") if np.allclose(values, powers, rtol=_SAME_BASE, atol=0) else None


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
    def sides(self) -> tuple[slice, slice]:
        """The first coordinates of all planes, and the second ones."""
        start, middle, end = self.start, self.start + self.planes, self.start + 2 * self.planes
        return (slice(start, middle), slice(middle, end)) if self.layout == "half" else (
            slice(start, end, 2), slice(start + 1, end, 2)
        )  # fmt: skip

    @property
    def pairs(self) -> Int[np.ndarray, "planes 2"]:
        """Coordinates of each plane."""
        coordinates = np.arange(self.start + 2 * self.planes)
        return np.stack([coordinates[side] for side in self.sides], -1)

    def rest(self, d: int) -> Int[np.ndarray, "rest"]:
        """Coordinates that are not rotated."""
        return np.r_[0 : self.start, self.start + 2 * self.planes : d]

    def planes_of(self, x: Float[np.ndarray, "*batch d"]) -> Complex[np.ndarray, "*batch planes"]:
        """The rotated coordinates as complex numbers."""
        first, second = self.sides
        planes = np.empty((*x.shape[:-1], self.planes), dtype=np.result_type(x.dtype, np.complex64))
        planes.real, planes.imag = x[..., first], x[..., second]
        return planes

    def turns(self, position: Real[np.ndarray, "n"]) -> Complex[np.ndarray, "n planes"]:
        """The rotation of each plane at these positions; that of a sample is kept, because heads share their tokens."""
        turned = _kept_turns if len(position) <= KEPT_POSITIONS else _turns
        return turned(position.tobytes(), position.dtype.str, np.asarray(self.frequencies, float).tobytes(), self.sign)

    def unrotated(self, x: Float[np.ndarray, "n d"], position: Int[np.ndarray, "n"]) -> Complex[np.ndarray, "n planes"]:
        """The planes with their rotation undone."""
        return self.planes_of(x) * self.turns(position).conj()


def _turns(position: bytes, dtype: str, frequencies: bytes, sign: int) -> Complex[np.ndarray, "n planes"]:
    at = np.frombuffer(position, dtype)[:, None]
    turns = np.exp(1j * sign * at * np.frombuffer(frequencies))
    turns.flags.writeable = False
    return turns


KEPT_POSITIONS = 16_384
_kept_turns = lru_cache(maxsize=6)(_turns)


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
