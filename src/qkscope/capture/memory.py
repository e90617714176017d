"""Memory that runs out, told from other errors."""

from __future__ import annotations

import torch

_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


class OutOfMemoryIn(Exception):
    """Documents that, together, did not fit."""

    def __init__(self, rows: list[int], reason: str) -> None:
        self.rows, self.reason = rows, reason
        super().__init__(reason)


def out_of_memory(error: Exception) -> str | None:
    """What torch says of it, in one of its ways; None where it is another error."""
    said = " ".join(str(error).split())[:120]
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return said or "no memory left"
    return said if any(words in str(error) for words in _WORDS) else None
