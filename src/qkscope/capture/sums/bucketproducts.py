"""Σ z zᵀ of vectors by position bucket, z = (x − shift, t − middle of the window, 1), from products in float32."""

from __future__ import annotations

from functools import lru_cache

import torch

from qkscope.capture.sums.tokens import BatchTokens, Plan


def bucket_products(x: torch.Tensor, shift: torch.Tensor, tokens: BatchTokens, plan: Plan) -> tuple[torch.Tensor, int]:
    """Z zᵀ summed over the tokens of each bucket (B, H, n, D, D), float64, and the first of the n buckets."""
    batch, heads, columns, d = x.shape
    first = tokens.first // plan.width
    n = -(-columns // plan.width)
    z = scratch((batch, heads, n * plan.width, d + 2), x.device)
    torch.sub(x.float(), shift[:, None], out=z[:, :, :columns, :d])
    position = torch.arange(columns, device=x.device)
    z[:, :, :columns, d] = (position % plan.width - (plan.width - 1) / 2).to(z.dtype)
    z[:, :, :columns, d + 1] = 1.0
    for row, (begin, end) in enumerate(tokens.counted(plan)):
        z[row, :, :begin] = 0.0
        z[row, :, end:] = 0.0
    flat = z.view(batch * heads * n, plan.width, d + 2)
    products = torch.bmm(flat.transpose(1, 2), flat).view(batch, heads, n, d + 2, d + 2).double()
    # Move the origin of t from the bucket's centre to the middle of the window, the same for all buckets.
    centre = (torch.arange(first, first + n, device=x.device) + 0.5) * plan.width - 0.5 - plan.window / 2
    products[..., d, :] += centre.double()[:, None] * products[..., d + 1, :]
    products[..., :, d] += centre.double()[:, None] * products[..., :, d + 1]
    return products, first


@lru_cache(maxsize=4)  # queries and keys
def scratch(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Memory that all layers use in turn; allocating it each time would take as long as the product."""
    return torch.empty(shape, device=device)
