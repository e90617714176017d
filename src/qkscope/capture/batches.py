"""Documents of a shard as a padded batch, and which of its tokens count."""

from __future__ import annotations

import numpy as np
import torch

from qkscope.capture.shards import Shard
from qkscope.capture.sums.tokens import BatchTokens
from qkscope.core.headmoments import N_GROUPS


def padded(documents: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids of documents, padded to one length, and the attention mask if any are padded."""
    length = max(map(len, documents))
    ids = torch.zeros(len(documents), length, dtype=torch.int64)
    for number, document in enumerate(documents):
        ids[number, : len(document)] = torch.from_numpy(document)
    if all(len(document) == length for document in documents):
        return ids, None
    return ids, torch.tensor([[1] * len(document) + [0] * (length - len(document)) for document in documents])


def batch_tokens(shard: Shard, rows: list[int], first: int, columns: int) -> BatchTokens:
    """The tokens of these documents of a shard at ``columns`` positions from ``first`` on."""
    kept = [shard.kept[row] for row in rows]
    return BatchTokens(
        first=first,
        lengths=np.array([np.clip(len(shard.ids[row]) - first, 0, columns) for row in rows]),
        groups=np.array([shard.examples[row] for row in rows]) % N_GROUPS,
        kept=[part[(part >= first) & (part < first + columns)] - first for part in kept],
    )
