"""Sums Σ v·e^{−iωt} at every ω of a grid of step 2π/(4·window), both signs, and where they are largest.

Transforms give every second point of the grid. Positions fill half of what those points resolve, so the points between
them follow by band-limited interpolation; they are computed only where a neighbour is close to the maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
from jaxtyping import Complex, Complex64, Float, Int
from scipy import fft

OVERSAMPLING = 4
"""Grid points per 2π/window."""
TAPS = 16
"""Points that a point between them is interpolated from; the error is 1e-5 of the largest sum."""
WORTH_A_LOOK = 0.4
"""The neighbours of a point are examined if its score (a squared sum) is at least this share of the largest.

Between two points a sum can be larger by a factor of at most √2, if all of it comes from both ends of the window.
"""


AT_ONCE = 4
"""Transforms that are taken together."""

Part = tuple[Complex[np.ndarray, "_"], Int[np.ndarray, "_"]]
"""Values v and their positions t."""


@dataclass(frozen=True)
class Grid:
    """The frequencies searched for positions below a window."""

    window: int

    @cached_property
    def base(self) -> int:
        """Length of one transform: the window, rounded up to a fast length."""
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

    def even(self, parts: Sequence[Part]) -> Complex64[np.ndarray, "parts 2 base"]:
        """The sums at points 0, 4, 8, … and at 2, 6, 10, …; each up to a phase that ``between`` corrects."""
        return self._sums(parts, (0, 2))

    def everywhere(self, part: Part) -> Complex64[np.ndarray, "grid"]:
        """The sums at every point; each up to a phase."""
        return self._sums([part], (0, 1, 2, 3))[0].T.reshape(-1)

    def _sums(self, parts: Sequence[Part], shifts: tuple[int, ...]) -> Complex64[np.ndarray, "parts shifts base"]:
        """The sums at the given offsets within every four points, positions counted from the middle of a transform.

        Single precision is enough for finding a maximum. A few transforms at a time take half as long as one by one;
        always the same number, so that no result depends on how many are requested.
        """
        rows = len(parts) * len(shifts)
        sums = np.zeros((-(-rows // AT_ONCE) * AT_ONCE, self.base), dtype=np.complex64)
        for row, ((values, position), shift) in zip(sums, product(parts, shifts), strict=False):
            turned = values * _shifted(position.tobytes(), position.dtype.str, shift, self.size, self.middle)
            np.add.at(row, position, turned.astype(np.complex64))
        for start in range(0, len(sums), AT_ONCE):
            chunk = slice(start, start + AT_ONCE)
            sums[chunk] = fft.fft(sums[chunk], axis=-1, overwrite_x=True)
        return sums[:rows].reshape(len(parts), len(shifts), self.base)

    @property
    def middle(self) -> int:
        """The position that positions are counted from."""
        return self.base // 2

    def between(
        self, even: Complex64[np.ndarray, "parts 2 base"], before: Int[np.ndarray, "some"]
    ) -> Complex[np.ndarray, "parts some"]:
        """The sums half-way between points 2·``before`` and those after them."""
        around = (before[:, None] + _OFFSETS) % (2 * self.base)
        place = around // 2
        return (even[:, around % 2, place] * _turns(self.base)[place]) @ _WEIGHTS


@lru_cache(maxsize=32)
def _shifted(position: bytes, dtype: str, shift: int, size: int, middle: int) -> Complex[np.ndarray, "n"]:
    """Factors that shift every frequency by ``shift`` grid points; cached, since heads of a run share their tokens."""
    return np.exp(-2j * np.pi * shift / size * (np.frombuffer(position, dtype) - middle))


@lru_cache(maxsize=4)
def _turns(base: int) -> Complex[np.ndarray, "base"]:
    """Phase of each point of a transform that comes from counting positions from the middle."""
    return np.exp(2j * np.pi / base * (base // 2) * np.arange(base)).astype(np.complex64)


_OFFSETS = np.arange(1 - TAPS // 2, TAPS // 2 + 1)
_REACH = (_OFFSETS - 0.5) / (TAPS / 2)
# A sinc under Kaiser's window; the positions fill half of what every second point resolves.
_WEIGHTS = (
    np.sinc(_OFFSETS - 0.5) * np.i0(np.pi * TAPS / 4 * np.sqrt(1 - _REACH**2)) / np.i0(np.pi * TAPS / 4)
).astype(np.float32)

Score = Callable[[Complex[np.ndarray, "parts *points"], Int[np.ndarray, "points"] | None], Float[np.ndarray, "*points"]]
"""A score, in squares of sums, from the sums at the given grid points; None: at all even points, laid out as in
``Grid.even``."""


def strongest(grid: Grid, even: Complex64[np.ndarray, "parts 2 base"], score: Score) -> int:
    """The point of the grid, other than 0, at which the score of one or several sums is largest."""
    scores = score(even, None)
    scores[0, 0] = -1.0  # frequency 0 is not a rotation
    place, best = np.unravel_index(int(scores.argmax()), scores.shape)
    first = 2 * int(best) + int(place)
    parity, index = np.divmod(np.flatnonzero(scores >= WORTH_A_LOOK * scores[place, best]), grid.base)
    last = 2 * grid.base - 1
    good = np.concatenate([2 * index + parity, [0, last]])  # the lowest frequencies are next to 0
    before = np.unique(np.concatenate([good, (good - 1) % (last + 1)]))
    odd = score(grid.between(even, before), 2 * before + 1)
    largest = int(odd.argmax())
    return 2 * int(before[largest]) + 1 if odd[largest] >= scores[place, best] else 2 * first
