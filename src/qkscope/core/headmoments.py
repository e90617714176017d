"""Statistics of a head: moments by document group and by position bucket, means by group and bucket.

Documents are divided into 8 groups (example_id mod 8), which the jackknife deletes one at a time.
Positions are divided into 16 equal buckets over the window. A group and a bucket together are a cell.
All statistics can be merged and batched over heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse

from qkscope.core.leaveoneout import LeaveOneOut, PooledLeaveOneOut
from qkscope.core.linalg import ratio
from qkscope.core.moments import Moments
from qkscope.core.momentsbatch import MomentsBatch
from qkscope.core.rope import Rope, UndoneSums
from qkscope.core.rows import Rows, token_keys
from qkscope.options import N_BUCKETS

N_GROUPS = 8
DELETE_ONE = 1.0 - np.eye(N_GROUPS)
ALL_AND_WITHOUT = np.vstack([np.ones(N_GROUPS), DELETE_ONE])
"""Weights of the document groups: first all of them, then each one left out."""
HALVES = np.stack([np.arange(N_GROUPS) % 2 == 0, np.arange(N_GROUPS) % 2 == 1]).astype(float)
"""Even and odd groups."""


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

    def merged(self, weights: Float[np.ndarray, "... groups"] | None = None) -> BucketMeans:
        """Cells (…, groups, buckets) merged over the groups; ``weights`` (…, groups) of 0 and 1 choose them."""
        chosen = np.ones(self.n.shape[-2]) if weights is None else weights
        n = np.einsum("xg,...gb->...xb", np.atleast_2d(chosen), self.n)
        share = ratio(np.atleast_2d(chosen)[:, :, None] * self.n[..., None, :, :], n[..., None, :])
        mean_x = np.einsum("...xgb,...gbd->...xbd", share, self.mean_x)
        mean_t = np.einsum("...xgb,...gb->...xb", share, self.mean_t)
        if chosen.ndim > 1:
            return BucketMeans(n, mean_x, mean_t)
        return BucketMeans(n[..., 0, :], mean_x[..., 0, :, :], mean_t[..., 0, :])

    @classmethod
    def stack(cls, parts: Sequence[BucketMeans]) -> BucketMeans:
        """Put equally shaped means side by side along a new first axis."""
        return cls(*(np.stack([getattr(means, name) for means in parts]) for name in ("n", "mean_x", "mean_t")))

    def __getitem__(self, index: Any) -> BucketMeans:
        """Index the batch axes."""
        return BucketMeans(*(np.asarray(array[index]) for array in (self.n, self.mean_x, self.mean_t)))


@dataclass(frozen=True)
class HeadMoments:
    """Sufficient statistics of one query head and the key head it reads, or of a batch of such pairs."""

    q: Moments
    """Queries by document group (…, 8)."""
    k: Moments
    """Keys by document group (…, 8)."""
    k_cells: BucketMeans
    """Key means by document group and position bucket (…, 8, 16)."""
    window: Int[np.ndarray, "*batch"]
    """Context length of the capture, in tokens."""
    scaling: Float[np.ndarray, "*batch"]
    """The factor on q·k before the softmax."""
    dropped_q: Int[np.ndarray, "*batch"]
    """Non-finite query rows left out."""
    dropped_k: Int[np.ndarray, "*batch"]
    """Non-finite key rows left out."""
    repeated_q: Int[np.ndarray, "*batch"]
    """Query rows whose token occurs in an earlier row too."""
    repeated_k: Int[np.ndarray, "*batch"]
    """Key rows whose token occurs in an earlier row too."""
    cross: Moments | None = None
    """Moments of (q, k) at the same token by document group (…, 8), for ``pairing="token"``."""
    q_cells: BucketMeans | None = None
    """Query means by document group and position bucket (…, 8, 16), for plasticity."""

    @classmethod
    def stack(cls, heads: Sequence[HeadMoments]) -> HeadMoments:
        """Several heads side by side along a new first axis; optional parts are None unless all heads have them."""
        cross = [h.cross for h in heads if h.cross is not None]
        q_cells = [h.q_cells for h in heads if h.q_cells is not None]
        return cls(
            q=MomentsBatch([h.q for h in heads]),
            k=MomentsBatch([h.k for h in heads]),
            k_cells=BucketMeans.stack([h.k_cells for h in heads]),
            window=np.stack([h.window for h in heads]),
            scaling=np.stack([h.scaling for h in heads]),
            dropped_q=np.stack([h.dropped_q for h in heads]),
            dropped_k=np.stack([h.dropped_k for h in heads]),
            repeated_q=np.stack([h.repeated_q for h in heads]),
            repeated_k=np.stack([h.repeated_k for h in heads]),
            cross=Moments.stack(cross) if len(cross) == len(heads) else None,
            q_cells=BucketMeans.stack(q_cells) if len(q_cells) == len(heads) else None,
        )

    def batches(self, count: int) -> Iterator[tuple[slice, HeadMoments]]:
        """Yield consecutive slices of at most ``count`` heads, with their moments."""
        for start in range(0, len(self.window), count):
            span = slice(start, start + count)
            values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
            chosen: dict[str, Any] = {name: None if value is None else value[span] for name, value in values.items()}
            yield span, HeadMoments(**chosen)

    @property
    def d(self) -> int:
        """Head dimension."""
        return self.q.d

    @cached_property
    def k_buckets(self) -> BucketMeans:
        """Key means by position bucket (…, 16)."""
        return self.k_cells.merged()

    @property
    def halves_q(self) -> Moments:
        """Queries of the even and of the odd document groups (…, 2)."""
        return self.q.halves

    @property
    def halves_k(self) -> Moments:
        """Keys of the even and of the odd document groups (…, 2)."""
        return self.k.halves

    @property
    def total_q(self) -> Moments:
        """Queries of all documents."""
        return self.q.total

    @property
    def total_k(self) -> Moments:
        """Keys of all documents."""
        return self.k.total

    @cached_property
    def leave_one_out_q(self) -> LeaveOneOut:
        """Queries with each document group left out in turn (…, 8)."""
        return LeaveOneOut(self.q, self.total_q)

    @cached_property
    def leave_one_out_k(self) -> LeaveOneOut:
        """Keys with each document group left out in turn (…, 8)."""
        return LeaveOneOut(self.k, self.total_k)

    @cached_property
    def pooled(self) -> Moments:
        """Queries and keys of all documents together."""
        return self.total_q.merge(self.total_k)

    @cached_property
    def pooled_leave_one_out(self) -> PooledLeaveOneOut:
        """Queries and keys together with each document group left out in turn (…, 8)."""
        return PooledLeaveOneOut(self.leave_one_out_q, self.leave_one_out_k)

    @property
    def groups_present(self) -> Float[np.ndarray, "*batch 8"]:
        """1 for each document group that has rows, else 0."""
        return ((self.q.n > 0) | (self.k.n > 0)).astype(float)

    @property
    def n_groups(self) -> Int[np.ndarray, "*batch"]:
        """Number of document groups with rows; the smallest over queries, keys and (if present) pairs."""
        classes = [self.q, self.k] + ([] if self.cross is None else [self.cross])
        return np.asarray(np.min([(moments.n > 0).sum(-1) for moments in classes], axis=0))


def group_moments(rows: Rows) -> Moments:
    """Moments of the rows in each document group (8,)."""
    group = rows.example_id % N_GROUPS
    return Moments.stack(
        Moments.from_rows(rows.x[chosen], rows.position[chosen])
        for chosen in (np.flatnonzero(group == g) for g in range(N_GROUPS))
    )


def undone_sums(rows: Rows, rope: Rope) -> UndoneSums:
    """Sums over the rows of each document group with their rotation undone."""
    undone, group = rope.unrotated(rows.x, rows.position), rows.example_id % N_GROUPS
    total, size = (np.stack([part[group == g].sum(0) for g in range(N_GROUPS)]) for part in (undone, np.abs(undone)))
    return UndoneSums(total, np.bincount(group, minlength=N_GROUPS).astype(float), size)


def bucket_width(window: int, buckets: int = N_BUCKETS) -> int:
    """Positions per bucket.

    >>> bucket_width(4096), bucket_width(100)
    (256, 7)
    """
    return -(-window // buckets)


def bucket_of(position: Int[np.ndarray, "n"], window: int, buckets: int = N_BUCKETS) -> Int[np.ndarray, "n"]:
    """The bucket of each position: equal widths over the window, except that the last may be shorter."""
    return np.clip(position // bucket_width(window, buckets), 0, buckets - 1)


def cell_means(rows: Rows, window: int, buckets: int = N_BUCKETS) -> BucketMeans:
    """Means of the rows of each document group in each position bucket (8, buckets)."""
    cell = (rows.example_id % N_GROUPS) * buckets + bucket_of(rows.position, window, buckets)
    n = np.bincount(cell, minlength=N_GROUPS * buckets).astype(float)
    weight = 1.0 / n[cell]
    means = sparse.csr_array((weight, (cell, np.arange(len(cell)))), shape=(len(n), len(cell)))
    return BucketMeans(
        n.reshape(N_GROUPS, buckets),
        (means @ rows.x).reshape(N_GROUPS, buckets, rows.d),
        (means @ rows.position).reshape(N_GROUPS, buckets),
    )


def bucket_moments(rows: Rows, window: int, buckets: int = N_BUCKETS) -> Moments:
    """Moments of the rows in each position bucket (buckets,)."""
    bucket = bucket_of(rows.position, window, buckets)
    return Moments.stack(
        Moments.from_rows(rows.x[chosen], rows.position[chosen])
        for chosen in (np.flatnonzero(bucket == b) for b in range(buckets))
    )


def cross_moments(q: Rows, k: Rows) -> Moments:
    """Moments of (q, k) stacked into one vector of length 2d, over their common tokens, by document group (8,)."""
    keys_q, keys_k = (token_keys(rows.example_id, rows.position) for rows in (q, k))
    _, in_q, in_k = np.intersect1d(keys_q, keys_k, return_indices=True)
    stacked = Rows(np.concatenate([q.x[in_q], k.x[in_k]], axis=-1), q.position[in_q], q.example_id[in_q])
    return group_moments(stacked)
