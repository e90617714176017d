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
    rows = pair.q.concat(pair.k)
    names, which = np.unique(rows.example_id, return_inverse=True)
    if len(names) < 2:
        return float("nan")
    middle = _middles(rows, which, len(names))
    off = rows.position - middle[which]
    kinds = [pair.q.x, pair.k.x] if within else [rows.x]
    x = np.concatenate([kind - kind.mean(0, dtype=np.float64) for kind in kinds])
    order = np.argsort(which, kind="stable")
    starts = np.searchsorted(which[order], np.arange(len(names)))
    turning = np.add.reduceat((off[:, None] * x)[order], starts)
    sign = np.where(np.random.default_rng(seed).random((DRAWS, len(names))) < 0.5, -1.0, 1.0)
    c = (middle[which] @ x + sign @ turning) / len(rows)
    var_t = _variances(middle, which, off, sign)
    along = np.einsum("sd,sd->s", c @ cov, c)
    return float(np.quantile(np.minimum(ratio((c**2).sum(-1), np.sqrt(along * var_t)), 1.0), QUANTILE))


def _middles(rows: Rows, which: Int[np.ndarray, "n"], n: int) -> Float[np.ndarray, "documents"]:
    first, last = np.full(n, np.iinfo(np.int64).max), np.zeros(n, dtype=np.int64)
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
