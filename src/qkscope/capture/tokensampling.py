"""The tokens whose vectors are kept: a fixed-size sample of the run, or the published samplers for a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from qkscope.capture.options import VectorSampling
from qkscope.core.rows import token_keys
from qkscope.core.sample import priority

Stretches = tuple[tuple[int, int], ...]
"""Positions of the tokens of a document: the first of each stretch of consecutive ones, and the one after its last."""


def positions_of(document: Mapping[str, Any]) -> Stretches:
    """Positions of the tokens of a document in a manifest: from 0 on, unless images lie between them.

    >>> positions_of({"tokens": 5}), positions_of({"tokens": 5, "positions": [[0, 3], [9, 11]]})
    (((0, 5),), ((0, 3), (9, 11)))
    """
    stretches = document.get("positions")
    return ((0, int(document["tokens"])),) if stretches is None else tuple((int(a), int(b)) for a, b in stretches)


def sample_tokens(documents: Sequence[Stretches], size: int, seed: int, skip_first: int) -> list[np.ndarray]:
    """Positions of each document whose tokens are among the ``size`` of lowest priority in the whole run."""
    return _sampled(tuple(documents), size, seed, skip_first)


def numbered_tokens(tokens: list[np.ndarray]) -> np.ndarray:
    """Positions of each document as one number per token (``token_keys``)."""
    return np.concatenate([token_keys(np.full(len(part), number), part) for number, part in enumerate(tokens)])


@lru_cache(maxsize=2)  # those to keep, and those of the finished run's sample
def _sampled(documents: tuple[Stretches, ...], size: int, seed: int, skip_first: int) -> list[np.ndarray]:
    positions = [_all(stretches) for stretches in documents]
    example = np.concatenate([np.full(len(part), i) for i, part in enumerate(positions)])
    position = np.concatenate(positions)
    counted = np.flatnonzero(position >= skip_first)
    keys = priority(example[counted], position[counted], seed)
    chosen = np.sort(counted[np.lexsort([position[counted], example[counted], keys])[:size]])
    ends = np.cumsum(np.bincount(example[chosen], minlength=len(documents)))
    return np.split(position[chosen], ends[:-1])


def _all(stretches: Stretches) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(first, end) for first, end in stretches)])


def vector_tokens(example: int, stretches: Stretches, sampling: VectorSampling, skip_first: int) -> np.ndarray:
    """Positions of one document whose vectors go into a dataset."""
    position = _all(stretches)
    position = position[position >= skip_first]
    if sampling.sampler == "all" or not len(position):
        return position
    draw = priority(np.full(len(position), example), position, sampling.seed + 1) / 2.0**64
    probability = np.full(len(position), sampling.rate)
    if sampling.sampler == "log_uniform":
        weight = 1.0 / (position + 1)
        probability = np.minimum(1.0, sampling.rate * len(position) * weight / weight.sum())
    return position[draw < probability]
