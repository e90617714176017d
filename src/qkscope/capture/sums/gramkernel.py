"""Small GPU kernels: xxᵀ of each head and bucket without copying x, its addition to totals, lengths, and ranges.

A program of the first computes one tile for one head and bucket; of the second, adds one range of entries to the
totals, bucket after bucket; of the third, adds the lengths of some tokens of one head to a part of their sum; of the
last, sums the ranges of one column of one head. No two programs write to the same address, so the order of additions
never changes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable

    jit: Callable[[], Callable[[Callable[..., Any]], Any]]
else:
    # Sizes that differ from call to call: without this, a kernel would be compiled for every kind of number.
    sizes = ("begin", "end", "heads", "n", "first", "buckets", "groups", "stretch", "columns", "stride_total")
    jit = partial(triton.jit, do_not_specialize=sizes)

_ROWS = 128
STRETCH = 256


@jit()
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


@jit()
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


@jit()
def _lengths(  # type: ignore[no-untyped-def]
    x_ptr, stride_h, stride_t, total_ptr, stride_total, begin, end, stretch, first, second, step,
    PLANES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    plane = tl.arange(0, WIDE)
    inside = plane < PLANES
    sizes = tl.zeros((ROWS, WIDE), tl.float32)
    last = tl.minimum(begin + (part + 1) * stretch, end)
    for start in range(begin + part * stretch, last, ROWS):
        row = start + tl.arange(0, ROWS)
        counts = (row < last)[:, None] & inside[None, :]
        row_ptr = x_ptr + head * stride_h + row[:, None].to(tl.int64) * stride_t + plane[None, :] * step
        u = tl.load(row_ptr + first, mask=counts, other=0.0).to(tl.float32)
        v = tl.load(row_ptr + second, mask=counts, other=0.0).to(tl.float32)
        sizes += tl.sqrt(u * u + v * v)
    target_ptr = total_ptr + head * stride_total + part * PLANES + plane
    total = tl.load(target_ptr, mask=inside, other=0.0) + tl.sum(sizes, 0).to(tl.float64)
    tl.store(target_ptr, total, mask=inside)


def add_lengths(
    total: torch.Tensor, x: torch.Tensor, bounds: tuple[int, int], coordinates: tuple[slice, slice]
) -> None:
    """Add √(u² + v²) of each plane, of the vectors x (H, T, d) within bounds, to parts of a sum (H, parts, planes).

    The coordinates of all planes are two slices; the lengths are the sum of the parts.
    """
    begin, end = max(bounds[0], 0), min(bounds[1], x.shape[1])
    parts, planes = total.shape[1:]
    first, second = coordinates
    _lengths[(len(x), parts)](
        x, x.stride(0), x.stride(1), total, total.stride(0), begin, end, triton.cdiv(max(end - begin, 0), parts),
        first.start, second.start, first.step or 1,
        PLANES=planes, WIDE=triton.next_power_of_2(planes), ROWS=128, num_warps=8,
    )  # fmt: skip


@jit()
def _ranges(  # type: ignore[no-untyped-def]
    x_ptr, stride_h, stride_n, range_ptr, total_ptr, stride_total, n, columns, KEYS: tl.constexpr
):  # fmt: skip
    head, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    weights = tl.zeros((KEYS,), tl.float32)
    for query in range(n):
        begin = tl.load(range_ptr + (query * columns + column) * 2)
        end = tl.load(range_ptr + (query * columns + column) * 2 + 1)
        for start in range(begin, end, KEYS):
            key = start + tl.arange(0, KEYS)
            weights += tl.load(x_ptr + head * stride_h + query * stride_n + key, mask=key < end, other=0.0)
    target_ptr = total_ptr + head * stride_total + column
    tl.store(target_ptr, tl.load(target_ptr) + tl.sum(weights, 0).to(tl.float64))


def add_ranges(total: torch.Tensor, x: torch.Tensor, ranges: torch.Tensor) -> None:
    """Add the sums of x (H, n, S) over ranges (n, columns, 2) of its last axis to a total (H, columns)."""
    columns = total.shape[1]
    _ranges[(len(x), columns)](
        x, x.stride(0), x.stride(1), ranges, total, total.stride(0), x.shape[1], columns, KEYS=512, num_warps=4
    )


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
