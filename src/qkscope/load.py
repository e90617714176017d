"""From what is on disk to the moments of heads: a dataset of vectors, or the folder of a captured run.

Both offer the same; what is wrong with a head is said of that head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qkscope.core.headmoments import BucketMeans, HeadMoments, bucket_means, cross_moments, group_moments
from qkscope.core.layermoments import LayerMoments
from qkscope.core.moments import Moments
from qkscope.core.rows import Rows
from qkscope.core.sample import Sample
from qkscope.errors import DatasetError, HeadError
from qkscope.heads import HeadId
from qkscope.store.datasets import Dataset
from qkscope.store.runs import MOMENTS, SAMPLE, RunFolder, layer_file


@dataclass(frozen=True)
class Reading:
    """How the rows of a head are taken from its file."""

    max_samples: int | None = None
    """Keep at most this many rows of each head, chosen by a hash of (seed, document, position)."""
    seed: int = 0
    """Seed of that choice."""
    paired: bool = False
    """Also take moments of (q, k) at the same token."""


TOO_LARGE = 1e60
"""Beyond this, squares and their products leave float64."""


@dataclass(frozen=True)
class _Kind:
    """The rows and moments of one query or key head."""

    head: HeadId
    rows: Rows
    groups: Moments
    dropped: int
    last: int
    _buckets: dict[int, BucketMeans] = field(default_factory=dict)

    def buckets(self, window: int) -> BucketMeans:
        """Means by position bucket; the query heads of a group nearly always share the window."""
        if window not in self._buckets:
            self._buckets[window] = bucket_means(self.rows, window)
        return self._buckets[window]


Loaded = list[tuple[HeadId, HeadMoments]]
"""Query heads with their moments."""


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

    def key_head(self, head: HeadId) -> HeadId:
        """The key head that a query head reads; a ``HeadError`` if there is none."""

    def file(self, head: HeadId) -> str | None:
        """The file that a message about this head should name."""

    def load(self, heads: Sequence[HeadId], reading: Reading) -> tuple[Loaded, list[HeadError]]:
        """Moments of query heads that read one key head, and the heads that failed."""

    def rows(self, head: HeadId, reading: Reading) -> Rows:
        """Vectors of a query or key head: all there are, or the run's sample of them."""

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

    def key_head(self, head: HeadId) -> HeadId:
        """The key head, if its file is there."""
        return self.dataset.key_head(head)

    def file(self, head: HeadId) -> str | None:
        """The head's parquet file."""
        return self.dataset.heads.get(head)

    def load(self, heads: Sequence[HeadId], reading: Reading) -> tuple[Loaded, list[HeadError]]:
        """Read each file once and reduce it."""
        return load_key_group(self.dataset, heads, reading)

    def rows(self, head: HeadId, reading: Reading) -> Rows:
        """All finite rows of the head."""
        return read_head(self.dataset, head, reading).rows

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

    def key_head(self, head: HeadId) -> HeadId:
        """The key head; captured with every query head that reads it."""
        return head.key_head(self.q_per_kv)

    def file(self, head: HeadId) -> str | None:
        """The file of the head's layer."""
        return str(self.run.folder / MOMENTS / layer_file(head.layer))

    def load(self, heads: Sequence[HeadId], reading: Reading) -> tuple[Loaded, list[HeadError]]:
        """Take the heads out of their layer's moments."""
        if reading.paired or reading.max_samples is not None:
            what = "pairing by token" if reading.paired else "max_samples"
            reason = f"{what} needs vectors, and a captured run holds moments; analyse its vectors instead"
            return [], [HeadError(head, reason, self.file(head)) for head in heads]
        try:
            moments = _layer_moments(str(self.run.folder), heads[0].layer)
        except DatasetError as error:
            return [], [HeadError(head, str(error), self.file(head)) for head in heads]
        layer = self._layers[heads[0].layer]
        loaded = []
        for head in heads:
            query, key = layer["query_heads"].index(head.head), layer["key_heads"].index(self.key_head(head).head)
            loaded.append((head, moments.head(query, key, int(self.run.manifest["window"]), layer["scaling"])))
        return loaded, []

    def rows(self, head: HeadId, reading: Reading) -> Rows:
        """The run's sample of the head's vectors."""
        return read_head(Dataset.open(self.run.folder / SAMPLE), head, reading).rows

    def identity(self) -> dict[str, str]:
        """Folder, model and corpus."""
        model = self.run.manifest["model"]
        place = {"kind": "run", "path": str(self.run.folder.resolve())}
        return place | {"model": str(model.get("id")), "corpus": str(self.run.manifest["corpus"])}

    def __str__(self) -> str:
        return str(self.run.folder)


@lru_cache(maxsize=2)
def _layer_moments(folder: str, layer: int) -> LayerMoments:
    """The heads of a layer are asked for group by group; its file is read once."""
    return RunFolder(Path(folder), {}).layer(layer)


@dataclass(frozen=True)
class HeadRows:
    """The finite rows of a head in canonical order, how many were not finite, and the last position among all."""

    rows: Rows
    dropped: int
    last: int


def read_head(dataset: Dataset, head: HeadId, reading: Reading) -> HeadRows:
    """Read a head and put its rows in order."""
    rows = dataset.read(head)
    finite = rows.finite()
    dropped = len(rows) - len(finite)
    if len(finite) and float(max(finite.x.max(), -finite.x.min())) > TOO_LARGE:
        reason = f"holds values beyond ±{TOO_LARGE:g}, which no attention vector does"
        raise HeadError(head, reason, dataset.heads.get(head))
    if reading.max_samples is not None:
        finite = Sample.from_rows(finite, reading.max_samples, reading.seed).rows
    return HeadRows(finite.ordered(), dropped, int(rows.position.max()))


def load_key_group(dataset: Dataset, heads: Sequence[HeadId], reading: Reading) -> tuple[Loaded, list[HeadError]]:
    """Moments of the query heads that read one key head, whose file is read once; and the heads that failed."""
    loaded: Loaded = []
    failed: list[HeadError] = []
    key: _Kind | HeadError | None = None
    for head in heads:
        try:
            key = key or _attempt(dataset, dataset.key_head(head), reading)
            if isinstance(key, HeadError):
                raise HeadError(head, f"its key head {key.head} cannot be used: {key.reason}", key.file)
            loaded.append((head, _pair(dataset, _load(dataset, head, reading), key, reading)))
        except HeadError as error:
            failed.append(error)
    return loaded, failed


def _attempt(dataset: Dataset, head: HeadId, reading: Reading) -> _Kind | HeadError:
    try:
        return _load(dataset, head, reading)
    except HeadError as error:
        return error


def _load(dataset: Dataset, head: HeadId, reading: Reading) -> _Kind:
    file = dataset.heads.get(head)
    try:
        found = read_head(dataset, head, reading)
    except DatasetError as error:
        raise HeadError(head, str(error), file) from None
    rows, dropped = found.rows, found.dropped
    if len(rows) < 2:
        lost = f" after dropping {dropped} non-finite ones" if dropped else ""
        raise HeadError(head, f"expected at least 2 rows, got {len(rows)}{lost}", file)
    if rows.position.min() == rows.position.max():
        reason = f"all {len(rows)} rows stand at position {rows.position[0]}; nothing can correlate with it"
        raise HeadError(head, reason, file)
    if rows.d < 2:
        raise HeadError(head, f"expected vectors of length 2 or more, got {rows.d}", file)
    return _Kind(head, rows, group_moments(rows), dropped, found.last)


def _pair(dataset: Dataset, query: _Kind, key: _Kind, reading: Reading) -> HeadMoments:
    file = dataset.heads[query.head]
    if query.rows.d != key.rows.d:
        reason = f"its vectors have length {query.rows.d}, those of its key head {key.head} have {key.rows.d}"
        raise HeadError(query.head, reason, file)
    last = max(query.last, key.last)
    window = dataset.window or last + 1
    if last >= window:
        raise HeadError(query.head, f"has positions up to {last}, which a window of {window} does not hold", file)
    cross = cross_moments(query.rows, key.rows) if reading.paired else None
    if cross is not None and cross.n.sum() < 2:
        reason = f"pairing by token needs tokens that it shares with {key.head}; use pairing 'independent'"
        raise HeadError(query.head, reason, file)
    return HeadMoments(
        q=query.groups,
        k=key.groups,
        k_buckets=key.buckets(window),
        window=np.asarray(window),
        scaling=np.asarray(dataset.scaling or query.rows.d**-0.5),
        dropped_q=np.asarray(query.dropped),
        dropped_k=np.asarray(key.dropped),
        cross=cross,
    )
