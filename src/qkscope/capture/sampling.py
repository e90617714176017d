"""The tokens whose vectors are kept, and the vectors: saved shard by shard, then written as a dataset."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from qkscope.capture.options import VectorSampling
from qkscope.core.headmoments import bucket_width
from qkscope.core.rows import token_keys
from qkscope.core.sample import priority
from qkscope.errors import CaptureError
from qkscope.files.checksums import digest
from qkscope.files.dataset import write_card
from qkscope.files.inprogress import VECTORS_FOLDER
from qkscope.files.layerfiles import write_tensors
from qkscope.files.manifest import LayerEntry, RunManifest
from qkscope.files.runfolder import SAMPLE
from qkscope.files.vectors import DATA_FILE, token_columns, write_vectors
from qkscope.headids import HeadId

TextSpans = tuple[tuple[int, int], ...]
"""Positions of a document's tokens: the first of each consecutive span, and the one after its last."""


def sample_tokens(documents: Sequence[TextSpans], size: int, seed: int, skip_first: int) -> list[np.ndarray]:
    """Return, for each document, the positions of its tokens among the ``size`` of lowest priority in the whole run."""
    return _sampled(tuple(documents), size, seed, skip_first)


def numbered_tokens(tokens: list[np.ndarray]) -> np.ndarray:
    """Return the positions of each document as one number per token (``token_keys``)."""
    return np.concatenate([token_keys(np.full(len(part), number), part) for number, part in enumerate(tokens)])


@lru_cache(maxsize=2)  # the tokens to keep, and the sample of the finished run
def _sampled(documents: tuple[TextSpans, ...], size: int, seed: int, skip_first: int) -> list[np.ndarray]:
    positions = [_positions_in(text_spans) for text_spans in documents]
    example = np.concatenate([np.full(len(part), i) for i, part in enumerate(positions)])
    position = np.concatenate(positions)
    counted = np.flatnonzero(position >= skip_first)
    keys = priority(example[counted], position[counted], seed)
    chosen = np.sort(counted[np.lexsort([position[counted], example[counted], keys])[:size]])
    ends = np.cumsum(np.bincount(example[chosen], minlength=len(documents)))
    return np.split(position[chosen], ends[:-1])


def _positions_in(text_spans: TextSpans) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(first, end) for first, end in text_spans)])


def vector_tokens(example: int, text_spans: TextSpans, sampling: VectorSampling, skip_first: int) -> np.ndarray:
    """Return the positions of one document whose vectors go into a dataset."""
    position = _positions_in(text_spans)
    position = position[position >= skip_first]
    if sampling.sampler == "all" or not len(position):
        return position
    draw = priority(np.full(len(position), example), position, sampling.seed + 1) / 2.0**64
    probability = np.full(len(position), sampling.rate)
    if sampling.sampler == "log_uniform":
        weight = 1.0 / (position + 1)
        probability = np.minimum(1.0, sampling.rate * len(position) * weight / weight.sum())
    return position[draw < probability]


_TEXTS = "texts"
"""Name of the tensor with a shard's tokens as text: bytes of JSON."""


@dataclass(frozen=True)
class KeptVectors:
    """The kept tokens of one shard, with their queries and keys (n, H, d) by layer."""

    example_id: np.ndarray
    position: np.ndarray
    vectors: dict[int, tuple[np.ndarray, np.ndarray]]
    texts: list[str] | None = None
    """The tokens as text, if they are stored."""

    @property
    def token(self) -> np.ndarray:
        """The tokens as text, or None for each."""
        return _object_array([None] * len(self.position) if self.texts is None else self.texts)


def write_kept(folder: Path, shard: int, kept: KeptVectors) -> dict[str, str]:
    """Write one shard's vectors, if any; return the name and digest of the file, which do not vary between runs."""
    if not len(kept.example_id):
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"example_id": kept.example_id.astype(np.int64), "position": kept.position.astype(np.int64)}
    for layer, (q, k) in kept.vectors.items():
        tensors |= {f"{layer}.q": q, f"{layer}.k": k}
    if kept.texts is not None:
        tensors[_TEXTS] = np.frombuffer(json.dumps(kept.texts).encode(), dtype=np.uint8)
    path = folder / f"shard-{shard:06d}.safetensors"
    write_tensors(path, tensors)
    return {path.name: digest(path)}


class LayerRows(NamedTuple):
    """The kept vectors of a layer, sorted by document and position."""

    example: np.ndarray
    position: np.ndarray
    token: np.ndarray
    """Tokens as text, or None."""
    q: np.ndarray
    """Queries (n, Hq, d)."""
    k: np.ndarray
    """Keys (n, Hk, d)."""

    def at(self, index: np.ndarray) -> LayerRows:
        """Return the rows at these indices."""
        return LayerRows(*(array[index] for array in self))


@dataclass(frozen=True)
class KeptFiles:
    """The kept vectors of all shards: in files, and of the last shard possibly in memory."""

    folder: Path
    names: tuple[str, ...]
    last: tuple[int, KeptVectors] | None = None

    def rows(self, layer: int) -> LayerRows:
        """Read the vectors of one layer."""
        by_shard = {int(Path(name).stem.rpartition("-")[-1]): self._read(name, layer) for name in self.names}
        if self.last is not None:
            number, kept = self.last
            if layer in kept.vectors:
                by_shard[number] = LayerRows(kept.example_id, kept.position, kept.token, *kept.vectors[layer])
        parts = [part for _, part in sorted(by_shard.items()) if part is not None]
        if not parts:
            raise CaptureError(
                "none of the sampled tokens could be measured, so there are no vectors; use a larger --sample"
            )
        if len(parts) == 1:
            return parts[0]
        return LayerRows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _read(self, name: str, layer: int) -> LayerRows | None:
        path = self.folder / name
        try:
            with safe_open(path, framework="np") as file:
                names = file.keys()
                if f"{layer}.q" not in names:
                    return None
                example, position = file.get_tensor("example_id"), file.get_tensor("position")
                texts = json.loads(file.get_tensor(_TEXTS).tobytes()) if _TEXTS in names else [None] * len(position)
                q, k = file.get_tensor(f"{layer}.q"), file.get_tensor(f"{layer}.k")
                return LayerRows(example, position, _object_array(texts), q, k)
        except (OSError, ValueError, SafetensorError) as error:
            raise CaptureError(f"{path} cannot be read as kept vectors ({error}); capture the run again") from None


@dataclass(frozen=True)
class RunVectors:
    """A dataset that a run contains: its sample, or the vectors it was asked to save."""

    target: Path
    manifest: RunManifest
    tokens: np.ndarray
    """Tokens of the dataset, one number each."""
    heads: set[HeadId] | None
    """Heads of the dataset; None: all."""

    def of(self, rows: LayerRows) -> LayerRows:
        """Return the kept vectors that belong to the dataset."""
        return rows.at(np.flatnonzero(np.isin(token_keys(rows.example, rows.position), self.tokens)))

    def write_layer(self, layer: LayerEntry, rows: LayerRows) -> list[Path]:
        """Write the heads of a layer; return the files, which are not synced to disk yet."""
        bucket = rows.position // bucket_width(self.manifest.window, self.manifest.options.buckets)
        columns = token_columns(
            rows.position, rows.example, bucket=bucket, sliding_window=layer.sliding_window,
            tokens=rows.token.tolist(),
        )  # fmt: skip
        paths = []
        for kind, names, values in (("q", layer.query_heads, rows.q), ("k", layer.key_heads, rows.k)):
            for number, name in enumerate(names):
                head = HeadId(layer.layer, name, "q" if kind == "q" else "k")
                if self.heads is None or head in self.heads:
                    paths.append(self.target / str(head) / DATA_FILE)
                    write_vectors(paths[-1], values[:, number], columns)
        return paths

    def write_card(self) -> None:
        """Write dataset.json."""
        scalings = {layer.scaling for layer in self.manifest.layers}
        write_card(
            self.target,
            q_per_kv=self.manifest.q_per_kv,
            window=self.manifest.window,
            scaling=min(scalings) if len(scalings) == 1 else None,
            rope=_rope(self.manifest),
        )


def datasets_of(folder: Path, manifest: RunManifest) -> list[RunVectors]:
    """Return the sample of a run and, if it was requested, its dataset of vectors."""
    options, documents = manifest.options, [document.spans for document in manifest.documents]
    sampled = sample_tokens(documents, options.sample, options.seed, options.skip_first)
    datasets = [RunVectors(folder / SAMPLE, manifest, numbered_tokens(sampled), None)]
    if options.vectors is not None:
        sampling = VectorSampling(**options.vectors.model_dump())
        chosen = [vector_tokens(i, text_spans, sampling, options.skip_first) for i, text_spans in enumerate(documents)]
        heads = _drawn_heads(manifest, sampling)
        datasets.append(RunVectors(folder / VECTORS_FOLDER, manifest, numbered_tokens(chosen), heads))
    return datasets


def _object_array(texts: Sequence[str | None]) -> np.ndarray:
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array


def _rope(manifest: RunManifest) -> dict[str, Any] | None:
    """Return the rotary encoding of each layer for dataset.json; None for vectors before the rotation."""
    if not manifest.rotated:
        return None
    keys = ("frequencies", "layout", "start", "sign")
    layers = {str(layer.layer): layer.rope for layer in manifest.layers}
    described = {
        name: None if rope is None else {key: getattr(rope, key) for key in keys} for name, rope in layers.items()
    }
    return {"layers": described}


def _drawn_heads(manifest: RunManifest, sampling: VectorSampling) -> set[HeadId] | None:
    """Return the query heads of a dataset, drawn by ``random.Random(seed).sample``, and the key heads they read."""
    if sampling.heads is None:
        return None
    queries = sorted(HeadId(layer.layer, h, "q") for layer in manifest.layers for h in layer.query_heads)
    drawn = random.Random(sampling.seed).sample(queries, min(sampling.heads, len(queries)))
    return {*drawn, *(head.key_head(manifest.q_per_kv) for head in drawn)}
