"""Half-precision sums over rows: queries and keys are first copied into rows z = (x − shift, a, b, 1, 0 …).

One product zᵀz per head and bucket, with float32 output, gives all sums of squares; a second one, with a table of
cosines and sines, gives the sums with the rotation undone (of all coordinates with all planes; the matching ones are
then selected, since a matrix unit computes all faster than other units compute the matching ones). Coordinates are
shifted only if their mean is so far from zero that float32 sums would lose precision; there the difference is exact for
nearly every vector (Sterbenz), while a small shift would be lost to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from qkscope.capture.sums.halfsums import LOW, HalfSums, RawSums
from qkscope.capture.sums.tokens import BatchTokens
from qkscope.capture.sums.undonerotation import UndoneRotation
from qkscope.core.headmoments import N_GROUPS

_ALIGNED = 8
"""Columns are padded to a multiple of this, which makes matrix units fast."""


class RowSums(HalfSums):
    """Sums of one layer over rows."""

    tokens_at_once = 32_768

    def reserve(self) -> None:
        """Totals of whole rows, padding included."""
        self.columns = -(-(self.d + 3) // _ALIGNED) * _ALIGNED
        self.shifted = bool(self.shift.any())
        self.by_group = self.zeros(self.heads, N_GROUPS, self.columns, self.columns)
        self.by_bucket = self.zeros(self.n_q, self.plan.buckets, self.columns, self.columns)
        self.by_cell = self.zeros(self.heads, N_GROUPS, self.plan.buckets, self.columns)
        self.turned = self.zeros(self.heads, N_GROUPS, self.planes, 4)

    def add_part(
        self, q: torch.Tensor, k: torch.Tensor, part: slice, tokens: BatchTokens, turning: UndoneRotation | None
    ) -> None:
        """Copy the vectors into rows, and form both products."""
        batch, width, length = q.shape[0], self.plan.width, part.stop - part.start
        n = -(-length // width)
        rows = _rows((batch, self.heads, n * width, self.columns), self.d, width, q.dtype, q.device)
        bounds = [(begin - part.start, end - part.start) for begin, end in tokens.counted(self.plan)]
        uncounted = rows.uncounted(bounds)
        for x, heads in ((q, slice(0, self.n_q)), (k, slice(self.n_q, None))):
            place = rows.z[:, heads, :length, : self.d]
            if self.shifted:
                torch.sub(x[:, :, part], self.shift[heads, None], out=place)
            else:
                _copy(x[:, :, part], place)
        for row, begin, end in uncounted:
            rows.z[row, :, begin:end, : self.d] = 0
        flat = rows.z.view(batch * self.heads * n, width, self.columns)
        products = _product(flat.transpose(1, 2), flat).view(batch, self.heads, n, self.columns, self.columns)
        bucket = (tokens.first + part.start) // width
        span = slice(bucket, bucket + n)
        for row, group in enumerate(tokens.groups.tolist()):
            self.by_bucket[:, span] += products[row, : self.n_q]
            self.by_group[:, group] += products[row].sum(1)
            self.by_cell[:, group, span] += products[row, :, :, self.d + 2]
        if turning is not None:
            self._add_turned(rows.z[:, :, :length], turning.table(flat.dtype)[part], tokens)

    def _add_turned(self, z: torch.Tensor, table: torch.Tensor, tokens: BatchTokens) -> None:
        """Σ z cos and Σ z sin of both coordinates of each plane."""
        assert self.rope is not None
        batch = z.shape[0]
        flat = z.reshape(batch * self.heads, *z.shape[2:]) if batch > 1 else z[0]
        products = _product(flat.transpose(1, 2), table.expand(len(flat), *table.shape))
        tables = products[..., : self.planes], products[..., self.planes :]
        parts = [torch.diagonal(at[:, rows], 0, 1, 2) for at in tables for rows in self.rope.coordinates]
        both = torch.stack(parts, -1).view(batch, self.heads, self.planes, 4)
        for row, group in enumerate(tokens.groups.tolist()):
            self.turned[:, group] += both[row]

    def raw(self, heads: slice, *, queries: bool) -> RawSums:
        """The sums as they are stored."""
        groups, cells, turned = (x[heads].double() for x in (self.by_group, self.by_cell, self.turned))
        return RawSums(groups, self.by_bucket.double() if queries else None, cells, turned)


@dataclass
class _Rows:
    """Memory for z that all layers use in turn; the columns next to the vectors are the same for all layers."""

    z: torch.Tensor
    beside: torch.Tensor
    """(a, b, 1) of every row (T, 3)."""
    d: int
    zeroed: list[tuple[int, int, int]] = field(default_factory=list)

    def uncounted(self, bounds: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Rows (document, first, end) that do not count; sets their columns next to the vectors to zero."""
        total, columns = self.z.shape[2], slice(self.d, self.d + 3)
        ranges = [(row, a, b) for row, (begin, end) in enumerate(bounds) for a, b in ((0, begin), (end, total))]
        wanted = [(row, max(a, 0), min(b, total)) for row, a, b in ranges if max(a, 0) < min(b, total)]
        if wanted != self.zeroed:
            for row, begin, end in self.zeroed:
                self.z[row, :, begin:end, columns] = self.beside[begin:end]
            for row, begin, end in wanted:
                self.z[row, :, begin:end, columns] = 0
            self.zeroed = wanted
        return wanted


@lru_cache(maxsize=2)
def _rows(shape: tuple[int, int, int, int], d: int, width: int, dtype: torch.dtype, device: torch.device) -> _Rows:
    z = torch.zeros(shape, dtype=dtype, device=device)
    t = torch.arange(shape[2], device=device) % width - width // 2
    high = torch.div(t, LOW, rounding_mode="floor")
    beside = torch.stack([high, t - LOW * high, torch.ones_like(t)], -1).to(dtype)
    z[..., d : d + 3] = beside
    return _Rows(z, beside, d)


def _copy(x: torch.Tensor, place: torch.Tensor) -> None:
    """Copy vectors, eight bytes at a time if they are aligned, which is much faster than two bytes at a time."""
    wide = all(t.stride(-1) == 1 and all(s % 4 == 0 for s in t.stride()[:-1]) for t in (x, place))
    if wide and x.shape[-1] % 4 == 0 and x.storage_offset() % 4 == 0:
        place.view(torch.float64).copy_(x.view(torch.float64))
    else:
        place.copy_(x)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched product of half-precision matrices, in float32."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
