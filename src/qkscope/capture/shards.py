"""Shards: fixed numbers of documents that are measured and saved together and, after a kill, measured again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from qkscope.capture.images import ImageInputs
from qkscope.capture.options import CaptureOptions
from qkscope.capture.sampling import Stretches, sample_tokens, vector_tokens

_DOCUMENTS = 8
"""Documents per shard on a CPU, and the minimum on a GPU."""
TOKENS = 2**22
"""Tokens per shard on a GPU, where saving the sums of a large model takes as long as many forward passes."""


@dataclass(frozen=True)
class Shard:
    """Consecutive documents of a run."""

    number: int
    examples: list[int]
    """Numbers of its documents in the run."""
    names: list[str]
    ids: list[np.ndarray]
    """Tokens of each document."""
    kept: list[np.ndarray]
    """Positions of each document whose vectors are kept."""
    window: int
    sampled: np.ndarray | None = None
    """The tokens of the run's sample, one number each, if this shard is the whole run."""
    images: dict[int, ImageInputs] = field(default_factory=dict)
    """What the model is called with, for each of its documents that has images, by number in the run."""

    def __str__(self) -> str:
        return f"documents {self.examples[0]} to {self.examples[-1]}"


def per_shard(options: CaptureOptions, longest: int, device: str) -> int:
    """Documents per shard: as requested, or chosen by the device and the longest document."""
    if options.documents_per_shard is not None:
        return options.documents_per_shard
    return _DOCUMENTS if device == "cpu" else max(_DOCUMENTS, TOKENS // longest)


def kept_tokens(documents: Sequence[Stretches], options: CaptureOptions) -> list[np.ndarray]:
    """Positions of each document whose vectors are kept, for the sample or for the dataset of vectors."""
    sampled = sample_tokens(documents, options.sample, options.seed, options.skip_first)
    sampling = options.vectors
    if sampling is None:
        return sampled
    chosen = [
        vector_tokens(example, stretches, sampling, options.skip_first) for example, stretches in enumerate(documents)
    ]
    return [np.union1d(*both) for both in zip(sampled, chosen, strict=True)]


_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemoryIn(Exception):
    """Out of memory in a batch of documents, given by their rows in the shard; no rows: in another step."""

    def __init__(self, rows: list[int], reason: str) -> None:
        self.rows, self.reason = rows, reason
        super().__init__(reason)


@contextmanager
def raise_out_of_memory(rows: list[int]) -> Iterator[None]:
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
