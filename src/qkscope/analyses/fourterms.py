"""A score in four terms, and the contributions of position and content to it when keys change places.

With the rotation undone, x_t = R_t(μ̃ + δ_t) for queries and keys (positionlocked.py). Then, exactly,

    s_ij = scaling · [R_i μ̃_q · R_j μ̃_k    position: where query and key are
                    + R_i μ̃_q · R_j δk_j   key: which key it is, to the average query
                    + R_i δq_i · R_j μ̃_k   query: which query it is, to the average key
                    + R_i δq_i · R_j δk_j]  content: this query with this key

The two-way table of a query has the keys it sees as rows and their positions as columns: S_ab is the score of key a
turned to the position of key b. Its sum of squares about the mean is the sum of those of column means (position), of
row means (content) and of the rest (interaction).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Complex, Float, Int

from qkscope.core.headmoments import N_GROUPS
from qkscope.core.linalg import ratio
from qkscope.core.rope import Rope
from qkscope.core.rows import Pair, Rows
from qkscope.core.visible import VisibleKeys

PAIRED_TOKENS = 96
"""Sampled tokens of one document that are paired with each other, at most."""
_TABLE_KEYS = 24
"""Keys of a two-way table, at most."""
_LEAST_KEYS = 4
_QUERIES = 2
"""Queries per document that have a two-way table."""


@dataclass(frozen=True)
class LockedMean:
    """The position-locked mean μ̃ of one class of vectors."""

    rope: Rope | None
    """None: nothing is rotated."""
    planes: Complex[np.ndarray, "planes"]
    mean: Float[np.ndarray, "d"]
    """The plain mean, used for coordinates that are not rotated."""
    factor: Float[np.ndarray, "positions"] | None = None
    """Temperature at each position."""

    def at(self, position: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n d"]:
        """R_t μ̃ at these positions, times the temperature there."""
        x = np.tile(self.mean, (len(position), 1))
        if self.rope is not None:
            rotated = self.planes * np.exp(1j * self.rope.sign * position[:, None] * self.rope.frequencies)
            x[:, self.rope.pairs[:, 0]], x[:, self.rope.pairs[:, 1]] = rotated.real, rotated.imag
        return x if self.factor is None else x * self.factor[position][:, None]


@dataclass(frozen=True)
class FourTermSums:
    """Sums over pairs of one document group each: of (1, position, key, query, content) with itself."""

    products: Float[np.ndarray, "groups 5 5"]

    def covariance(self, weights: Float[np.ndarray, "sets groups"]) -> Float[np.ndarray, "sets 4 4"]:
        """Covariances of the terms, whose sum is the variance of the score. NaN without pairs."""
        total = np.einsum("sg,gij->sij", weights, self.products)
        n = np.maximum(total[:, :1, :1], 1.0)
        covariance = total[:, 1:, 1:] / n - total[:, 1:, :1] * total[:, :1, 1:] / n**2
        return np.where(total[:, :1, :1] > 2, covariance, np.nan)


def shares(covariance: Float[np.ndarray, "sets 4 4"]) -> Float[np.ndarray, "sets 4 4"]:
    """Covariances of the terms as shares of the variance of the score; they sum to 1. NaN where it does not vary."""
    variance = covariance.sum((1, 2), keepdims=True)
    return np.where(variance > 0, ratio(covariance, variance), np.nan)


def terms(
    q: Float[np.ndarray, "n d"],
    k: Float[np.ndarray, "m d"],
    locked_q: Float[np.ndarray, "n d"],
    locked_k: Float[np.ndarray, "m d"],
    scaling: float,
) -> Float[np.ndarray, "4 n m"]:
    """The four terms of every pair of these queries and keys."""
    score, of_query, of_key, position = (scaling * (a @ b.T) for a in (q, locked_q) for b in (k, locked_k))
    return np.stack([position, of_key - position, of_query - position, score - of_key - of_query + position])


def four_term_sums(pair: Pair, q: LockedMean, k: LockedMean, scaling: float, visible_keys: VisibleKeys) -> FourTermSums:
    """Sums over pairs of sampled tokens of one document, the key visible to the query."""
    products = np.zeros((N_GROUPS, 5, 5))
    for document in np.intersect1d(pair.q.example_id, pair.k.example_id).tolist():
        queries, keys = (rows.of_document(document, PAIRED_TOKENS) for rows in (pair.q, pair.k))
        visible = visible_keys.sees(queries.position[:, None] - keys.position)
        term_values = terms(queries.x, keys.x, q.at(queries.position), k.at(keys.position), scaling)[:, visible]
        columns = np.vstack([np.ones(term_values.shape[1]), term_values])
        products[document % N_GROUPS] += columns @ columns.T
    return FourTermSums(products)


@dataclass(frozen=True)
class PartSums:
    """Sums over pairs of one document group each, from which Cov(X, s) follows for any position-locked means.

    Coordinates are complex: a rotated plane is one, an unrotated coordinate one of frequency zero. ``weighted`` are
    summed with the score s as weight, then with 1.
    """

    n: Float[np.ndarray, "groups"]
    s: Float[np.ndarray, "groups"]
    ss: Float[np.ndarray, "groups"]
    of_q: Complex[np.ndarray, "groups 2 c"]
    """Σ_ij w R_i conj(k_j): times μ̃_q the sum of R_i μ̃_q · k_j."""
    of_k: Complex[np.ndarray, "groups 2 c"]
    """Σ_ij w conj(R_j) q_i: times conj(μ̃_k) the sum of q_i · R_j μ̃_k."""
    of_both: Complex[np.ndarray, "groups 2 c"]
    """Σ_ij w R_i conj(R_j): times μ̃_q conj(μ̃_k) the sum of R_i μ̃_q · R_j μ̃_k."""

    def parts(
        self,
        weights: Float[np.ndarray, "sets groups"],
        mean_q: Complex[np.ndarray, "sets c"],
        mean_k: Complex[np.ndarray, "sets c"],
        scaling: float,
    ) -> tuple[Float[np.ndarray, "sets 4"], Float[np.ndarray, "sets"]]:
        """Cov(X, s)/Var(s) of the four terms, which sum to 1, and Var(s); NaN without pairs or variance."""
        of_key, of_query, position = (
            scaling * np.einsum("sc,swc->sw", mean, np.einsum("sg,gwc->swc", weights, total)).real
            for mean, total in ((mean_q, self.of_q), (mean_k.conj(), self.of_k), (mean_q * mean_k.conj(), self.of_both))
        )
        n, s, ss = (weights @ total for total in (self.n, self.s, self.ss))
        score = np.stack([ss, s], -1)
        sums = np.stack([position, of_key - position, of_query - position, score - of_key - of_query + position], 1)
        count = np.maximum(n, 1.0)
        covariance = sums[..., 0] / count[:, None] - sums[..., 1] * (s / count**2)[:, None]
        variance = np.where(n > 2, ss / count - (s / count) ** 2, np.nan)
        varies = variance > 0
        return np.where(varies[:, None], covariance / np.where(varies, variance, 1.0)[:, None], np.nan), variance


def part_sums(
    pair: Pair,
    rope: Rope | None,
    factor: Float[np.ndarray, "positions"] | None,
    scaling: float,
    visible_keys: VisibleKeys,
) -> PartSums:
    """Sums over pairs of sampled tokens of one document, the key visible to the query; ``factor`` is on the queries."""
    n_columns = len(coordinates(rope, pair.q.x[:1])[0])
    counts = np.zeros((3, N_GROUPS))
    sums = np.zeros((3, N_GROUPS, 2, n_columns), dtype=complex)
    for document in np.intersect1d(pair.q.example_id, pair.k.example_id).tolist():
        queries, keys = (rows.of_document(document, PAIRED_TOKENS) for rows in (pair.q, pair.k))
        visible = visible_keys.sees(queries.position[:, None] - keys.position).astype(float)
        score = scaling * (queries.x @ keys.x.T) * visible
        weights = np.stack([score, visible])
        q, k = coordinates(rope, queries.x), coordinates(rope, keys.x)
        turn_q, turn_k = (_turns(rope, rows.position, n_columns) for rows in (queries, keys))
        if factor is not None:
            turn_q = turn_q * factor[queries.position][:, None]
        group = document % N_GROUPS
        counts[:, group] += visible.sum(), score.sum(), (score**2).sum()
        sums[0, group] += (turn_q * (weights @ k.conj())).sum(1)
        sums[1, group] += (turn_k.conj() * (weights.swapaxes(1, 2) @ q)).sum(1)
        sums[2, group] += (turn_q * (weights @ turn_k.conj())).sum(1)
    return PartSums(*counts, *sums)


def coordinates(rope: Rope | None, x: Float[np.ndarray, "*batch d"]) -> Complex[np.ndarray, "*batch c"]:
    """Rotated planes as complex numbers, then the unrotated coordinates."""
    if rope is None:
        return x.astype(complex)
    return np.concatenate([rope.planes_of(x), x[..., rope.rest(x.shape[-1])]], -1)


def _turns(rope: Rope | None, position: Int[np.ndarray, "n"], n_columns: int) -> Complex[np.ndarray, "n c"]:
    turns = np.ones((len(position), n_columns), dtype=complex)
    if rope is not None:
        turns[:, : rope.planes] = np.exp(1j * rope.sign * position[:, None] * rope.frequencies)
    return turns


def two_way_sums(
    pair: Pair, rope: Rope | None, scaling: float, visible_keys: VisibleKeys
) -> Float[np.ndarray, "groups 3"]:
    """Sums of squares of the two-way tables of some queries: position, content, interaction, by document group."""
    sums = np.zeros((N_GROUPS, 3))
    for document in np.intersect1d(pair.q.example_id, pair.k.example_id).tolist():
        queries, keys = (rows.of_document(document) for rows in (pair.q, pair.k))
        for i in np.unique(np.linspace(0, len(queries) - 1, _QUERIES + 1).astype(int))[1:].tolist():
            visible = np.flatnonzero(visible_keys.sees(queries.position[i] - keys.position))
            if len(visible) >= _LEAST_KEYS:
                table_keys = keys.take(visible[np.unique(np.linspace(0, len(visible) - 1, _TABLE_KEYS).astype(int))])
                sums[document % N_GROUPS] += _squares(scaling * two_way_table(queries.x[i], table_keys, rope))
    return sums


def two_way_table(q: Float[np.ndarray, "d"], keys: Rows, rope: Rope | None) -> Float[np.ndarray, "n n"]:
    """Product of a query with each key (rows) turned to the position of each key (columns)."""
    if rope is None:
        return np.repeat((keys.x @ q)[:, None], len(keys), axis=1)
    unrotated_products = rope.planes_of(q) * rope.unrotated(keys.x, keys.position).conj()
    rotation = np.exp(-1j * rope.sign * keys.position[:, None] * rope.frequencies)
    unrotated = rope.rest(len(q))
    return (unrotated_products @ rotation.T).real + (keys.x[:, unrotated] @ q[unrotated])[:, None]


def _squares(table: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "3"]:
    """Sums of squares of column means, of row means and of the rest."""
    away = table - table.mean()
    columns, rows = (len(table) * (away.mean(axis) ** 2).sum() for axis in (0, 1))
    return np.array([columns, rows, max((away**2).sum() - columns - rows, 0.0)])
