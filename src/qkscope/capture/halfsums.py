"""The sums of reduce.py from half-precision vectors, at a cost that a forward pass hardly notices.

Queries and keys of a call become rows z = (x − shift, a, b, 1, 0 …) in their own precision. Products of half-precision
numbers are exact in float32, and 256·a + b is the position within its bucket, in two parts that half precision holds
exactly. Coordinates are shifted only where their mean is so far from zero that float32 sums would feel it; there the
difference is exact for nearly every vector (Sterbenz), while a small shift would be lost to rounding.

One product zᵀz per head and bucket, with float32 out, holds all sums of squares; a second one, with a table of cosines
and sines, holds the sums with the rotation undone (all coordinates with all planes, of which the matching ones are
taken: a matrix unit does that faster than anything does the sum alone). On a GPU all of it runs on a stream of its own,
beside the forward pass. Counts and sums of positions need no vectors and are kept on the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from qkscope.capture.turning import Turning
from qkscope.core.headmoments import N_GROUPS

if TYPE_CHECKING:
    from qkscope.capture.reduce import Plan, Tokens
    from qkscope.capture.rope import LayerRope

ALIGNED = 8
"""Columns are padded to a multiple of this, as matrix units like it."""
LOW = 256
"""Whole numbers up to this are exact in half precision."""
TOKENS_AT_ONCE = 32_768
SHIFT_TOKENS = 256
"""The shift is the mean of so many vectors."""
FAR = 8.0
"""Means beyond so many standard deviations are shifted to zero."""


def takes(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether these vectors are reduced here: half precision on a GPU."""
    return (
        q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype and q.shape[-1] == k.shape[-1]
    )


@dataclass(frozen=True)
class HostSums:
    """Sums of z zᵀ with z = (x − shift, t − middle of the window, 1), in float64 on the host."""

    shift: np.ndarray
    """(H, d)."""
    by_group: np.ndarray
    """(H, 8, d + 2, d + 2)."""
    by_cell: np.ndarray
    """(H, 8, buckets, d + 2): sums alone."""
    by_bucket: np.ndarray | None
    """(H, buckets, d + 2, d + 2); queries only."""
    unrotated: np.ndarray
    """(H, 8, planes, 2)."""


class HalfSums:
    """Sums of one layer, query heads first and key heads after them."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, tokens: Tokens, plan: Plan, rope: LayerRope | None) -> None:
        self.plan, self.rope, self.d, self.n_q = plan, rope, q.shape[-1], q.shape[1]
        self.heads, self.planes = q.shape[1] + k.shape[1], 0 if rope is None else rope.planes
        self.columns = -(-(self.d + 3) // ALIGNED) * ALIGNED
        self.shift = torch.cat([_shift(x, tokens.counted(plan)[0][0]) for x in (q, k)]).to(q.dtype)
        self.shifted = bool(self.shift.any())

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=q.device)

        self.by_group = zeros(self.heads, N_GROUPS, self.columns, self.columns)
        self.by_bucket = zeros(self.n_q, plan.buckets, self.columns, self.columns)
        self.by_cell = zeros(self.heads, N_GROUPS, plan.buckets, self.columns)
        self.turned = zeros(self.heads, N_GROUPS, self.planes, 4)
        self.angles: list[tuple[int, torch.Tensor]] = []
        """Σ of cosines and sines by bucket, and of what the table rounds off, for each document, with its group."""
        self.places = np.zeros((N_GROUPS, plan.buckets, 3))
        if q.is_cuda:
            _side(q.device).wait_stream(torch.cuda.current_stream(q.device))

    def add(self, q: torch.Tensor, k: torch.Tensor, tokens: Tokens, turning: Turning | None) -> None:
        """Add the vectors (B, H, T, d) of one attention call."""
        for row, group in enumerate(tokens.groups.tolist()):
            self.places[group] += tokens.once("places", lambda: _places(tokens, self.plan))[row]
        step = max(self.plan.width, TOKENS_AT_ONCE // self.plan.width * self.plan.width)
        with _beside(q):
            for first in range(0, q.shape[2], step):
                self._add_part(q, k, slice(first, min(first + step, q.shape[2])), tokens, turning)
            if turning is not None:
                self.angles += zip(tokens.groups.tolist(), turning.sums(tokens, self.plan, q.dtype), strict=True)
            if q.is_cuda:
                for x in (q, k):
                    x.record_stream(torch.cuda.current_stream(q.device))

    def _add_part(self, q: torch.Tensor, k: torch.Tensor, part: slice, tokens: Tokens, turning: Turning | None) -> None:
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

    def _add_turned(self, z: torch.Tensor, table: torch.Tensor, tokens: Tokens) -> None:
        """Σ z cos and Σ z sin of both coordinates of each plane."""
        assert self.rope is not None
        batch = z.shape[0]
        flat = z.reshape(batch * self.heads, *z.shape[2:]) if batch > 1 else z[0]
        found = _product(flat.transpose(1, 2), table.expand(len(flat), *table.shape))
        tables = found[..., : self.planes], found[..., self.planes :]
        parts = [torch.diagonal(at[:, rows], 0, 1, 2) for at in tables for rows in self._coordinates]
        both = torch.stack(parts, -1).view(batch, self.heads, self.planes, 4)
        for row, group in enumerate(tokens.groups.tolist()):
            self.turned[:, group] += both[row]

    @property
    def _coordinates(self) -> tuple[slice, slice]:
        """First and second coordinate of every plane."""
        assert self.rope is not None
        start, planes = self.rope.start, self.planes
        if self.rope.layout == "half":
            return slice(start, start + planes), slice(start + planes, start + 2 * planes)
        return slice(start, start + 2 * planes, 2), slice(start + 1, start + 2 * planes, 2)

    # ---- to the host ----------------------------------------------------------------------------

    def host(self) -> tuple[HostSums, HostSums]:
        """The sums of the query heads and of the key heads."""
        if self.by_group.is_cuda:
            torch.cuda.current_stream(self.by_group.device).wait_stream(_side(self.by_group.device))
        return self._kind(slice(0, self.n_q), queries=True), self._kind(slice(self.n_q, None), queries=False)

    def _kind(self, heads: slice, *, queries: bool) -> HostSums:
        plan, d = self.plan, self.d
        groups, cells, shift = (x[heads].double().cpu().numpy() for x in (self.by_group, self.by_cell, self.shift))
        middle = np.arange(plan.buckets) * plan.width + plan.width // 2 - plan.window / 2
        n, t, tt = np.moveaxis(self.places, -1, 0)
        places = np.stack([n, t + middle * n, tt + 2 * middle * t + middle**2 * n], -1)
        moved = np.einsum("b,hgbc->hgc", middle, cells)
        buckets = None
        if queries:
            found = self.by_bucket.double().cpu().numpy()
            buckets = _assembled(found, middle[:, None] * cells.sum(1), places.sum(0), d)
        ends = np.broadcast_to(places[..., [1, 0]], (len(cells), *places.shape[:-1], 2))
        return HostSums(
            shift,
            _assembled(groups, moved, places.sum(1), d),
            np.concatenate([cells[..., :d], ends], -1),
            buckets,
            self._unrotated(heads, shift, cells[..., :d]),
        )

    def _unrotated(self, heads: slice, shift: np.ndarray, cells: np.ndarray) -> np.ndarray:
        if self.rope is None:
            return np.zeros((len(shift), N_GROUPS, 0, 2))
        sums = self.turned[heads].double().cpu().numpy()
        angles = np.zeros((N_GROUPS, self.plan.buckets, self.planes, 4))
        for group, part in self.angles:
            angles[group] += part.cpu().numpy()
        cos, sin = np.moveaxis(angles[..., :2].sum(1), -1, 0)
        first, second = self._coordinates
        u, v = shift[:, None, first], shift[:, None, second]
        # What the table rounds off meets vectors that within a bucket are their mean, or turn so fast that it cancels.
        mean = cells / np.maximum(self.places[..., :1], 1.0)
        lost = [np.einsum("hgbp,gbp->hgp", mean[..., rows], angles[..., which])
                for which in (2, 3) for rows in (first, second)]  # fmt: skip
        cos_u, cos_v, sin_u, sin_v = np.moveaxis(sums + np.stack(lost, -1), -1, 0)
        cos_u, cos_v, sin_u, sin_v = cos_u + u * cos, cos_v + v * cos, sin_u + u * sin, sin_v + v * sin
        turned = np.stack([cos_u + self.rope.sign * sin_v, cos_v - self.rope.sign * sin_u], -1)
        return turned / self.rope.attention_factor


@dataclass
class _Rows:
    """Memory for z that all layers use in turn; the columns beside the vectors are the same for all of them."""

    z: torch.Tensor
    beside: torch.Tensor
    """(a, b, 1) of every row (T, 3)."""
    d: int
    zeroed: list[tuple[int, int, int]] = field(default_factory=list)

    def uncounted(self, bounds: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Rows (document, first, end) that do not count, their columns beside the vectors set to zero."""
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


def _places(tokens: Tokens, plan: Plan) -> np.ndarray:
    """Count, Σ t and Σ t² of the tokens that count, by row and bucket (B, buckets, 3); t from the bucket's middle."""
    found = np.zeros((len(tokens.lengths), plan.buckets, 3))
    for row, (begin, end) in enumerate(tokens.counted(plan)):
        position = tokens.first + np.arange(begin, end)
        t = (position % plan.width - plan.width // 2).astype(float)
        for power in range(3):
            found[row, :, power] = np.bincount(position // plan.width, t**power, minlength=plan.buckets)
    return found


def _assembled(products: np.ndarray, moved: np.ndarray, places: np.ndarray, d: int) -> np.ndarray:
    """Z zᵀ for z = (x, t, 1) out of that for (x, a, b, 1): t = 256a + b + the bucket's middle, ``moved`` its part."""
    found = np.empty((*products.shape[:-2], d + 2, d + 2))
    with_t = LOW * products[..., :d, d] + products[..., :d, d + 1] + moved[..., :d]
    found[..., :d, :d] = products[..., :d, :d]
    found[..., :d, d] = found[..., d, :d] = with_t
    found[..., :d, d + 1] = found[..., d + 1, :d] = products[..., :d, d + 2]
    found[..., d, d] = places[..., 2]
    found[..., d, d + 1] = found[..., d + 1, d] = places[..., 1]
    found[..., d + 1, d + 1] = places[..., 0]
    return found


def _shift(x: torch.Tensor, begin: int) -> torch.Tensor:
    """Mean of the first vectors (H, d), and 0 where that is near enough to zero."""
    some = x[0, :, begin : begin + SHIFT_TOKENS].float()
    if some.shape[1] < 2:
        return torch.zeros_like(some[:, :1].sum(1))
    mean, spread = some.mean(1), some.std(1)
    return torch.where(mean.abs() > FAR * spread, mean, torch.zeros_like(mean))


def _copy(x: torch.Tensor, place: torch.Tensor) -> None:
    """Copy vectors, eight bytes at a time where they lie so: two at a time leaves most of the memory's speed unused."""
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


def _beside(x: torch.Tensor) -> AbstractContextManager[object]:
    """On a GPU, a stream beside the forward pass that begins where that now is."""
    if not x.is_cuda:
        return nullcontext()
    side = _side(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    return torch.cuda.stream(side)


@lru_cache(maxsize=64)
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
