"""Lengths of queries and keys in each RoPE plane, summed over all tokens, on the layer's own device."""

from __future__ import annotations

import torch

from qkscope.capture.rope import LayerRope
from qkscope.capture.sums.gramsums import trusted
from qkscope.capture.sums.tokens import BatchTokens, Plan
from qkscope.core.headmoments import N_GROUPS

_PARTS = 16
"""A sum on a GPU is kept in so many parts, each written by one program."""


class PlaneSizes:
    """Σ |z_m| of the query heads and of the key heads by document group; a rotation does not change it."""

    def __init__(self, rope: LayerRope | None) -> None:
        self.rope = rope
        self.totals: tuple[torch.Tensor, torch.Tensor] | None = None
        """(H, 8, parts, planes) of queries and of keys, float64."""

    def add(
        self, q: torch.Tensor, k: torch.Tensor, tokens: BatchTokens, plan: Plan, factor: torch.Tensor | None
    ) -> None:
        """Add the vectors (B, H, T, d) of one attention call; queries are divided by their temperature (B, T)."""
        if self.rope is None:
            return
        if self.totals is None:
            self.totals = (self._zeros(q), self._zeros(k))
        for row, bounds in enumerate(tokens.counted(plan)):
            group = int(tokens.groups[row])
            for x, total, divisor in ((q, self.totals[0], factor), (k, self.totals[1], None)):
                _add_lengths(total[:, group], x[row], bounds, self.rope, None if divisor is None else divisor[row])

    def exact(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """The sums (H, 8, planes); None where there are no planes."""
        return (None, None) if self.totals is None else (self.totals[0].sum(2), self.totals[1].sum(2))

    def _zeros(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rope is not None
        shape = x.shape[1], N_GROUPS, _PARTS if x.is_cuda else 1, self.rope.planes
        return torch.zeros(shape, dtype=torch.float64, device=x.device)


def _add_lengths(
    total: torch.Tensor,
    x: torch.Tensor,
    bounds: tuple[int, int],
    rope: LayerRope,
    divisor: torch.Tensor | None = None,
) -> None:
    """Add to parts of a sum (H, parts, planes) the lengths in each plane of x (H, T, d) within bounds, each divided."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    if divisor is None and half and x.stride(-1) == 1 and trusted(x.device, x.dtype, x.shape[-1]):
        from qkscope.capture.sums import gramkernel

        gramkernel.add_lengths(total, x, bounds, rope.coordinates)
        return
    begin, end = bounds
    first, second = rope.coordinates
    sizes = torch.hypot(x[:, begin:end, first].float(), x[:, begin:end, second].float())
    total[:, 0] += (sizes if divisor is None else sizes / divisor[begin:end, None].abs()).sum(1)
