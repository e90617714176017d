"""The sums of a shard, copied to the host: moments of every layer, and the kept vectors."""

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
    """The sums of all layers as moments on the host; several layers in parallel."""
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(sums, threads.map(layer_moments, sums.values()), strict=True))


def kept_vectors(labels: list[tuple[np.ndarray, np.ndarray]], sums: dict[int, LayerSums]) -> KeptVectors:
    """The kept vectors, sorted by document and position."""
    empty = [np.zeros(0, dtype=np.int64)]
    example, position = (np.concatenate(empty + [pair[index] for pair in labels]) for index in (0, 1))
    order = np.lexsort([position, example])
    vectors = {
        layer: tuple(torch.cat([pair[index] for pair in layer_sums.kept]).float().numpy()[order] for index in (0, 1))
        for layer, layer_sums in sums.items()
        if layer_sums.kept
    }
    return KeptVectors(example[order], position[order], vectors)  # type: ignore[arg-type]


def check_finite(moments: dict[int, LayerMoments], shard: Shard) -> None:
    """Raise an error that names the layer if a forward pass gave non-finite values."""
    for layer, of_layer in moments.items():
        for name, of_kind in (("queries", of_layer.q), ("keys", of_layer.k)):
            if not np.isfinite(of_kind.scatter).all():
                raise CaptureError(f"layer {layer} gave non-finite {name} in {shard}; try --dtype float32 or bfloat16")
