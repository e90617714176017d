"""The position-locked split: how much of a head's vectors position alone determines.

With the rotation undone, x_t = R_t(μ̃ + δ_t): R_t μ̃ is the part of x that position alone determines (any function of
position that RoPE can carry), δ is content. The share is cross-fitted over document groups g, so that noise counts
against it:

    position_share = 1 − Σ_g Σ_{t∈g} ‖x_t − R_t μ̃_{−g}‖² / Σ_g Σ_{t∈g} ‖x_t − μ_{−g}‖²

where −g means that the mean is over all other groups. Both sums follow from sums by group alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Complex, Float

from qkscope.core.headmoments import ALL_AND_WITHOUT, N_GROUPS
from qkscope.core.moments import Moments
from qkscope.core.rope import Rope, UndoneSums
from qkscope.core.rows import Rows


@dataclass(frozen=True)
class LockedSums:
    """Sums of one class of vectors by document group."""

    n: Float[np.ndarray, "8"]
    energy: Float[np.ndarray, "8 d"]
    """Σ x²."""
    total: Float[np.ndarray, "8 d"]
    """Σ x."""
    undone: Complex[np.ndarray, "8 planes"]
    """Σ of the planes with their rotation undone; each times its temperature, if there is one."""
    weight: Float[np.ndarray, "8"]
    """Number of rows, or Σ temperature²."""

    @classmethod
    def of_moments(cls, moments: Moments, undone: UndoneSums) -> LockedSums:
        """Take the sums from moments by document group."""
        mean, n = moments.mean_x, moments.n
        energy = moments.diagonal[..., :-1] + n[:, None] * mean**2
        return cls(n, energy, n[:, None] * mean, undone.total, undone.n)

    @classmethod
    def of_rows(cls, rows: Rows, rope: Rope, temperature: Float[np.ndarray, "positions"], n_all: float) -> LockedSums:
        """Estimate the sums of ``n_all`` vectors from a sample, where positions have a temperature."""
        factor, multiplier = temperature[rows.position], n_all / max(len(rows), 1)
        undone = rope.unrotated(rows.x, rows.position) * factor[:, None]
        member = (rows.example_id % N_GROUPS == np.arange(N_GROUPS)[:, None]).astype(float)
        sums = (member.sum(1), member @ rows.x**2, member @ rows.x, member @ undone, member @ factor**2)
        return cls(*(multiplier * total for total in sums))


@dataclass(frozen=True)
class LockedSplit:
    """Squared residuals of one class without its position, by plane; the last is the coordinates without rotary.

    First index: all document groups, then each one left out; NaN with fewer than two groups.
    """

    content: Float[np.ndarray, "sets planes"]
    """Σ ‖x − R μ̃‖²."""
    total: Float[np.ndarray, "sets planes"]
    """Σ ‖x − μ‖²."""

    @property
    def by_plane(self) -> Float[np.ndarray, "planes"]:
        """The share of position in each plane; NaN where nothing varies, or with fewer than two groups."""
        varies = self.total[0] > 0
        return np.where(varies, 1.0 - self.content[0] / np.where(varies, self.total[0], 1.0), np.nan)


def locked_split(sums: LockedSums, rope: Rope) -> LockedSplit:
    """The split of one class of vectors."""
    plain = _residual(sums.energy, sums.total, sums.n, sums.n)
    energy = sums.energy[:, rope.pairs].sum(-1)
    rotated = _residual(energy, sums.undone, sums.n, sums.weight)
    unrotated = plain[:, rope.rest(sums.energy.shape[-1])]
    total = np.concatenate([plain[:, rope.pairs].sum(-1), unrotated.sum(-1, keepdims=True)], -1)
    return LockedSplit(np.concatenate([rotated, unrotated.sum(-1, keepdims=True)], -1), total)


def shares(*classes: LockedSplit) -> Float[np.ndarray, "sets"]:
    """The share of position in these classes together."""
    return 1.0 - sum(c.content.sum(-1) for c in classes) / sum(c.total.sum(-1) for c in classes)


def _residual(
    energy: Float[np.ndarray, "8 c"],
    total: Float[np.ndarray, "8 c"] | Complex[np.ndarray, "8 c"],
    n: Float[np.ndarray, "8"],
    weight: Float[np.ndarray, "8"],
) -> Float[np.ndarray, "sets c"]:
    """Σ_g Σ_{t∈g} |x_t − m_{−g}|² for every set of groups; NaN where a set has fewer than two groups with rows."""
    other_total, other_weight = (ALL_AND_WITHOUT @ total)[:, None] - total, (ALL_AND_WITHOUT @ weight)[:, None] - weight
    mean = np.where(
        other_weight[..., None] > 0, other_total / np.where(other_weight > 0, other_weight, 1.0)[..., None], 0.0
    )
    product = (total * mean.conj()).real
    residuals = energy - 2 * product + weight[:, None] * np.abs(mean) ** 2
    enough = ((ALL_AND_WITHOUT * n) > 0).sum(-1) > 1
    return np.where(enough[:, None], np.einsum("sg,sgc->sc", ALL_AND_WITHOUT * (n > 0), residuals), np.nan)
