"""Kept vectors: saved shard by shard during a capture, then written in the dataset layout."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from qkscope.capture.options import VectorSampling
from qkscope.core.headmoments import bucket_width
from qkscope.core.rows import Rows
from qkscope.errors import CaptureError
from qkscope.files.arrays import write_tensors
from qkscope.files.checksums import digest
from qkscope.files.dataset import write_card
from qkscope.files.inprogress import KEPT_FOLDER, VECTORS_FOLDER
from qkscope.files.parts import THREADS
from qkscope.files.runfolder import SAMPLE
from qkscope.files.vectors import DATA_FILE, write_rows
from qkscope.heads import HeadId


@dataclass(frozen=True)
class KeptVectors:
    """The kept tokens of one shard, with their queries and keys (n, H, d) by layer."""

    example_id: np.ndarray
    position: np.ndarray
    vectors: dict[int, tuple[np.ndarray, np.ndarray]]


def write_kept(folder: Path, shard: int, kept: KeptVectors) -> dict[str, str]:
    """Write one shard's vectors, if any; returns the name and digest of the file, which are always the same."""
    if not len(kept.example_id):
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"example_id": kept.example_id.astype(np.int64), "position": kept.position.astype(np.int64)}
    for layer, (q, k) in kept.vectors.items():
        tensors |= {f"{layer}.q": q, f"{layer}.k": k}
    path = folder / f"shard-{shard:06d}.safetensors"
    write_tensors(path, tensors)
    return {path.name: digest(path)}


def write_datasets(
    folder: Path,
    manifest: dict[str, Any],
    names: list[str],
    sampled: list[np.ndarray],
    chosen: list[np.ndarray] | None,
    sampling: VectorSampling | None,
    on_done: Callable[[int, int], None] | None = None,
) -> None:
    """Write the run's sample and, if requested, its dataset of vectors, from the files of its shards.

    Samples are small, so several layers are written in parallel; with a dataset, which may be large, one at a time.
    """
    if not names:
        raise CaptureError(
            "none of the sampled tokens could be measured, so there are no vectors; use a larger --sample"
        )
    targets: dict[Path, tuple[list[np.ndarray], set[HeadId] | None]] = {folder / SAMPLE: (sampled, None)}
    if chosen is not None and sampling is not None:
        targets[folder / VECTORS_FOLDER] = (chosen, _drawn_heads(manifest, sampling))
    files = [folder / KEPT_FOLDER / name for name in names]

    def write(layer: dict[str, Any]) -> None:
        rows = _layer_rows(files, layer["layer"])
        for target, (tokens, heads) in targets.items():
            _write_layer(target, layer, rows, tokens, heads, manifest)

    with ThreadPoolExecutor(THREADS if chosen is None else 1) as threads:
        for number, _ in enumerate(threads.map(write, manifest["layers"]), start=1):
            if on_done is not None:
                on_done(number, len(manifest["layers"]))
    scalings = {layer["scaling"] for layer in manifest["layers"]}
    scaling = min(scalings) if len(scalings) == 1 else None
    for target in targets:
        write_card(
            target, q_per_kv=manifest["q_per_kv"], window=manifest["window"], scaling=scaling, rope=_rope(manifest)
        )


def _rope(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The rotary encoding of each layer, as dataset.json states it; None for vectors before the rotation."""
    if manifest["stage"] != "post-rope":
        return None
    keys = ("frequencies", "layout", "start", "sign")
    layers = {str(layer["layer"]): layer["rope"] for layer in manifest["layers"]}
    return {
        "layers": {name: None if rope is None else {key: rope[key] for key in keys} for name, rope in layers.items()}
    }


def _layer_rows(files: list[Path], layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    by_shard = []
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                if f"{layer}.q" in file.keys():  # noqa: SIM118
                    names = ("example_id", "position", f"{layer}.q", f"{layer}.k")
                    by_shard.append([file.get_tensor(name) for name in names])
        except (OSError, SafetensorError) as error:
            raise CaptureError(f"{path} cannot be read as kept vectors ({error}); capture the run again") from None
    example, position, q, k = (np.concatenate(arrays) for arrays in zip(*by_shard, strict=True))
    return example, position, q, k


def _write_layer(
    target: Path,
    layer: dict[str, Any],
    rows: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    tokens: list[np.ndarray],
    heads: set[HeadId] | None,
    manifest: dict[str, Any],
) -> None:
    example, position, q, k = rows
    wanted_tokens = np.concatenate(
        [np.full(len(positions), i, dtype=np.int64) << 32 | positions for i, positions in enumerate(tokens)]
    )
    index = np.flatnonzero(np.isin(example << 32 | position, wanted_tokens))
    bucket = position[index] // bucket_width(manifest["window"], manifest["options"]["buckets"])
    for kind, names, values in (("q", layer["query_heads"], q), ("k", layer["key_heads"], k)):
        for number, name in enumerate(names):
            head = HeadId(layer["layer"], name, "q" if kind == "q" else "k")
            if heads is None or head in heads:
                head_rows = Rows(values[index, number], position[index], example[index])
                path = target / str(head) / DATA_FILE
                write_rows(path, head_rows, bucket=bucket, sliding_window=layer["sliding_window"])


def _drawn_heads(manifest: dict[str, Any], sampling: VectorSampling) -> set[HeadId] | None:
    """The query heads of a dataset, drawn as ``random.Random(seed).sample``, with the key heads they read."""
    if sampling.heads is None:
        return None
    queries = sorted(HeadId(la["layer"], h, "q") for la in manifest["layers"] for h in la["query_heads"])
    drawn = random.Random(sampling.seed).sample(queries, min(sampling.heads, len(queries)))
    return {*drawn, *(head.key_head(manifest["q_per_kv"]) for head in drawn)}
