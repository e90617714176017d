"""The folder of a captured run as a source: moments as they were stored, vectors from its sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from qkscope.core.headdata import HeadData
from qkscope.core.layermoments import LayerMoments
from qkscope.core.rope import Rope
from qkscope.core.rows import Pair, Rows
from qkscope.core.sample import ordered_sample
from qkscope.errors import DatasetError, HeadError
from qkscope.files.dataset import Dataset
from qkscope.files.layerfiles import layer_file
from qkscope.files.runfolder import LEFT_OUT, MOMENTS, SAMPLE, RunFolder
from qkscope.heads import HeadId
from qkscope.runs.loading import read_head
from qkscope.runs.source import WHOLE, Extent, LayerNotes, Reading


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

    def load(self, heads: Sequence[HeadId], reading: Reading) -> tuple[list[HeadData], list[HeadError]]:
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
        loaded: list[HeadData] = []
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
            noted = vars(self.layer_notes(head))
            loaded.append(HeadData(head, self.key_head(head), of_head, vectors, rotary, **noted))
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
