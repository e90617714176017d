"""Documents in shards of fixed size: what is measured, saved and, after a kill, done again as one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qkscope.capture.options import CaptureOptions
from qkscope.capture.tokensampling import sample_tokens, vector_tokens

_DOCUMENTS = 8
"""Documents per shard on a CPU, and at least so many."""
TOKENS = 2**22
"""Tokens per shard on a GPU, where keeping the sums of a large model costs as much as many forward passes."""


@dataclass(frozen=True)
class Shard:
    """Some consecutive documents of a run."""

    number: int
    examples: list[int]
    """Their numbers in the run."""
    names: list[str]
    ids: list[np.ndarray]
    """Their tokens."""
    kept: list[np.ndarray]
    """Positions of each whose vectors are kept."""
    window: int

    def __str__(self) -> str:
        return f"documents {self.examples[0]} to {self.examples[-1]}"


def per_shard(options: CaptureOptions, longest: int, device: str) -> int:
    """Documents per shard: as asked, or by the device and the longest document."""
    if options.documents_per_shard is not None:
        return options.documents_per_shard
    return _DOCUMENTS if device == "cpu" else max(_DOCUMENTS, TOKENS // longest)


def kept_tokens(lengths: list[int], options: CaptureOptions) -> list[np.ndarray]:
    """Positions of each document whose vectors are kept: those of the sample and of the dataset."""
    sampled = sample_tokens(lengths, options.sample, options.seed, options.skip_first)
    sampling = options.vectors
    if sampling is None:
        return sampled
    chosen = [vector_tokens(example, length, sampling, options.skip_first) for example, length in enumerate(lengths)]
    return [np.union1d(*both) for both in zip(sampled, chosen, strict=True)]
