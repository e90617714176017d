"""Documents in shards of fixed size: what is measured, saved and, after a kill, done again as one."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from qkscope.capture.options import CaptureOptions
from qkscope.capture.tokensampling import sample_tokens, vector_tokens
from qkscope.errors import CaptureError

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


@dataclass(frozen=True)
class Share:
    """Which of several jobs this is, from 1."""

    job: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.job <= self.of:
            raise CaptureError(f"expected a share such as 2/8, the second of eight jobs; got '{self.job}/{self.of}'")

    @classmethod
    def parse(cls, text: str) -> Share:
        """From ``2/8``.

        >>> Share.parse("2/8")
        Share(job=2, of=8)
        """
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if found is None:
            raise CaptureError(f"expected a share such as 2/8, the second of eight jobs; got {text!r}")
        return cls(int(found[1]), int(found[2]))

    def shards(self, in_all: int) -> range:
        """The shards of this job: consecutive ones, as evenly as it goes."""
        if self.of > in_all:
            many = "one shard" if in_all == 1 else f"{in_all} shards"
            raise CaptureError(f"these documents make {many}, too few for {self.of} jobs; use {in_all} or fewer")
        return range((self.job - 1) * in_all // self.of, self.job * in_all // self.of)


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
