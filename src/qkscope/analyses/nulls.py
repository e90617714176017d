"""The correlation with position that arises by chance if the content does not depend on position.

Neighbouring tokens are similar, so positions must not be shuffled. Instead, the linear drift of each class is removed,
and half of the documents, drawn at random so that both halves have about as many tokens, are read backwards,
t → first + last − t: this keeps the similarity of neighbours. Axis a is refitted for each draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from qkscope.core.linalg import ratio
from qkscope.core.rows import Pair, Rows

DRAWS = 200
QUANTILE = 0.95
MIN_DOCUMENTS = 6
"""With fewer documents there are too few ways to choose half of them (10 with 6, 3 with 4)."""


def null_r95(
    pair: Pair,
    cov: Float[np.ndarray, "d d"],
    drifts: Sequence[Float[np.ndarray, "d"]],
    seed: int = 0,
    *,
    within: bool = False,
) -> float:
    """The 95th percentile of position_r over random choices of the documents read backwards.

    With m the middle of a document, t = m ± (t − m): Cov(x, t) is a fixed part plus one signed part per document.
    ``cov`` is the pooled covariance of queries and keys without the drift of each class, about the common mean or, if
    ``within``, about the mean of each class; ``drifts`` are the slopes per token of queries and keys. NaN with fewer
    than MIN_DOCUMENTS documents.
    """
    reversal = _reversal(pair.q.tokens, pair.k.tokens, seed)
    if reversal is None:
        return float("nan")
    classes = list(zip((pair.q, pair.k), (reversal.q, reversal.k), strict=True))
    sums = [
        positions.without_drift(
            rows.once(("by document", pair.q.tokens, pair.k.tokens), lambda: _sums(rows, positions)),  # noqa: B023  called at once
            beta,
        )
        for (rows, positions), beta in zip(classes, drifts, strict=True)
    ]
    means = [total.sum(0) / len(rows) for (total, _), (rows, _) in zip(sums, classes, strict=True)]
    if not within:
        means = [sum(total.sum(0) for total, _ in sums) / reversal.n] * 2
    by_document = zip(sums, (reversal.q, reversal.k), means, strict=True)
    centred = [
        (total - np.outer(positions.n, mu), weighted - np.outer(positions.away, mu))
        for (total, weighted), positions, mu in by_document
    ]
    fixed_sums, reversed_sums = (sum(sums_of_class) for sums_of_class in zip(*centred, strict=True))
    c = (reversal.middle @ fixed_sums + reversal.sign @ reversed_sums) / reversal.n
    along = np.vecdot(c @ cov, c)
    return float(np.quantile(np.minimum(ratio((c**2).sum(-1), np.sqrt(along * reversal.var_t)), 1.0), QUANTILE))


_DocumentSums = tuple[Float[np.ndarray, "documents d"], Float[np.ndarray, "documents d"]]


@dataclass(frozen=True)
class _ClassPositions:
    """Positions of the rows of one class."""

    edges: Int[np.ndarray, "edges"]
    """Index of each document's first row, then the number of rows."""
    off: Float[np.ndarray, "rows"]
    """t − m."""
    n: Int[np.ndarray, "documents"]
    away: Float[np.ndarray, "documents"]
    """Σ (t − m)."""
    late: Float[np.ndarray, "documents"]
    """Σ (t − t̄)."""
    away_late: Float[np.ndarray, "documents"]
    """Σ (t − m)(t − t̄)."""

    def without_drift(self, sums: _DocumentSums, beta: Float[np.ndarray, "d"]) -> _DocumentSums:
        """Σ x and Σ (t − m)·x of each document, with β(t − t̄) subtracted from every row."""
        total, weighted = sums
        return total - np.outer(self.late, beta), weighted - np.outer(self.away_late, beta)


@dataclass(frozen=True)
class _Reversal:
    """Random choices of documents that are read backwards: everything that depends on token positions only."""

    q: _ClassPositions
    k: _ClassPositions
    n: int
    middle: Float[np.ndarray, "documents"]
    sign: Float[np.ndarray, "draws documents"]
    """−1 where a document is read backwards."""
    var_t: Float[np.ndarray, "draws"]


@lru_cache(maxsize=8)
def _reversal(tokens_q: bytes, tokens_k: bytes, seed: int) -> _Reversal | None:
    """The choices for these tokens; None with too few documents."""
    classes = [np.frombuffer(tokens, np.int64).reshape(2, -1) for tokens in (tokens_q, tokens_k)]
    documents_present = np.unique(np.concatenate([documents for documents, _ in classes]))
    if len(documents_present) < MIN_DOCUMENTS:
        return None
    document_index = [np.searchsorted(documents_present, documents) for documents, _ in classes]
    middle = _middles(
        [(index, position) for index, (_, position) in zip(document_index, classes, strict=True)],
        len(documents_present),
    )
    offsets = [position - middle[index] for index, (_, position) in zip(document_index, classes, strict=True)]
    q, k = (
        _class_positions(index, offset, position, len(documents_present))
        for index, offset, (_, position) in zip(document_index, offsets, classes, strict=True)
    )
    sign = _balanced(q.n + k.n, np.random.default_rng(seed))
    return _Reversal(
        q, k, sum(map(len, offsets)), middle, sign, _variances(middle, q, k, np.concatenate(offsets), sign)
    )


def _balanced(n: Int[np.ndarray, "documents"], rng: np.random.Generator) -> Float[np.ndarray, "draws documents"]:
    """Signs of the documents: in random order, each is assigned to the half that has fewer rows so far."""
    order = np.stack([rng.permutation(len(n)) for _ in range(DRAWS)])
    sign, excess = np.empty(order.shape), np.zeros(DRAWS)
    draws = np.arange(DRAWS)
    for documents in order.T:
        signs = np.where(excess > 0, -1.0, 1.0)
        sign[draws, documents] = signs
        excess += signs * n[documents]
    return sign * np.where(rng.random(DRAWS) < 0.5, -1.0, 1.0)[:, None]


def _class_positions(
    document_index: Int[np.ndarray, "n"], off: Float[np.ndarray, "n"], position: Int[np.ndarray, "n"], documents: int
) -> _ClassPositions:
    edges, late = np.searchsorted(document_index, np.arange(documents + 1)), position - position.mean()
    counted = (np.bincount(document_index, values, documents) for values in (off, late, off * late))
    return _ClassPositions(edges, off, np.bincount(document_index, minlength=documents), *counted)


def _sums(rows: Rows, positions: _ClassPositions) -> _DocumentSums:
    """For each document Σ x, and Σ (t − m)·x."""
    x = rows.x
    weights = np.stack([np.ones(len(rows)), positions.off]).astype(x.dtype)
    sums = np.zeros((len(positions.n), 2, rows.d))
    for document in np.flatnonzero(positions.n):
        span = slice(positions.edges[document], positions.edges[document + 1])
        sums[document] = weights[:, span] @ x[span]
    return sums[:, 0], sums[:, 1]


def _middles(
    classes: list[tuple[Int[np.ndarray, "_"], Int[np.ndarray, "_"]]], n: int
) -> Float[np.ndarray, "documents"]:
    first, last = np.full(n, np.iinfo(np.int64).max), np.zeros(n, dtype=np.int64)
    for document_index, position in classes:
        np.minimum.at(first, document_index, position)
        np.maximum.at(last, document_index, position)
    return (first + last) / 2


def _variances(
    middle: Float[np.ndarray, "documents"],
    q: _ClassPositions,
    k: _ClassPositions,
    off: Float[np.ndarray, "n"],
    sign: Float[np.ndarray, "draws documents"],
) -> Float[np.ndarray, "draws"]:
    """Variance of the positions with these documents read backwards."""
    n, sums = q.n + k.n, q.away + k.away
    mean = ((n * middle).sum() + sign @ sums) / n.sum()
    square = ((n * middle**2).sum() + 2 * sign @ (middle * sums) + (off**2).sum()) / n.sum()
    return np.maximum(square - mean**2, 0.0)
