"""Small GPU kernels: xxᵀ of each head and bucket without copying x, its addition to totals, and lengths in planes.

Each program of the first forms one tile for one head and bucket; each program of the second adds one stretch of entries
to the totals, bucket after bucket; each of the third sums the lengths of some tokens of one head. No two programs write
to the same address, so the order of additions never changes.
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
    product = tl.zeros((TILE, TILE), tl.float32)
    base = x_ptr + head * stride_h
    last = tl.minimum((bucket + 1) * width, end)
    for start in range(bucket * width, last, ROWS):
        row = start + tl.arange(0, ROWS)
        counts = (row >= begin) & (row < last)
        rows_ptr = base + row[:, None].to(tl.int64) * stride_t
        if D == TILE:
            left_rows = tl.load(rows_ptr + left[None, :], mask=counts[:, None], other=0.0)
            product = tl.dot(tl.trans(left_rows), left_rows, product)
        else:
            left_rows = tl.load(rows_ptr + left[None, :], mask=counts[:, None] & (left < D)[None, :], other=0.0)
            right_rows = tl.load(rows_ptr + right[None, :], mask=counts[:, None] & (right < D)[None, :], other=0.0)
            product = tl.dot(tl.trans(left_rows), right_rows, product)
    target_ptr = out_ptr + (bucket * heads + head) * D * D + left[:, None] * D + right[None, :]
    tl.store(target_ptr, product, mask=(left < D)[:, None] & (right < D)[None, :])


@jit
def _add(  # type: ignore[no-untyped-def]
    product_ptr, bucket_ptr, group_ptr, n, heads, first, buckets, groups, size,
    BY_BUCKET: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    head, entry = tl.program_id(1).to(tl.int64), tl.program_id(0) * STRETCH + tl.arange(0, STRETCH)
    inside = entry < size
    total = tl.zeros((STRETCH,), tl.float32)
    for bucket in range(n):
        product = tl.load(product_ptr + (bucket * heads + head) * size + entry, mask=inside, other=0.0)
        total += product
        if BY_BUCKET:
            target_ptr = bucket_ptr + (head * buckets + first + bucket) * size + entry
            tl.store(target_ptr, tl.load(target_ptr, mask=inside, other=0.0) + product, mask=inside)
    target_ptr = group_ptr + head * groups * size + entry
    tl.store(target_ptr, tl.load(target_ptr, mask=inside, other=0.0) + total, mask=inside)


@jit
def _lengths(  # type: ignore[no-untyped-def]
    x_ptr, stride_h, stride_t, out_ptr, begin, end, blocks, first, second, step,
    PLANES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    plane = tl.arange(0, WIDE)
    inside = plane < PLANES
    total = tl.zeros((WIDE,), tl.float32)
    for part in range(STEPS):
        row = (block * STEPS + part) * ROWS + tl.arange(0, ROWS)
        counts = ((row >= begin) & (row < end))[:, None] & inside[None, :]
        row_ptr = x_ptr + head * stride_h + row[:, None].to(tl.int64) * stride_t + plane[None, :] * step
        u = tl.load(row_ptr + first, mask=counts, other=0.0).to(tl.float32)
        v = tl.load(row_ptr + second, mask=counts, other=0.0).to(tl.float32)
        total += tl.sum(tl.sqrt(u * u + v * v), 0)
    tl.store(out_ptr + (head * blocks + block) * PLANES + plane, total, mask=inside)


def plane_lengths(
    x: torch.Tensor, bounds: tuple[int, int], first: int, second: int, step: int, planes: int
) -> torch.Tensor:
    """Σ √(u² + v²) of each plane (H, planes) over the vectors x (H, T, d) within bounds.

    Plane m has its coordinates at first + m·step and second + m·step.
    """
    heads, length, _ = x.shape
    rows, steps = 32, 4
    blocks = triton.cdiv(length, rows * steps)
    out = torch.empty(heads, blocks, planes, dtype=torch.float32, device=x.device)
    _lengths[(heads, blocks)](
        x, x.stride(0), x.stride(1), out, max(bounds[0], 0), min(bounds[1], length), blocks, first, second, step,
        PLANES=planes, WIDE=triton.next_power_of_2(planes), ROWS=rows, STEPS=steps, num_warps=4,
    )  # fmt: skip
    return out.sum(1)


def add_squares(
    x: torch.Tensor,
    bounds: tuple[int, int],
    width: int,
    first: int,
    by_group: torch.Tensor,
    by_bucket: torch.Tensor | None,
) -> None:
    """Add Σ xxᵀ of vectors x (H, T, d) within bounds to the totals of a group (H, d, d) and of buckets (H, B, d, d).

    The first token of x is the first of bucket ``first``; ``by_group`` is a view of one group of (H, groups, d, d).
    """
    heads, length, d = x.shape
    n, tile = triton.cdiv(length, width), 128 if d > 64 else 64
    products = torch.empty(n, heads, d, d, dtype=torch.float32, device=x.device)
    begin, end = max(bounds[0], 0), min(bounds[1], length)
    grid = (heads, n, triton.cdiv(d, tile) ** 2)
    # One stage: with two, a buffer was overwritten while it was still being read.
    _squares[grid](
        x, x.stride(0), x.stride(1), products, begin, end, width, heads,
        D=d, TILE=tile, ROWS=_ROWS, num_warps=4, num_stages=1,
    )  # fmt: skip
    buckets, groups = 0 if by_bucket is None else by_bucket.shape[1], by_group.stride(0) // (d * d)
    _add[(triton.cdiv(d * d, STRETCH), heads)](
        products, by_group if by_bucket is None else by_bucket, by_group, n, heads, first, buckets, groups, d * d,
        BY_BUCKET=by_bucket is not None, STRETCH=STRETCH, num_warps=2,
    )  # fmt: skip
