"""What the moment-based analyses see of a head: moments by document group, key means by position bucket.

Documents fall into 8 groups (example_id mod 8), which is what the jackknife deletes one at a time.
Positions fall into 16 equal buckets over the window. Both merge, and both batch over heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from qkscope.core.linalg import ratio
from qkscope.core.moments import Moments
from qkscope.core.rows import Rows

N_GROUPS = 8
N_BUCKETS = 16
DELETE_ONE = 1.0 - np.eye(N_GROUPS)


@dataclass(frozen=True)
class BucketMeans:
    """Count, mean vector and mean position of the rows in each position bucket (last batch axis)."""

    n: Float[np.ndarray, "*batch buckets"]
    mean_x: Float[np.ndarray, "*batch buckets d"]
    mean_t: Float[np.ndarray, "*batch buckets"]

    def merge(self, other: BucketMeans) -> BucketMeans:
        """The means of both sets of rows."""
        n = self.n + other.n
        share = ratio(other.n, n)
        mean_x = self.mean_x + share[..., None] * (other.mean_x - self.mean_x)
        return BucketMeans(n, mean_x, self.mean_t + share * (other.mean_t - self.mean_t))


@dataclass(frozen=True)
class HeadMoments:
    """Sufficient statistics of one query head and the key head it reads, or of a batch of such pairs."""

    q: Moments
    """Queries by document group (…, 8)."""
    k: Moments
    """Keys by document group (…, 8)."""
    k_buckets: BucketMeans
    """Key means by position bucket (…, 16)."""
    window: Int[np.ndarray, "*batch"]
    """Context length of the capture, in tokens."""
    scaling: Float[np.ndarray, "*batch"]
    """What the model multiplies q·k by before the softmax."""
    dropped_q: Int[np.ndarray, "*batch"]
    """Non-finite query rows left out."""
    dropped_k: Int[np.ndarray, "*batch"]
    """Non-finite key rows left out."""
    cross: Moments | None = None
    """Moments of (q, k) at the same token by document group (…, 8), for ``pairing="token"``."""

    @classmethod
    def stack(cls, heads: Sequence[HeadMoments]) -> HeadMoments:
        """Several heads side by side along a new first axis; all with ``cross``, or none."""
        cross = [h.cross for h in heads if h.cross is not None]
        if cross and len(cross) != len(heads):
            raise ValueError("expected all heads with cross moments or none")
        buckets = [h.k_buckets for h in heads]
        return cls(
            q=Moments.stack(h.q for h in heads),
            k=Moments.stack(h.k for h in heads),
            k_buckets=BucketMeans(
                np.stack([b.n for b in buckets]),
                np.stack([b.mean_x for b in buckets]),
                np.stack([b.mean_t for b in buckets]),
            ),
            window=np.stack([h.window for h in heads]),
            scaling=np.stack([h.scaling for h in heads]),
            dropped_q=np.stack([h.dropped_q for h in heads]),
            dropped_k=np.stack([h.dropped_k for h in heads]),
            cross=Moments.stack(cross) if cross else None,
        )

    @property
    def d(self) -> int:
        """Head dimension."""
        return self.q.d

    @cached_property
    def total_q(self) -> Moments:
        """Queries of all documents."""
        return self.q.merged()

    @cached_property
    def total_k(self) -> Moments:
        """Keys of all documents."""
        return self.k.merged()

    @cached_property
    def without_q(self) -> Moments:
        """Queries with each document group left out in turn (…, 8)."""
        return self.q.merged(DELETE_ONE)

    @cached_property
    def without_k(self) -> Moments:
        """Keys with each document group left out in turn (…, 8)."""
        return self.k.merged(DELETE_ONE)

    @property
    def groups_present(self) -> Float[np.ndarray, "*batch 8"]:
        """1 for each document group that has rows, 0 for the others."""
        return ((self.q.n > 0) | (self.k.n > 0)).astype(float)

    @property
    def n_groups(self) -> Int[np.ndarray, "*batch"]:
        """Document groups with rows, of the class (or the pairs) that has fewest."""
        parts = [self.q, self.k] + ([] if self.cross is None else [self.cross])
        return np.min([(part.n > 0).sum(-1) for part in parts], axis=0)


def group_moments(rows: Rows) -> Moments:
    """Moments of the rows in each document group (8,)."""
    group = rows.example_id % N_GROUPS
    return Moments.stack(
        Moments.from_rows(rows.x[chosen], rows.position[chosen])
        for chosen in (np.flatnonzero(group == g) for g in range(N_GROUPS))
    )


def bucket_width(window: int, buckets: int = N_BUCKETS) -> int:
    """Positions per bucket.

    >>> bucket_width(4096), bucket_width(100)
    (256, 7)
    """
    return -(-window // buckets)


def bucket_means(rows: Rows, window: int) -> BucketMeans:
    """Means of the rows in each of 16 position buckets of equal width over the window (the last may be shorter)."""
    bucket = np.clip(rows.position // bucket_width(window), 0, N_BUCKETS - 1)
    member = (bucket == np.arange(N_BUCKETS)[:, None]).astype(float)
    n = member.sum(-1)
    per_row = member / np.maximum(n, 1.0)[:, None]
    return BucketMeans(n, per_row @ rows.x, per_row @ rows.position)


def cross_moments(q: Rows, k: Rows) -> Moments:
    """Moments of (q, k) stacked into one vector of 2d, over the tokens both have, by document group (8,)."""
    keys_q, keys_k = _token_keys(q), _token_keys(k)
    _, in_q, in_k = np.intersect1d(keys_q, keys_k, return_indices=True)
    both = Rows(np.concatenate([q.x[in_q], k.x[in_k]], axis=-1), q.position[in_q], q.example_id[in_q])
    return group_moments(both)


def _token_keys(rows: Rows) -> Int[np.ndarray, "n"]:
    """One integer per (example_id, position); both are 32-bit in the dataset format."""
    return (rows.example_id.astype(np.int64) << 32) + rows.position
