"""The complement of {a, b}: sampled vectors, principal planes of the other dimensions, and RoPE's rings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Complex, Float

from qkscope.analyses.spectrum import Circle, Turning, fit_circles, token_positions, turning
from qkscope.core.linalg import eigh_descending, fisher_direction, ratio
from qkscope.core.rows import Coordinates, Pair, Rows
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
        """True if there are enough vectors, and a complement."""
        return min(len(self.pair.q), len(self.pair.k)) >= MIN_ROWS and len(self.a) >= 4

    def measured(self) -> Pair:
        """The vectors that planes are measured on: at most PLANE_ROWS of each kind."""
        return sample_pair(self.pair, PLANE_ROWS)

    def on_plane(self, pair: Pair) -> Coordinates:
        """Coordinates of these vectors of the head on a and b."""
        if self.coordinates is not None and pair.q is self.pair.q and pair.k is self.pair.k:
            return self.coordinates
        return Coordinates.of(pair, np.stack([self.a, self.b]))


_MOST_PLANES = 30


@dataclass(frozen=True)
class Complement:
    """Principal axes of the complement, strongest first, and its mean."""

    axes: Float[np.ndarray, "axes d"]
    mean: Float[np.ndarray, "d"]
    share: Float[np.ndarray, "planes"]
    """Share of the complement's variance in each plane (two axes each)."""

    def project(self, rows: Rows) -> Float[np.ndarray, "n axes"]:
        """Centred coordinates of rows; a and b do not contribute, because they are orthogonal to every axis."""
        return (rows.x - self.mean) @ self.axes.T


@dataclass(frozen=True)
class Planes:
    """Measures of the planes of the complement, one value per plane."""

    share: Float[np.ndarray, "planes"]
    turning: Turning
    ring: Float[np.ndarray, "planes"]
    """Coefficient of variation of the radius: 0 for a perfect ring, about 0.5 for a Gaussian cloud."""
    qk_accuracy: Float[np.ndarray, "planes"]
    """Accuracy of a line between queries and keys: about 0.5 on a shared ring."""

    @property
    def angle_r(self) -> Float[np.ndarray, "planes"]:
        """The resultant, with the sign of the frequency."""
        return np.sign(self.turning.frequency) * self.turning.resultant

    def active(self, chance: float) -> Bool[np.ndarray, "planes"]:
        """True for planes that turn with position more coherently over documents than 99% of structureless ones."""
        return self.turning.coherence > chance


def complement_axes(pair: Pair, a: Float[np.ndarray, "d"], b: Float[np.ndarray, "d"]) -> Complement:
    """Principal axes orthogonal to a and b; each is oriented so that its largest coefficient is positive."""
    x = np.concatenate([pair.q.x, pair.k.x])
    mean = x.mean(0)
    off = np.eye(len(a)) - np.outer(a, a) - np.outer(b, b)
    cov = off @ np.cov(x.T, bias=True) @ off
    values, axes = eigh_descending(cov)
    n_planes = min(_MOST_PLANES, (len(a) - 2) // 2)
    axes = axes[: 2 * n_planes] @ off  # rounding error along a or b would show where there is little variance
    axes = axes / np.maximum(np.linalg.norm(axes, axis=-1, keepdims=True), 1e-300)
    largest = np.take_along_axis(axes, np.abs(axes).argmax(-1)[:, None], -1)
    share = ratio(values[: 2 * n_planes].reshape(n_planes, 2).sum(-1), values.sum())
    return Complement(axes * np.where(largest < 0, -1.0, 1.0), mean, share)


def measure_planes(pair: Pair, basis: Complement, window: int) -> Planes:
    """Measure every plane of the complement."""
    on_q, on_k = (_by_plane(basis.project(rows)) for rows in (pair.q, pair.k))
    radius_q, radius_k = np.abs(on_q), np.abs(on_k)
    phasor_q, phasor_k = (
        np.divide(on, radius, out=np.ones_like(on), where=radius > 0)
        for on, radius in ((on_q, radius_q), (on_k, radius_k))
    )
    radius = np.concatenate([radius_q, radius_k], -1)
    return Planes(
        basis.share,
        turning(phasor_q, phasor_k, *token_positions(pair), window),
        ratio(radius.std(-1), radius.mean(-1)),
        line_accuracy(on_q, on_k),
    )


def circles(heads: Sequence[Coordinates], pair: Pair, window: int) -> list[Circle]:
    """Ω of several heads from their vectors' coordinates on a and b; ``pair`` has their token positions."""
    turning = [tuple(on[:, 0] + 1j * on[:, 1] for on in head) for head in heads]
    return fit_circles([(w_q, w_k) for w_q, w_k in turning], *token_positions(pair), window)


def line_accuracy(
    q: Complex[np.ndarray, "planes n_q"], k: Complex[np.ndarray, "planes n_k"]
) -> Float[np.ndarray, "planes"]:
    """Share of rows on the correct side of Fisher's line, averaged over the two classes, for each plane."""
    mean_q, mean_k = (_as_vectors(on.mean(-1)) for on in (q, k))
    w = fisher_direction(_scatter(q) + _scatter(k), mean_q - mean_k)
    threshold = ((w * (mean_q + mean_k)).sum(-1) / 2)[:, None]
    along_q, along_k = (w[:, :1] * on.real + w[:, 1:] * on.imag for on in (q, k))
    return ((along_q > threshold).mean(-1) + (along_k <= threshold).mean(-1)) / 2


def _scatter(on: Complex[np.ndarray, "planes n"]) -> Float[np.ndarray, "planes 2 2"]:
    centred = on - on.mean(-1, keepdims=True)
    x, y = centred.real, centred.imag
    xx, xy, yy = (x * x).sum(-1), (x * y).sum(-1), (y * y).sum(-1)
    return np.stack([xx, xy, xy, yy], -1).reshape(-1, 2, 2)


def _as_vectors(z: Complex[np.ndarray, "planes"]) -> Float[np.ndarray, "planes 2"]:
    return np.stack([z.real, z.imag], -1)


def _by_plane(coordinates: Float[np.ndarray, "n axes"]) -> Complex[np.ndarray, "planes n"]:
    """The coordinates of each plane as complex numbers."""
    return np.ascontiguousarray(np.ascontiguousarray(coordinates).view(complex).T)
