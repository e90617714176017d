"""Count, mean and scatter of rows in chunks of fixed size, so that no result depends on how the rows were read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Real

CHUNK = 65_536
"""Rows per chunk."""
SINGLE_CHUNK = 1024
"""Rows per chunk in single precision, where the sums within a chunk are in single precision too."""
SINGLE_RANGE = 1e-9, 1e15
"""Range of the largest absolute value for single-precision sums; other rows are converted to double precision."""


class Sums(NamedTuple):
    """Count, mean and scatter of z = (x, t) over the rows of a chunk."""

    n: Float[np.ndarray, "*batch"]
    mean: Float[np.ndarray, "*batch z"]
    scatter: Float[np.ndarray, "*batch z z"]
    """Σ (z − mean)(z − mean)ᵀ."""


def chunk_sums(x: Real[np.ndarray, "*batch n d"], t: Real[np.ndarray, "..."]) -> Iterator[Sums]:
    """The sums of each chunk; single-precision rows are squared in single precision if the squares fit."""
    if x.dtype == np.float32 and x.ndim == 2 and _squares_fit(x):
        return _single(x, t)
    starts = range(0, x.shape[-2], CHUNK)
    return (_double(x[..., i : i + CHUNK, :], t[..., i : i + CHUNK]) for i in starts)


def _squares_fit(x: Float32[np.ndarray, "n d"]) -> bool:
    """True if the squares of these rows are well within the range of single precision."""
    largest = float(max(x.max(), -x.min()))
    return SINGLE_RANGE[0] < largest < SINGLE_RANGE[1]


def _single(x: Float32[np.ndarray, "n d"], t: Real[np.ndarray, "n"]) -> Iterator[Sums]:
    """Sums with squares in single precision, each chunk centred on its mean: as exact as the rows themselves."""
    origin = x[0].astype(np.float64)  # relative to a row, coordinates that are equal in all rows are exactly zero
    starts = range(0, len(x), SINGLE_CHUNK)
    return (_squared(x[i : i + SINGLE_CHUNK], t[i : i + SINGLE_CHUNK], origin) for i in starts)


def _squared(x: Float32[np.ndarray, "n d"], t: Real[np.ndarray, "n"], origin: Float[np.ndarray, "d"]) -> Sums:
    """Sums of a chunk; ``origin`` is a vector close to its rows, the same for all chunks.

    The mean and the products with t are summed in double precision, because the drift depends on them.
    """
    n, mean_t = len(x), float(t.mean())
    centred_t = t - mean_t
    double = x.astype(np.float64)
    double -= origin
    sums, with_t = np.stack([np.ones(n), centred_t]) @ double
    mean = origin + sums / n
    shift = mean.astype(np.float32)
    z = x - shift
    scatter = np.empty((x.shape[1] + 1,) * 2)
    scatter[:-1, :-1] = z.T @ z
    rounding = mean - shift
    if (rounding**2 > 1e-9 / n * np.diagonal(scatter)[:-1]).any():
        scatter[:-1, :-1] -= n * rounding[:, None] * rounding
    scatter[:-1, -1] = scatter[-1, :-1] = with_t
    scatter[-1, -1] = centred_t @ centred_t
    return Sums(np.asarray(float(n)), np.append(mean, mean_t), scatter)


def _double(x: Real[np.ndarray, "*batch n d"], t: Real[np.ndarray, "..."]) -> Sums:
    n = x.shape[-2]
    z = np.empty((*x.shape[:-1], x.shape[-1] + 1))
    z[..., :-1], z[..., -1] = x, t
    mean = np.ones(n) @ z / max(n, 1)
    z -= mean[..., None, :]
    return Sums(np.full(z.shape[:-2], float(n)), mean, z.swapaxes(-1, -2) @ z)
