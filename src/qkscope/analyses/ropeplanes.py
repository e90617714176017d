"""RoPE planes: their variance, how firmly each is locked to position, and its part of the bias.

For plane m with frequency θ_m and z_m its coordinates as a complex number: lock = |E[z̃_m]| / E|z_m| with the rotation
undone: 1 if every vector is the same vector rotated by its position, 0 if phases are uniform. bias_part is the plane's
part of bias_full = μ_Q · β_K; the parts add up to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from qkscope.core.headmoments import ALL_AND_WITHOUT
from qkscope.core.linalg import ratio
from qkscope.core.moments import Moments
from qkscope.core.rope import HeadRotary, UndoneSums
from qkscope.core.rows import Pair, Rows


@dataclass(frozen=True)
class RopePlanes:
    """One value per plane; coordinates that are not rotated, if any, are one more plane with frequency 0."""

    theta: Float[np.ndarray, "planes"]
    var_share: Float[np.ndarray, "planes"]
    """Share of the pooled variance of queries and keys."""
    lock_q: Float[np.ndarray, "planes"]
    lock_k: Float[np.ndarray, "planes"]
    cycles: Float[np.ndarray, "planes"]
    """Turns over the window."""
    bias_part: Float[np.ndarray, "planes"]
    """Part of bias_full, score per token; signed."""
    bias_share: Float[np.ndarray, "planes"]
    """|bias_part| over the sum of all |bias_part|."""


def rope_planes(rotary: HeadRotary, q: Moments, k: Moments, pair: Pair, window: int) -> RopePlanes:
    """Measure every plane of a head: moments for variance and bias, vectors for the mean length."""
    rope = rotary.rope
    planes = [*rope.pairs, *([unrotated] if len(unrotated := rope.rest(q.d)) else [])]
    theta = np.concatenate([rope.frequencies, np.zeros(len(planes) - rope.planes)])
    variance = np.diagonal(q.merge(k).cov_x)
    product = q.mean_x * ratio(k.cov_xt, k.var_t)
    bias_part = np.array([product[plane].sum() for plane in planes])
    return RopePlanes(
        theta=theta,
        var_share=ratio(np.array([variance[plane].sum() for plane in planes]), variance.sum()),
        lock_q=_lock(rotary.q, _without_temperature(pair.q, rotary), planes, q),
        lock_k=_lock(rotary.k, pair.k.x, planes, k),
        cycles=theta * window / (2 * np.pi),
        bias_part=bias_part,
        bias_share=ratio(np.abs(bias_part), np.abs(bias_part).sum()),
    )


def _without_temperature(rows: Rows, rotary: HeadRotary) -> Float[np.ndarray, "n d"]:
    """The vectors divided by the temperature of their positions, as the means are."""
    return rows.x if rotary.temperature is None else rows.x / rotary.temperature[rows.position][:, None]


def _lock(
    undone: UndoneSums, x: Float[np.ndarray, "n d"], planes: list[np.ndarray], m: Moments
) -> Float[np.ndarray, "planes"]:
    """The lock of each plane, from the lengths of all vectors if they were summed, else from those of the sample."""
    summed = np.zeros(0) if undone.size is None else undone.size.sum(0) / max(float(undone.n.sum()), 1.0)
    sampled = [np.linalg.norm(x[:, plane], axis=-1).mean() for plane in planes[len(summed) :]]
    unrotated = [np.linalg.norm(m.mean_x[plane]) for plane in planes[len(undone.mean) :]]
    return np.minimum(ratio(np.concatenate([np.abs(undone.mean), unrotated]), np.r_[summed, sampled]), 1.0)


def lock(undone: UndoneSums, energy: Float[np.ndarray, "8 planes"]) -> Float[np.ndarray, "sets"] | None:
    """Lock of a head to the rotation: the mean over its planes, weighted by their energy Σ |z_m|².

    From all documents, then with each group left out; None where lengths were not summed.
    """
    if undone.size is None:
        return None
    total, size, weight = (ALL_AND_WITHOUT @ sums for sums in (undone.total, undone.size, energy))
    by_plane = np.minimum(ratio(np.abs(total), size), 1.0)
    total_weight = weight.sum(-1)
    return np.where(total_weight > 0, ratio((by_plane * weight).sum(-1), total_weight), np.nan)
