"""Sums of the shards of a capture, merged in a binary tree on disk.

A part holds the moments of shards first … first + count − 1, with count a power of two that divides first. Two parts
that are neighbours in the tree become one as soon as both are there, so the order in which shards are done, and by how
many workers or jobs, changes no bit of what is left in the end: log₂ n parts, which are merged from the left.

    parts/000000-000016/part.json   digests of its files and of its shards' kept vectors, documents left out
    parts/000000-000016/layer-000.safetensors …

A part is written under another name, synced and then renamed; only then do the parts it is made of go.
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
from qkscope.files.layerfiles import layer_file, read_layer_of, write_layer
from qkscope.files.readers import read_text

PARTS = "parts"
NOTE = "part.json"
THREADS = 8
"""Layers that are read, merged and written at a time."""
_NAME = re.compile(r"(\d{6,9})-(\d{6,9})")
_UNFINISHED = re.compile(r"\.\d{6,9}-\d{6,9}\.\d+\.tmp")
KEPT_NAME = re.compile(r"shard-\d{6,9}\.safetensors")
"""Files of kept vectors, which lie beside the parts."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, order=True)
class Span:
    """Shards first … first + count − 1."""

    first: int
    count: int = 1

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.first:06d}-{self.count:06d}"

    @property
    def sibling(self) -> Span:
        """The span it becomes one with.

        >>> Span(4, 2).sibling, Span(4, 4).sibling
        (Span(first=6, count=2), Span(first=0, count=4))
        """
        return Span(self.first ^ self.count, self.count)

    @property
    def parent(self) -> Span:
        """The span of both."""
        return Span(self.first & ~self.count, 2 * self.count)

    def __contains__(self, shard: int) -> bool:
        return self.first <= shard < self.first + self.count

    @classmethod
    def parse(cls, name: str) -> Span | None:
        """The span of a folder's name, if it is one."""
        found = _NAME.fullmatch(name)
        span = None if found is None else cls(int(found[1]), int(found[2]))
        good = span is not None and span.count.bit_count() == 1 and span.first % span.count == 0 and span.name == name
        return span if good else None


class LeftOutDocument(BaseModel):
    """A document that was not measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    document: Annotated[int, Field(ge=0, strict=True)]
    reason: str


class Note(BaseModel):
    """What a part says of itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str = ""
    """Digest of the manifest of the run that it is part of."""
    layers: dict[str, Digest] = {}
    """Digest of each layer's file, by name; none if no document of these shards could be measured."""
    kept: dict[str, Digest] = {}
    """Digest of each file of kept vectors, by name."""
    left_out: list[LeftOutDocument] = []
    one_by_one: list[int] = []
    """Shards whose batches did not fit and whose documents were measured alone."""

    def with_(self, other: Note) -> Note:
        """What both say together; their layers are merged, so those digests are none."""
        left_out = sorted([*self.left_out, *other.left_out], key=lambda one: one.document)
        kept = dict(sorted((self.kept | other.kept).items()))
        return Note(kept=kept, left_out=left_out, one_by_one=sorted([*self.one_by_one, *other.one_by_one]))


_Layers = Mapping[int, Callable[[], LayerMoments]]
"""The moments of each layer, in memory or yet to be read."""


@dataclass
class Parts:
    """The parts of one capture, in its folder."""

    folder: Path
    """Of the capture."""
    manifest: dict[str, Any]
    notes: dict[Span, Note] = field(default_factory=dict)
    """Every part that is there."""

    @property
    def place(self) -> Path:
        """The folder of the parts."""
        return self.folder / PARTS

    @property
    def done(self) -> set[int]:
        """Shards that are in some part."""
        return {shard for span in self.notes for shard in range(span.first, span.first + span.count)}

    def open(self, kept: Path, *, remove: bool = True) -> list[str]:
        """Find the parts that an earlier attempt left; those that are damaged are named and, unless told not to,
        removed with whatever else a kill left over.
        """  # noqa: D205
        for place in (self.place, kept):
            if place.is_symlink():
                raise DatasetError(f"{place} is a link, which a capture does not make; choose another folder")
        damaged = []
        for path in sorted(self.place.iterdir()) if self.place.is_dir() else ():
            span, unfinished = Span.parse(path.name), _UNFINISHED.fullmatch(path.name) is not None
            if path.is_symlink() or not path.is_dir() or (span is None and not unfinished):
                raise DatasetError(f"{path} is no part of a capture; move it away or choose another folder")
            if span is not None and span.first + span.count > self.in_all:
                raise DatasetError(f"{path} is no part of this capture, which has {self.in_all} shards; remove it")
            found = None if span is None else self._read(span, kept)
            if span is not None and isinstance(found, Note):
                self.notes[span] = found
                continue
            damaged += [] if found is None else [f"{path} is damaged ({found})"]
            if remove:
                shutil.rmtree(path)
        # A kill after a part was written and before those it is made of were removed.
        for span in [s for s in self.notes if any(o.count > s.count and s.first in o for o in self.notes)]:
            del self.notes[span]
            if remove:
                shutil.rmtree(self.place / span.name)
        return damaged

    def add(self, span: Span, layers: _Layers, note: Note) -> None:
        """Add a part, merged with its neighbours in the tree as far up as they are there."""
        merged, made_of = span, list[Span]()
        while merged.sibling in self.notes:
            made_of.append(merged.sibling)
            merged = merged.parent
        others = [(one, self.layers(one)) for one in made_of]

        def layer(number: int) -> LayerMoments | None:
            found, at = _moments(layers, number), span
            for one, its in others:
                pair = (_moments(its, number), found) if one < at else (found, _moments(its, number))
                found, at = _both(*pair), at.parent
            return found

        self._write(merged, layer, reduce(Note.with_, (self.notes[one] for one in made_of), note))
        for one in made_of:
            del self.notes[one]
            shutil.rmtree(self.place / one.name)

    def layers(self, span: Span) -> _Layers:
        """The layers of a part, to be read when they are wanted."""
        place = self.place / span.name
        numbers = self._numbers if self.notes[span].layers else []
        return {number: partial(read_layer_of, self.manifest, place, number) for number in numbers}

    def total(self, number: int) -> LayerMoments | None:
        """One layer of all parts together, from the left; None if no document could be measured."""
        found = None
        for span in sorted(self.notes):
            found = _both(found, _moments(self.layers(span), number))
        return found

    @property
    def note(self) -> Note:
        """What all parts say together."""
        return reduce(Note.with_, (self.notes[span] for span in sorted(self.notes)), Note())

    def _documents(self, span: Span) -> range:
        """The documents of some shards."""
        size = int(self.manifest["options"]["documents_per_shard"])
        return range(span.first * size, min((span.first + span.count) * size, len(self.manifest["documents"])))

    @property
    def in_all(self) -> int:
        """How many shards the documents of the run make."""
        return -(-len(self.manifest["documents"]) // int(self.manifest["options"]["documents_per_shard"]))

    @cached_property
    def _run(self) -> str:
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    @property
    def _numbers(self) -> list[int]:
        return [int(one["layer"]) for one in self.manifest["layers"]]

    def _read(self, span: Span, kept: Path) -> Note | str:
        """What a part says of itself, or what is wrong with it."""
        place = self.place / span.name
        try:
            note = Note.model_validate_json(read_text(place / NOTE))
            if note.run != self._run:
                return "it is part of another run"
            files = {place / name: said for name, said in note.layers.items()}
            files |= {kept / name: said for name, said in note.kept.items()}
            documents = set(self._documents(span))
            if not {one.document for one in note.left_out} <= documents:
                return "it leaves out documents of other shards"
            if not note.layers and len(note.left_out) < len(documents):
                return "it holds no sums"
            if note.layers and set(note.layers) != set(map(layer_file, self._numbers)):
                return "it does not hold the layers of its manifest"
            if not all(map(KEPT_NAME.fullmatch, note.kept)):
                return f"{NOTE} names files that no capture writes"
            changed = [path for path, said in files.items() if path.is_symlink() or digest(path) != said]
        except (OSError, ValueError) as error:
            return " ".join(str(error).split())[:200]
        return f"{changed[0].name} is not what was written" if changed else note

    def _write(self, span: Span, layer: Callable[[int], LayerMoments | None], note: Note) -> None:
        final = self.place / span.name
        temporary = final.with_name(temporary_name(span.name))
        temporary.mkdir(parents=True)
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                found = threads.map(lambda number: _write_layer(temporary, number, layer(number)), self._numbers)
                layers = {name: said for name, said in found if said}
            note = note.model_copy(update={"run": self._run, "layers": layers})
            write_together(temporary, {NOTE: note.model_dump_json(indent=1).encode()})
            os.replace(temporary, final)  # noqa: PTH105
            sync(self.place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.notes[span] = note


def _write_layer(place: Path, number: int, moments: LayerMoments | None) -> tuple[str, str]:
    name = layer_file(number)
    if moments is None:
        return name, ""
    write_layer(place / name, moments)
    return name, digest(place / name)


def _moments(layers: _Layers, number: int) -> LayerMoments | None:
    return layers[number]() if number in layers else None


def _both(left: LayerMoments | None, right: LayerMoments | None) -> LayerMoments | None:
    return right if left is None else left if right is None else left.merge(right)
