"""The stored statistics of a layer: moments of all heads by document group and position bucket."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from qkscope.core.bucketspread import StoredSpread
from qkscope.core.headmoments import BucketMeans, HeadMoments
from qkscope.core.linalg import ratio
from qkscope.core.moments import Moments
from qkscope.core.rope import HeadRotary, Rope, UndoneSums

UNDONE_COV = "undone-cov"
"""Value of ``--keep`` that stores the covariance of queries before the rotation."""


SUMMED = ("sizes_q", "sizes_k", "reach", "entropy", "repeats")
"""Sums that a part may lack; merging parts adds them up, and a layer file stores each under its name."""
LARGEST = ("max_logit",)
"""Maxima that a part may lack; merging parts takes the larger, and a layer file stores each under its name."""


@dataclass(frozen=True)
class LayerMoments:
    """Moments of the query and key heads of one layer; they merge over documents."""

    q: Moments
    """Queries by document group (Hq, 8)."""
    k: Moments
    """Keys by document group (Hkv, 8)."""
    q_buckets: Moments | None
    """Queries by position bucket (Hq, buckets) during the capture; None in a finished run."""
    q_cells: BucketMeans
    """Query means by document group and position bucket (Hq, 8, buckets)."""
    k_cells: BucketMeans
    """Key means by document group and position bucket (Hkv, 8, buckets)."""
    unrotated_q: Float[np.ndarray, "hq 8 planes 2"]
    """Σ over tokens of the queries with their rotation undone, as (real, imaginary); no planes without rotary."""
    unrotated_k: Float[np.ndarray, "hkv 8 planes 2"]
    """As ``unrotated_q``, for the keys."""
    temperature: Float[np.ndarray, "2 positions"]
    """If queries are scaled by a factor that depends on position: its sum and count at each position; else empty."""
    sizes_q: Float[np.ndarray, "hq 8 planes"] | None = None
    """Σ over tokens of the lengths of the queries in each plane; None in runs that did not sum them."""
    sizes_k: Float[np.ndarray, "hkv 8 planes"] | None = None
    """As ``sizes_q``, for the keys."""
    reach: Float[np.ndarray, "hq 8 columns"] | None = None
    """Attention weights of some queries by distance, as in reach.py; None in runs that did not sum them."""
    entropy: Float[np.ndarray, "hq 8"] | None = None
    """Σ over the queries of ``reach`` of the entropy of their attention, in nats."""
    max_logit: Float[np.ndarray, "hq"] | None = None
    """Largest score of these queries, before the softmax; ``LOWEST`` where there are none."""
    repeats: Float[np.ndarray, "hq 8 counts"] | None = None
    """Attention on random tokens that come twice, by draw: REPEAT_COUNTS of reach.py."""
    spread: StoredSpread | None = None
    """The part of ``q_buckets`` that a finished run stores; None if it was not loaded."""
    undone: Moments | None = None
    """Queries with their rotation undone (Hq); None without rotary, if not requested at capture, or not loaded."""

    def merge(self, other: LayerMoments) -> LayerMoments:
        """The moments of both sets of documents."""
        optional: dict[str, Any] = {
            name: _merged(getattr(self, name), getattr(other, name), np.maximum if name in LARGEST else np.add)
            for name in (*SUMMED, *LARGEST)
        }
        return LayerMoments(
            self.q.merge(other.q),
            self.k.merge(other.k),
            None if self.q_buckets is None or other.q_buckets is None else self.q_buckets.merge(other.q_buckets),
            self.q_cells.merge(other.q_cells),
            self.k_cells.merge(other.k_cells),
            self.unrotated_q + other.unrotated_q,
            self.unrotated_k + other.unrotated_k,
            self.temperature + other.temperature,
            **optional,
            undone=None if self.undone is None or other.undone is None else self.undone.merge(other.undone),
        )

    def rotary(self, query: int, key: int, rope: Rope) -> HeadRotary:
        """The sums, with the rotation undone, of one query head and the key head it reads."""
        q, k = (
            UndoneSums(sums[i, ..., 0] + 1j * sums[i, ..., 1], n, None if sizes is None else sizes[i])
            for sums, i, n, sizes in (
                (self.unrotated_q, query, self.q[query].n, self.sizes_q),
                (self.unrotated_k, key, self._keys[key].n, self.sizes_k),
            )
        )
        has_temperature = self.temperature.shape[-1] > 0
        temperature = ratio(self.temperature[0], self.temperature[1]) if has_temperature else None
        return HeadRotary(rope, q, k, temperature)

    def head(self, query: int, key: int, window: int, scaling: float) -> HeadMoments:
        """The statistics of one query head and the key head it reads."""
        return HeadMoments(
            q=self.q[query],
            k=self._keys[key],
            k_cells=self.k_cells[key],
            window=np.asarray(window),
            scaling=np.asarray(scaling),
            dropped_q=np.asarray(0),
            dropped_k=np.asarray(0),
            repeated_q=np.asarray(0),
            repeated_k=np.asarray(0),
            q_cells=self.q_cells[query],
        )

    @cached_property
    def _keys(self) -> list[Moments]:
        """Keys of each head: query heads that read the same key head share its cached results."""
        return [self.k[key] for key in range(len(self.k.n))]


def _merged(
    left: Float[np.ndarray, "..."] | None, right: Float[np.ndarray, "..."] | None, how: np.ufunc
) -> Float[np.ndarray, "..."] | None:
    return None if left is None or right is None else how(left, right)
