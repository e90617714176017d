"""Moments of several heads as one batch, copied into one array only if needed.

Most results of a batch need only totals and halves. Each head caches its own; query heads that read the same key head
share the cached results of that key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from qkscope.core.moments import Moments


class MomentsBatch(Moments):
    """Moments with a first batch axis that runs over heads."""

    heads: tuple[Moments, ...]

    def __init__(self, heads: Sequence[Moments]) -> None:
        object.__setattr__(self, "heads", tuple(heads))
        object.__setattr__(self, "n", np.stack([head.n for head in heads]))
        object.__setattr__(self, "mean", np.stack([head.mean for head in heads]))

    @cached_property
    def scatter(self) -> Float[np.ndarray, "heads *batch z z"]:
        """Scatters of all heads."""
        return self.heads[0].scatter[None] if len(self.heads) == 1 else np.stack([head.scatter for head in self.heads])

    @cached_property
    def diagonal(self) -> Float[np.ndarray, "heads *batch z"]:
        """Diagonals of the scatters."""
        return np.stack([head.diagonal for head in self.heads])

    @cached_property
    def scatter_xt(self) -> Float[np.ndarray, "heads *batch d"]:
        """Scatter of x with t."""
        return np.stack([head.scatter_xt for head in self.heads])

    def times(self, vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        """Each row of ``vectors`` multiplied by the scatter of x; adjacent identical heads share one product."""
        *_, m, d = vectors.shape
        batch = np.broadcast_shapes(vectors.shape[:-2], self.n.shape)
        assert batch[0] == len(self.heads)
        rows = np.broadcast_to(vectors, (*(1,) * (len(batch) + 2 - vectors.ndim), *vectors.shape))
        products = np.empty((*batch, m, d))
        for start, stop in self._identical_heads:
            head_rows = rows[start:stop] if len(rows) > 1 else rows
            product = self.heads[start].times(np.concatenate(list(head_rows), -2))
            products[start:stop] = np.stack(np.split(product, len(head_rows), -2))
        return products

    @cached_property
    def _identical_heads(self) -> list[tuple[int, int]]:
        """Start and end of each range of adjacent heads that are the same object."""
        edges = [i for i in range(len(self.heads)) if i == 0 or self.heads[i] is not self.heads[i - 1]]
        return list(zip(edges, [*edges[1:], len(self.heads)], strict=True))

    @cached_property
    def halves(self) -> Moments:
        """Even and odd parts of the last batch axis, merged."""
        return MomentsBatch([head.halves for head in self.heads])

    @cached_property
    def total(self) -> Moments:
        """All parts of the last batch axis, merged."""
        return MomentsBatch([head.total for head in self.heads])

    def __getitem__(self, index: Any) -> Moments:
        """Index the batch axes; a slice of heads is not copied."""
        return MomentsBatch(self.heads[index]) if isinstance(index, slice) else super().__getitem__(index)
