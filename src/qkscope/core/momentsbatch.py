"""Moments of several heads side by side, copied into one array only where that is asked for.

Most of what is made of a batch needs totals and halves. Each head has those once, and query heads that read one key
head share its.
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
        return self.heads[0].scatter[None] if len(self.heads) == 1 else np.stack([one.scatter for one in self.heads])

    @cached_property
    def diagonal(self) -> Float[np.ndarray, "heads *batch z"]:
        """Diagonals of the scatters."""
        return np.stack([head.diagonal for head in self.heads])

    @cached_property
    def scatter_xt(self) -> Float[np.ndarray, "heads *batch d"]:
        """Scatter of x with t."""
        return np.stack([head.scatter_xt for head in self.heads])

    def times(self, vectors: Float[np.ndarray, "*#batch m d"]) -> Float[np.ndarray, "*batch m d"]:
        """Each row of ``vectors`` multiplied by the scatter of x; heads that are one and the same take one product."""
        *_, m, d = vectors.shape
        batch = np.broadcast_shapes(vectors.shape[:-2], self.n.shape)
        assert batch[0] == len(self.heads)
        given = np.broadcast_to(vectors, (*(1,) * (len(batch) + 2 - vectors.ndim), *vectors.shape))
        found = np.empty((*batch, m, d))
        for start, stop in self._runs:
            some = given[start:stop] if len(given) > 1 else given
            side_by_side = np.concatenate(list(some), -2)
            product = self.heads[start].times(side_by_side)
            found[start:stop] = np.stack(np.split(product, len(some), -2))
        return found

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """Where neighbours that are one and the same head begin and end."""
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
        """Index the batch axes; a range of heads is not copied."""
        return MomentsBatch(self.heads[index]) if isinstance(index, slice) else super().__getitem__(index)
