"""Load the moments of a dataset's heads from their files; errors name the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import (
    BucketMeans,
    HeadMoments,
    bucket_moments,
    cell_means,
    cross_moments,
    group_moments,
    undone_sums,
)
from qkscope.core.moments import Moments
from qkscope.core.rope import HeadRotary, Rope, UndoneSums
from qkscope.core.rows import Pair, Rows
from qkscope.core.sample import Sample, ordered_sample
from qkscope.errors import DatasetError, HeadError
from qkscope.files.dataset import Dataset
from qkscope.files.manifest import WIDE_WINDOW
from qkscope.headids import HeadId
from qkscope.options import MOST_TOKENS
from qkscope.runs.source import LoadSpec

SPARSE = 4096
"""Largest number of tokens of a very wide window per row; fewer rows do not justify so long a frequency search."""
TOO_LARGE = 1e60
"""Beyond this, products of squares exceed the range of float64."""


@dataclass(frozen=True)
class _LoadedHead:
    """The rows and moments of one query or key head."""

    head: HeadId
    rows: Rows
    groups: Moments
    dropped: int
    last: int
    _cells: dict[int, BucketMeans] = field(default_factory=dict)
    _undone: list[UndoneSums] = field(default_factory=list)
    _sample: list[Rows] = field(default_factory=list)

    def cells(self, window: int) -> BucketMeans:
        """Means by document group and position bucket; cached, since the query heads of a key head share them."""
        if window not in self._cells:
            self._cells[window] = cell_means(self.rows, window)
        return self._cells[window]

    def sample(self, size: int) -> Rows:
        """The sampled rows; cached, since the query heads of a key head share them."""
        if not self._sample:
            self._sample.append(ordered_sample(self.rows, size))
        return self._sample[0]

    def undone(self, rope: Rope) -> UndoneSums:
        """Sums of the rows with their rotation undone; cached, since the query heads of a key head share them."""
        if not self._undone:
            self._undone.append(undone_sums(self.rows, rope))
        return self._undone[0]


@dataclass(frozen=True)
class HeadRows:
    """The finite rows of a head in canonical order, the number of non-finite rows, and the last position.

    Rows at skipped positions count only for the last position.
    """

    rows: Rows
    dropped: int
    last: int


def read_head(dataset: Dataset, head: HeadId, spec: LoadSpec) -> HeadRows:
    """Read a head, skip its first positions, drop non-finite rows and sort the rest."""
    all_rows = dataset.read(head)
    rows = _from_position(all_rows, spec.skip_first)
    finite = rows.finite()
    dropped = len(rows) - len(finite)
    if len(finite) and float(max(finite.x.max(), -finite.x.min())) > TOO_LARGE:
        reason = f"contains values beyond ±{TOO_LARGE:g}, larger than in any attention vector"
        raise HeadError(head, reason, dataset.heads.get(head))
    if spec.max_samples is not None:
        finite = Sample.from_rows(finite, spec.max_samples, spec.seed).rows
    return HeadRows(finite.ordered(), dropped, int(all_rows.position.max()))


def too_wide(window: int, rows: int, last: int) -> str | None:
    """The error text for a window that is too wide for this number of rows and last position; None if it is not.

    Time and memory of frequency searches depend on the window, not on the number of rows.
    """
    if window <= WIDE_WINDOW or (window <= 4 * (last + 1) and window <= SPARSE * rows):
        return None
    return f"a window of {window:,} tokens for {rows:,} rows at positions up to {last:,}"


def _from_position(rows: Rows, first: int) -> Rows:
    """The rows at this and later positions."""
    is_later = rows.position >= first
    return rows if is_later.all() else rows.take(np.flatnonzero(is_later))


def load_key_group(dataset: Dataset, heads: Sequence[HeadId], spec: LoadSpec) -> tuple[list[HeadData], list[HeadError]]:
    """Moments of the query heads that read one key head, and the heads that failed; the key file is read once."""
    loaded: list[HeadData] = []
    failed: list[HeadError] = []
    key: _LoadedHead | HeadError | None = None
    for head in heads:
        try:
            key = key or _load_or_error(dataset, dataset.key_head(head), spec)
            if isinstance(key, HeadError):
                raise HeadError(head, f"its key head {key.head} cannot be used: {key.reason}", key.file)
            query = _load(dataset, head, spec)
            moments = _pair(dataset, query, key, spec)
            vectors = Pair(query.sample(spec.sample), key.sample(spec.sample)) if spec.sample else None
            rotary = _rotary(dataset, query, key) if spec.rotary else None
            buckets = bucket_moments(query.rows, int(moments.window), spec.buckets) if spec.buckets else None
            loaded.append(HeadData(head, key.head, moments, vectors, rotary, q_buckets=buckets))
        except HeadError as error:
            failed.append(error)
        except DatasetError as error:
            failed.append(HeadError(head, str(error), dataset.heads.get(head)))
    return loaded, failed


def _rotary(dataset: Dataset, query: _LoadedHead, key: _LoadedHead) -> HeadRotary | None:
    rope = dataset.rotary.of(query.head.layer, query.rows.d)
    return None if rope is None else HeadRotary(rope, query.undone(rope), key.undone(rope))


def _load_or_error(dataset: Dataset, head: HeadId, spec: LoadSpec) -> _LoadedHead | HeadError:
    try:
        return _load(dataset, head, spec)
    except HeadError as error:
        return error


def _load(dataset: Dataset, head: HeadId, spec: LoadSpec) -> _LoadedHead:
    file = dataset.heads.get(head)
    try:
        head_rows = read_head(dataset, head, spec)
    except DatasetError as error:
        raise HeadError(head, str(error), file) from None
    rows, dropped = head_rows.rows, head_rows.dropped
    if len(rows) < 2:
        dropped_text = f" after dropping {dropped} non-finite ones" if dropped else ""
        skipped_text = f" from position {spec.skip_first} on" if spec.skip_first else ""
        raise HeadError(head, f"expected at least 2 rows{skipped_text}, got {len(rows)}{dropped_text}", file)
    if rows.position.min() == rows.position.max():
        reason = f"all {len(rows)} rows have position {rows.position[0]}, so nothing can correlate with position"
        raise HeadError(head, reason, file)
    if rows.d < 2:
        raise HeadError(head, f"expected vectors of length 2 or more, got {rows.d}", file)
    return _LoadedHead(head, rows, group_moments(rows), dropped, head_rows.last)


def _pair(dataset: Dataset, query: _LoadedHead, key: _LoadedHead, spec: LoadSpec) -> HeadMoments:
    file = dataset.heads[query.head]
    if query.rows.d != key.rows.d:
        reason = f"its vectors have length {query.rows.d}, those of its key head {key.head} have {key.rows.d}"
        raise HeadError(query.head, reason, file)
    last = max(query.last, key.last)
    window = dataset.window or last + 1
    if window > MOST_TOKENS:
        reason = f"a window of {window:,} tokens exceeds the limit of {MOST_TOKENS:,} for the frequency search"
        raise HeadError(query.head, reason, file)
    problem = too_wide(window, min(len(query.rows), len(key.rows)), last)
    if problem:
        raise HeadError(query.head, f"{problem}; give the real --window", file)
    if last >= window:
        raise HeadError(
            query.head, f"has positions up to {last}, beyond the window of {window}; use a larger window", file
        )
    cross = cross_moments(query.rows, key.rows) if spec.paired else None
    if cross is not None and cross.n.sum() < 2:
        reason = f"pairing by token needs tokens in common with {key.head}; use pairing 'independent'"
        raise HeadError(query.head, reason, file)
    return HeadMoments(
        q=query.groups,
        k=key.groups,
        k_cells=key.cells(window),
        window=np.asarray(window),
        scaling=np.asarray(dataset.scaling or query.rows.d**-0.5),
        dropped_q=np.asarray(query.dropped),
        dropped_k=np.asarray(key.dropped),
        repeated_q=np.asarray(query.rows.repeated),
        repeated_k=np.asarray(key.rows.repeated),
        cross=cross,
        q_cells=cell_means(query.rows, window, spec.buckets) if spec.buckets else None,
    )
