"""The mean-field score of a head: its scores if every query and every key were its mean.

With the rotation undone, μ̃_q and μ̃_k are the mean query and key of each plane, and the score at distance Δ = i − j is

    predicted(Δ) = scaling · [Σ_m Re(μ̃_{q,m} conj(μ̃_{k,m}) e^{i s θ_m Δ}) + μ_q^rest · μ_k^rest]

where *rest* are the coordinates that are not rotated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Complex, Float, Int, Real

from qkscope.core.headmoments import ALL_AND_WITHOUT
from qkscope.core.moments import Moments
from qkscope.core.rope import HeadRotary, Rope


@dataclass(frozen=True)
class MeanField:
    """The means of a head that predict its scores: from all documents, then with each document group left out."""

    rope: Rope
    planes: Complex[np.ndarray, "sets planes"]
    """μ̃_q conj(μ̃_k) of each plane."""
    rest: Float[np.ndarray, "sets"]
    """Product of the means of the coordinates that are not rotated."""
    scaling: float
    temperature: Float[np.ndarray, "positions"] | None = None
    """Factor on the queries at each position, if the layer applies one."""

    def curves(self, distance: Real[np.ndarray, "n"]) -> Float[np.ndarray, "sets n"]:
        """The mean-field score at these distances, without temperature."""
        turn = np.exp(1j * self.rope.sign * distance[:, None] * self.rope.frequencies)
        return self.scaling * ((turn @ self.planes.T).real.T + self.rest[:, None])

    def dense(self, n: int) -> Float[np.ndarray, "sets n"]:
        """The mean-field score at every distance 0 … n − 1: computed in blocks of √n, each a rotation of the first."""
        size = int(np.ceil(np.sqrt(max(n, 1))))
        step = np.exp(1j * self.rope.sign * np.arange(size)[:, None] * self.rope.frequencies)
        block = np.exp(1j * self.rope.sign * size * np.arange(size)[:, None] * self.rope.frequencies)
        starts = (self.planes[:, None] * block).reshape(-1, self.rope.planes)
        real = np.hstack([starts.real, -starts.imag]) @ np.hstack([step.real, step.imag]).T
        return self.scaling * (real.reshape(len(self.planes), -1)[:, :n] + self.rest[:, None])

    @property
    def mirrored(self) -> MeanField:
        """The mean-field score of later keys: its value at Δ is this one's at −Δ."""
        return replace(self, planes=self.planes.conj())

    def factors(self, query_position: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """The temperature of queries at these positions; 1 if the layer applies none."""
        return np.ones(len(query_position)) if self.temperature is None else self.temperature[query_position]


def mean_field(rotary: HeadRotary, q: Moments, k: Moments, scaling: float) -> MeanField:
    """The means of a head, whose moments are by document group: of its planes, and of the unrotated coordinates."""
    unrotated = rotary.rope.rest(q.d)
    means_q, means_k = (leave_out_means(m.mean_x[:, unrotated] * m.n[:, None], m.n) for m in (q, k))
    undone_q, undone_k = (leave_out_means(sums.total, sums.n) for sums in (rotary.q, rotary.k))
    return MeanField(rotary.rope, undone_q * undone_k.conj(), (means_q * means_k).sum(-1), scaling, rotary.temperature)


def leave_out_means(total: np.ndarray, n: Float[np.ndarray, "8"]) -> np.ndarray:
    """Means over all rows, and with each document group left out; 0 where there are no rows."""
    return (ALL_AND_WITHOUT @ total) / np.maximum(ALL_AND_WITHOUT @ n, 1.0)[:, None]
