"""The spread of the queries of each position bucket along differences of keys, which is what plasticity needs.

A covariance per bucket would take two thirds of a captured run. Only its variances δᵀΣ_bδ are used: along a few hundred
differences of keys and, for the published model, along the axes of a basis that begins with the drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from qkscope.core.headmoments import BucketMeans
from qkscope.core.keypairs import SampledKeys, TokenPairs
from qkscope.core.linalg import ratio, unit
from qkscope.core.moments import Moments


@dataclass(frozen=True)
class BucketSpread:
    """Queries of each position bucket, of a head or of a batch of heads."""

    n: Float[np.ndarray, "*batch buckets"]
    """Queries in the bucket."""
    mean_x: Float[np.ndarray, "*batch buckets d"]
    """Their mean."""
    along_pairs: Float[np.ndarray, "*batch buckets pairs"]
    """Their variance along each difference of keys."""
    along_axes: Float[np.ndarray, "*batch buckets d"]
    """Their variance along each axis of ``drift_basis``."""

    @classmethod
    def of(cls, buckets: Moments, drift: Moments, delta: Float[np.ndarray, "buckets pairs d"]) -> BucketSpread:
        """Compute the spread from the moments of each bucket (…, buckets); ``drift``: moments of all queries (…)."""
        cov, basis = buckets.cov_x, drift_basis(drift)[..., None, :, :]
        return cls(buckets.n, buckets.mean_x, spread_along(delta, cov), spread_along(basis, cov))

    def __getitem__(self, index: Any) -> BucketSpread:
        """Index the batch axes."""
        return BucketSpread(*(np.asarray(array[index]) for array in vars(self).values()))


@dataclass(frozen=True)
class StoredSpread:
    """The stored spread of a layer's queries by bucket: variances along differences of its sampled keys."""

    pairs: TokenPairs
    along_pairs: Float[np.ndarray, "hq buckets pairs"]
    along_axes: Float[np.ndarray, "hq buckets d"]

    @classmethod
    def of(cls, buckets: Moments, total: Moments, sampled: SampledKeys) -> StoredSpread:
        """Compute the spread from the moments of a layer's queries by bucket (Hq, buckets) and in total (Hq,)."""
        earlier, later = sampled.rows
        spreads = []
        for query, key in enumerate(sampled.read):
            keys = sampled.keys[:, key].astype(np.float64)
            spreads.append(BucketSpread.of(buckets[query], total[query], keys[later] - keys[earlier]))
        variances = (np.stack([getattr(spread, name) for spread in spreads]) for name in ("along_pairs", "along_axes"))
        return cls(sampled.pairs, *variances)

    def head(self, query: int, cells: BucketMeans) -> BucketSpread:
        """One query head; ``cells`` are its means by document group and bucket."""
        means = cells.merged()
        return BucketSpread(means.n, means.mean_x, self.along_pairs[query], self.along_axes[query])


def spread_along(
    vectors: Float[np.ndarray, "*#batch m d"], cov: Float[np.ndarray, "*batch d d"]
) -> Float[np.ndarray, "*batch m"]:
    """δᵀΣδ for every row δ of ``vectors``."""
    product = vectors @ cov
    return np.asarray(np.einsum("...pd,...pd->...p", product, np.broadcast_to(vectors, product.shape)))


def drift_basis(queries: Moments) -> Float[np.ndarray, "*batch d d"]:
    """Rows are axes, the first one the drift: the reflection that maps it to +e₁; the identity if it is +e₁ already."""
    axis = unit(queries.cov_xt)
    v = axis - np.eye(axis.shape[-1])[0]
    size = (v * v).sum(-1)[..., None, None]
    return np.eye(axis.shape[-1]) - 2.0 * ratio(v[..., :, None] * v[..., None, :], size)
