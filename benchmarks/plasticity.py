"""Plasticity of 1,000 heads: 16 buckets, 256 pairs of keys each, with the replicates of its intervals, on one core.

python -m benchmarks.plasticity
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from threadpoolctl import threadpool_limits

from qkscope.analyses.pairplasticity import plasticity
from qkscope.core.headmoments import BucketMeans
from qkscope.core.keypairs import key_pairs
from qkscope.core.moments import Moments
from qkscope.core.rows import Rows

BUCKETS, WINDOW, TOGETHER = 16, 4096, 4


def heads(n: int, d: int, rng: np.random.Generator) -> tuple[Moments, BucketMeans, Rows]:
    """Random moments of n query heads, and keys that they read."""
    half = rng.standard_normal((n, BUCKETS, d + 1, d + 1))
    queries = Moments(
        np.full((n, BUCKETS), 1000.0), rng.standard_normal((n, BUCKETS, d + 1)), 1000 * half @ half.swapaxes(-1, -2)
    )
    cells = BucketMeans(
        np.full((n, 8, BUCKETS), 125.0), rng.standard_normal((n, 8, BUCKETS, d)), np.zeros((n, 8, BUCKETS))
    )
    position = np.concatenate([np.sort(rng.choice(WINDOW, 128, replace=False)) for _ in range(32)])
    return queries, cells, Rows(rng.standard_normal((4096, d)), position, np.repeat(np.arange(32), 128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=1000)
    n_heads = parser.parse_args().heads
    rng = np.random.default_rng(0)
    for d in (64, 128):
        queries, cells, keys = heads(TOGETHER, d, rng)
        total = queries.merged()
        start = time.perf_counter()
        with threadpool_limits(1):
            for _ in range(n_heads // TOGETHER):
                pairs = key_pairs(keys, WINDOW, BUCKETS)
                plasticity(queries, cells, total, pairs, WINDOW // BUCKETS)
        print(f"d = {d}: {n_heads:,} heads in {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
