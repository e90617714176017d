"""The report of a replica on its model, and the sums of a shard, copied to the host."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from qkscope.capture.layers import Layer
from qkscope.capture.sampling import KeptVectors
from qkscope.capture.shards import Shard
from qkscope.capture.sums.finish import layer_moments
from qkscope.capture.sums.layersums import LayerSums
from qkscope.core.keypairs import SampledKeys
from qkscope.core.layermoments import LayerMoments
from qkscope.core.rows import token_keys
from qkscope.errors import CaptureError
from qkscope.files.parts import THREADS
from qkscope.files.runfolder import Vectors
from qkscope.headids import read_by


@dataclass(frozen=True)
class ModelReport:
    """Description of a replica's model; all replicas of a capture must have the same one."""

    model: dict[str, Any]
    layers: list[dict[str, Any]]
    q_per_kv: int
    longest: int
    """The model's max_position_embeddings."""
    vocabulary: int
    """Number of tokens in the model's vocabulary."""
    threads: int | None
    """Threads on a CPU, on which the last bits of a forward pass depend; None on a GPU."""
    device: str
    """``cpu``, or the name of the GPU and how its sums are computed."""
    versions: dict[str, str]
    passage: dict[int, Vectors] = field(default_factory=dict)
    """Queries and keys of the passage by layer; only the first replica reads it."""

    placeholders: list[int] = field(default_factory=list)
    """Ids of the tokens that stand for images, video or sound."""

    @property
    def digest(self) -> str:
        """Digest that identifies the model, independent of the process."""
        described = {name: value for name, value in vars(self).items() if name != "passage"}
        return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class ShardSums:
    """The sums and kept vectors of one shard."""

    moments: dict[int, LayerMoments]
    """Moments by layer; empty if no document could be measured."""
    kept: KeptVectors
    left_out: dict[int, str]
    """Documents that could not be measured, and why."""
    report_digest: str
    """Digest of the replica's ``ModelReport``."""
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Sum of the losses of some tokens of each document, and their number."""
    one_by_one: bool = False
    """True if batches did not fit into memory and documents were measured alone, which changes the last bits."""
    nested: tuple[ShardSums, ...] = ()
    """The sums of the same documents cut to shorter windows, in the order of the shard's."""

    def with_nested(self, **changes: Any) -> ShardSums:
        """Return these sums and the nested ones with changed fields."""
        return replace(self, nested=tuple(replace(sums, **changes) for sums in self.nested), **changes)


OfLayer = Callable[[int], SampledKeys | None]
"""A function from a layer's number to its sampled keys."""
_AT_ONCE = 4
"""Layers that are finished in parallel; each takes some hundred MiB of its device meanwhile."""
_WAITING = 2**27
"""Bytes of kept vectors per transfer from a GPU, at least: each new allocation of host memory makes the GPU wait."""


def finished(sums: dict[int, LayerSums], shard: Shard, sampled: OfLayer) -> dict[int, LayerMoments]:
    """Return the sums of all layers as moments on the host, several in parallel; an error if they are not finite."""

    def finish(layer: int) -> LayerMoments:
        moments = layer_moments(sums[layer], sampled(layer))
        for name, of_kind in (("queries", moments.q), ("keys", moments.k)):
            if not np.isfinite(of_kind.scatter).all():
                raise CaptureError(f"layer {layer} gave non-finite {name} in {shard}; try --dtype float32 or bfloat16")
        return moments

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return dict(zip(sums, threads.map(finish, sums), strict=True))


def sampled_keys(kept: KeptVectors, shard: Shard, layers: Mapping[int, Layer], q_per_kv: int, buckets: int) -> OfLayer:
    """Return the sampled keys by layer if the shard is the whole run; otherwise None, as sums are merged first."""
    if shard.sampled is None:
        return lambda _: None
    index = np.flatnonzero(np.isin(token_keys(kept.example_id, kept.position), shard.sampled))
    example, position = kept.example_id[index], kept.position[index]

    def of_layer(number: int) -> SampledKeys | None:
        if number not in kept.vectors:
            return None
        layer, (_, keys) = layers[number], kept.vectors[number]
        read = read_by(layer.query_heads, layer.key_heads, q_per_kv)
        return SampledKeys.of(example, position, keys[index], shard.window, buckets, layer.sliding_window, read)

    return of_layer


def kept_vectors(labels: list[tuple[np.ndarray, np.ndarray]], sums: dict[int, LayerSums]) -> KeptVectors:
    """Wait until the kept vectors are on the host, and return them sorted by document and position."""
    empty = [np.zeros(0, dtype=np.int64)]
    example, position = (np.concatenate(empty + [pair[index] for pair in labels]) for index in (0, 1))
    order = np.lexsort([position, example])
    send_kept(sums, least=0)
    for device in {layer_sums.device for layer_sums in sums.values() if layer_sums.device is not None}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    in_order = bool((order == np.arange(len(order))).all())

    def of_layer(layer: int) -> tuple[np.ndarray, np.ndarray]:
        q, k = (torch.cat([pair[index] for pair in sums[layer].kept]).float().numpy() for index in (0, 1))
        return (q, k) if in_order else (q[order], k[order])

    layers = [layer for layer, layer_sums in sums.items() if layer_sums.kept]
    with ThreadPoolExecutor(THREADS) as threads:
        vectors = dict(zip(layers, threads.map(of_layer, layers), strict=True))
    return KeptVectors(example[order], position[order], vectors)


def send_kept(sums: dict[int, LayerSums], *, least: int = _WAITING) -> None:
    """Start copying newly kept vectors to the host, if there are many: all layers of a device in one transfer.

    They must not be read before the device is synchronized.
    """
    by_device: dict[tuple[torch.device, torch.dtype], list[tuple[LayerSums, int]]] = {}
    for layer_sums in sums.values():
        for index, (q, _) in enumerate(layer_sums.kept):
            if q.is_cuda:
                by_device.setdefault((q.device, q.dtype), []).append((layer_sums, index))
    for entries in by_device.values():
        tensors = [x for layer_sums, index in entries for x in layer_sums.kept[index]]
        if sum(x.nbytes for x in tensors) < least:
            continue
        flat = torch.cat([x.reshape(-1) for x in tensors])
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        parts = iter(host.split([x.numel() for x in tensors]))
        for layer_sums, index in entries:
            q, k = layer_sums.kept[index]
            layer_sums.kept[index] = next(parts).view(q.shape), next(parts).view(k.shape)
