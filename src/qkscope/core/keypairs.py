"""Pairs of keys of the same document, drawn uniformly from the keys before a bucket of queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from qkscope.core.headmoments import N_GROUPS, bucket_width
from qkscope.core.rows import Rows, token_keys
from qkscope.core.sample import sampled_rows

MOST_PAIRS = 256
"""Largest number of pairs of keys per bucket."""
PAIR_ROWS = 4096
"""Largest number of sampled tokens that a capture draws pairs from."""


@dataclass(frozen=True)
class TokenPairs:
    """For each bucket of queries, pairs of earlier tokens of one document; buckets are padded to equal length."""

    example: Int[np.ndarray, "buckets pairs"]
    """Document of the pair; −1 is padding."""
    earlier: Int[np.ndarray, "buckets pairs"]
    """Position of the earlier token."""
    later: Int[np.ndarray, "buckets pairs"]
    """Position of the later token."""

    @property
    def real(self) -> Bool[np.ndarray, "buckets pairs"]:
        """True for pairs, False for padding."""
        return self.example >= 0

    def rows_in(
        self, example_id: Int[np.ndarray, "n"], position: Int[np.ndarray, "n"]
    ) -> tuple[Int[np.ndarray, "buckets pairs"], Int[np.ndarray, "buckets pairs"]]:
        """Indices of both tokens in rows sorted by document and position; a ``LookupError`` if one is missing."""
        row_tokens = token_keys(example_id, position)
        indices = []
        for pair_position in (self.earlier, self.later):
            tokens = token_keys(self.example, pair_position)
            index = np.minimum(np.searchsorted(row_tokens, tokens), max(len(row_tokens) - 1, 0))
            if (self.real & (row_tokens[index] != tokens if len(row_tokens) else True)).any():
                raise LookupError("a token of a pair of keys is not among the sampled ones")
            indices.append(np.where(self.real, index, 0))
        return indices[0], indices[1]


@dataclass(frozen=True)
class KeyPairs:
    """For each bucket of queries, pairs of earlier keys of the same document; buckets are padded to equal length."""

    delta: Float[np.ndarray, "buckets pairs d"]
    """The later key minus the earlier one."""
    weight: Float[np.ndarray, "buckets pairs"]
    """1 for a pair, 0 for padding."""
    group: Int[np.ndarray, "buckets pairs"]
    """Document group of the pair."""
    inter_key: Int[np.ndarray, "buckets pairs"]
    """Tokens between the two keys."""
    key_to_query: Int[np.ndarray, "buckets pairs"]
    """Tokens from the later key to the middle of the bucket."""

    @classmethod
    def of(cls, keys: Rows, pairs: TokenPairs, window: int) -> KeyPairs:
        """The keys of these tokens; ``keys`` must contain them and be sorted by document and position."""
        buckets = len(pairs.example)
        width = bucket_width(window, buckets)
        earlier, later = pairs.rows_in(keys.example_id, keys.position)
        x = keys.x.astype(np.float64)
        delta = x[later] - x[earlier]
        centre = np.arange(buckets) * width + (width - 1) // 2
        return cls(
            delta,
            (pairs.real & (delta != 0).any(-1)).astype(float),
            pairs.example % N_GROUPS,
            pairs.later - pairs.earlier,
            centre[:, None] - pairs.later,
        )

    @cached_property
    def square(self) -> Float[np.ndarray, "buckets d d"]:
        """Σ δδᵀ over the pairs of each bucket."""
        return (self.delta * self.weight[..., None]).swapaxes(-1, -2) @ self.delta

    @property
    def n(self) -> Int[np.ndarray, "buckets"]:
        """Pairs of each bucket."""
        return self.weight.sum(-1).astype(np.int64)


@dataclass(frozen=True)
class SampledKeys:
    """Sampled keys of a captured layer, and the pairs along whose differences its queries are measured."""

    keys: Float[np.ndarray, "n hk d"]
    pairs: TokenPairs
    rows: tuple[Int[np.ndarray, "buckets pairs"], Int[np.ndarray, "buckets pairs"]]
    """Indices of the earlier and of the later key of each pair."""
    read: list[int]
    """Index of the key head that each query head reads."""

    @classmethod
    def of(
        cls,
        example_id: Int[np.ndarray, "n"],
        position: Int[np.ndarray, "n"],
        keys: Float[np.ndarray, "n hk d"],
        window: int,
        buckets: int,
        sliding_window: int | None,
        read: list[int],
    ) -> SampledKeys:
        """Draw the pairs among the keys of the sampled tokens."""
        chosen = sampled_rows(example_id, position, PAIR_ROWS)
        example_id, position = example_id[chosen], position[chosen]
        pairs = token_pairs(example_id, position, window, buckets, sliding_window=sliding_window)
        return cls(keys[chosen], pairs, pairs.rows_in(example_id, position), read)


def key_pairs(
    keys: Rows, window: int, buckets: int, *, sliding_window: int | None = None, most: int = MOST_PAIRS, seed: int = 0
) -> KeyPairs:
    """Pairs drawn by ``token_pairs`` among these keys."""
    drawn = token_pairs(
        keys.example_id, keys.position, window, buckets, sliding_window=sliding_window, most=most, seed=seed
    )
    return KeyPairs.of(keys, drawn, window)


def token_pairs(
    example: Int[np.ndarray, "n"],
    position: Int[np.ndarray, "n"],
    window: int,
    buckets: int,
    *,
    sliding_window: int | None = None,
    most: int = MOST_PAIRS,
    seed: int = 0,
) -> TokenPairs:
    """Draw pairs uniformly for every bucket, without repetition; the same tokens give the same pairs.

    Tokens must be sorted by document and position. Both tokens of a pair are before the bucket and, in a layer with a
    sliding window, visible to the last query of the bucket.
    """
    order = _Documents(example, position)
    width = bucket_width(window, buckets)
    drawn = [
        order.draw(0 if sliding_window is None else (b + 1) * width - sliding_window, b * width, most, seed + b)
        for b in range(buckets)
    ]
    longest = max((len(first) for first, _ in drawn), default=0)
    earlier, later = (
        np.array([np.pad(pair[side], (0, longest - len(pair[side]))) for pair in drawn], dtype=np.int64)
        for side in (0, 1)
    )
    real = np.arange(longest) < np.array([len(pair[0]) for pair in drawn])[:, None]
    return TokenPairs(np.where(real, example[earlier], -1), position[earlier], position[later])


class _Documents:
    """Tokens sorted by document and position, to draw uniform pairs in a range of positions."""

    def __init__(self, example: Int[np.ndarray, "n"], position: Int[np.ndarray, "n"]) -> None:
        starts = np.r_[True, example[1:] != example[:-1]][: len(example)]
        document = np.cumsum(starts, dtype=np.int64) - 1
        self.stride = int(position.max(initial=0)) + 1
        self.token = document * self.stride + position
        """Increases along the tokens, by ``stride`` from document to document."""
        self.first = np.arange(np.count_nonzero(starts)) * self.stride

    def draw(self, low: int, high: int, most: int, seed: int) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
        """Indices of at most ``most`` pairs of tokens with low ≤ position < high, the earlier one first."""
        within_document = np.clip([low, high], 0, self.stride)
        bounds = np.searchsorted(self.token, self.first[:, None] + within_document)
        n = np.maximum(bounds[:, 1] - bounds[:, 0], 0)
        cumulative = np.cumsum(n * (n - 1) // 2)
        total = int(cumulative[-1]) if len(cumulative) else 0
        rank = np.sort(np.random.default_rng(seed).choice(total, min(most, total), replace=False))
        document = np.searchsorted(cumulative, rank, side="right")
        within = rank - np.r_[0, cumulative[:-1]][document] if total else rank
        later = _triangle(within)
        first = bounds[document, 0] if total else rank
        return first + within - later * (later - 1) // 2, first + later


def _triangle(rank: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """The index j of the rank-th pair (i, j), i < j, in the order 01, 02, 12, 03 and so on.

    >>> _triangle(np.arange(6)).tolist()
    [1, 2, 2, 3, 3, 3]
    """
    later = ((1 + np.sqrt(1 + 8.0 * rank)) / 2).astype(np.int64)
    later -= later * (later - 1) // 2 > rank
    return later + ((later + 1) * later // 2 <= rank)
