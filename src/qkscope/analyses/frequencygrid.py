"""Sums Σ v·e^{−iωt} at every ω of a grid of step 2π/(4·window), both signs, and where they are largest.

Transforms give every second point of the grid. Positions fill half of what those points resolve, so the points between
them follow by band-limited interpolation; they are asked for only where a neighbour comes near the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Complex, Float, Int
from scipy import fft

OVERSAMPLING = 4
"""Grid points per 2π/window."""
TAPS = 16
"""Points that one between them is interpolated from: an error of 1e-5 of the largest."""
WORTH_A_LOOK = 0.4
"""Share of the largest score, in squares of sums, from which on the points beside a point are looked at.

Between two points a sum can be larger by at most √2 where all of it comes from both ends of the window.
"""


@dataclass(frozen=True)
class Grid:
    """The frequencies searched for positions below a window."""

    window: int

    @cached_property
    def base(self) -> int:
        """Length of one transform: the window, rounded up to what transforms fast."""
        return int(fft.next_fast_len(self.window))

    @property
    def size(self) -> int:
        """Number of frequencies."""
        return OVERSAMPLING * self.base

    @property
    def frequencies(self) -> Float[np.ndarray, "grid"]:
        """Radians per token, in the order of a transform: 0, then those above, then those below."""
        return self.frequency(np.arange(self.size))

    def frequency(self, index: Int[np.ndarray, "*some"]) -> Float[np.ndarray, "*some"]:
        """Radians per token of these points."""
        signed = np.where(index < self.size // 2, index, index - self.size)
        return np.asarray(2 * np.pi / self.size * signed)

    def every_second(
        self, values: Complex[np.ndarray, "rows n"], position: Int[np.ndarray, "n"]
    ) -> Complex[np.ndarray, "rows half"]:
        """The sums at points 0, 2, 4 and so on."""
        return self._interleaved(values, position, (0, 2))

    def everywhere(
        self, values: Complex[np.ndarray, "rows n"], position: Int[np.ndarray, "n"]
    ) -> Complex[np.ndarray, "rows grid"]:
        """The sums at every point."""
        return self._interleaved(values, position, (0, 1, 2, 3))

    def _interleaved(
        self, values: Complex[np.ndarray, "rows n"], position: Int[np.ndarray, "n"], shifts: tuple[int, ...]
    ) -> Complex[np.ndarray, "rows points"]:
        """The sums at some points of every four, with positions counted from the middle of a transform.

        Single precision is ample for finding a maximum.
        """
        found = np.empty((len(values), len(shifts) * self.base), dtype=np.complex64)
        for place, shift in enumerate(shifts):
            turned = values * np.exp(-2j * np.pi * shift / self.size * (position - self.middle)) if shift else values
            laid = np.zeros((len(values), self.base), dtype=np.complex64)
            for row, one in zip(laid, turned.astype(np.complex64), strict=True):
                np.add.at(row, position, one)
            transformed = fft.fft(laid, axis=-1, overwrite_x=True)
            np.multiply(transformed, _turns(self.base), out=found[:, place :: len(shifts)])
        return found

    @property
    def middle(self) -> int:
        """Where positions are counted from."""
        return self.base // 2

    def between(
        self, found: Complex[np.ndarray, "half"], before: Int[np.ndarray, "some"]
    ) -> Complex[np.ndarray, "some"]:
        """The sums half-way between the points ``before`` of ``every_second`` and those after them."""
        around = (before[:, None] + _OFFSETS) % len(found)
        return found[around] @ _WEIGHTS


@lru_cache(maxsize=4)
def _turns(base: int) -> Complex[np.ndarray, "base"]:
    """What counting positions from the middle does at each point of a transform."""
    return np.exp(2j * np.pi / base * (base // 2) * np.arange(base)).astype(np.complex64)


_OFFSETS = np.arange(1 - TAPS // 2, TAPS // 2 + 1)
_REACH = (_OFFSETS - 0.5) / (TAPS / 2)
# A sinc under Kaiser's window; the positions fill half of what every second point resolves.
_WEIGHTS = (
    np.sinc(_OFFSETS - 0.5) * np.i0(np.pi * TAPS / 4 * np.sqrt(1 - _REACH**2)) / np.i0(np.pi * TAPS / 4)
).astype(np.float32)

Score = Callable[[list[Complex[np.ndarray, "points"]], slice | Int[np.ndarray, "points"]], Float[np.ndarray, "points"]]
"""What is made of the sums at some points of the grid, given as a slice or indices; in squares of sums."""


def strongest(grid: Grid, sums: list[Complex[np.ndarray, "half"]], score: Score) -> int:
    """The point of the grid, other than 0, at which the score of one or several sums is largest."""
    even = score(sums, slice(0, None, 2))
    even[0] = -1.0  # standing still is no rotation
    best = int(even.argmax())
    good = even >= WORTH_A_LOOK * even[best]
    good[0] = good[-1] = True  # the lowest frequencies lie beside 0
    before = np.flatnonzero(good | np.roll(good, -1))
    odd = score([grid.between(part, before) for part in sums], 2 * before + 1)
    most = int(odd.argmax())
    return 2 * int(before[most]) + 1 if odd[most] >= even[best] else 2 * best
