"""Documents of a shard side by side, as they go through the model, and which of their tokens count."""

from __future__ import annotations

import numpy as np
import torch

from qkscope.capture.shards import Shard
from qkscope.capture.sums.tokens import BatchTokens
from qkscope.core.headmoments import N_GROUPS


def padded(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Documents side by side, and which of it is tokens, where not all is."""
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, one in enumerate(rows):
        ids[row, : len(one)] = torch.from_numpy(one)
    if all(len(one) == length for one in rows):
        return ids, None
    return ids, torch.tensor([[1] * len(one) + [0] * (length - len(one)) for one in rows])


def batch_tokens(shard: Shard, rows: list[int], first: int, columns: int) -> BatchTokens:
    """The tokens of some documents in so many columns from a position on."""
    kept = [shard.kept[row] for row in rows]
    return BatchTokens(
        first=first,
        lengths=np.array([np.clip(len(shard.ids[row]) - first, 0, columns) for row in rows]),
        groups=np.array([shard.examples[row] for row in rows]) % N_GROUPS,
        kept=[part[(part >= first) & (part < first + columns)] - first for part in kept],
    )
