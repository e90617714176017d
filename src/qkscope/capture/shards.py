"""Shards: fixed numbers of documents that are measured and saved together and, after a kill, repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from qkscope.capture.images import ImageInputs
from qkscope.capture.options import CaptureOptions
from qkscope.capture.sampling import TextSpans, sample_tokens, vector_tokens

_DOCUMENTS = 8
"""Documents per shard, at least."""
TOKENS_PER_SHARD = {"cpu": 2**14, "cuda": 2**22}
"""Tokens per shard: saving the sums of a large model takes as long as many forward passes, above all on a GPU."""
_TOKENS_PER_PASS = {"cpu": 2**12, "cuda": 2**14}
"""Tokens of short documents in one forward pass: more would not make it faster."""
_SQUARE = 2**26
"""Tokens times the length of the longest document in one forward pass, at most: a model may form all scores."""


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
    """The inputs of the model for each document with images, by number in the run."""
    nested: tuple[Shard, ...] = ()
    """The same documents cut to shorter windows, which are measured in the same passes."""

    def __str__(self) -> str:
        return f"documents {self.examples[0]} to {self.examples[-1]}"


def per_shard(options: CaptureOptions, longest: int, device: str) -> int:
    """Return the documents per shard: as requested, or by the device and the longest document."""
    if options.documents_per_shard is not None:
        return options.documents_per_shard
    return max(_DOCUMENTS, TOKENS_PER_SHARD["cpu" if device == "cpu" else "cuda"] // longest)


def in_passes(lengths: Sequence[int], batch: int | None, device: str) -> list[list[int]]:
    """Return the documents of each forward pass, by index; without a size, those of about one length together."""
    order = list(range(len(lengths)))
    if batch is not None:
        return [order[first : first + batch] for first in range(0, len(order), batch)]
    together: list[list[int]] = []
    for index in sorted(order, key=lambda index: lengths[index]):
        longest = lengths[index]
        others = together[-1] if together else []
        if others and len(others) < documents_at_once(longest, device) and 2 * lengths[others[0]] >= longest:
            others.append(index)
        else:
            together.append([index])
    return together


def documents_at_once(length: int, device: str) -> int:
    """Return how many documents of this length go through the model in one pass."""
    tokens = _TOKENS_PER_PASS["cpu" if device == "cpu" else "cuda"]
    return max(1, min(tokens // length, _SQUARE // length**2))


def kept_tokens(documents: Sequence[TextSpans], options: CaptureOptions) -> list[np.ndarray]:
    """Return the positions of each document whose vectors are kept, for the sample or the dataset of vectors."""
    sampled = sample_tokens(documents, options.sample, options.seed, options.skip_first)
    sampling = options.vectors
    if sampling is None:
        return sampled
    chosen = [
        vector_tokens(example, text_spans, sampling, options.skip_first) for example, text_spans in enumerate(documents)
    ]
    return [np.union1d(*positions) for positions in zip(sampled, chosen, strict=True)]


_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemoryIn(Exception):
    """Out of memory in a batch of documents, given by their rows in the shard; no rows: in another step."""

    def __init__(self, rows: list[int], reason: str) -> None:
        self.rows, self.reason = rows, reason
        super().__init__(reason)


@contextmanager
def raise_out_of_memory(rows: list[int]) -> Iterator[None]:
    """Raise ``OutOfMemoryIn`` for any error with which torch reports that memory ran out."""
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
    """Return a message on what did not fit into memory and what to do."""
    if not error.rows:
        return f"out of memory while merging the sums of {shard} ({error.reason}); use fewer --documents-per-shard"
    row = error.rows[0]
    return (
        f"document {shard.examples[row]} ({shard.names[row]}, {len(shard.ids[row])} tokens) does not fit into memory "
        f"({error.reason}); try --prefill 2048 or a smaller --window, or use --keep-going to leave out such documents"
    )
