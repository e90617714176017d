"""Shards: fixed numbers of documents that are measured and saved together and, after a kill, measured again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qkscope.capture.imageinputs import ImageInputs
from qkscope.capture.options import CaptureOptions
from qkscope.capture.tokensampling import Stretches, sample_tokens, vector_tokens

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
