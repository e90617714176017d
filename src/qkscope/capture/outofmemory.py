"""Out-of-memory errors, distinguished from other errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qkscope.capture.shards import Shard

_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemoryIn(Exception):
    """Out of memory in a batch of documents, given by their rows in the shard; no rows: in another step."""

    def __init__(self, rows: list[int], reason: str) -> None:
        self.rows, self.reason = rows, reason
        super().__init__(reason)


@contextmanager
def memory_told(rows: list[int]) -> Iterator[None]:
    """Raise ``OutOfMemoryIn`` for any of the errors by which torch reports that memory ran out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        is_out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            message in str(error) for message in _MESSAGES
        )
        if not is_out_of_memory:
            raise
        raise OutOfMemoryIn(rows, reason or "no memory left") from None


def does_not_fit(shard: Shard, error: OutOfMemoryIn) -> str:
    """What did not fit into memory, and what to do about it."""
    if not error.rows:
        return f"out of memory while merging the sums of {shard} ({error.reason}); use fewer --documents-per-shard"
    row = error.rows[0]
    return (
        f"document {shard.examples[row]} ({shard.names[row]}, {len(shard.ids[row])} tokens) does not fit into memory "
        f"({error.reason}); try --prefill 2048 or a smaller --window, or use --keep-going to leave out such documents"
    )
