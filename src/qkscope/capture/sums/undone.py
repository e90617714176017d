"""Sums with the rotation undone: the angles of a pass, as a table and as sums, and moments of undone queries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from qkscope.capture.rope import LayerRope
from qkscope.capture.sums.tokens import BatchTokens, Plan, bucket_products, on_device


@dataclass
class UndoneRotation:
    """Unit angles (T, planes), float64, at the positions of a forward pass, shared by all layers with one embedding."""

    cos: torch.Tensor
    sin: torch.Tensor
    _table: torch.Tensor | None = None
    _sums: torch.Tensor | None = None

    def table(self, dtype: torch.dtype) -> torch.Tensor:
        """Cosines and then sines (T, 2·planes), in the precision of the vectors."""
        if self._table is None or self._table.dtype != dtype:
            self._table = torch.cat([self.cos, self.sin], -1).to(dtype)
        return self._table

    def sums(self, tokens: BatchTokens, plan: Plan, dtype: torch.dtype) -> torch.Tensor:
        """Sums over the tokens of each row that count, by bucket (B, buckets, planes, 4), in float64.

        The four are cosines, sines, and the rounding errors of the table for each.
        """
        if self._sums is None:
            exact = torch.stack([self.cos, self.sin], -1)
            coarse = torch.stack(self.table(dtype).double().chunk(2, -1), -1)
            values = torch.cat([exact, exact - coarse], -1)
            edges = np.arange(plan.buckets + 1) * plan.width - tokens.first
            columns = np.stack([np.clip(edges, begin, end) for begin, end in tokens.counted(plan)])
            running = torch.nn.functional.pad(values.cumsum(0), (0, 0, 0, 0, 1, 0))
            index = on_device(np.clip(columns, 0, len(values)), values.device)
            self._sums = running[index].diff(dim=1)
        return self._sums


class UndoneQueries:
    """Σ z zᵀ over all tokens, z = (x̃ − shift, t − middle of the window, 1), x̃ the query with its rotation undone."""

    def __init__(self, rope: LayerRope) -> None:
        self.rope = rope
        self.shift: torch.Tensor | None = None
        """Mean of the first x̃ (Hq, d), which keeps the products small."""
        self.total: torch.Tensor | None = None
        """(Hq, d + 2, d + 2), float64."""

    def add(
        self,
        q: torch.Tensor,
        tokens: BatchTokens,
        plan: Plan,
        angles: tuple[torch.Tensor, torch.Tensor],
        factor: torch.Tensor | None,
    ) -> None:
        """Add the queries (B, Hq, T, d) of one attention call; they are divided by their temperature (B, T)."""
        undone = _undone(q, self.rope, angles, factor)
        if self.total is None or self.shift is None:
            self.shift = _mean(undone, tokens, plan)
            size = q.shape[-1] + 2
            self.total = torch.zeros(q.shape[1], size, size, dtype=torch.float64, device=q.device)
        products, _, _ = bucket_products(undone, self.shift, tokens, plan)
        self.total += products.sum((0, 2))


def _undone(
    q: torch.Tensor, rope: LayerRope, angles: tuple[torch.Tensor, torch.Tensor], factor: torch.Tensor | None
) -> torch.Tensor:
    """Queries with their rotation undone, in float32; the encoding's own factor stays in."""
    first, second = rope.coordinates
    cos, sin = angles[0] / rope.attention_factor, rope.sign * angles[1] / rope.attention_factor
    undone = q.to(torch.float32, copy=True)
    u, v = q[..., first].float(), q[..., second].float()
    undone[..., first], undone[..., second] = u * cos + v * sin, v * cos - u * sin
    return undone if factor is None else undone / factor[:, None, :, None]


def _mean(x: torch.Tensor, tokens: BatchTokens, plan: Plan) -> torch.Tensor:
    """Mean of the vectors that count (H, d); the others may not be finite."""
    rows = [x[row, :, begin:end] for row, (begin, end) in enumerate(tokens.counted(plan))]
    return torch.cat(rows, 1).sum(1) / max(sum(part.shape[1] for part in rows), 1)
