"""Lengths of queries and keys in each RoPE plane, summed over all tokens, on the layer's own device."""

from __future__ import annotations

import numpy as np
import torch

from qkscope.capture.rope import LayerRope
from qkscope.capture.sums.gramsums import trusted
from qkscope.capture.sums.tokens import BatchTokens, Plan
from qkscope.core.headmoments import N_GROUPS


class PlaneSizes:
    """Σ |z_m| of the query heads and of the key heads by document group; a rotation does not change it."""

    def __init__(self, rope: LayerRope | None) -> None:
        self.rope = rope
        self.totals: tuple[torch.Tensor, torch.Tensor] | None = None
        """(H, 8, planes) of queries and of keys, float64."""

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
                of_row = None if divisor is None else divisor[row]
                total[:, group] += plane_sums(x[row], bounds, self.rope, of_row).double()

    def host(self) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """The sums on the host; None where there are no planes."""
        return (None, None) if self.totals is None else (self.totals[0].cpu().numpy(), self.totals[1].cpu().numpy())

    def _zeros(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rope is not None
        return torch.zeros(x.shape[1], N_GROUPS, self.rope.planes, dtype=torch.float64, device=x.device)


def plane_sums(
    x: torch.Tensor, bounds: tuple[int, int], rope: LayerRope, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    """Σ of the lengths in each plane (H, planes) over the vectors x (H, T, d) within bounds, each over its divisor."""
    first, second = rope.coordinates
    half = x.dtype in (torch.bfloat16, torch.float16)
    if divisor is None and half and x.stride(-1) == 1 and trusted(x.device, x.dtype, x.shape[-1]):
        from qkscope.capture.sums import gramkernel

        return gramkernel.plane_lengths(x, bounds, first.start, second.start, first.step or 1, rope.planes)
    begin, end = bounds
    sizes = torch.hypot(x[:, begin:end, first].float(), x[:, begin:end, second].float())
    return (sizes if divisor is None else sizes / divisor[begin:end, None].abs()).sum(1)
