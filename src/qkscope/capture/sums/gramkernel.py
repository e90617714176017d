"""Small GPU kernels: xxᵀ of each head and bucket without copying x, its addition to totals, lengths, and ranges.

Each takes all documents of a batch in one launch. A program of the first computes one tile for one head, document group
and bucket; of the second, adds one range of entries to the totals, bucket after bucket; of the third, adds the lengths
of some tokens of one head and group to a part of their sum; of the last, sums the ranges of one column of one head and
group. No two programs write to the same address, so the order of additions never changes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from qkscope.capture.sums.tokens import Documents

if TYPE_CHECKING:
    from collections.abc import Callable

    jit: Callable[[], Callable[[Callable[..., Any]], Any]]
else:
    # Sizes that differ from call to call: without this, a kernel would be compiled for every kind of number.
    sizes = (
        "heads",
        "n",
        "n_groups",
        "width",
        "first",
        "buckets",
        "queries",
        "columns",
        "stride_total",
        "stride_group",
    )
    jit = partial(triton.jit, do_not_specialize=sizes)

_ROWS = 128
STRETCH = 256


@jit()
def _squares(  # type: ignore[no-untyped-def]
    x_ptr, stride_b, stride_h, stride_t, out_ptr, row_ptr, start_ptr, bound_ptr, width, heads, n,
    D: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, cell, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group, bucket = cell // n, cell % n
    tiles: tl.constexpr = (D + TILE - 1) // TILE
    left = (tile // tiles) * TILE + tl.arange(0, TILE)
    right = (tile % tiles) * TILE + tl.arange(0, TILE)
    product = tl.zeros((TILE, TILE), tl.float32)
    first_row, last_row = tl.load(start_ptr + group), tl.load(start_ptr + group + 1)
    # The tokens of this bucket, document after document, so that short buckets fill a tile together.
    for start in range(0, (last_row - first_row) * width, ROWS):
        token = start + tl.arange(0, ROWS)
        document, column = first_row + token // width, bucket * width + token % width
        exists = document < last_row
        row = tl.load(row_ptr + document, mask=exists, other=0)
        begin = tl.load(bound_ptr + 2 * row, mask=exists, other=0)
        end = tl.load(bound_ptr + 2 * row + 1, mask=exists, other=0)
        counts = exists & (column >= begin) & (column < end)
        rows_ptr = x_ptr + head * stride_h + (row.to(tl.int64) * stride_b + column.to(tl.int64) * stride_t)[:, None]
        if D == TILE:
            left_rows = tl.load(rows_ptr + left[None, :], mask=counts[:, None], other=0.0)
            product = tl.dot(tl.trans(left_rows), left_rows, product)
        else:
            left_rows = tl.load(rows_ptr + left[None, :], mask=counts[:, None] & (left < D)[None, :], other=0.0)
            right_rows = tl.load(rows_ptr + right[None, :], mask=counts[:, None] & (right < D)[None, :], other=0.0)
            product = tl.dot(tl.trans(left_rows), right_rows, product)
    target_ptr = out_ptr + (cell * heads + head) * D * D + left[:, None] * D + right[None, :]
    tl.store(target_ptr, product, mask=(left < D)[:, None] & (right < D)[None, :])


@jit()
def _add(  # type: ignore[no-untyped-def]
    product_ptr, bucket_ptr, total_ptr, group_ptr, n_groups, n, heads, first, buckets, stride_total, stride_group, size,
    BY_BUCKET: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    head, entry = tl.program_id(1).to(tl.int64), tl.program_id(0) * STRETCH + tl.arange(0, STRETCH)
    inside = entry < size
    for group in range(n_groups):
        total = tl.zeros((STRETCH,), tl.float32)
        for bucket in range(n):
            cell = group * n + bucket
            product = tl.load(product_ptr + (cell * heads + head) * size + entry, mask=inside, other=0.0)
            total += product
            if BY_BUCKET:
                target_ptr = bucket_ptr + (head * buckets + first + bucket) * size + entry
                tl.store(target_ptr, tl.load(target_ptr, mask=inside, other=0.0) + product, mask=inside)
        target_ptr = total_ptr + head * stride_total + tl.load(group_ptr + group) * stride_group + entry
        tl.store(target_ptr, tl.load(target_ptr, mask=inside, other=0.0) + total, mask=inside)


@jit()
def _lengths(  # type: ignore[no-untyped-def]
    x_ptr, stride_b, stride_h, stride_t, total_ptr, stride_total, stride_group,
    row_ptr, start_ptr, group_ptr, bound_ptr, first, second, step,
    PARTS: tl.constexpr, PLANES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, part, group = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    plane = tl.arange(0, WIDE)
    inside = plane < PLANES
    sizes = tl.zeros((ROWS, WIDE), tl.float32)
    for document in range(tl.load(start_ptr + group), tl.load(start_ptr + group + 1)):
        row = tl.load(row_ptr + document)
        begin, end = tl.load(bound_ptr + 2 * row), tl.load(bound_ptr + 2 * row + 1)
        stretch = tl.cdiv(end - begin, PARTS)
        last = tl.minimum(begin + (part + 1) * stretch, end)
        for start in range(begin + part * stretch, last, ROWS):
            token = start + tl.arange(0, ROWS)
            counts = (token < last)[:, None] & inside[None, :]
            token_ptr = x_ptr + row.to(tl.int64) * stride_b + head * stride_h + token[:, None].to(tl.int64) * stride_t
            u = tl.load(token_ptr + plane[None, :] * step + first, mask=counts, other=0.0).to(tl.float32)
            v = tl.load(token_ptr + plane[None, :] * step + second, mask=counts, other=0.0).to(tl.float32)
            sizes += tl.sqrt(u * u + v * v)
    target_ptr = total_ptr + head * stride_total + tl.load(group_ptr + group) * stride_group + part * PLANES + plane
    total = tl.load(target_ptr, mask=inside, other=0.0) + tl.sum(sizes, 0).to(tl.float64)
    tl.store(target_ptr, total, mask=inside)


def add_lengths(total: torch.Tensor, x: torch.Tensor, documents: Documents, coordinates: tuple[slice, slice]) -> None:
    """Add √(u² + v²) of each plane, of the vectors x (B, H, T, d) that count, to parts of sums (H, 8, parts, planes).

    The coordinates of all planes are two slices; the lengths are the sum of the parts.
    """
    parts, planes = total.shape[2:]
    first, second = coordinates
    _lengths[(x.shape[1], parts, documents.n_groups)](
        x, *x.stride()[:3], total, *total.stride()[:2],
        documents.rows, documents.starts, documents.groups, documents.bounds,
        first.start, second.start, first.step or 1,
        PARTS=parts, PLANES=planes, WIDE=triton.next_power_of_2(planes), ROWS=128, num_warps=8,
    )  # fmt: skip


@jit()
def _ranges(  # type: ignore[no-untyped-def]
    x_ptr, stride_b, stride_h, stride_n, range_ptr, total_ptr, stride_total, stride_group,
    row_ptr, start_ptr, group_ptr, queries, columns, KEYS: tl.constexpr,
):  # fmt: skip
    head, column, group = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    weights = tl.zeros((KEYS,), tl.float32)
    for document in range(tl.load(start_ptr + group), tl.load(start_ptr + group + 1)):
        row = tl.load(row_ptr + document).to(tl.int64)
        for query in range(queries):
            bound_ptr = range_ptr + ((row * queries + query) * columns + column) * 2
            begin, end = tl.load(bound_ptr), tl.load(bound_ptr + 1)
            for start in range(begin, end, KEYS):
                key = start + tl.arange(0, KEYS)
                of_query = x_ptr + row * stride_b + head * stride_h + query * stride_n
                weights += tl.load(of_query + key, mask=key < end, other=0.0)
    target_ptr = total_ptr + head * stride_total + tl.load(group_ptr + group) * stride_group + column
    tl.store(target_ptr, tl.load(target_ptr) + tl.sum(weights, 0).to(tl.float64))


def add_ranges(total: torch.Tensor, x: torch.Tensor, ranges: torch.Tensor, documents: Documents) -> None:
    """Add the sums of x (B, H, n, S) over ranges (B, n, columns, 2) of its last axis to totals (H, 8, columns)."""
    queries, columns = ranges.shape[1:3]
    _ranges[(x.shape[1], columns, documents.n_groups)](
        x, *x.stride()[:3], ranges, total, *total.stride()[:2], documents.rows, documents.starts, documents.groups,
        queries, columns, KEYS=512, num_warps=4,
    )  # fmt: skip


def add_squares(
    x: torch.Tensor,
    documents: Documents,
    width: int,
    first: int,
    by_group: torch.Tensor,
    by_bucket: torch.Tensor | None,
) -> None:
    """Add Σ xxᵀ of the vectors x (B, H, T, d) that count to totals of groups (H, 8, d, d) and of buckets (H, B, d, d).

    The first token of x is the first of bucket ``first``.
    """
    heads, length, d = x.shape[1:]
    n, tile = triton.cdiv(length, width), 128 if d > 64 else 64
    products = torch.empty(documents.n_groups * n, heads, d, d, dtype=torch.float32, device=x.device)
    grid = (heads, documents.n_groups * n, triton.cdiv(d, tile) ** 2)
    # One stage: with two, a buffer was overwritten while it was still being read.
    _squares[grid](
        x, *x.stride()[:3], products, documents.rows, documents.starts, documents.bounds, width, heads, n,
        D=d, TILE=tile, ROWS=_ROWS, num_warps=4, num_stages=1,
    )  # fmt: skip
    buckets = 0 if by_bucket is None else by_bucket.shape[1]
    _add[(triton.cdiv(d * d, STRETCH), heads)](
        products, by_group if by_bucket is None else by_bucket, by_group, documents.groups, documents.n_groups,
        n, heads, first, buckets, *by_group.stride()[:2], d * d,
        BY_BUCKET=by_bucket is not None, STRETCH=STRETCH, num_warps=2,
    )  # fmt: skip
