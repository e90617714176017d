"""The sums of layersums.py from half-precision vectors, at a small fraction of the cost of a forward pass.

Products of half-precision numbers are exact in float32, and the position within a bucket is 256·a + b, two parts that
half precision represents exactly. Squares xxᵀ are summed by head and bucket, and x itself with a, b, 1 and with the
cosines and sines of its position; on a GPU in parallel to the forward pass, on a separate stream. Counts and sums of
positions need no vectors. ``GramSums`` computes the sums without copying the vectors, ``RowSums`` copies them into rows
first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from qkscope.capture.rope import LayerRope
from qkscope.capture.sums.tokens import BatchTokens, Plan
from qkscope.capture.sums.undone import UndoneRotation
from qkscope.core.headmoments import N_GROUPS

TOKENS_AT_ONCE = 32_768
"""Tokens that are copied into rows at once."""
LOW = 256
"""Integers up to this are exact in half precision."""
SHIFT_TOKENS = 256
"""The shift is the mean of this many vectors."""
FAR = 8.0
"""Means of more than this many standard deviations are shifted to zero."""


def supports(q: torch.Tensor, k: torch.Tensor) -> bool:
    """True if these vectors are supported: half precision on a GPU."""
    return (
        q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype and q.shape[-1] == k.shape[-1]
    )


def far_means(q: torch.Tensor, k: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the mean of the first queries and keys (H, d) from column ``begin`` on, or 0 where it is close to zero."""
    return torch.cat([_far_mean(x[0, :, begin : begin + SHIFT_TOKENS].float()) for x in (q, k)]).to(q.dtype)


def _far_mean(vectors: torch.Tensor) -> torch.Tensor:
    if vectors.shape[1] < 2:
        return torch.zeros_like(vectors[:, :1].sum(1))
    mean, spread = vectors.mean(1), vectors.std(1)
    return torch.where(mean.abs() > FAR * spread, mean, torch.zeros_like(mean))


@dataclass(frozen=True)
class RawSums:
    """The sums of some heads, in float64; z = (x − shift, a, b, 1), further columns are padding."""

    by_group: torch.Tensor
    """Σ z zᵀ (H, 8, d + 3 …, d + 3 …); of the rows of a, b and 1, only the products with x are used."""
    by_bucket: torch.Tensor | None
    """(H, buckets, d + 3 …, d + 3 …); queries only."""
    by_cell: torch.Tensor
    """Σ x − shift (H, 8, buckets, d …)."""
    turned: torch.Tensor
    """Σ of cos·u, cos·v, sin·u, sin·v of each plane (u, v) (H, 8, planes, 4)."""


@dataclass(frozen=True)
class ExactSums:
    """Sums of z zᵀ with z = (x − shift, t − middle of the window, 1), in float64 on the layer's device."""

    shift: torch.Tensor
    """(H, d)."""
    by_group: torch.Tensor
    """(H, 8, d + 2, d + 2)."""
    by_cell: torch.Tensor
    """(H, 8, buckets, d + 2): sums only, no products."""
    by_bucket: torch.Tensor | None
    """(H, buckets, d + 2, d + 2); queries only."""
    unrotated: torch.Tensor
    """(H, 8, planes, 2)."""


class HalfSums(ABC):
    """Sums of one layer; query heads first, then key heads."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, shift: torch.Tensor, plan: Plan, rope: LayerRope | None
    ) -> None:
        self.plan, self.rope, self.d, self.n_q = plan, rope, q.shape[-1], q.shape[1]
        self.heads, self.planes = q.shape[1] + k.shape[1], 0 if rope is None else rope.planes
        self.shift, self.device = shift, q.device
        self.angles: list[tuple[np.ndarray, torch.Tensor]] = []
        """Groups of documents, and Σ of cosines, sines and rounding errors of their table (B, buckets, planes, 4)."""
        self.position_sums = np.zeros((N_GROUPS, plan.buckets, 3))
        self.reserve()
        if q.is_cuda:
            _side(q.device).wait_stream(torch.cuda.current_stream(q.device))

    def zeros(self, *shape: int) -> torch.Tensor:
        """A tensor for sums."""
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def add(self, q: torch.Tensor, k: torch.Tensor, tokens: BatchTokens, turning: UndoneRotation | None) -> None:
        """Add the vectors (B, H, T, d) of one attention call."""
        self.position_sums += tokens.once("places", lambda: _position_sums(tokens, self.plan))
        with on_side_stream(q):
            self.add_vectors(q, k, tokens, turning)
            if turning is not None:
                self.angles.append((tokens.groups, turning.sums(tokens, self.plan, q.dtype)))
            if q.is_cuda:
                for x in (q, k):
                    x.record_stream(torch.cuda.current_stream(q.device))

    @abstractmethod
    def reserve(self) -> None:
        """Allocate the sums."""

    @abstractmethod
    def add_vectors(
        self, q: torch.Tensor, k: torch.Tensor, tokens: BatchTokens, turning: UndoneRotation | None
    ) -> None:
        """Add the products of the vectors of a call."""

    @abstractmethod
    def raw(self, heads: slice, *, queries: bool) -> RawSums:
        """The sums of these heads."""

    # ---- results --------------------------------------------------------------------------------

    def exact(self) -> tuple[ExactSums, ExactSums]:
        """The sums of the query heads and of the key heads."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_stream(_side(self.device))
        return self._kind(slice(0, self.n_q), queries=True), self._kind(slice(self.n_q, None), queries=False)

    def _kind(self, heads: slice, *, queries: bool) -> ExactSums:
        plan, d, raw = self.plan, self.d, self.raw(heads, queries=queries)
        shift, cells = self.shift[heads].double(), raw.by_cell[..., :d]
        middle = np.arange(plan.buckets) * plan.width + plan.width // 2 - plan.window / 2
        n, t, tt = np.moveaxis(self.position_sums, -1, 0)
        by_cell = np.stack([n, t + middle * n, tt + 2 * middle * t + middle**2 * n], -1)
        position_sums, middles = (torch.from_numpy(array).to(self.device) for array in (by_cell, middle))
        moved = torch.einsum("b,hgbc->hgc", middles, cells)
        buckets = None
        if raw.by_bucket is not None:
            buckets = _assembled(raw.by_bucket, middles[:, None] * cells.sum(1), position_sums.sum(0), d)
        ends = position_sums[..., [1, 0]].expand(len(cells), *position_sums.shape[:-1], 2)
        return ExactSums(
            shift,
            _assembled(raw.by_group, moved, position_sums.sum(1), d),
            torch.cat([cells, ends], -1),
            buckets,
            self._unrotated(raw.turned, shift, cells),
        )

    def _unrotated(self, sums: torch.Tensor, shift: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        if self.rope is None:
            return shift.new_zeros(len(shift), N_GROUPS, 0, 2)
        groups, documents = (list(parts) for parts in zip(*self.angles, strict=True))
        of_documents = torch.cat(documents)
        angles = torch.einsum("xg,xbpc->gbpc", in_groups(np.concatenate(groups), of_documents), of_documents)
        cos, sin = angles[..., :2].sum(1).unbind(-1)
        first, second = self.rope.coordinates
        u, v = shift[:, None, first], shift[:, None, second]
        # The rounding errors of the table are corrected with the mean vector of each bucket: within a bucket, vectors
        # are close to it, or turn so fast that the errors cancel.
        mean = cells / torch.from_numpy(self.position_sums[..., :1]).to(self.device).clamp_min(1.0)
        lost = [torch.einsum("hgbp,gbp->hgp", mean[..., rows], angles[..., which])
                for which in (2, 3) for rows in (first, second)]  # fmt: skip
        cos_u, cos_v, sin_u, sin_v = (sums + torch.stack(lost, -1)).unbind(-1)
        cos_u, cos_v, sin_u, sin_v = cos_u + u * cos, cos_v + v * cos, sin_u + u * sin, sin_v + v * sin
        return torch.stack([cos_u + self.rope.sign * sin_v, cos_v - self.rope.sign * sin_u], -1)


def in_groups(groups: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return 1 where a document belongs to a group (documents, 8), to add them up always in the same order."""
    return torch.nn.functional.one_hot(torch.from_numpy(groups), N_GROUPS).to(like)


def _position_sums(tokens: BatchTokens, plan: Plan) -> np.ndarray:
    """Count, Σ t and Σ t² of the tokens that count, by group and bucket (8, buckets, 3); t from the bucket's middle."""
    sums = np.zeros((N_GROUPS, plan.buckets, 3))
    for (begin, end), group in zip(tokens.counted(plan), tokens.groups, strict=True):
        position = tokens.first + np.arange(begin, end)
        t = (position % plan.width - plan.width // 2).astype(float)
        for power in range(3):
            sums[group, :, power] += np.bincount(position // plan.width, t**power, minlength=plan.buckets)
    return sums


def _assembled(products: torch.Tensor, moved: torch.Tensor, position_sums: torch.Tensor, d: int) -> torch.Tensor:
    """Return Σ z zᵀ for z = (x, t, 1) from that for (x, a, b, 1): t = 256a + b + middle; ``moved`` = Σ middle·x."""
    full = products.new_empty(*products.shape[:-2], d + 2, d + 2)
    with_t = LOW * products[..., :d, d] + products[..., :d, d + 1] + moved[..., :d]
    full[..., :d, :d] = products[..., :d, :d]
    full[..., :d, d] = full[..., d, :d] = with_t
    full[..., :d, d + 1] = full[..., d + 1, :d] = products[..., :d, d + 2]
    full[..., d, d] = position_sums[..., 2]
    full[..., d, d + 1] = full[..., d + 1, d] = position_sums[..., 1]
    full[..., d + 1, d + 1] = position_sums[..., 0]
    return full


def on_side_stream(x: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context that, on a GPU, runs work on a parallel stream, after the work queued so far."""
    if not x.is_cuda:
        return nullcontext()
    side = _side(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    return torch.cuda.stream(side)


@lru_cache(maxsize=64)
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_ALIGNED = 8
"""Columns are padded to a multiple of this, which makes matrix units fast."""


class RowSums(HalfSums):
    """Sums of one layer over rows."""

    def reserve(self) -> None:
        """Totals of whole rows, padding included."""
        self.columns = -(-(self.d + 3) // _ALIGNED) * _ALIGNED
        self.shifted = bool(self.shift.any())
        self.by_group = self.zeros(self.heads, N_GROUPS, self.columns, self.columns)
        self.by_bucket = self.zeros(self.n_q, self.plan.buckets, self.columns, self.columns)
        self.by_cell = self.zeros(self.heads, N_GROUPS, self.plan.buckets, self.columns)
        self.turned = self.zeros(self.heads, N_GROUPS, self.planes, 4)

    def add_vectors(
        self, q: torch.Tensor, k: torch.Tensor, tokens: BatchTokens, turning: UndoneRotation | None
    ) -> None:
        """Some columns at a time, in whole buckets."""
        step = max(1, TOKENS_AT_ONCE // len(q) // self.plan.width) * self.plan.width
        for first in range(0, q.shape[2], step):
            self._add_part(q, k, slice(first, min(first + step, q.shape[2])), tokens, turning)

    def _add_part(
        self, q: torch.Tensor, k: torch.Tensor, part: slice, tokens: BatchTokens, turning: UndoneRotation | None
    ) -> None:
        """Copy the vectors into rows, and form both products."""
        batch, width, length = q.shape[0], self.plan.width, part.stop - part.start
        n = -(-length // width)
        rows = _rows((batch, self.heads, n * width, self.columns), self.d, width, q.dtype, q.device)
        bounds = [(begin - part.start, end - part.start) for begin, end in tokens.counted(self.plan)]
        uncounted = rows.uncounted(bounds)
        for x, heads in ((q, slice(0, self.n_q)), (k, slice(self.n_q, None))):
            target = rows.z[:, heads, :length, : self.d]
            if self.shifted:
                torch.sub(x[:, :, part], self.shift[heads, None], out=target)
            else:
                _copy(x[:, :, part], target)
        for row, begin, end in uncounted:
            rows.z[row, :, begin:end, : self.d] = 0
        flat = rows.z.view(batch * self.heads * n, width, self.columns)
        products = _product(flat.transpose(1, 2), flat).view(batch, self.heads, n, self.columns, self.columns)
        bucket = (tokens.first + part.start) // width
        span = slice(bucket, bucket + n)
        self.by_bucket[:, span] += products[:, : self.n_q].sum(0)
        tokens.add_by_group(self.by_group, products.sum(2))
        tokens.add_by_group(self.by_cell[:, :, span], products[..., self.d + 2, :])
        if turning is not None:
            self._add_turned(rows.z[:, :, :length], turning.table(flat.dtype)[part], tokens)

    def _add_turned(self, z: torch.Tensor, table: torch.Tensor, tokens: BatchTokens) -> None:
        """Σ z cos and Σ z sin of both coordinates of each plane."""
        assert self.rope is not None
        batch = z.shape[0]
        flat = z.reshape(batch * self.heads, *z.shape[2:]) if batch > 1 else z[0]
        products = _product(flat.transpose(1, 2), table.expand(len(flat), *table.shape))
        tables = products[..., : self.planes], products[..., self.planes :]
        parts = [torch.diagonal(product[:, rows], 0, 1, 2) for product in tables for rows in self.rope.coordinates]
        tokens.add_by_group(self.turned, torch.stack(parts, -1).view(batch, self.heads, self.planes, 4))

    def raw(self, heads: slice, *, queries: bool) -> RawSums:
        """Return the stored sums."""
        groups, cells, turned = (x[heads].double() for x in (self.by_group, self.by_cell, self.turned))
        return RawSums(groups, self.by_bucket.double() if queries else None, cells, turned)


@dataclass
class _Rows:
    """Memory for z, shared by all layers in turn; the columns next to the vectors are the same for all layers."""

    z: torch.Tensor
    position_columns: torch.Tensor
    """(a, b, 1) of every row (T, 3)."""
    d: int
    zeroed: list[tuple[int, int, int]] = field(default_factory=list)

    def uncounted(self, bounds: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Return rows (document, first, end) that do not count; set their columns next to the vectors to zero."""
        total, columns = self.z.shape[2], slice(self.d, self.d + 3)
        ranges = [(row, a, b) for row, (begin, end) in enumerate(bounds) for a, b in ((0, begin), (end, total))]
        uncounted_rows = [(row, max(a, 0), min(b, total)) for row, a, b in ranges if max(a, 0) < min(b, total)]
        if uncounted_rows != self.zeroed:
            for row, begin, end in self.zeroed:
                self.z[row, :, begin:end, columns] = self.position_columns[begin:end]
            for row, begin, end in uncounted_rows:
                self.z[row, :, begin:end, columns] = 0
            self.zeroed = uncounted_rows
        return uncounted_rows


@lru_cache(maxsize=2)
def _rows(shape: tuple[int, int, int, int], d: int, width: int, dtype: torch.dtype, device: torch.device) -> _Rows:
    z = torch.zeros(shape, dtype=dtype, device=device)
    t = torch.arange(shape[2], device=device) % width - width // 2
    high = torch.div(t, LOW, rounding_mode="floor")
    position_columns = torch.stack([high, t - LOW * high, torch.ones_like(t)], -1).to(dtype)
    z[..., d : d + 3] = position_columns
    return _Rows(z, position_columns, d)


def _copy(x: torch.Tensor, target: torch.Tensor) -> None:
    """Copy vectors, eight bytes at a time if they are aligned, which is much faster than two bytes."""
    wide = all(t.stride(-1) == 1 and all(s % 4 == 0 for s in t.stride()[:-1]) for t in (x, target))
    if wide and x.shape[-1] % 4 == 0 and x.storage_offset() % 4 == 0:
        target.view(torch.float64).copy_(x.view(torch.float64))
    else:
        target.copy_(x)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched product of half-precision matrices, in float32."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
