"""Memory that runs out, told from other errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemoryIn(Exception):
    """Documents of a shard, by row, that together did not fit; none: what comes after them did not."""

    def __init__(self, rows: list[int], reason: str) -> None:
        self.rows, self.reason = rows, reason
        super().__init__(reason)


@contextmanager
def memory_told(rows: list[int]) -> Iterator[None]:
    """Raise ``OutOfMemoryIn`` where torch, in one of its ways, says that memory ran out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = " ".join(str(error).split())[:120]
        ours = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)
        if not ours:
            raise
        raise OutOfMemoryIn(rows, said or "no memory left") from None
