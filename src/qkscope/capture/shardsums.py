"""What was gathered of a shard, brought to the host: moments of every layer, and the vectors that are kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from qkscope.capture.shards import Shard
from qkscope.capture.sums.layersums import LayerSums, layer_moments
from qkscope.capture.vectors import KeptVectors
from qkscope.core.layermoments import LayerMoments
from qkscope.errors import CaptureError
from qkscope.files.parts import THREADS


def finished(sums: dict[int, LayerSums]) -> dict[int, LayerMoments]:
    """The sums of all layers as moments on the host, several layers at a time."""
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(sums, threads.map(layer_moments, sums.values()), strict=True))


def kept_vectors(labels: list[tuple[np.ndarray, np.ndarray]], sums: dict[int, LayerSums]) -> KeptVectors:
    """The kept tokens by document and position, in whatever order they passed."""
    empty = [np.zeros(0, dtype=np.int64)]
    example, position = (np.concatenate(empty + [pair[which] for pair in labels]) for which in (0, 1))
    order = np.lexsort([position, example])
    vectors = {
        layer: tuple(torch.cat([pair[which] for pair in part.kept]).float().numpy()[order] for which in (0, 1))
        for layer, part in sums.items()
        if part.kept
    }
    return KeptVectors(example[order], position[order], vectors)  # type: ignore[arg-type]


def check_finite(moments: dict[int, LayerMoments], shard: Shard) -> None:
    """Raise an error that names the layer if a forward pass gave numbers that are none."""
    for layer, part in moments.items():
        for name, found in (("queries", part.q), ("keys", part.k)):
            if not np.isfinite(found.scatter).all():
                raise CaptureError(
                    f"layer {layer} gave {name} that are not finite in documents {shard.examples[0]} to "
                    f"{shard.examples[-1]}; try --dtype float32 or bfloat16"
                )
