"""Sums of the shards of a capture, merged in a binary tree on disk.

A part contains the moments of shards first … first + count − 1, where count is a power of two that divides first. Two
sibling parts are merged as soon as both exist. At most log₂ n parts remain, which are merged from the left. So the
result does not depend, to the last bit, on the order of the shards or on the number of workers or jobs.

    parts/000000-000016/part.json   digests of its files and of its shards' kept vectors, documents left out
    parts/000000-000016/layer-000.safetensors …

A part is written under a temporary name, synced and renamed; only then are the parts it was merged from removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from qkscope.core.layermoments import LayerMoments
from qkscope.errors import DatasetError
from qkscope.files.atomic import sync, temporary_name, write_together
from qkscope.files.checksums import digest
from qkscope.files.layerfiles import layer_file, read_layer_of, write_part_layer
from qkscope.files.readers import read_text

PARTS = "parts"
METADATA_FILE = "part.json"
THREADS = 16
"""Number of layers that are read, merged and written in parallel."""
_NAME = re.compile(r"(\d{6,9})-(\d{6,9})")
_UNFINISHED = re.compile(r"\.\d{6,9}-\d{6,9}\.\d+\.tmp")
KEPT_NAME = re.compile(r"shard-\d{6,9}\.safetensors")
"""Names of the files of kept vectors, which are in a folder next to that of the parts."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, order=True)
class Span:
    """Shards first … first + count − 1."""

    first: int
    count: int = 1

    @property
    def name(self) -> str:
        """Name of the part's folder."""
        return f"{self.first:06d}-{self.count:06d}"

    @property
    def sibling(self) -> Span:
        """The span that this one is merged with.

        >>> Span(4, 2).sibling, Span(4, 4).sibling
        (Span(first=6, count=2), Span(first=0, count=4))
        """
        return Span(self.first ^ self.count, self.count)

    @property
    def parent(self) -> Span:
        """The span of this part and its sibling."""
        return Span(self.first & ~self.count, 2 * self.count)

    def __contains__(self, shard: int) -> bool:
        return self.first <= shard < self.first + self.count

    @classmethod
    def parse(cls, name: str) -> Span | None:
        """The span of a part's folder name; None if it is not the name of a part."""
        match = _NAME.fullmatch(name)
        span = None if match is None else cls(int(match[1]), int(match[2]))
        is_valid = (
            span is not None and span.count.bit_count() == 1 and span.first % span.count == 0 and span.name == name
        )
        return span if is_valid else None


class LeftOutDocument(BaseModel):
    """A document that was not measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    document: Annotated[int, Field(ge=0, strict=True)]
    reason: str


class PartMetadata(BaseModel):
    """The content of a part's part.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str = ""
    """Digest of the manifest of the run that the part belongs to."""
    layers: dict[str, Digest] = {}
    """Digest of each layer's file, by name; empty if no document of these shards could be measured."""
    kept: dict[str, Digest] = {}
    """Digest of each file of kept vectors, by name."""
    left_out: list[LeftOutDocument] = []
    one_by_one: list[int] = []
    """Shards whose batches did not fit into memory and whose documents were measured one by one."""
    losses: dict[Annotated[int, Field(ge=0)], tuple[Annotated[float, Field(allow_inf_nan=False)], int]] = {}
    """Sum of the losses of some tokens of each document, and their number."""

    def merge(self, other: PartMetadata) -> PartMetadata:
        """The metadata of two parts together, without digests of layers, since these are not merged yet."""
        left_out = sorted([*self.left_out, *other.left_out], key=lambda entry: entry.document)
        kept = dict(sorted((self.kept | other.kept).items()))
        losses = dict(sorted((self.losses | other.losses).items()))
        one_by_one = sorted([*self.one_by_one, *other.one_by_one])
        return PartMetadata(kept=kept, left_out=left_out, one_by_one=one_by_one, losses=losses)


_Layers = Mapping[int, Callable[[], LayerMoments | None]]
"""The moments of each layer, in memory or read when called; None if no document could be measured."""


@dataclass
class Parts:
    """The parts of one capture, in its folder."""

    folder: Path
    """Folder of the capture."""
    manifest: dict[str, Any]
    metadata: dict[Span, PartMetadata] = field(default_factory=dict)
    """The metadata of every part, on disk or not."""
    unsaved: dict[Span, _Layers] = field(default_factory=dict)
    """The part that completed the run, if the run is then written from memory."""

    @property
    def parts_folder(self) -> Path:
        """The folder of the parts."""
        return self.folder / PARTS

    @property
    def done(self) -> set[int]:
        """Shards that the parts contain."""
        return {shard for span in self.metadata for shard in range(span.first, span.first + span.count)}

    def open(self, kept: Path, *, remove: bool = True) -> list[str]:
        """Load the parts of an earlier attempt, and return a line for each damaged one.

        If ``remove``, damaged parts and leftovers of a killed process are removed.
        """
        for folder in (self.parts_folder, kept):
            if folder.is_symlink():
                raise DatasetError(f"{folder} is a symbolic link, which a capture never creates; choose another folder")
        damaged = []
        for path in sorted(self.parts_folder.iterdir()) if self.parts_folder.is_dir() else ():
            span, unfinished = Span.parse(path.name), _UNFINISHED.fullmatch(path.name) is not None
            if path.is_symlink() or not path.is_dir() or (span is None and not unfinished):
                raise DatasetError(f"{path} is not a part of a capture; move it away or choose another folder")
            if span is not None and span.first + span.count > self.n_shards:
                raise DatasetError(f"{path} is not a part of this capture, which has {self.n_shards} shards; remove it")
            metadata_or_error = None if span is None else self._read(span, kept)
            if span is not None and isinstance(metadata_or_error, PartMetadata):
                self.metadata[span] = metadata_or_error
                continue
            damaged += [] if metadata_or_error is None else [f"{path} is damaged ({metadata_or_error})"]
            if remove:
                shutil.rmtree(path)
        # If a process is killed after it wrote a part, the parts that this one was merged from remain.
        spans = list(self.metadata)
        for span in [
            span for span in spans if any(larger.count > span.count and span.first in larger for larger in spans)
        ]:
            del self.metadata[span]
            if remove:
                shutil.rmtree(self.parts_folder / span.name)
        return damaged

    def completes(self, span: Span) -> bool:
        """True if this part is the last missing one."""
        return len(self.done) + span.count == self.n_shards

    def add(self, span: Span, layers: _Layers, metadata: PartMetadata, *, save: bool = True) -> None:
        """Add a part, and merge it with its sibling and the parents' siblings, as long as they exist.

        Unless ``save``, the merge happens when the part is read, and the siblings stay on disk.
        """
        merged, sibling_spans = span, list[Span]()
        while merged.sibling in self.metadata:
            sibling_spans.append(merged.sibling)
            merged = merged.parent
        siblings = [(sibling, self.layers(sibling)) for sibling in sibling_spans]

        def layer(number: int) -> LayerMoments | None:
            moments, current = _moments(layers, number), span
            for sibling, sibling_layers in siblings:
                sibling_moments = _moments(sibling_layers, number)
                pair = (sibling_moments, moments) if sibling < current else (moments, sibling_moments)
                moments, current = _merged(*pair), current.parent
            return moments

        merged_metadata = reduce(PartMetadata.merge, (self.metadata[sibling] for sibling in sibling_spans), metadata)
        if not save:
            self.unsaved[merged] = {number: partial(layer, number) for number in self._numbers}
            remaining = {part: entry for part, entry in self.metadata.items() if part not in sibling_spans}
            self.metadata = remaining | {merged: merged_metadata}
            return
        self._write(merged, layer, merged_metadata)
        for sibling in sibling_spans:
            del self.metadata[sibling]
            shutil.rmtree(self.parts_folder / sibling.name)

    def layers(self, span: Span) -> _Layers:
        """The layers of a part, each read when called."""
        if span in self.unsaved:
            return self.unsaved[span]
        folder = self.parts_folder / span.name
        numbers = self._numbers if self.metadata[span].layers else []
        return {number: partial(read_layer_of, self.manifest, folder, number, finished=False) for number in numbers}

    def total(self, number: int) -> LayerMoments | None:
        """One layer of all parts, merged from the left; None if no document could be measured."""
        merged = None
        for span in sorted(self.metadata):
            merged = _merged(merged, _moments(self.layers(span), number))
        return merged

    @property
    def total_metadata(self) -> PartMetadata:
        """The metadata of all parts together."""
        return reduce(PartMetadata.merge, (self.metadata[span] for span in sorted(self.metadata)), PartMetadata())

    def _documents(self, span: Span) -> range:
        """The documents of the shards in a span."""
        size = int(self.manifest["options"]["documents_per_shard"])
        return range(span.first * size, min((span.first + span.count) * size, len(self.manifest["documents"])))

    @property
    def n_shards(self) -> int:
        """Number of shards in the whole run."""
        return -(-len(self.manifest["documents"]) // int(self.manifest["options"]["documents_per_shard"]))

    @cached_property
    def _run(self) -> str:
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    @property
    def _numbers(self) -> list[int]:
        return [int(layer["layer"]) for layer in self.manifest["layers"]]

    def _read(self, span: Span, kept: Path) -> PartMetadata | str:
        """The metadata of a part, or a text that says why the part is invalid."""
        folder = self.parts_folder / span.name
        try:
            metadata = PartMetadata.model_validate_json(read_text(folder / METADATA_FILE))
            if metadata.run != self._run:
                return "it belongs to another run"
            files = {folder / name: checksum for name, checksum in metadata.layers.items()}
            files |= {kept / name: checksum for name, checksum in metadata.kept.items()}
            documents = set(self._documents(span))
            if not {entry.document for entry in metadata.left_out} <= documents:
                return "it lists left-out documents of other shards"
            if not metadata.layers and len(metadata.left_out) < len(documents):
                return "it contains no sums"
            if metadata.layers and set(metadata.layers) != set(map(layer_file, self._numbers)):
                return "its layers are not those of its manifest"
            if not all(map(KEPT_NAME.fullmatch, metadata.kept)):
                return f"{METADATA_FILE} lists files that no capture writes"
            changed = [path for path, checksum in files.items() if path.is_symlink() or digest(path) != checksum]
        except (OSError, ValueError) as error:
            return " ".join(str(error).split())[:200]
        return f"{changed[0].name} differs from its checksum" if changed else metadata

    def _write(self, span: Span, layer: Callable[[int], LayerMoments | None], metadata: PartMetadata) -> None:
        final = self.parts_folder / span.name
        temporary = final.with_name(temporary_name(span.name))
        temporary.mkdir(parents=True)
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                digests = threads.map(lambda number: _write_layer(temporary, number, layer(number)), self._numbers)
                layers = {name: checksum for name, checksum in digests if checksum}
            metadata = metadata.model_copy(update={"run": self._run, "layers": layers})
            write_together(temporary, {METADATA_FILE: metadata.model_dump_json(indent=1).encode()})
            os.replace(temporary, final)  # noqa: PTH105
            sync(self.parts_folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.metadata[span] = metadata


def _write_layer(folder: Path, number: int, moments: LayerMoments | None) -> tuple[str, str]:
    name = layer_file(number)
    if moments is None:
        return name, ""
    write_part_layer(folder / name, moments)
    return name, digest(folder / name)


def _moments(layers: _Layers, number: int) -> LayerMoments | None:
    return layers[number]() if number in layers else None


def _merged(left: LayerMoments | None, right: LayerMoments | None) -> LayerMoments | None:
    return right if left is None else left if right is None else left.merge(right)
