"""Moments of a layer's queries with their rotation undone, of captures with ``--keep undone-cov``.

As in layersums.py: float32 products of shifted rows, added up in float64. In half precision on a GPU too, and there in
the stream of the forward pass: the memory of these products is shared with layers that are summed there.
"""

from __future__ import annotations

import torch

from qkscope.capture.rope import LayerRope
from qkscope.capture.sums.bucketproducts import bucket_products
from qkscope.capture.sums.tokens import BatchTokens, Plan


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
        products, _ = bucket_products(undone, self.shift, tokens, plan)
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
