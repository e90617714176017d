"""The tokens whose vectors are kept: a fixed-size sample of the run, or the published samplers for a dataset."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from qkscope.capture.options import VectorSampling
from qkscope.core.rows import token_keys
from qkscope.core.sample import priority


def sample_tokens(lengths: list[int], size: int, seed: int, skip_first: int) -> list[np.ndarray]:
    """Positions of each document whose tokens are among the ``size`` of lowest priority in the whole run."""
    return _sampled(tuple(lengths), size, seed, skip_first)


def numbered_tokens(tokens: list[np.ndarray]) -> np.ndarray:
    """Positions of each document as one number per token (``token_keys``)."""
    return np.concatenate([token_keys(np.full(len(part), number), part) for number, part in enumerate(tokens)])


@lru_cache(maxsize=2)  # those to keep, and those of the finished run's sample
def _sampled(lengths: tuple[int, ...], size: int, seed: int, skip_first: int) -> list[np.ndarray]:
    example = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)])
    position = np.concatenate([np.arange(n) for n in lengths])
    counted = np.flatnonzero(position >= skip_first)
    keys = priority(example[counted], position[counted], seed)
    chosen = np.sort(counted[np.lexsort([position[counted], example[counted], keys])[:size]])
    ends = np.cumsum(np.bincount(example[chosen], minlength=len(lengths)))
    return np.split(position[chosen], ends[:-1])


def vector_tokens(example: int, length: int, sampling: VectorSampling, skip_first: int) -> np.ndarray:
    """Positions of one document whose vectors go into a dataset."""
    position = np.arange(skip_first, length)
    if sampling.sampler == "all" or not len(position):
        return position
    draw = priority(np.full(len(position), example), position, sampling.seed + 1) / 2.0**64
    probability = np.full(len(position), sampling.rate)
    if sampling.sampler == "log_uniform":
        weight = 1.0 / (position + 1)
        probability = np.minimum(1.0, sampling.rate * len(position) * weight / weight.sum())
    return position[draw < probability]
