"""The frequency at which a plane turns with position, from sums on a grid of frequencies, and a test against chance.

Transforms give every second point of the grid. Positions fill half of what those points resolve, so the points between
them follow by band-limited interpolation; they are computed only where a neighbour is close to the maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Complex64, Float, Float32, Int
from scipy import fft

from qkscope.core.rows import Pair

OVERSAMPLING = 4
"""Grid points per 2π/window."""
TAPS = 16
"""Points from which one between them is interpolated; the error is 1e-5 of the largest sum."""
WORTH_A_LOOK = 0.4
"""The neighbours of a point are examined if its score (a squared sum) is at least this share of the largest.

Between two points a sum can be larger by a factor of at most √2, if all of it comes from both ends of the window.
"""


AT_ONCE = 4
"""Transforms that are computed together."""

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

    def even(
        self, values: Complex[np.ndarray, "parts n"], position: Int[np.ndarray, "n"]
    ) -> Complex64[np.ndarray, "parts 2 base"]:
        """The sums at points 0, 4, 8, … and at 2, 6, 10, …; each up to a phase that ``between`` corrects."""
        return self._sums(values, position, (0, 2))

    def everywhere(
        self, values: Complex[np.ndarray, "n"], position: Int[np.ndarray, "n"]
    ) -> Complex64[np.ndarray, "grid"]:
        """The sums at every point; each up to a phase."""
        return self._sums(values[None], position, (0, 1, 2, 3))[0].T.reshape(-1)

    def turns(self, point: Int[np.ndarray, "some"], position: Int[np.ndarray, "n"]) -> Complex[np.ndarray, "some n"]:
        """e^{−iωt} at these points of the grid and these positions."""
        return _roots(self.size)[np.multiply.outer(point, position.astype(np.int64)) % self.size]

    def _sums(
        self, values: Complex[np.ndarray, "parts n"], position: Int[np.ndarray, "n"], shifts: tuple[int, ...]
    ) -> Complex64[np.ndarray, "parts shifts base"]:
        """The sums at the given offsets within every four points, positions counted from the middle of a transform.

        Single precision is enough for finding a maximum. A few transforms at a time take half as long as one by one;
        always the same number, so that no result depends on how many are requested.
        """
        order, starts, occurring = _same_positions(position.tobytes(), position.dtype.str)
        by_position = np.zeros((len(values), self.base), dtype=np.complex64)
        if len(order):
            by_position[:, occurring] = np.add.reduceat(values[:, order], starts, axis=-1)
        rows = len(values) * len(shifts)
        sums = np.zeros((-(-rows // AT_ONCE) * AT_ONCE, self.base), dtype=np.complex64)
        by_shift = sums[:rows].reshape(len(values), len(shifts), self.base)
        for i, shift in enumerate(shifts):
            np.multiply(by_position, _shifted(self.base, shift), out=by_shift[:, i])
        for start in range(0, len(sums), AT_ONCE):
            chunk = slice(start, start + AT_ONCE)
            sums[chunk] = fft.fft(sums[chunk], axis=-1, overwrite_x=True)
        return by_shift

    def between(
        self,
        even: Complex64[np.ndarray, "parts signals 2 base"],
        signal: Int[np.ndarray, "some"],
        before: Int[np.ndarray, "some"],
    ) -> Complex[np.ndarray, "parts some"]:
        """The sums half-way between points 2·``before`` of these signals and those after them."""
        around = (before[:, None] + _OFFSETS) % (2 * self.base)
        column = around // 2
        return (even[:, signal[:, None], around % 2, column] * _turns(self.base)[column]) @ _WEIGHTS


@lru_cache(maxsize=8)
def _same_positions(
    position: bytes, dtype: str
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "different"], Int[np.ndarray, "different"]]:
    """Rows in the order of their positions, the first of each position, and the positions that occur."""
    at = np.frombuffer(position, dtype)
    order = np.argsort(at, kind="stable")
    occurring, starts = np.unique(at[order], return_index=True)
    return order, starts, occurring


@lru_cache(maxsize=8)
def _shifted(base: int, shift: int) -> Complex64[np.ndarray, "base"]:
    """Factors by position that shift every frequency by ``shift`` grid points."""
    angle = -2j * np.pi * shift / (OVERSAMPLING * base) * (np.arange(base) - base // 2)
    return np.exp(angle).astype(np.complex64)


@lru_cache(maxsize=4)
def _roots(size: int) -> Complex[np.ndarray, "size"]:
    """e^{−2πi·n/size}."""
    return np.exp(-2j * np.pi / size * np.arange(size))


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


def strongest(
    grid: Grid, even: Complex64[np.ndarray, "parts signals 2 base"], score: Score
) -> Int[np.ndarray, "signals"]:
    """The point of the grid, other than 0, at which the score of each signal's sums is largest."""
    scores, points = score(even, None), 2 * grid.base
    scores[:, 0, 0] = -1.0  # frequency 0 is not a rotation
    each = np.arange(len(scores))
    parity, index = np.divmod(scores.reshape(len(scores), -1).argmax(-1), grid.base)
    largest_even = scores[each, parity, index]
    signal, good_parity, good = np.nonzero(scores >= WORTH_A_LOOK * largest_even[:, None, None])
    # Around good points, and around 0, where the lowest frequencies are.
    after = np.concatenate([signal * points + 2 * good + good_parity, each * points, each * points + points - 1])
    signal, before = np.divmod(np.unique(np.concatenate([after, after - 1 + points * (after % points == 0)])), points)
    odd = score(grid.between(even, signal, before), 2 * before + 1)
    largest_odd = np.maximum.reduceat(odd, np.searchsorted(signal, each))
    is_largest = np.flatnonzero(odd == largest_odd[signal])
    first = before[is_largest[np.searchsorted(signal[is_largest], each)]]
    return np.where(largest_odd >= largest_even, 2 * first + 1, 2 * (2 * index + parity))


NULL_DRAWS = 400
NULL_QUANTILE = 0.99


@dataclass(frozen=True)
class TokenPositions:
    """Token positions of the rows of one class: documents in order, positions in any order."""

    example_id: Int[np.ndarray, "n"]
    position: Int[np.ndarray, "n"]

    def __len__(self) -> int:
        return len(self.position)

    @property
    def starts(self) -> Int[np.ndarray, "documents"]:
        """Index of each document's first row."""
        return np.flatnonzero(np.r_[True, self.example_id[1:] != self.example_id[:-1]])


def token_positions(pair: Pair) -> tuple[TokenPositions, TokenPositions]:
    """Token positions of the queries and the keys of a head."""
    return TokenPositions(pair.q.example_id, pair.q.position), TokenPositions(pair.k.example_id, pair.k.position)


@dataclass(frozen=True)
class Turning:
    """The rotation of planes with position, one value per plane."""

    frequency: Float[np.ndarray, "planes"]
    """Radians per token; its sign depends on the orientation of the plane."""
    resultant: Float[np.ndarray, "planes"]
    """Mean length of (e^{iθ} − mean)e^{−iωt} over both classes; in [0, 1]."""
    coherence: Float[np.ndarray, "planes"]
    """T = |Σ_d F_d|² / Σ_d |F_d|² over documents d, both classes: about 1 by chance, up to their number for a ring."""


def turning(
    phasor_q: Complex[np.ndarray, "planes n_q"],
    phasor_k: Complex[np.ndarray, "planes n_k"],
    tokens_q: TokenPositions,
    tokens_k: TokenPositions,
    window: int,
) -> Turning:
    """The strongest common frequency of queries and keys in each plane, from e^{iθ} of their vectors."""
    grid = Grid(window)
    classes = [(_centred(phasor_q), tokens_q), (_centred(phasor_k), tokens_k)]

    def squared_lengths(sums: np.ndarray, _: object) -> Float[np.ndarray, "*points"]:
        return np.abs(sums).sum(0) ** 2

    even = np.stack([grid.even(phasor, tokens.position) for phasor, tokens in classes])
    point = strongest(grid, even, squared_lengths)
    by_document = [_sums(phasor, tokens, grid.turns(point, tokens.position)) for phasor, tokens in classes]
    lengths = [np.abs(sums.sum(-1)) for sums in by_document]
    coherent = np.sum([length**2 for length in lengths], axis=0)
    incoherent = np.sum([(np.abs(sums) ** 2).sum(-1) for sums in by_document], axis=0)
    n = max(len(tokens_q) + len(tokens_k), 1)
    return Turning(
        grid.frequency(point),
        np.sum(lengths, axis=0) / n,
        np.divide(coherent, incoherent, out=np.zeros(len(incoherent)), where=incoherent > 0),
    )


def chance_coherence(tokens_q: TokenPositions, tokens_k: TokenPositions, window: int, seed: int = 0) -> float:
    """The 99th percentile of T, at the strongest frequency, for random angles on the same tokens."""
    arrays = (array.tobytes() for tokens in (tokens_q, tokens_k) for array in (tokens.example_id, tokens.position))
    docs_q, at_q, docs_k, at_k = arrays
    return _chance(docs_q, at_q, docs_k, at_k, tokens_q.position.dtype.str, window, seed)


@lru_cache(maxsize=16)
def _chance(docs_q: bytes, at_q: bytes, docs_k: bytes, at_k: bytes, dtype: str, window: int, seed: int) -> float:
    q, k = (
        TokenPositions(np.frombuffer(docs, dtype), np.frombuffer(position, dtype))
        for docs, position in ((docs_q, at_q), (docs_k, at_k))
    )
    rng = np.random.default_rng(seed)
    coherences = []
    for start in range(0, NULL_DRAWS, 25):
        size = min(25, NULL_DRAWS - start)
        phasors = [np.exp(1j * rng.uniform(-np.pi, np.pi, (size, len(tokens)))) for tokens in (q, k)]
        coherences.append(turning(phasors[0], phasors[1], q, k, window).coherence)
    return float(np.quantile(np.concatenate(coherences), NULL_QUANTILE))


def _centred(phasor: Complex[np.ndarray, "planes n"]) -> Complex[np.ndarray, "planes n"]:
    """Subtract the mean: a cloud off the centre has the same angle at every position, which is not a rotation."""
    return phasor - phasor.mean(-1, keepdims=True) if phasor.shape[-1] else phasor


def _sums(
    values: Complex[np.ndarray, "planes n"], tokens: TokenPositions, turns: Complex[np.ndarray, "planes n"]
) -> Complex[np.ndarray, "planes documents"]:
    """F_d = Σ over the document of v·e^{−iωt}, at each plane's own frequency."""
    if not len(tokens):
        return np.zeros((len(values), 0), dtype=complex)
    return np.add.reduceat(values * turns, tokens.starts, axis=-1)


# ---- the plane of a and b -----------------------------------------------------------------------


@dataclass(frozen=True)
class Circle:
    """The best fit of w ≈ c_class + C·e^{iωt}."""

    omega: float
    r_squared: float
    at_edge: bool
    """True if ω is the lowest frequency of the grid, as for a drift that does not turn."""


def fit_circles(
    heads: Sequence[tuple[Complex[np.ndarray, "n_q"], Complex[np.ndarray, "n_k"]]],
    tokens_q: TokenPositions,
    tokens_k: TokenPositions,
    window: int,
) -> list[Circle]:
    """For several heads on the same tokens: least squares over C and the class centres at every ω of the grid.

    R² = |Σ w̃ē|² / (Σ|ẽ|² Σ|w̃|²).
    """
    grid = Grid(window)
    weight = _weights(*(tokens.position.astype(np.int64).tobytes() for tokens in (tokens_q, tokens_k)), window)
    position = np.concatenate([tokens_q.position, tokens_k.position])
    centred = [tuple(w - w.mean() for w in head) for head in heads]
    totals = [sum(float(np.vdot(w, w).real) for w in head) for head in centred]
    fittable = [total > 0 and weight.any_nonzero for total in totals]
    signals = [
        np.concatenate(head) / total**0.5
        for head, total, can_fit in zip(centred, totals, fittable, strict=True)
        if can_fit
    ]

    def explained(sums: np.ndarray, points: Int[np.ndarray, "points"] | None) -> Float[np.ndarray, "*points"]:
        power = sums[0].real ** 2 + sums[0].imag ** 2
        power *= weight.even if points is None else weight.all[points]
        return power

    points = iter(strongest(grid, grid.even(np.stack(signals), position)[None], explained) if signals else ())
    fits = []
    for head, total, can_fit in zip(centred, totals, fittable, strict=True):
        if not can_fit:
            fits.append(Circle(float("nan"), float("nan"), False))
            continue
        best = int(next(points))
        omega = float(grid.frequency(np.array(best)))
        classes = list(zip(head, (tokens_q, tokens_k), strict=True))
        fits.append(Circle(omega, _r_squared(classes, omega, total), best in (1, grid.size - 1)))
    return fits


class _Weights(NamedTuple):
    """1 / Σ|ẽ|² at every ω; 0 where e^{iωt} hardly varies over the tokens and would fit anything."""

    all: Float32[np.ndarray, "grid"]
    even: Float32[np.ndarray, "2 base"]
    """At even points, as ``Grid.even`` lays them out."""
    any_nonzero: bool
    """True if any weight is not 0."""


@lru_cache(maxsize=4)
def _weights(at_q: bytes, at_k: bytes, window: int) -> _Weights:
    """The weights for these token positions; cached, because heads share tokens."""
    grid = Grid(window)
    spread = np.zeros(grid.size)
    for position in (np.frombuffer(at_q, np.int64), np.frombuffer(at_k, np.int64)):
        sums = grid.everywhere(np.ones(len(position), complex), position)
        spread += len(position) - np.abs(sums) ** 2 / len(position)
    spread[0] = 0.0
    enough = spread > 1e-3 * spread.max()
    weights = np.where(enough, 1.0 / np.where(enough, spread, 1.0), 0.0).astype(np.float32)
    return _Weights(weights, np.ascontiguousarray(weights.reshape(grid.base, 4)[:, ::2].T), bool(weights.any()))


def _r_squared(classes: list[tuple[Complex[np.ndarray, "_"], TokenPositions]], omega: float, total: float) -> float:
    """The share of variance explained at one ω, in double precision."""
    fitted, spread = 0j, 0.0
    for w, tokens in classes:
        turn = np.exp(-1j * omega * tokens.position)
        turn -= turn.mean()
        fitted += complex(w @ turn)
        spread += float((np.abs(turn) ** 2).sum())
    return min(abs(fitted) ** 2 / (spread * total), 1.0) if spread > 0 else 0.0
