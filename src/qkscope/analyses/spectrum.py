"""At which frequency a plane turns with position, and whether that is more than chance.

An angle θ that turns with position has no linear correlation with it, so its frequency is searched: e^{iθ} minus its
mean is multiplied by e^{−iωt} and summed within each class at every ω of a grid. The absolute values of the class sums
are added, because rings in antiphase would cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float, Float32, Int

from qkscope.analyses.frequencygrid import Grid, strongest
from qkscope.core.rows import Pair

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
    """How planes turn with position, one value per plane."""

    frequency: Float[np.ndarray, "planes"]
    """Radians per token; its sign depends on the orientation of the plane."""
    resultant: Float[np.ndarray, "planes"]
    """Mean length of (e^{iθ} − mean)e^{−iωt} over both classes; in [0, 1]."""
    coherence: Float[np.ndarray, "planes"]
    """T = |Σ_d F_d|² / Σ_d |F_d|² over documents d, both classes: about 1 by chance, up to their number for a ring."""


def turning(
    angle_q: Float[np.ndarray, "planes n_q"],
    angle_k: Float[np.ndarray, "planes n_k"],
    tokens_q: TokenPositions,
    tokens_k: TokenPositions,
    window: int,
) -> Turning:
    """The strongest common frequency of queries and keys in each plane."""
    classes = [(_centred(np.exp(1j * angle_q)), tokens_q), (_centred(np.exp(1j * angle_k)), tokens_k)]
    frequency = _strongest(classes, Grid(window))
    by_document = [_sums(phasor, tokens, frequency) for phasor, tokens in classes]
    lengths = [np.abs(sums.sum(-1)) for sums in by_document]
    together = np.sum([np.abs(sums.sum(-1)) ** 2 for sums in by_document], axis=0)
    apart = np.sum([(np.abs(sums) ** 2).sum(-1) for sums in by_document], axis=0)
    n = max(len(tokens_q) + len(tokens_k), 1)
    return Turning(
        frequency, np.sum(lengths, axis=0) / n, np.divide(together, apart, out=np.zeros(len(apart)), where=apart > 0)
    )


def chance_coherence(tokens_q: TokenPositions, tokens_k: TokenPositions, window: int, seed: int = 0) -> float:
    """The 99th percentile of T, at the strongest frequency, for random angles on the same tokens."""
    arrays = (array.tobytes() for tokens in (tokens_q, tokens_k) for array in (tokens.example_id, tokens.position))
    docs_q, at_q, docs_k, at_k = arrays
    return _chance(docs_q, at_q, docs_k, at_k, tokens_q.position.dtype.str, window, seed)


@lru_cache(maxsize=16)
def _chance(docs_q: bytes, at_q: bytes, docs_k: bytes, at_k: bytes, dtype: str, window: int, seed: int) -> float:
    q, k = (
        TokenPositions(np.frombuffer(docs, dtype), np.frombuffer(at, dtype))
        for docs, at in ((docs_q, at_q), (docs_k, at_k))
    )
    rng = np.random.default_rng(seed)
    drawn = []
    for start in range(0, NULL_DRAWS, 25):
        size = min(25, NULL_DRAWS - start)
        angle_q, angle_k = (rng.uniform(-np.pi, np.pi, (size, len(tokens))) for tokens in (q, k))
        drawn.append(turning(angle_q, angle_k, q, k, window).coherence)
    return float(np.quantile(np.concatenate(drawn), NULL_QUANTILE))


def _centred(phasor: Complex[np.ndarray, "planes n"]) -> Complex[np.ndarray, "planes n"]:
    """Without its mean: a cloud off the centre has the same angle at every position, which is not a rotation."""
    return phasor - phasor.mean(-1, keepdims=True) if phasor.shape[-1] else phasor


def _strongest(
    classes: list[tuple[Complex[np.ndarray, "planes _"], TokenPositions]], grid: Grid
) -> Float[np.ndarray, "planes"]:
    def squared_lengths(sums: np.ndarray, _: object) -> Float[np.ndarray, "*points"]:
        return np.abs(sums).sum(0) ** 2

    strongest_points = []
    for plane in range(len(classes[0][0])):
        even = grid.even([(phasor[plane], tokens.position) for phasor, tokens in classes])
        strongest_points.append(strongest(grid, even, squared_lengths))
    return grid.frequency(np.array(strongest_points, dtype=np.int64))


def _sums(
    values: Complex[np.ndarray, "planes n"], tokens: TokenPositions, frequency: Float[np.ndarray, "planes"]
) -> Complex[np.ndarray, "planes documents"]:
    """F_d = Σ over the document of v·e^{−iωt}, at each plane's own frequency."""
    if not len(tokens):
        return np.zeros((len(values), 0), dtype=complex)
    turned = values * np.exp(-1j * frequency[:, None] * tokens.position)
    return np.add.reduceat(turned, tokens.starts, axis=-1)


# ---- the plane of a and b -----------------------------------------------------------------------


@dataclass(frozen=True)
class Circle:
    """The best fit of w ≈ c_class + C·e^{iωt}."""

    omega: float
    r_squared: float
    at_edge: bool
    """Whether ω is the lowest frequency of the grid, as for a drift that does not turn."""


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
    parts = [
        (np.concatenate(head) / total**0.5, position)
        for head, total, can_fit in zip(centred, totals, fittable, strict=True)
        if can_fit
    ]
    even = iter(grid.even(parts) if parts else ())

    def explained(sums: np.ndarray, points: Int[np.ndarray, "points"] | None) -> Float[np.ndarray, "*points"]:
        power = sums[0].real ** 2 + sums[0].imag ** 2
        power *= weight.even if points is None else weight.all[points]
        return power

    fits = []
    for head, total, can_fit in zip(centred, totals, fittable, strict=True):
        if not can_fit:
            fits.append(Circle(float("nan"), float("nan"), False))
            continue
        best = strongest(grid, next(even)[None], explained)
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
    """Whether any weight is not 0."""


@lru_cache(maxsize=4)
def _weights(at_q: bytes, at_k: bytes, window: int) -> _Weights:
    """Cached, because heads share tokens."""
    grid = Grid(window)
    spread = np.zeros(grid.size)
    for position in (np.frombuffer(at_q, np.int64), np.frombuffer(at_k, np.int64)):
        sums = grid.everywhere((np.ones(len(position), complex), position))
        spread += len(position) - np.abs(sums) ** 2 / len(position)
    spread[0] = 0.0
    enough = spread > 1e-3 * spread.max()
    weights = np.where(enough, 1.0 / np.where(enough, spread, 1.0), 0.0).astype(np.float32)
    return _Weights(weights, np.ascontiguousarray(weights.reshape(grid.base, 4)[:, ::2].T), bool(weights.any()))


def _r_squared(classes: list[tuple[Complex[np.ndarray, "_"], TokenPositions]], omega: float, total: float) -> float:
    """The share explained at one ω, in double precision."""
    fitted, spread = 0j, 0.0
    for w, tokens in classes:
        turn = np.exp(-1j * omega * tokens.position)
        turn -= turn.mean()
        fitted += complex(w @ turn)
        spread += float((np.abs(turn) ** 2).sum())
    return min(abs(fitted) ** 2 / (spread * total), 1.0) if spread > 0 else 0.0
