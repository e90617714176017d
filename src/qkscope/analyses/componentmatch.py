"""Following a direction over checkpoints: component 0 of one checkpoint need not be component 0 of the next.

Components of consecutive checkpoints are paired so that the sum of their |cos| is largest. Where eigenvalues nearly
coincide, a component can rotate freely among its neighbours, so the reported angle is to the span of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from qkscope.analyses.components import DEGENERATE_GAP


@dataclass(frozen=True)
class Match:
    """For each component of one checkpoint, its successor among the components of the next; −1 where there is none."""

    pc: Int[np.ndarray, "c"]
    cos: Float[np.ndarray, "c"]
    """|cos| of the two axes."""
    angle: Float[np.ndarray, "c"]
    """Degrees between the axis and the span of the components that cannot be distinguished from its successor."""


def match(
    before: Float[np.ndarray, "c d"], after: Float[np.ndarray, "e d"], share_after: Float[np.ndarray, "e"]
) -> Match:
    """Pair the axes of one checkpoint with those of the next."""
    cos = np.abs(before @ after.T)
    rows, columns = linear_sum_assignment(cos, maximize=True)
    pc = np.full(len(before), -1)
    pc[rows] = columns
    blocks = degenerate_blocks(share_after)
    matched_cos, angle = np.zeros(len(before)), np.full(len(before), 90.0)
    for i in rows.tolist():
        matched_cos[i] = cos[i, pc[i]]
        within = float(np.linalg.norm(cos[i, blocks == blocks[pc[i]]]))
        angle[i] = np.degrees(np.arccos(min(within, 1.0)))
    return Match(pc, matched_cos, angle)


def degenerate_blocks(share: Float[np.ndarray, "c"]) -> Int[np.ndarray, "c"]:
    """A number for each component; neighbours whose variances nearly coincide have the same one.

    >>> degenerate_blocks(np.array([5.0, 2.0, 1.99, 1.0])).tolist()
    [0, 1, 1, 2]
    """
    gap = (share[:-1] - share[1:]) / np.maximum(share[:-1], 1e-300)
    return np.concatenate([[0], np.cumsum(gap >= DEGENERATE_GAP)]).astype(np.int64)


def follow(axes: list[Float[np.ndarray, "_ d"]], shares: list[Float[np.ndarray, "_"]]) -> list[Match]:
    """Each component of the first checkpoint followed through all of them; the first match is with itself.

    ``cos`` and ``angle`` are from one checkpoint to the next.
    """
    n = len(axes[0])
    steps = [Match(np.arange(n), np.ones(n), np.zeros(n))]
    for i in range(1, len(axes)):
        step = match(axes[i - 1], axes[i], shares[i])
        at = steps[-1].pc
        lost = at < 0
        steps.append(
            Match(
                np.where(lost, -1, step.pc[at]), np.where(lost, 0.0, step.cos[at]), np.where(lost, 90.0, step.angle[at])
            )
        )
    return steps
