"""How large a correlation with position arises by chance if the content does not depend on position.

Neighbouring tokens are similar, so positions must not be shuffled. Instead, the linear drift of each class is removed,
and half of the documents, drawn at random so that both halves have about as many tokens, are read backwards,
t → first + last − t: this keeps the similarity of neighbours. Axis a is fitted again for each draw.
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
    turned = _turned(pair.q.tokens, pair.k.tokens, seed)
    if turned is None:
        return float("nan")
    kinds = list(zip((pair.q, pair.k), (turned.q, turned.k), strict=True))
    sums = [
        places.without_drift(
            rows.once(("by document", pair.q.tokens, pair.k.tokens), lambda: _sums(rows, places)),  # noqa: B023  called at once
            beta,
        )
        for (rows, places), beta in zip(kinds, drifts, strict=True)
    ]
    means = [total.sum(0) / len(rows) for (total, _), (rows, _) in zip(sums, kinds, strict=True)]
    if not within:
        means = [sum(total.sum(0) for total, _ in sums) / turned.n] * 2
    by_document = zip(sums, (turned.q, turned.k), means, strict=True)
    centred = [
        (total - np.outer(places.n, mu), weighted - np.outer(places.away, mu))
        for (total, weighted), places, mu in by_document
    ]
    staying, turning = (sum(parts) for parts in zip(*centred, strict=True))
    c = (turned.middle @ staying + turned.sign @ turning) / turned.n
    along = np.vecdot(c @ cov, c)
    return float(np.quantile(np.minimum(ratio((c**2).sum(-1), np.sqrt(along * turned.var_t)), 1.0), QUANTILE))


_DocumentSums = tuple[Float[np.ndarray, "documents d"], Float[np.ndarray, "documents d"]]


@dataclass(frozen=True)
class _Places:
    """Positions of the rows of one class."""

    edges: Int[np.ndarray, "edges"]
    """Index where each document begins, and the end."""
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
class _Turned:
    """Documents read backwards: everything that depends on token positions only."""

    q: _Places
    k: _Places
    n: int
    middle: Float[np.ndarray, "documents"]
    sign: Float[np.ndarray, "draws documents"]
    """−1 where a document is read backwards."""
    var_t: Float[np.ndarray, "draws"]


@lru_cache(maxsize=8)
def _turned(tokens_q: bytes, tokens_k: bytes, seed: int) -> _Turned | None:
    """None with too few documents."""
    kinds = [np.frombuffer(tokens, np.int64).reshape(2, -1) for tokens in (tokens_q, tokens_k)]
    names = np.unique(np.concatenate([documents for documents, _ in kinds]))
    if len(names) < MIN_DOCUMENTS:
        return None
    document_index = [np.searchsorted(names, documents) for documents, _ in kinds]
    middle = _middles(
        [(index, position) for index, (_, position) in zip(document_index, kinds, strict=True)], len(names)
    )
    off = [position - middle[index] for index, (_, position) in zip(document_index, kinds, strict=True)]
    q, k = (
        _places(index, offset, position, len(names))
        for index, offset, (_, position) in zip(document_index, off, kinds, strict=True)
    )
    sign = _balanced(q.n + k.n, np.random.default_rng(seed))
    return _Turned(q, k, sum(map(len, off)), middle, sign, _variances(middle, q, k, np.concatenate(off), sign))


def _balanced(n: Int[np.ndarray, "documents"], rng: np.random.Generator) -> Float[np.ndarray, "draws documents"]:
    """Signs of the documents: taken in random order, each goes to the half that has fewer rows so far."""
    order = np.stack([rng.permutation(len(n)) for _ in range(DRAWS)])
    sign, excess = np.empty(order.shape), np.zeros(DRAWS)
    draws = np.arange(DRAWS)
    for documents in order.T:
        chosen = np.where(excess > 0, -1.0, 1.0)
        sign[draws, documents] = chosen
        excess += chosen * n[documents]
    return sign * np.where(rng.random(DRAWS) < 0.5, -1.0, 1.0)[:, None]


def _places(
    document_index: Int[np.ndarray, "n"], off: Float[np.ndarray, "n"], position: Int[np.ndarray, "n"], documents: int
) -> _Places:
    edges, late = np.searchsorted(document_index, np.arange(documents + 1)), position - position.mean()
    counted = (np.bincount(document_index, values, documents) for values in (off, late, off * late))
    return _Places(edges, off, np.bincount(document_index, minlength=documents), *counted)


def _sums(rows: Rows, places: _Places) -> _DocumentSums:
    """For each document Σ x, and Σ (t − m)·x."""
    x = rows.x
    weights = np.stack([np.ones(len(rows)), places.off]).astype(x.dtype)
    sums = np.zeros((len(places.n), 2, rows.d))
    for document in np.flatnonzero(places.n):
        span = slice(places.edges[document], places.edges[document + 1])
        sums[document] = weights[:, span] @ x[span]
    return sums[:, 0], sums[:, 1]


def _middles(kinds: list[tuple[Int[np.ndarray, "_"], Int[np.ndarray, "_"]]], n: int) -> Float[np.ndarray, "documents"]:
    first, last = np.full(n, np.iinfo(np.int64).max), np.zeros(n, dtype=np.int64)
    for document_index, position in kinds:
        np.minimum.at(first, document_index, position)
        np.maximum.at(last, document_index, position)
    return (first + last) / 2


def _variances(
    middle: Float[np.ndarray, "documents"],
    q: _Places,
    k: _Places,
    off: Float[np.ndarray, "n"],
    sign: Float[np.ndarray, "draws documents"],
) -> Float[np.ndarray, "draws"]:
    """Variance of the positions with these documents read backwards."""
    n, sums = q.n + k.n, q.away + k.away
    mean = ((n * middle).sum() + sign @ sums) / n.sum()
    square = ((n * middle**2).sum() + 2 * sign @ (middle * sums) + (off**2).sum()) / n.sum()
    return np.maximum(square - mean**2, 0.0)
