"""The tokens of one forward pass: the counted ones, and the values that all layers of the pass share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from qkscope.core.headmoments import bucket_width

Shared = TypeVar("Shared")


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device; on a GPU, neither this process nor the work queued there waits for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class Plan:
    """Settings that all layers and forward passes of a run share."""

    window: int
    buckets: int
    skip_first: int

    @property
    def width(self) -> int:
        """Positions per bucket."""
        return bucket_width(self.window, self.buckets)


@dataclass(frozen=True)
class Documents:
    """The documents of a forward pass in the order of their groups, and the columns that count, on one device."""

    rows: torch.Tensor
    """Row of each document (B,)."""
    starts: torch.Tensor
    """First document of each group that occurs, and the number of all (n_groups + 1,)."""
    groups: torch.Tensor
    """The groups that occur (n_groups,)."""
    bounds: torch.Tensor
    """First column of each row that counts and the one after the last (B, 2)."""
    n_groups: int

    @classmethod
    def of(cls, groups: np.ndarray, bounds: list[tuple[int, int]], device: torch.device) -> Documents:
        """The documents with these groups and bounds, by row."""
        rows = np.argsort(groups, kind="stable")
        occurring, counts = np.unique(groups, return_counts=True)
        parts = [rows, np.concatenate([[0], np.cumsum(counts)]), occurring, np.ravel(bounds)]
        # One transfer; each part is aligned, or GPU kernels would be compiled again for the others.
        sizes = [-(-len(part) // _ALIGNED) * _ALIGNED for part in parts]
        packed = np.concatenate([np.pad(part, (0, size - len(part))) for part, size in zip(parts, sizes, strict=True)])
        of_rows, starts, of_groups, of_bounds = (
            values[: len(part)]
            for values, part in zip(on_device(packed.astype(np.int32), device).split(sizes), parts, strict=True)
        )
        return cls(of_rows, starts, of_groups, of_bounds.view(-1, 2), len(occurring))


_ALIGNED = 4
"""32-bit numbers in 16 bytes, to which compiled kernels are specialised."""


@dataclass(frozen=True)
class BatchTokens:
    """The tokens of one forward pass: rows are documents, columns consecutive positions from ``first``."""

    first: int
    """Position of the first column: a multiple of the bucket width."""
    lengths: np.ndarray
    """Columns of each row that are tokens; the rest is padding."""
    groups: np.ndarray
    """Document group of each row."""
    kept: list[np.ndarray]
    """Columns of each row whose vectors are kept."""
    queries: list[np.ndarray] = field(default_factory=list)
    """Columns of each row whose attention over all keys is summed."""
    begins: np.ndarray | None = None
    """First column of each row that is a token; None: 0."""
    _shared: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: object, make: Callable[[], Shared]) -> Shared:
        """Return a value that all layers of the pass share, computed on first use."""
        if key not in self._shared:
            self._shared[key] = make()
        value: Shared = self._shared[key]
        return value

    @property
    def _begins(self) -> np.ndarray:
        return np.zeros(len(self.lengths), dtype=np.int64) if self.begins is None else self.begins

    def counted(self, plan: Plan) -> list[tuple[int, int]]:
        """Return the first column that counts and the one after the last, for each row."""
        skipped = plan.skip_first - self.first
        begins = [max(0, skipped, int(begin)) for begin in self._begins]
        return [(begin, max(begin, int(length))) for begin, length in zip(begins, self.lengths, strict=True)]

    def documents(self, plan: Plan, device: torch.device) -> Documents:
        """Return the documents in the order of their groups, on a device; the same for all layers there."""
        return self.once(("documents", device), lambda: Documents.of(self.groups, self.counted(plan), device))

    def add_by_group(self, totals: torch.Tensor, values: torch.Tensor) -> None:
        """Add the values of each document (B, H, …) to those of its group (H, 8, …), always in the same order."""
        membership = self.once(
            ("membership", totals.dtype, totals.device),
            lambda: on_device(np.eye(totals.shape[1])[self.groups].T.copy(), totals.device).to(totals.dtype),
        )
        totals += (membership @ values.transpose(0, 1).flatten(2).to(totals.dtype)).view(totals.shape)

    def weights(self, plan: Plan, columns: int, device: torch.device) -> torch.Tensor:
        """Return 1 for a token that counts, 0 for padding and for the first positions of a document (B, T)."""
        counts = np.zeros((len(self.lengths), columns), dtype=np.float32)
        for row, (begin, end) in enumerate(self.counted(plan)):
            counts[row, begin:end] = 1.0
        return on_device(counts, device)


def bucket_products(
    x: torch.Tensor, shift: torch.Tensor, tokens: BatchTokens, plan: Plan
) -> tuple[torch.Tensor, np.ndarray, int]:
    """Return Σ z zᵀ over the tokens of each group and bucket (G, H, n, D, D), float64, the groups, and first bucket.

    Documents of one group are summed together: for short ones, a product each would cost more than their tokens.
    """
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
    groups = np.unique(tokens.groups)
    cells = z.view(batch, heads, n, plan.width, d + 2)
    of_groups = [cells[np.flatnonzero(tokens.groups == group)].permute(1, 2, 0, 3, 4) for group in groups.tolist()]
    flat = [part.reshape(heads * n, -1, d + 2) for part in of_groups]
    products = torch.stack([torch.bmm(part.transpose(1, 2), part) for part in flat]).double()
    products = products.view(len(groups), heads, n, d + 2, d + 2)
    # Move the origin of t from the bucket's centre to the middle of the window, the same for all buckets.
    centre = (torch.arange(first, first + n, device=x.device) + 0.5) * plan.width - 0.5 - plan.window / 2
    products[..., d, :] += centre.double()[:, None] * products[..., d + 1, :]
    products[..., :, d] += centre.double()[:, None] * products[..., :, d + 1]
    return products, groups, first


@lru_cache(maxsize=12)  # two uses for queries and for keys, at up to three windows
def scratch(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return memory that all layers use in turn; allocating it each time would take as long as the product."""
    return torch.empty(shape, device=device)
