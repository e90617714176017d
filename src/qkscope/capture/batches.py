"""Documents of a shard as a padded batch, and which of its tokens count."""

from __future__ import annotations

import numpy as np
import torch

from qkscope.capture.options import CaptureOptions
from qkscope.capture.shards import Shard
from qkscope.capture.sums.tokens import BatchTokens
from qkscope.core.headmoments import N_GROUPS
from qkscope.core.reach import query_positions


def padded(documents: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids of documents, padded to one length, and the attention mask if any are padded."""
    length = max(map(len, documents))
    ids = torch.zeros(len(documents), length, dtype=torch.int64)
    for number, document in enumerate(documents):
        ids[number, : len(document)] = torch.from_numpy(document)
    if all(len(document) == length for document in documents):
        return ids, None
    return ids, torch.tensor([[1] * len(document) + [0] * (length - len(document)) for document in documents])


def batch_tokens(shard: Shard, rows: list[int], first: int, columns: int, options: CaptureOptions) -> BatchTokens:
    """The tokens of these documents of a shard at ``columns`` positions from ``first`` on."""

    def within(chosen: list[np.ndarray]) -> list[np.ndarray]:
        return [part[(part >= first) & (part < first + columns)] - first for part in chosen]

    return BatchTokens(
        first=first,
        lengths=np.array([np.clip(len(shard.ids[row]) - first, 0, columns) for row in rows]),
        groups=np.array([shard.examples[row] for row in rows]) % N_GROUPS,
        kept=within([shard.kept[row] for row in rows]),
        queries=within(
            [query_positions(len(shard.ids[row]), options.reach_queries, options.skip_first) for row in rows]
        ),
    )
