"""Count, mean and scatter of rows in chunks of fixed size, so that no result depends on how rows were delivered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Real

CHUNK = 65_536
"""Rows are reduced in chunks of this size, so that a result never depends on how they were read."""
SINGLE_CHUNK = 1024
"""The chunk size for rows in single precision, whose sums within a chunk are in single precision too."""
SINGLE_RANGE = 1e-9, 1e15
"""Range of the largest absolute value of such rows; otherwise they are converted to double precision first."""


class Sums(NamedTuple):
    """Of z = (x, t) over the rows of a chunk."""

    n: Float[np.ndarray, "*batch"]
    mean: Float[np.ndarray, "*batch z"]
    scatter: Float[np.ndarray, "*batch z z"]
    """Σ (z − mean)(z − mean)ᵀ."""


def chunk_sums(x: Real[np.ndarray, "*batch n d"], t: Real[np.ndarray, "..."]) -> Iterator[Sums]:
    """The sums of each chunk; squares of single-precision rows are taken in single precision where they fit."""
    if x.dtype == np.float32 and x.ndim == 2 and _squares_fit(x):
        return _single(x, t)
    starts = range(0, x.shape[-2], CHUNK)
    return (_double(x[..., i : i + CHUNK, :], t[..., i : i + CHUNK]) for i in starts)


def _squares_fit(x: Float32[np.ndarray, "n d"]) -> bool:
    """Whether the squares of these rows are well within the range of single precision."""
    largest = float(max(x.max(), -x.min()))
    return SINGLE_RANGE[0] < largest < SINGLE_RANGE[1]


def _single(x: Float32[np.ndarray, "n d"], t: Real[np.ndarray, "n"]) -> Iterator[Sums]:
    """Squares in single precision, each chunk about its mean, which is as exact as the rows are."""
    origin = x[0].astype(np.float64)  # with sums about a row, coordinates that are equal in all rows stay exactly zero
    starts = range(0, len(x), SINGLE_CHUNK)
    return (_squared(x[i : i + SINGLE_CHUNK], t[i : i + SINGLE_CHUNK], origin) for i in starts)


def _squared(x: Float32[np.ndarray, "n d"], t: Real[np.ndarray, "n"], origin: Float[np.ndarray, "d"]) -> Sums:
    """Sums of a chunk; ``origin`` is a vector close to its rows, the same for all chunks.

    The mean and the products with t are summed in double precision, because they decide whether there is a drift.
    """
    n, mean_t = len(x), float(t.mean())
    at = t - mean_t
    double = x.astype(np.float64)
    double -= origin
    sums, with_t = np.stack([np.ones(n), at]) @ double
    mean = origin + sums / n
    shift = mean.astype(np.float32)
    z = x - shift
    scatter = np.empty((x.shape[1] + 1,) * 2)
    scatter[:-1, :-1] = z.T @ z
    off = mean - shift
    if (off**2 > 1e-9 / n * np.diagonal(scatter)[:-1]).any():
        scatter[:-1, :-1] -= n * off[:, None] * off
    scatter[:-1, -1] = scatter[-1, :-1] = with_t
    scatter[-1, -1] = at @ at
    return Sums(np.asarray(float(n)), np.append(mean, mean_t), scatter)


def _double(x: Real[np.ndarray, "*batch n d"], t: Real[np.ndarray, "..."]) -> Sums:
    n = x.shape[-2]
    z = np.empty((*x.shape[:-1], x.shape[-1] + 1))
    z[..., :-1], z[..., -1] = x, t
    mean = np.ones(n) @ z / max(n, 1)
    z -= mean[..., None, :]
    return Sums(np.full(z.shape[:-2], float(n)), mean, z.swapaxes(-1, -2) @ z)
