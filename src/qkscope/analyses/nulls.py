"""How large a correlation with position comes about by chance, when content is as it is but does not know where it is.

Neighbouring tokens are alike, so positions must not be shuffled. Half of the documents, drawn at random, are read
backwards instead, t → first + last − t: that keeps every likeness between neighbours and takes back any drift that
documents have in common. Axis a is found anew each time.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from qkscope.core.linalg import ratio
from qkscope.core.rows import Pair, Rows

DRAWS = 200
QUANTILE = 0.95


def null_r95(pair: Pair, cov: Float[np.ndarray, "d d"], seed: int = 0, *, within: bool = False) -> float:
    """The 95th percentile of position_r over random choices of the documents read backwards.

    With m the middle of a document, t = m ± (t − m): Cov(x, t) is one part that stays and one signed part per document.
    ``cov`` is the pooled covariance of queries and keys, about the common mean or, ``within`` classes, about each
    one's own. NaN with fewer than two documents.
    """
    names = np.unique(np.concatenate([pair.q.example_id, pair.k.example_id]))
    if len(names) < 2:
        return float("nan")
    kinds = [(rows, np.searchsorted(names, rows.example_id)) for rows in (pair.q, pair.k)]
    middle = _middles(kinds, len(names))
    which = np.concatenate([at for _, at in kinds])
    off = np.concatenate([rows.position - middle[at] for rows, at in kinds])
    sums = [_sums(rows, at, rows.position - middle[at], len(names)) for rows, at in kinds]
    n = [np.bincount(at, minlength=len(names)) for _, at in kinds]
    away = [np.bincount(at, rows.position - middle[at], len(names)) for rows, at in kinds]
    means = [of.sum(0) / len(rows) for (of, _), (rows, _) in zip(sums, kinds, strict=True)]
    if not within:
        means = [sum(of.sum(0) for of, _ in sums) / len(which)] * 2
    by_document = zip(sums, n, away, means, strict=True)
    centred = [(of - np.outer(c, mu), turned - np.outer(a, mu)) for (of, turned), c, a, mu in by_document]
    staying, turning = (sum(parts) for parts in zip(*centred, strict=True))
    sign = np.where(np.random.default_rng(seed).random((DRAWS, len(names))) < 0.5, -1.0, 1.0)
    c = (middle @ staying + sign @ turning) / len(which)
    var_t = _variances(middle, which, off, sign)
    along = np.einsum("sd,sd->s", c @ cov, c)
    return float(np.quantile(np.minimum(ratio((c**2).sum(-1), np.sqrt(along * var_t)), 1.0), QUANTILE))


def _sums(
    rows: Rows, which: Int[np.ndarray, "n"], off: Float[np.ndarray, "n"], documents: int
) -> tuple[Float[np.ndarray, "documents d"], Float[np.ndarray, "documents d"]]:
    """Of each document Σ x, and Σ (t − m)·x."""
    weights, x = np.stack([np.ones(len(rows)), off]), rows.as_double().x
    edges = np.searchsorted(which, np.arange(documents + 1))
    found = np.zeros((documents, 2, rows.d))
    for document in np.flatnonzero(edges[1:] > edges[:-1]):
        one = slice(edges[document], edges[document + 1])
        found[document] = weights[:, one] @ x[one]
    return found[:, 0], found[:, 1]


def _middles(kinds: list[tuple[Rows, Int[np.ndarray, "_"]]], n: int) -> Float[np.ndarray, "documents"]:
    first, last = np.full(n, np.iinfo(np.int64).max), np.zeros(n, dtype=np.int64)
    for rows, which in kinds:
        np.minimum.at(first, which, rows.position)
        np.maximum.at(last, which, rows.position)
    return (first + last) / 2


def _variances(
    middle: Float[np.ndarray, "documents"],
    which: Int[np.ndarray, "n"],
    off: Float[np.ndarray, "n"],
    sign: Float[np.ndarray, "draws documents"],
) -> Float[np.ndarray, "draws"]:
    """Variance of the positions with these documents read backwards."""
    n, sums = np.bincount(which), np.bincount(which, off)
    mean = ((n * middle).sum() + sign @ sums) / n.sum()
    square = ((n * middle**2).sum() + 2 * sign @ (middle * sums) + (off**2).sum()) / n.sum()
    return np.maximum(square - mean**2, 0.0)
