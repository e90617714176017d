"""At which frequency a plane turns with position, and whether that is more than chance.

An angle θ that turns with position has no linear correlation with it, so its frequency is searched for: e^{iθ}, less
its mean, is summed by position within each class, and one Fourier transform gives the resultant at every ω of a grid of
step 2π/(4·window), both signs. Classes are added as lengths, for rings in antiphase would cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Complex, Float, Int
from scipy import fft

from qkscope.core.rows import Pair

OVERSAMPLING = 4
"""Grid points per 2π/window."""
NULL_DRAWS = 400
NULL_QUANTILE = 0.99
PLANES_AT_ONCE = 2**22
"""Complex numbers transformed at a time, to bound memory at long windows."""


@dataclass(frozen=True)
class Tokens:
    """Where the rows of one class stand: documents in order, positions as they come."""

    example_id: Int[np.ndarray, "n"]
    position: Int[np.ndarray, "n"]

    def __len__(self) -> int:
        return len(self.position)

    @property
    def starts(self) -> Int[np.ndarray, "documents"]:
        """Index of each document's first row."""
        return np.flatnonzero(np.r_[True, self.example_id[1:] != self.example_id[:-1]])


def tokens_of(pair: Pair) -> tuple[Tokens, Tokens]:
    """Where the queries and the keys of a head stand."""
    return Tokens(pair.q.example_id, pair.q.position), Tokens(pair.k.example_id, pair.k.position)


@dataclass(frozen=True)
class Turning:
    """One value per plane each."""

    frequency: Float[np.ndarray, "planes"]
    """Radians per token; its sign depends on the orientation of the plane."""
    resultant: Float[np.ndarray, "planes"]
    """Mean length of (e^{iθ} − mean)e^{−iωt} over both classes; in [0, 1]."""
    coherence: Float[np.ndarray, "planes"]
    """T = |Σ_d F_d|² / Σ_d |F_d|² over documents d, both classes: near 1 by chance, their number for a ring."""


def grid_size(window: int) -> int:
    """Number of frequencies searched: 4·window, rounded up to what transforms fast."""
    return int(fft.next_fast_len(OVERSAMPLING * window))


def frequencies(window: int) -> Float[np.ndarray, "grid"]:
    """The grid in radians per token, in the order of the transform."""
    return 2 * np.pi * np.fft.fftfreq(grid_size(window))


def turning(
    angle_q: Float[np.ndarray, "planes n_q"],
    angle_k: Float[np.ndarray, "planes n_k"],
    tokens_q: Tokens,
    tokens_k: Tokens,
    window: int,
) -> Turning:
    """The strongest common frequency of queries and keys in each plane."""
    classes = [(_centred(np.exp(1j * angle_q)), tokens_q), (_centred(np.exp(1j * angle_k)), tokens_k)]
    step = max(1, PLANES_AT_ONCE // grid_size(window))
    found = [
        _strongest([(phasor[i : i + step], tokens) for phasor, tokens in classes], window)
        for i in range(0, len(angle_q), step)
    ]
    frequency = np.concatenate(found)
    by_document = [_sums(phasor, tokens, frequency) for phasor, tokens in classes]
    lengths = [np.abs(sums.sum(-1)) for sums in by_document]
    together = np.sum([np.abs(sums.sum(-1)) ** 2 for sums in by_document], axis=0)
    apart = np.sum([(np.abs(sums) ** 2).sum(-1) for sums in by_document], axis=0)
    n = max(len(tokens_q) + len(tokens_k), 1)
    return Turning(
        frequency, np.sum(lengths, axis=0) / n, np.divide(together, apart, out=np.zeros(len(apart)), where=apart > 0)
    )


def chance_coherence(tokens_q: Tokens, tokens_k: Tokens, window: int, seed: int = 0) -> float:
    """The 99th percentile of T, at the strongest frequency, of angles without structure on the same tokens."""
    parts = (array.tobytes() for tokens in (tokens_q, tokens_k) for array in (tokens.example_id, tokens.position))
    docs_q, at_q, docs_k, at_k = parts
    return _chance(docs_q, at_q, docs_k, at_k, tokens_q.position.dtype.str, window, seed)


@lru_cache(maxsize=16)
def _chance(docs_q: bytes, at_q: bytes, docs_k: bytes, at_k: bytes, dtype: str, window: int, seed: int) -> float:
    q, k = (
        Tokens(np.frombuffer(docs, dtype), np.frombuffer(at, dtype)) for docs, at in ((docs_q, at_q), (docs_k, at_k))
    )
    rng = np.random.default_rng(seed)
    drawn = []
    for start in range(0, NULL_DRAWS, 25):
        size = min(25, NULL_DRAWS - start)
        angle_q, angle_k = (rng.uniform(-np.pi, np.pi, (size, len(tokens))) for tokens in (q, k))
        drawn.append(turning(angle_q, angle_k, q, k, window).coherence)
    return float(np.quantile(np.concatenate(drawn), NULL_QUANTILE))


def _centred(phasor: Complex[np.ndarray, "planes n"]) -> Complex[np.ndarray, "planes n"]:
    """Without its mean: a cloud off the centre points one way at every position, which is no rotation."""
    return phasor - phasor.mean(-1, keepdims=True) if phasor.shape[-1] else phasor


def _strongest(classes: list[tuple[Complex[np.ndarray, "planes _"], Tokens]], window: int) -> Float[np.ndarray, "p"]:
    strength = np.sum([np.abs(_transform(phasor, tokens, window)) for phasor, tokens in classes], axis=0)
    strength[:, 0] = -1.0  # standing still is no rotation
    return frequencies(window)[strength.argmax(-1)]


def _transform(
    values: Complex[np.ndarray, "planes n"], tokens: Tokens, window: int
) -> Complex[np.ndarray, "planes grid"]:
    """Σ v_j e^{−iωt_j} on the grid; single precision is ample for finding a maximum."""
    by_position = np.zeros((len(values), grid_size(window)), dtype=np.complex64)
    np.add.at(by_position.T, tokens.position, values.T.astype(np.complex64))
    return fft.fft(by_position, axis=-1, overwrite_x=True)


def _sums(
    values: Complex[np.ndarray, "planes n"], tokens: Tokens, frequency: Float[np.ndarray, "planes"]
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


def fit_circle(
    w_q: Complex[np.ndarray, "n_q"],
    w_k: Complex[np.ndarray, "n_k"],
    tokens_q: Tokens,
    tokens_k: Tokens,
    window: int,
) -> Circle:
    """Least squares over C and the class centres at every ω of the grid: R² = |Σ w̃ē|² / (Σ|ẽ|² Σ|w̃|²)."""
    classes = [(w - w.mean(), tokens) for w, tokens in ((w_q, tokens_q), (w_k, tokens_k))]
    total = sum(float((np.abs(w) ** 2).sum()) for w, _ in classes)
    if total == 0:
        return Circle(float("nan"), float("nan"), False)
    scale = total**0.5
    fitted = np.abs(np.sum([_transform(w[None] / scale, tokens, window)[0] for w, tokens in classes], axis=0)) ** 2
    ones = (_transform(np.ones((1, len(tokens)), complex), tokens, window)[0] for _, tokens in classes)
    counted = np.sum([np.abs(e) ** 2 / len(tokens) for e, (_, tokens) in zip(ones, classes, strict=True)], axis=0)
    spread = len(tokens_q) + len(tokens_k) - counted
    spread[0] = 0.0
    # Frequencies at which e^{iωt} hardly varies over the tokens fit anything.
    share = np.where(spread > 1e-3 * spread.max(), fitted, 0.0) / np.maximum(spread, 1e-12)
    best = int(share.argmax())
    omega = float(frequencies(window)[best])
    return Circle(omega, float(min(share[best], 1.0)), best in (1, len(share) - 1))
