"""Two small GPU kernels: xxᵀ of each head and bucket from the vectors where they lie, and the adding of it to totals.

Each program of the first forms one tile for one head and bucket; each of the second adds one stretch of them to the
totals, bucket after bucket. No two programs write to one place, so the order of additions never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable

    jit: Callable[[Callable[..., Any]], Any]
else:
    jit = triton.jit

_ROWS = 128
STRETCH = 256


@jit
def _squares(  # type: ignore[no-untyped-def]
    x_ptr, stride_h, stride_t, out_ptr, begin, end, width, heads,
    D: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, bucket, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    tiles: tl.constexpr = (D + TILE - 1) // TILE
    left = (tile // tiles) * TILE + tl.arange(0, TILE)
    right = (tile % tiles) * TILE + tl.arange(0, TILE)
    found = tl.zeros((TILE, TILE), tl.float32)
    base = x_ptr + head * stride_h
    last = tl.minimum((bucket + 1) * width, end)
    for start in range(bucket * width, last, ROWS):
        row = start + tl.arange(0, ROWS)
        counts = (row >= begin) & (row < last)
        at = base + row[:, None].to(tl.int64) * stride_t
        if D == TILE:
            some = tl.load(at + left[None, :], mask=counts[:, None], other=0.0)
            found = tl.dot(tl.trans(some), some, found)
        else:
            some = tl.load(at + left[None, :], mask=counts[:, None] & (left < D)[None, :], other=0.0)
            other = tl.load(at + right[None, :], mask=counts[:, None] & (right < D)[None, :], other=0.0)
            found = tl.dot(tl.trans(some), other, found)
    to = out_ptr + (bucket * heads + head) * D * D + left[:, None] * D + right[None, :]
    tl.store(to, found, mask=(left < D)[:, None] & (right < D)[None, :])


@jit
def _add(  # type: ignore[no-untyped-def]
    found_ptr, bucket_ptr, group_ptr, n, heads, first, buckets, groups, size,
    BY_BUCKET: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    head, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * STRETCH + tl.arange(0, STRETCH)
    inside = at < size
    total = tl.zeros((STRETCH,), tl.float32)
    for bucket in range(n):
        found = tl.load(found_ptr + (bucket * heads + head) * size + at, mask=inside, other=0.0)
        total += found
        if BY_BUCKET:
            to = bucket_ptr + (head * buckets + first + bucket) * size + at
            tl.store(to, tl.load(to, mask=inside, other=0.0) + found, mask=inside)
    to = group_ptr + head * groups * size + at
    tl.store(to, tl.load(to, mask=inside, other=0.0) + total, mask=inside)


def add_squares(
    x: torch.Tensor,
    bounds: tuple[int, int],
    width: int,
    first: int,
    by_group: torch.Tensor,
    by_bucket: torch.Tensor | None,
) -> None:
    """Add Σ xxᵀ of vectors x (H, T, d) within bounds to one group's totals (H, d, d) and those of buckets (H, B, d, d).

    The first column is where bucket ``first`` begins; ``by_group`` is one group of (H, groups, d, d).
    """
    heads, length, d = x.shape
    n, tile = triton.cdiv(length, width), 128 if d > 64 else 64
    found = torch.empty(n, heads, d, d, dtype=torch.float32, device=x.device)
    begin, end = max(bounds[0], 0), min(bounds[1], length)
    grid = (heads, n, triton.cdiv(d, tile) ** 2)
    # One stage: with two, a buffer was seen to be overwritten while it was still read.
    _squares[grid](
        x, x.stride(0), x.stride(1), found, begin, end, width, heads,
        D=d, TILE=tile, ROWS=_ROWS, num_warps=4, num_stages=1,
    )  # fmt: skip
    buckets, groups = 0 if by_bucket is None else by_bucket.shape[1], by_group.stride(0) // (d * d)
    _add[(triton.cdiv(d * d, STRETCH), heads)](
        found, by_group if by_bucket is None else by_bucket, by_group, n, heads, first, buckets, groups, d * d,
        BY_BUCKET=by_bucket is not None, STRETCH=STRETCH, num_warps=2,
    )  # fmt: skip
