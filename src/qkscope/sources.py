"""Where moments and vectors come from: a dataset, or the folder of a captured run; both offer the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qkscope.core.layermoments import LayerMoments
from qkscope.core.rope import Rope
from qkscope.core.rows import Pair, Rows
from qkscope.core.sample import ordered_sample
from qkscope.errors import DatasetError, HeadError
from qkscope.heads import HeadId
from qkscope.load import Loaded, LoadedHead, Reading, load_key_group, read_head
from qkscope.store.datasets import Dataset
from qkscope.store.layerfiles import layer_file
from qkscope.store.runs import LEFT_OUT, MOMENTS, SAMPLE, RunFolder
from qkscope.store.vectors import read_sliding_window

WHOLE = Reading()
"""Every row of every head."""


@dataclass(frozen=True)
class LayerNotes:
    """What sets a layer apart; None where it is not known."""

    nope: bool | None = None
    """Without rotary encoding."""
    sliding_window: int | None = None
    """Tokens that a query sees, where it does not see them all."""


@dataclass(frozen=True)
class Extent:
    """How much text a run was measured on."""

    n_documents: int | None
    n_tokens: int | None


class Source(Protocol):
    """Where a run's moments and vectors come from."""

    @property
    def query_heads(self) -> list[HeadId]:
        """All query heads, by (layer, head)."""

    @property
    def q_per_kv(self) -> int:
        """Query heads per key head."""

    @property
    def window(self) -> int | None:
        """Context length, where it is known for all heads."""

    @property
    def buckets(self) -> int | None:
        """Position buckets that queries were reduced in; None where that is yet to be chosen."""

    def key_head(self, head: HeadId) -> HeadId:
        """The key head that a query head reads; a ``HeadError`` if there is none."""

    def file(self, head: HeadId) -> str | None:
        """The file that a message about this head should name."""

    def layer_notes(self, head: HeadId) -> LayerNotes:
        """What sets the layer of a query head apart from full attention with rotary encoding."""

    def load(self, heads: Sequence[HeadId], reading: Reading) -> tuple[Loaded, list[HeadError]]:
        """Moments of query heads that read one key head, and the heads that failed."""

    def rows(self, head: HeadId, reading: Reading) -> Rows:
        """Vectors of a query or key head: all there are, or the run's sample of them."""

    def extent(self, heads: Sequence[HeadId]) -> Extent:
        """How much was measured, by the first of these heads that can be read."""

    def identity(self) -> dict[str, str]:
        """What exactly was read, for the record."""


@dataclass(frozen=True)
class DatasetSource:
    """A dataset of vectors, reduced as it is read."""

    dataset: Dataset

    @property
    def query_heads(self) -> list[HeadId]:
        """All query heads of the dataset."""
        return self.dataset.query_heads

    @property
    def q_per_kv(self) -> int:
        """As the dataset says or its heads tell."""
        return self.dataset.q_per_kv

    @property
    def window(self) -> int | None:
        """As the dataset says, if it does."""
        return self.dataset.window

    @property
    def buckets(self) -> int | None:
        """As the analysis wants."""
        return None

    def key_head(self, head: HeadId) -> HeadId:
        """The key head, if its file is there."""
        return self.dataset.key_head(head)

    def file(self, head: HeadId) -> str | None:
        """The head's parquet file."""
        return self.dataset.heads.get(head)

    def layer_notes(self, head: HeadId) -> LayerNotes:
        """As the dataset's card and the file of this head say, if they do."""
        try:
            window = _sliding_window(str(self.dataset.path(head)))
        except (DatasetError, HeadError):
            window = None  # whoever reads the head will hear why
        return LayerNotes(self.dataset.rotary.nope(head.layer), window)

    def load(self, heads: Sequence[HeadId], reading: Reading) -> tuple[Loaded, list[HeadError]]:
        """Read each file once and reduce it."""
        return load_key_group(self.dataset, heads, reading)

    def rows(self, head: HeadId, reading: Reading) -> Rows:
        """All finite rows of the head."""
        return read_head(self.dataset, head, reading).rows

    def extent(self, heads: Sequence[HeadId]) -> Extent:
        """Documents and rows of the first of these heads that can be read; heads may differ in both."""
        for head in heads[:3]:
            try:
                rows = self.dataset.read(head)
            except (DatasetError, HeadError):
                continue
            return Extent(len(np.unique(rows.example_id)), len(rows))
        return Extent(None, None)

    def identity(self) -> dict[str, str]:
        """Folder, or Hub repository and commit."""
        return self.dataset.files.identity()

    def __str__(self) -> str:
        return str(self.dataset.files)


@dataclass(frozen=True)
class CapturedSource:
    """The folder of a captured run: moments as they were stored, vectors from its sample."""

    run: RunFolder

    @cached_property
    def _layers(self) -> dict[int, dict[str, Any]]:
        return {layer["layer"]: layer for layer in self.run.manifest["layers"]}

    @property
    def query_heads(self) -> list[HeadId]:
        """Every query head that was captured."""
        return [HeadId(number, h, "q") for number, layer in self._layers.items() for h in layer["query_heads"]]

    @property
    def q_per_kv(self) -> int:
        """As the model has it."""
        return int(self.run.manifest["q_per_kv"])

    @property
    def window(self) -> int | None:
        """Context length of the capture."""
        return int(self.run.manifest["window"])

    @property
    def buckets(self) -> int | None:
        """As the capture had it."""
        return int(self.run.manifest["options"]["buckets"])

    def key_head(self, head: HeadId) -> HeadId:
        """The key head; captured with every query head that reads it."""
        return head.key_head(self.q_per_kv)

    def file(self, head: HeadId) -> str | None:
        """The file of the head's layer."""
        return str(self.run.folder / MOMENTS / layer_file(head.layer))

    def layer_notes(self, head: HeadId) -> LayerNotes:
        """As the model showed it during the capture."""
        said = self._layers[head.layer]
        return LayerNotes(said["rope"] is None, said["sliding_window"])

    def load(self, heads: Sequence[HeadId], reading: Reading) -> tuple[Loaded, list[HeadError]]:
        """Take the heads out of their layer's moments, and vectors from the sample."""
        if reading.paired or reading.max_samples is not None:
            what = "pairing by token" if reading.paired else "max_samples"
            reason = f"{what} needs vectors, and a captured run holds moments; analyse its vectors instead"
            return [], [HeadError(head, reason, self.file(head)) for head in heads]
        try:
            moments = _layer_moments(str(self.run.folder), heads[0].layer, bool(reading.buckets))
        except DatasetError as error:
            return [], [HeadError(head, str(error)) for head in heads]
        layer = self._layers[heads[0].layer]
        keys = cache(partial(self._sampled, size=reading.sample))
        loaded: Loaded = []
        failed: list[HeadError] = []
        for head in heads:
            query, key = layer["query_heads"].index(head.head), layer["key_heads"].index(self.key_head(head).head)
            of_head = moments.head(query, key, int(self.run.manifest["window"]), layer["scaling"])
            try:
                vectors = (
                    Pair(self._sampled(head, reading.sample), keys(self.key_head(head))) if reading.sample else None
                )
            except (DatasetError, HeadError) as error:
                failed.append(HeadError(head, f"its sample cannot be read: {error}", self.run.folder / SAMPLE))
                vectors = None
            rope = _rope(layer)
            rotary = (
                None if rope is None or self.run.manifest["stage"] != "post-rope" else moments.rotary(query, key, rope)
            )
            loaded.append(LoadedHead(head, of_head, vectors, rotary))
        return loaded, failed

    def rows(self, head: HeadId, reading: Reading) -> Rows:
        """The run's sample of the head's vectors."""
        return read_head(self._sample, head, reading).rows

    @cached_property
    def _sample(self) -> Dataset:
        return Dataset.open(self.run.folder / SAMPLE)

    def _sampled(self, head: HeadId, size: int) -> Rows:
        return ordered_sample(self.rows(head, WHOLE), size)

    def extent(self, heads: Sequence[HeadId]) -> Extent:  # noqa: ARG002
        """Documents of the manifest, and their tokens, but for those that were left out."""
        left_out = {one["document"] for one in self.run.manifest.get(LEFT_OUT, [])}
        documents = [one for number, one in enumerate(self.run.manifest["documents"]) if number not in left_out]
        return Extent(len(documents), sum(int(one["tokens"]) for one in documents))

    def identity(self) -> dict[str, str]:
        """Folder, model and corpus."""
        model = self.run.manifest["model"]
        place = {"kind": "run", "path": str(self.run.folder.resolve()), "stage": str(self.run.manifest["stage"])}
        return place | {"model": str(model.get("id")), "corpus": str(self.run.manifest["corpus"])}

    def __str__(self) -> str:
        return str(self.run.folder)


@lru_cache(maxsize=512)
def _sliding_window(path: str) -> int | None:
    return read_sliding_window(Path(path))


def _rope(layer: dict[str, Any]) -> Rope | None:
    """The rotary encoding as the manifest describes it."""
    said = layer["rope"]
    if said is None:
        return None
    return Rope(np.array(said["frequencies"], dtype=float), said["layout"], int(said["start"]), int(said["sign"]))


@lru_cache(maxsize=2)
def _layer_moments(folder: str, layer: int, buckets: bool) -> LayerMoments:
    """The heads of a layer are asked for group by group; its file is read once."""
    return RunFolder.open(Path(folder)).layer(layer, buckets=buckets)
