"""Rows: the vectors of one head with their positions and documents, and their canonical order."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int, Integer

_T = TypeVar("_T")


def evenly_spaced(n: int, most: int) -> Int[np.ndarray, "m"]:
    """Indices ⌊i(n − 1)/(most − 1)⌋, i = 0 … most − 1, of n rows; all of them if there are no more.

    >>> evenly_spaced(6, 3).tolist(), evenly_spaced(2, 3).tolist()
    ([0, 2, 5], [0, 1])
    """
    return np.arange(n) if n <= most else np.arange(most) * (n - 1) // max(most - 1, 1)


def rows_of(example_id: Int[np.ndarray, "n"], document: int, most: int | None = None) -> Int[np.ndarray, "m"]:
    """Indices of the rows of one document, thinned evenly to at most ``most``; rows must be sorted by document.

    >>> rows_of(np.array([0, 0, 1, 1, 1, 1, 2]), 1, 3).tolist()
    [2, 3, 5]
    """
    first, end = np.searchsorted(example_id, [document, document + 1])
    if most is not None and end - first > most:
        return first + evenly_spaced(int(end - first), most)
    return np.arange(first, end)


@dataclass(frozen=True)
class Rows:
    """Vectors x of one head (or, with axes between n and d, of several) with position and document of each."""

    x: Float[np.ndarray, "n *heads d"]
    position: Int[np.ndarray, "n"]
    example_id: Int[np.ndarray, "n"]
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = len(self.x), len(self.position), len(self.example_id)
        if len(set(lengths)) != 1:
            raise ValueError(f"expected the same number of vectors, positions and example ids, got {lengths}")

    def __len__(self) -> int:
        return len(self.x)

    @property
    def d(self) -> int:
        """Length of the vectors."""
        return int(self.x.shape[-1])

    @cached_property
    def tokens(self) -> bytes:
        """Documents and positions as bytes: a cache key for results that depend on nothing else."""
        return self.example_id.astype(np.int64).tobytes() + self.position.astype(np.int64).tobytes()

    def once(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Return a result of these rows, computed on first use; query heads share the rows of their keys."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    def take(self, index: Int[np.ndarray, "m"]) -> Rows:
        """The rows at these indices, in this order."""
        return Rows(self.x[index], self.position[index], self.example_id[index])

    def of_document(self, document: int, most: int | None = None) -> Rows:
        """The rows of one document, thinned evenly to at most ``most``; rows must be sorted by document."""
        return self.take(rows_of(self.example_id, document, most))

    def as_double(self) -> Rows:
        """The same rows in float64; cached."""
        if self.x.dtype == np.float64:
            return self
        return self.once("double", lambda: Rows(self.x.astype(np.float64), self.position, self.example_id))

    def concat(self, other: Rows) -> Rows:
        """These rows, followed by those of ``other``."""
        return Rows(
            np.concatenate([self.x, other.x]),
            np.concatenate([self.position, other.position]),
            np.concatenate([self.example_id, other.example_id]),
        )

    def ordered(self) -> Rows:
        """The same rows sorted by (example_id, position), so that no result depends on the order in the file.

        Rows with the same document and position are sorted by the bytes of their vectors.
        """
        documents, positions = self.example_id, self.position
        same = documents[1:] == documents[:-1]
        if ((documents[1:] > documents[:-1]) | (same & (positions[1:] > positions[:-1]))).all():
            return self
        return self.take(row_order(self.x, self.example_id, self.position))

    @property
    def repeated(self) -> int:
        """Number of rows whose token occurs in an earlier row too; rows must be sorted."""
        tokens = token_keys(self.example_id, self.position)
        return int((tokens[1:] == tokens[:-1]).sum())

    def finite(self) -> Rows:
        """The rows whose vectors contain neither NaN nor infinity."""
        # One sum is enough for nearly all files; if it is not finite, each value is checked.
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(self.x.sum()):
                return self
        good = np.isfinite(self.x).all(axis=tuple(range(1, self.x.ndim)))
        return self.take(np.flatnonzero(good))


@dataclass(frozen=True)
class Pair:
    """Vectors of a query head and of the key head it reads, each sorted by (example_id, position)."""

    q: Rows
    k: Rows

    def as_double(self) -> Pair:
        """The same vectors in float64."""
        return Pair(self.q.as_double(), self.k.as_double())


class Coordinates(NamedTuple):
    """The vectors of both classes on a few axes."""

    q: Float[np.ndarray, "n_q m"]
    k: Float[np.ndarray, "n_k m"]

    @classmethod
    def of(cls, pair: Pair, axes: Float[np.ndarray, "m d"]) -> Coordinates:
        """Project on all axes in one product, in the precision of the vectors."""
        return cls(*((rows.x @ axes.astype(rows.x.dtype).T).astype(np.float64) for rows in (pair.q, pair.k)))

    def select(self, axes: slice) -> Coordinates:
        """The coordinates on some of the axes."""
        return Coordinates(self.q[:, axes], self.k[:, axes])


def token_keys(example_id: Int[np.ndarray, "*shape"], position: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
    """One integer per token; documents and positions are 32-bit in the dataset format."""
    return (example_id.astype(np.int64) << 32) + position


def row_order(x: Float[np.ndarray, "n *rest"], *keys: Integer[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Indices that sort by the keys, the first key first, and rows that are equal in all keys by the bytes of x."""
    order = np.lexsort(keys[::-1])
    tied = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in keys:
        tied &= key[order[1:]] == key[order[:-1]]
    if not tied.any():
        return order
    rows = np.ascontiguousarray(x).reshape(len(x), -1)
    columns = rows.view(f"u{rows.dtype.itemsize}").T
    return np.lexsort([*columns[::-1], *keys[::-1]])
