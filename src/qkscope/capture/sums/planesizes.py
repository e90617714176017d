"""Lengths of queries and keys in each RoPE plane, summed over all tokens, on the layer's own device."""

from __future__ import annotations

import numpy as np
import torch

from qkscope.capture.rope import LayerRope
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
        for row, (begin, end) in enumerate(tokens.counted(plan)):
            group = int(tokens.groups[row])
            for x, total, divisor in ((q, self.totals[0], factor), (k, self.totals[1], None)):
                sizes = self._sizes(x[row, :, begin:end])
                if divisor is not None:
                    sizes = sizes / divisor[row, begin:end, None].abs()
                total[:, group] += sizes.sum(1).double()

    def host(self) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """The sums on the host; None where there are no planes."""
        return (None, None) if self.totals is None else (self.totals[0].cpu().numpy(), self.totals[1].cpu().numpy())

    def _sizes(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rope is not None
        first, second = self.rope.coordinates
        return torch.hypot(x[..., first].float(), x[..., second].float())

    def _zeros(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rope is not None
        return torch.zeros(x.shape[1], N_GROUPS, self.rope.planes, dtype=torch.float64, device=x.device)
