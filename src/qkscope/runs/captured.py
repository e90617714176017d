"""The folder of a captured run as a source: stored moments, and vectors from its sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.core.bucketspread import BucketSpread
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import N_GROUPS
from qkscope.core.keypairs import TokenPairs
from qkscope.core.layermoments import LayerMoments
from qkscope.core.reach import HeadReach, bin_starts, query_positions
from qkscope.core.rope import Rope
from qkscope.core.rows import Pair, Rows
from qkscope.core.sample import ordered_sample
from qkscope.errors import DatasetError, HeadError
from qkscope.files.checksums import file_state, recorded_digests, run_digest
from qkscope.files.dataset import Dataset
from qkscope.files.hub import Files
from qkscope.files.layerfiles import layer_file
from qkscope.files.manifest import LayerEntry
from qkscope.files.runfolder import MANIFEST, MOMENTS, PASSAGE_FILE, SAMPLE, RunFolder, read_passage
from qkscope.files.vectors import DATA_FILE
from qkscope.headids import HeadId
from qkscope.runs.loading import read_head, too_wide
from qkscope.runs.source import WHOLE, Extent, LayerNotes, LoadSpec


@dataclass(frozen=True)
class CapturedSource:
    """A source that reads stored moments, and vectors from the sample, in the folder of a captured run."""

    run: RunFolder
    origin: Files | None = None
    """The files on the Hub, if the run was downloaded from there."""
    whole: CapturedSource | None = field(default=None, compare=False, repr=False)
    """The run at the longer window that this one comes from: its folder is removed with it, if it is temporary."""

    @cached_property
    def _layers(self) -> dict[int, LayerEntry]:
        return {layer.layer: layer for layer in self.run.manifest.layers}

    @property
    def query_heads(self) -> list[HeadId]:
        """All captured query heads."""
        return [HeadId(number, h, "q") for number, layer in self._layers.items() for h in layer.query_heads]

    @property
    def q_per_kv(self) -> int:
        """Query heads per key head of the model."""
        return self.run.manifest.q_per_kv

    @property
    def window(self) -> int | None:
        """Context length of the capture."""
        return self.run.manifest.window

    @property
    def buckets(self) -> int | None:
        """Position buckets of the capture."""
        return self.run.manifest.options.buckets

    def key_head(self, head: HeadId) -> HeadId:
        """The key head that a query head reads; always captured with it."""
        return head.key_head(self.q_per_kv)

    def file(self, head: HeadId) -> str | None:
        """The file of the head's layer."""
        return str(self.run.folder / MOMENTS / layer_file(head.layer))

    def layer_notes(self, head: HeadId) -> LayerNotes:
        """Properties of the layer, from the manifest."""
        layer = self._layers[head.layer]
        return LayerNotes(layer.rope is None, layer.sliding_window, layer.both)

    def load(self, heads: Sequence[HeadId], spec: LoadSpec) -> tuple[list[HeadData], list[HeadError]]:
        """Select the heads from their layer's moments, and read vectors from the sample."""
        if spec.paired or spec.max_samples is not None:
            feature = "pairing by token" if spec.paired else "max_samples"
            reason = f"{feature} needs vectors, but a captured run contains moments; analyse its vectors instead"
            return [], [HeadError(head, reason, self.file(head)) for head in heads]
        try:
            state = [file_state(path) for path in (self.run.folder / MANIFEST, Path(str(self.file(heads[0]))))]
            moments = _layer_moments(str(self.run.folder), heads[0].layer, bool(spec.buckets), *state)
        except DatasetError as error:
            return [], [HeadError(head, str(error)) for head in heads]
        layer = self._layers[heads[0].layer]
        keys = cache(partial(self._sampled, size=spec.sample))
        loaded: list[HeadData] = []
        failed: list[HeadError] = []
        for head in heads:
            query, key = layer.query_heads.index(head.head), layer.key_heads.index(self.key_head(head).head)
            head_moments = moments.head(query, key, self.run.manifest.window, layer.scaling)
            try:
                vectors = Pair(self._sampled(head, spec.sample), keys(self.key_head(head))) if spec.sample else None
            except (DatasetError, HeadError) as error:
                failed.append(HeadError(head, f"its sample cannot be read: {error}", self.run.folder / SAMPLE))
                vectors = None
            problem = None if vectors is None else _too_wide(int(head_moments.window), vectors)
            if problem:
                failed.append(HeadError(head, f"{problem}; capture the run again", self.run.folder / SAMPLE))
                continue
            rope = layer_rope(layer)
            rotary = None if rope is None or not self.run.manifest.rotated else moments.rotary(query, key, rope)
            notes = vars(self.layer_notes(head))
            reach = self._reach(moments, query)
            passage = None
            if spec.passage:
                passage = read_passage(self.run.folder, self.run.manifest, head.layer, query, key)
                self.run.check(PASSAGE_FILE)
            try:
                buckets, pairs = _buckets(moments, query, vectors)
            except LookupError:
                reason = f"{self.file(head)} has pairs of keys that are not in the run's sample; capture the run again"
                failed.append(HeadError(head, reason))
                continue
            loaded.append(
                HeadData(
                    head, self.key_head(head), head_moments, vectors, rotary, **notes,
                    reach=reach, q_buckets=buckets, pairs=pairs, passage=passage,
                )
            )  # fmt: skip
        return loaded, failed

    def _reach(self, moments: LayerMoments, query: int) -> HeadReach | None:
        """The attention weights of a query head by distance, with the positions of the measured queries."""
        manifest, options = self.run.manifest, self.run.manifest.options
        count = options.reach_queries
        if moments.reach is None or not count:
            return None
        text_documents = [number for number in manifest.measured if manifest.documents[number].positions is None]
        lengths = {number: manifest.documents[number].tokens for number in text_documents}
        positions = {n: query_positions(length, count, options.skip_first) for n, length in lengths.items()}
        after = [lengths[n] - 1 - queries for n, queries in positions.items()]
        groups = [np.full(len(queries), n % N_GROUPS) for n, queries in positions.items()]
        starts = bin_starts(manifest.window)
        empty = [np.zeros(0, dtype=np.int64)]
        return HeadReach(
            moments.reach[query],
            starts,
            np.concatenate(empty + list(positions.values())),
            np.concatenate(empty + after),
            np.concatenate(empty + groups),
            options.skip_first,
            None if moments.entropy is None else moments.entropy[query],
            None if moments.max_logit is None else float(moments.max_logit[query]),
            None if moments.repeats is None else moments.repeats[query],
        )

    def rows(self, head: HeadId, spec: LoadSpec) -> Rows:
        """The run's sample of the head's vectors; a ``DatasetError`` if its file has changed since the capture."""
        rows = read_head(self._sample, head, spec).rows
        self.run.check(f"{SAMPLE}/{head}/{DATA_FILE}")
        return rows

    def token_texts(self) -> pd.DataFrame:
        """Tokens as text, from the run's sample, in which all heads have the same tokens."""
        return self._sample.token_texts()

    @cached_property
    def _sample(self) -> Dataset:
        return Dataset.open(self.run.folder / SAMPLE)

    def _sampled(self, head: HeadId, size: int) -> Rows:
        return ordered_sample(self.rows(head, WHOLE), size)

    def extent(self, heads: Sequence[HeadId]) -> Extent:  # noqa: ARG002
        """Numbers of documents and of their tokens, without the documents that were left out."""
        manifest = self.run.manifest
        documents = [manifest.documents[number] for number in manifest.measured]
        loss = None if manifest.loss is None else manifest.loss.mean
        return Extent(len(documents), sum(document.tokens for document in documents), loss)

    def identity(self) -> dict[str, str]:
        """Folder or repository, model, its weights, corpus and, if there are checksums, the digest of the run."""
        manifest, recorded = self.run.manifest, recorded_digests(self.run.folder)
        location = {"path": str(self.run.folder.resolve())} if self.origin is None else self.origin.identity()
        run_identity = {"kind": ""} | location | {"kind": "run", "stage": manifest.stage}
        run_identity |= {"model": str(manifest.model.id), "corpus": manifest.corpus}
        run_identity |= {} if manifest.model.weights is None else {"weights": str(manifest.model.weights)}
        return run_identity | ({} if recorded is None else {"digest": run_digest(recorded)})

    def __str__(self) -> str:
        return str(self.run.folder if self.origin is None else self.origin)


def _too_wide(window: int, vectors: Pair) -> str | None:
    """The error text for a window that is too wide for the sample; None if it is not."""
    q, k = vectors.q, vectors.k
    return too_wide(window, min(len(q), len(k)), max(int(rows.position.max(initial=0)) for rows in (q, k)))


def layer_rope(layer: LayerEntry) -> Rope | None:
    """Return the rotary encoding of a layer."""
    rope = layer.rope
    return None if rope is None else Rope(np.array(rope.frequencies), rope.layout, rope.start, rope.sign)


def _buckets(
    moments: LayerMoments, query: int, vectors: Pair | None
) -> tuple[BucketSpread, TokenPairs] | tuple[None, None]:
    """The spread and pairs of keys of a query head; a ``LookupError`` if the sample lacks a key of a pair."""
    if moments.spread is None or vectors is None:
        return None, None
    moments.spread.pairs.rows_in(vectors.k.example_id, vectors.k.position)
    return moments.spread.head(query, moments.q_cells[query]), moments.spread.pairs


@lru_cache(maxsize=2)
def _layer_moments(folder: str, layer: int, buckets: bool, *_: object) -> LayerMoments:
    """The moments of a layer; cached while its files are the same, since its heads are loaded in several calls."""
    return RunFolder.open(Path(folder)).layer(layer, buckets=buckets)
