"""How a head's mean-field score falls with distance, in a unit that does not depend on the window.

The curve of meanfield.py is close to logarithmic, so its slope against log₂ Δ, in logits per doubling of the distance,
is about the same whatever window is looked at. No slope against Δ itself is: a line fitted to a logarithmic curve
flattens as the window grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from qkscope.core.linalg import ratio

PER_OCTAVE = 16
"""Distances per doubling at which the curve is taken."""


@dataclass(frozen=True)
class Recency:
    """The line through curves over log₂ Δ; one value per curve."""

    decay: Float[np.ndarray, "curves"]
    """− slope: positive if nearer keys score higher."""
    decay_r2: Float[np.ndarray, "curves"]
    curve_range: Float[np.ndarray, "curves"]
    """Largest minus smallest value."""


def distances(end: int) -> Float[np.ndarray, "n"]:
    """Distances from 1 to ``end``, evenly spaced in log₂.

    >>> distances(4)[[0, 16, 32]].tolist()
    [1.0, 2.0, 4.0]
    """
    return 2.0 ** (np.arange(int(np.floor(PER_OCTAVE * np.log2(max(end, 2)) + 1e-9)) + 1) / PER_OCTAVE)


def recency(curves: Float[np.ndarray, "curves n"], distance: Float[np.ndarray, "n"]) -> Recency:
    """Fit a line to each curve over log₂ of the distance."""
    x = np.log2(distance)
    x = x - x.mean()
    y = curves - curves.mean(-1, keepdims=True)
    slope = y @ x / (x @ x)
    r2 = ratio(slope**2 * (x @ x), (y**2).sum(-1))
    return Recency(-slope, r2, np.ptp(curves, -1))
