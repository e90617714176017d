"""Half-precision sums without copying the vectors: squares by the reduction kernel, the rest in one product.

Σ x with a, b, 1 of each bucket and with cosines and sines are one product xᵀ·table, of which the matching coordinates
and planes are selected at the end. The kernel is used only if a test at the start shows that it agrees with torch.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from threading import Lock, Thread

import numpy as np
import torch

from qkscope.capture.rope import LayerRope
from qkscope.capture.sums.halfsums import LOW, HalfSums, RawSums
from qkscope.capture.sums.tokens import BatchTokens, Documents, Plan
from qkscope.capture.sums.undone import UndoneRotation
from qkscope.core.headmoments import N_GROUPS

_log = logging.getLogger("qkscope")

_ALIGNED = 128
"""Columns of the table are padded to a multiple of this, which makes matrix units fast."""
AGREES = 1e-5
"""Largest error of the kernel, relative to the largest square, at which it is trusted."""


class GramSums(HalfSums):
    """Sums of one layer, without copying its vectors."""

    def reserve(self) -> None:
        """Totals of squares, and of products with the table."""
        self.columns = -(-(2 * self.planes + 3 * self.plan.buckets) // _ALIGNED) * _ALIGNED
        self.by_group = self.zeros(self.heads, N_GROUPS, self.d, self.d)
        self.by_bucket = self.zeros(self.n_q, self.plan.buckets, self.d, self.d)
        self.with_table = self.zeros(self.heads, N_GROUPS, self.d, self.columns)

    def add_vectors(
        self, q: torch.Tensor, k: torch.Tensor, tokens: BatchTokens, turning: UndoneRotation | None
    ) -> None:
        """Squares and products, of all documents of a group at once."""
        documents, bounds = tokens.documents(self.plan, q.device), tokens.counted(self.plan)
        begin, end = min(first for first, _ in bounds), max(last for _, last in bounds)
        end = max(begin, min(end, q.shape[2]))
        padded = any(of_row != (begin, end) for of_row in bounds)
        key = "table", id(turning), q.dtype, q.device, self.columns
        table = tokens.once(key, lambda: self._table(q, tokens, turning)[begin:end].repeat(len(q), 1))
        order = np.argsort(tokens.groups, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(tokens.groups[order])) + 1)
        for x, heads in ((q, slice(0, self.n_q)), (k, slice(self.n_q, None))):
            x = x if x.stride(-1) == 1 else x.contiguous()
            by_bucket = self.by_bucket if heads.start == 0 else None
            first = tokens.first // self.plan.width
            _add_squares(x, documents, self.plan.width, first, self.by_group[heads], by_bucket)
            if begin == end:
                continue
            counted = x[:, :, begin:end]
            if padded:  # tokens that do not count may be non-finite
                weights = tokens.once(("weights", x.device), lambda: tokens.weights(self.plan, q.shape[2], q.device))
                counted = counted.masked_fill(weights[:, None, begin:end, None] == 0, 0.0)
            by_head = counted.transpose(0, 1)
            by_head = by_head if len(q) == 1 else by_head.index_select(1, documents.rows)
            done = 0
            for rows in groups:
                left = by_head[:, done : done + len(rows)].reshape(len(by_head), -1, self.d).transpose(1, 2)
                group = int(tokens.groups[rows[0]])
                _add_product(self.with_table[heads, group], left, table[: left.shape[2]])
                done += len(rows)

    def _table(self, q: torch.Tensor, tokens: BatchTokens, turning: UndoneRotation | None) -> torch.Tensor:
        """Cosines, sines, and a, b, 1 in the columns of their bucket (T, columns)."""
        length, width, buckets = q.shape[2], self.plan.width, self.plan.buckets
        column = torch.arange(length, device=q.device)
        t, bucket = (tokens.first + column) % width - width // 2, (tokens.first + column) // width
        high = torch.div(t, LOW, rounding_mode="floor")
        table = torch.zeros(length, self.columns, dtype=q.dtype, device=q.device)
        if turning is not None:
            table[:, : 2 * self.planes] = turning.table(q.dtype)
        for part, values in enumerate((high, t - LOW * high, torch.ones_like(t))):
            table[column, 2 * self.planes + part * buckets + bucket] = values.to(q.dtype)
        return table

    def raw(self, heads: slice, *, queries: bool) -> RawSums:
        """Squares with the sums next to them, and the matching entries of the table."""
        d, buckets = self.d, self.plan.buckets
        squares, products = (x[heads].double() for x in (self.by_group, self.with_table))
        with_position = products[..., 2 * self.planes : 2 * self.planes + 3 * buckets].reshape(
            *squares.shape[:3], 3, buckets
        )
        by_bucket = None
        if queries:
            of_buckets = with_position.sum(1).movedim(-1, 1)
            by_bucket = _with_columns(self.by_bucket.double(), of_buckets, d)
        cells = with_position[..., 2, :].transpose(-1, -2)
        return RawSums(_with_columns(squares, with_position.sum(-1), d), by_bucket, cells, self._turned(products))

    def _turned(self, products: torch.Tensor) -> torch.Tensor:
        if self.rope is None:
            return products.new_zeros(*products.shape[:2], 0, 4)
        tables = products[..., : self.planes], products[..., self.planes : 2 * self.planes]
        parts = [torch.diagonal(table[:, :, rows], 0, 2, 3) for table in tables for rows in self.rope.coordinates]
        return torch.stack(parts, -1)


def _with_columns(squares: torch.Tensor, last_columns: torch.Tensor, d: int) -> torch.Tensor:
    """Return the used part of Σ z zᵀ: squares (…, d, d), and products of x with a, b and 1 (…, d, 3)."""
    products = squares.new_zeros(*squares.shape[:-2], d + 3, d + 3)
    products[..., :d, :d], products[..., :d, d:] = squares, last_columns
    return products


def _add_squares(
    x: torch.Tensor,
    documents: Documents,
    width: int,
    first: int,
    by_group: torch.Tensor,
    by_bucket: torch.Tensor | None,
) -> None:
    """Add Σ xxᵀ of the vectors (B, H, T, d) that count to the totals; on a GPU with the kernel."""
    if x.is_cuda:
        from qkscope.capture.sums import gramkernel

        gramkernel.add_squares(x, documents, width, first, by_group, by_bucket)
        return
    for group, a, b in zip(documents.groups.tolist(), documents.starts[:-1], documents.starts[1:], strict=True):
        for row in documents.rows[a:b].tolist():
            begin, end = documents.bounds[row].tolist()
            for bucket, start in enumerate(range(0, x.shape[2], width)):
                vectors = x[row, :, max(start, begin) : max(min(start + width, end), 0)].float()
                squares = vectors.transpose(1, 2) @ vectors
                by_group[:, group] += squares
                if by_bucket is not None:
                    by_bucket[:, first + bucket] += squares


def _add_product(total: torch.Tensor, left: torch.Tensor, table: torch.Tensor) -> None:
    """Add left (H, d, T) · table (T, c) to the total (H, d, c), in float32."""
    if total.is_cuda:
        torch.baddbmm(total, left, table.expand(len(left), *table.shape), out_dtype=torch.float32, out=total)
    else:
        total += left.float() @ table.float()


def _lengths(x: torch.Tensor) -> torch.Tensor:
    """Lengths in the planes of two halves, with the kernel."""
    from qkscope.capture.sums import gramkernel

    planes, documents = x.shape[-1] // 2, _whole(x)
    total = torch.zeros(x.shape[1], N_GROUPS, 3, planes, dtype=torch.float64, device=x.device)
    with torch.cuda.device(x.device):
        gramkernel.add_lengths(total, x, documents, (slice(0, planes), slice(planes, None)))
    return total.sum((1, 2)).float()


def _first_and_rest(x: torch.Tensor) -> torch.Tensor:
    """The sums of the first coordinate and of all others (H, 2), with the kernel."""
    from qkscope.capture.sums import gramkernel

    batch, heads, length, d = x.shape
    total = torch.zeros(heads, N_GROUPS, 2, dtype=torch.float64, device=x.device)
    ranges = torch.tensor([[0, 1], [1, d]], device=x.device).expand(batch, length, 2, 2).contiguous()
    with torch.cuda.device(x.device):
        gramkernel.add_ranges(total, x.float().contiguous(), ranges, _whole(x))
    return total.sum(1).float()


def _whole(x: torch.Tensor) -> Documents:
    """All columns of vectors (B, H, T, d), the documents in different groups."""
    return Documents.of(np.arange(len(x)) % N_GROUPS, [(0, x.shape[2])] * len(x), x.device)


def warm_up(device: torch.device, dtype: torch.dtype, d: int) -> None:
    """Compile and check the kernel in the background, for example while weights are loaded."""
    Thread(target=trusted, args=(device, dtype, d), daemon=True).start()


def trusted(device: torch.device, dtype: torch.dtype, d: int) -> bool:
    """True if the kernel runs on this device and agrees with torch, on vectors with the memory layout of a model's."""
    with _TRIAL:  # a second thread waits for the result
        return _trusted(device, dtype, d)


_TRIAL = Lock()


@lru_cache(maxsize=64)
def _trusted(device: torch.device, dtype: torch.dtype, d: int) -> bool:
    if device.type != "cuda" or d < 16 or dtype not in (torch.bfloat16, torch.float16):
        return False  # products of single precision would be rounded
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    generator = torch.Generator(device).manual_seed(0)
    x = (torch.randn(3, 700, 5, d, generator=generator, device=device) + 0.5).to(dtype).transpose(1, 2)
    kernel, reference = (
        [torch.zeros(5, 8, d, d, device=where), torch.zeros(5, 28, d, d, device=where)] for where in (device, "cpu")
    )
    groups = np.array([2, 5, 2])
    try:
        for width, bounds in ((128, [(3, 690), (0, 128), (5, 5)]), (25, [(4, 60), (0, 700), (0, 699)])):
            for vectors, totals in ((x, kernel), (x.cpu(), reference)):
                with torch.cuda.device(device):
                    _add_squares(vectors, Documents.of(groups, bounds, vectors.device), width, 0, *totals)
        kernel += [_lengths(x), _first_and_rest(x)]
        reference.append(torch.hypot(x[..., : d // 2].float(), x[..., d // 2 :].float()).cpu().sum((0, 2)))
        reference.append(torch.stack([x[..., 0].float().sum((0, 2)), x[..., 1:].float().sum((0, 2, 3))], -1).cpu())
        largest_error = max(
            float((a.cpu() - b).abs().max() / b.abs().max()) for a, b in zip(kernel, reference, strict=True)
        )
    except Exception as error:  # a missing compiler raises errors of many kinds
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        _log.warning(
            "the reduction kernel does not run on %s (%s); vectors are copied, which is slower", device, reason
        )
        return False
    if largest_error > AGREES:
        _log.warning(
            "the reduction kernel is off by %.1e on %s; vectors are copied, which is slower", largest_error, device
        )
    return largest_error <= AGREES


_PARTS = 16
"""Parts of a sum on a GPU, each written by one program."""


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
        for x, total, divisor in ((q, self.totals[0], factor), (k, self.totals[1], None)):
            if divisor is None and x.stride(-1) == 1 and trusted(x.device, x.dtype, x.shape[-1]):
                from qkscope.capture.sums import gramkernel

                gramkernel.add_lengths(total, x, tokens.documents(plan, x.device), self.rope.coordinates)
                continue
            for row, bounds in enumerate(tokens.counted(plan)):
                of_group = total[:, int(tokens.groups[row]), 0]
                of_group += _lengths_of(x[row], bounds, self.rope, None if divisor is None else divisor[row])

    def exact(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """The sums (H, 8, planes); None where there are no planes."""
        return (None, None) if self.totals is None else (self.totals[0].sum(2), self.totals[1].sum(2))

    def _zeros(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rope is not None
        shape = x.shape[1], N_GROUPS, _PARTS if x.is_cuda else 1, self.rope.planes
        return torch.zeros(shape, dtype=torch.float64, device=x.device)


def _lengths_of(
    x: torch.Tensor, bounds: tuple[int, int], rope: LayerRope, divisor: torch.Tensor | None
) -> torch.Tensor:
    """The lengths in each plane of x (H, T, d), summed within bounds, over ``divisor`` (H, planes)."""
    begin, end = bounds
    first, second = rope.coordinates
    sizes = torch.hypot(x[:, begin:end, first].float(), x[:, begin:end, second].float())
    return (sizes if divisor is None else sizes / divisor[begin:end, None].abs()).sum(1)
