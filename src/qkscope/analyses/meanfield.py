"""The mean-field score of a head: its scores if every query and every key were its mean.

With the rotation undone, μ̃_q and μ̃_k are the mean query and key of each plane, and the score at distance Δ = i − j is

    predicted(Δ) = scaling · [Σ_m Re(μ̃_{q,m} conj(μ̃_{k,m}) e^{i s θ_m Δ}) + μ_q^rest · μ_k^rest]

where *rest* are the coordinates that are not rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from qkscope.core.moments import Moments
from qkscope.core.rope import HeadRotary


@dataclass(frozen=True)
class MeanField:
    """What the prediction needs to know about a head."""

    rotary: HeadRotary
    rest: float
    """Product of the means of the coordinates that are not rotated."""
    scaling: float

    def predicted(
        self, distance: Int[np.ndarray, "n"], query_position: Int[np.ndarray, "n"] | None = None
    ) -> Float[np.ndarray, "n"]:
        """The mean-field score at these distances; if queries have a temperature, for queries at these positions."""
        distances, inverse = np.unique(distance, return_inverse=True)
        rope, means = self.rotary.rope, self.rotary.mean_q * self.rotary.mean_k.conj()
        turn = np.exp(1j * rope.sign * distances[:, None] * rope.frequencies)
        curve = (self.scaling * ((turn @ means).real + self.rest))[inverse]
        if self.rotary.temperature is None or query_position is None:
            return curve
        return curve * self.rotary.temperature[query_position]


def mean_field(rotary: HeadRotary, q: Moments, k: Moments, scaling: float) -> MeanField:
    """The means of a head: of its planes with the rotation undone, and of the coordinates that are not rotated."""
    rest = rotary.rope.rest(q.d)
    return MeanField(rotary, float(q.mean_x[rest] @ k.mean_x[rest]), scaling)
