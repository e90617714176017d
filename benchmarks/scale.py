"""Limits of one machine, one driver and many jobs: bytes of a part, speed of writing and merging parts here, and the
estimate for a cluster. Measured are only the speeds of this machine's disk and cores and the GPU's tokens per second,
the latter by benchmarks/gpu.py.

    python -m benchmarks.scale
    python -m benchmarks.scale --gpus 10000 --tokens-per-second 62500 --layers 28
"""  # noqa: D205

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qkscope.capture.shards import TOKENS_PER_SHARD
from qkscope.core.headmoments import N_BUCKETS, N_GROUPS, BucketMeans
from qkscope.core.layermoments import LayerMoments
from qkscope.core.moments import Moments
from qkscope.engine.target import cores
from qkscope.files.parts import PartMetadata, Parts, Span

N_Q, N_K, D = 24, 8, 128
"""Llama-3.2-3B: query heads, key heads, length of a vector."""
LAYERS_HERE = 4
"""Layers of the part that is written here; a complete part would take minutes."""


def layer(seed: int) -> LayerMoments:
    made = np.random.default_rng(seed)

    def moments(*batch: int) -> Moments:
        scatter = made.standard_normal((*batch, D + 1, D + 1))
        return Moments(np.full(batch, 1e5), made.standard_normal((*batch, D + 1)), scatter + scatter.swapaxes(-1, -2))

    def cells(*batch: int) -> BucketMeans:
        return BucketMeans(np.full(batch, 1e4), made.standard_normal((*batch, D)), made.standard_normal(batch))

    planes = made.standard_normal((N_Q, N_GROUPS, D // 2, 2)), made.standard_normal((N_K, N_GROUPS, D // 2, 2))
    by_bucket = moments(N_Q, N_BUCKETS), cells(N_Q, N_GROUPS, N_BUCKETS), cells(N_K, N_GROUPS, N_BUCKETS)
    return LayerMoments(moments(N_Q, N_GROUPS), moments(N_K, N_GROUPS), *by_bucket, *planes, np.zeros((2, 0)))


def manifest() -> dict[str, Any]:
    rope = {"frequencies": [1.0] * (D // 2)}
    said = {"query_heads": list(range(N_Q)), "key_heads": list(range(N_K)), "rope": rope}
    return {
        "layers": [said | {"layer": number} for number in range(LAYERS_HERE)],
        "options": {"buckets": N_BUCKETS, "documents_per_shard": 1},
        "documents": [{}] * 8,
        "stage": "post-rope",
        "window": 8192,
    }


def speeds(folder: Path) -> tuple[int, float, float]:
    """Bytes of a layer, and bytes per second of writing a part and of merging one with its neighbour."""
    parts = Parts(folder, manifest())
    first, second = ({n: partial(lambda m: m, layer(10 * k + n)) for n in range(LAYERS_HERE)} for k in (1, 2))
    start = time.perf_counter()
    parts.add(Span(0), first, PartMetadata())
    written = time.perf_counter()
    parts.add(Span(1), second, PartMetadata())
    merged = time.perf_counter()
    size = sum(path.stat().st_size for path in folder.rglob("layer-*"))
    return size // LAYERS_HERE, size / (written - start), size / (merged - written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--tokens-per-second", type=float, default=62_500, help="of one GPU, by benchmarks/gpu.py")
    parser.add_argument("--layers", type=int, default=28)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = [speeds(Path(scratch) / str(number)) for number in range(3)]
    per_layer, write, merge = found[0][0], *(float(np.median([one[k] for one in found])) for k in (1, 2))
    part, shard = per_layer * given.layers, TOKENS_PER_SHARD["cuda"] / given.tokens_per_second
    print(f"{N_Q} query and {N_K} key heads of {D}, {given.layers} layers; {cores()} cores here")
    print(f"a part                         {part / 1e9:.2f} GB, however many tokens it sums up")
    print(f"written here                   {write / 1e9:.2f} GB/s: {part / write:.1f} s for a part")
    print(f"merged with its neighbour      {merge / 1e9:.2f} GB/s: {part / merge:.1f} s")
    print(f"a shard                        {TOKENS_PER_SHARD['cuda'] / 1e6:.1f} M tokens: {shard:.0f} s of one GPU")
    print(f"one driver serves              {shard / (part / merge):.0f} GPUs")
    side = round(given.gpus**0.5)
    rounds = [("first", -(-given.gpus // side), side), ("second", 1, -(-given.gpus // side))]
    print(f"{given.gpus:,} jobs of a whole number of shards each:")
    print(f"  tokens per second            {given.gpus * given.tokens_per_second / 1e6:,.0f} M")
    print(
        f"  written by all               {given.gpus * part / 1e12:.1f} TB, {part / shard / 1e6:.0f} MB/s each at most"
    )
    for name, mergers, shares in rounds:
        what = f"{mergers} × {shares} shares, {shares * part / 1e9:,.0f} GB, {shares * part / merge / 60:.0f} min"
        print(f"  {name:<6} round of merging      {what}")
    total = sum(mergers * shares for _, mergers, shares in rounds) * part
    print(f"  read by merging              {total / 1e12:.1f} TB")
    least = given.gpus * TOKENS_PER_SHARD["cuda"] / 1e9
    merging = sum(shares * part / merge for _, _, shares in rounds)
    what = f"{least:,.0f} G tokens: {shard:.0f} s of measuring, {merging / 60:.0f} min of merging"
    print(f"  one shard each               {what}")
    even = merging * given.gpus * given.tokens_per_second
    print(f"  as long measuring as merging {even / 1e12:.1f} T tokens")


if __name__ == "__main__":
    main()
