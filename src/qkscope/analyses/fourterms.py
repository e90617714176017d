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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Complex, Float, Int

from qkscope.analyses.distancecurve import DocumentPairs, paired_documents
from qkscope.analyses.meanfield import leave_out_means
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import ALL_AND_WITHOUT, N_GROUPS
from qkscope.core.linalg import ratio
from qkscope.core.rope import Rope
from qkscope.core.rows import Pair, Rows, evenly_spaced, rows_of
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
            first, second = self.rope.sides
            rotated = self.planes * self.rope.turns(position)
            x[:, first], x[:, second] = rotated.real, rotated.imag
        return x if self.factor is None else x * self.factor[position][:, None]


@dataclass(frozen=True)
class PairedTokens:
    """Sampled tokens of some documents, paired with each other within each; shorter documents are padded."""

    of_group: Float[np.ndarray, "groups documents"]
    """1 for the document group of each document, 0 for the others."""
    q: Int[np.ndarray, "documents n"]
    """Rows of the sampled queries."""
    k: Int[np.ndarray, "documents m"]
    visible: Float[np.ndarray, "documents n m"]
    """1 where the query sees the key, 0 where it does not and for padding."""
    n: Float[np.ndarray, "groups"]
    """Visible pairs."""


@dataclass(frozen=True)
class TableTokens:
    """Queries of some documents with some of the keys they see: rows of the sample; fewer keys are padded."""

    of_group: Float[np.ndarray, "groups tables"]
    q: Int[np.ndarray, "tables"]
    k: Int[np.ndarray, "tables keys"]
    real: Float[np.ndarray, "tables keys"]
    """1 for keys, 0 for padding."""


def paired_tokens(pair: Pair, visible_keys: VisibleKeys) -> tuple[list[PairedTokens], list[TableTokens]]:
    """Pairs for the sums of terms, and queries with keys for two-way tables, a few documents at a time."""
    return _paired_tokens(pair.q.tokens, pair.k.tokens, visible_keys)


_AT_ONCE = 4
"""Documents whose pairs are summed together: enough to amortise a call, few enough for the cache."""


@lru_cache(maxsize=2)
def _paired_tokens(
    tokens_q: bytes, tokens_k: bytes, visible_keys: VisibleKeys
) -> tuple[list[PairedTokens], list[TableTokens]]:
    (doc_q, position_q), (doc_k, position_k) = (
        np.frombuffer(tokens, np.int64).reshape(2, -1) for tokens in (tokens_q, tokens_k)
    )
    documents = list(paired_documents((doc_q, position_q), (doc_k, position_k), visible_keys, PAIRED_TOKENS))
    tables = []
    for document in np.intersect1d(doc_q, doc_k).tolist():
        rows_q, rows_k = (rows_of(of_row, document) for of_row in (doc_q, doc_k))
        for query in rows_q[evenly_spaced(len(rows_q), _QUERIES + 1)[1:]].tolist():
            visible = rows_k[visible_keys.sees(position_q[query] - position_k[rows_k])]
            if len(visible) >= _LEAST_KEYS:
                tables.append((document, query, visible[evenly_spaced(len(visible), _TABLE_KEYS)]))
    return (
        [_paired(documents[i : i + _AT_ONCE]) for i in range(0, len(documents), _AT_ONCE)],
        [_tables(tables[i : i + _AT_ONCE]) for i in range(0, len(tables), _AT_ONCE)],
    )


def _paired(documents: list[DocumentPairs]) -> PairedTokens:
    n, m = (max(len(getattr(document, kind)) for document in documents) for kind in "qk")
    visible = np.zeros((len(documents), n, m))
    for i, document in enumerate(documents):
        visible[i, : len(document.q), : len(document.k)] = document.visible
    of_group = _membership([document.document for document in documents])
    q, k = (_padded([getattr(document, kind) for document in documents]) for kind in "qk")
    return PairedTokens(of_group, q, k, visible, of_group @ visible.sum((1, 2)))


def _tables(tables: list[tuple[int, int, Int[np.ndarray, "_"]]]) -> TableTokens:
    documents, queries, keys = zip(*tables, strict=True)
    padded = _padded(keys)
    real = np.arange(padded.shape[1]) < np.array([len(rows) for rows in keys])[:, None]
    return TableTokens(_membership(documents), np.array(queries), padded, real.astype(float))


def _membership(documents: Sequence[int]) -> Float[np.ndarray, "groups documents"]:
    return (np.array(documents) % N_GROUPS == np.arange(N_GROUPS)[:, None]).astype(float)


def _padded(rows: Sequence[Int[np.ndarray, "_"]]) -> Int[np.ndarray, "documents n"]:
    """Rows of each document, padded with row 0 to equal length."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for line, own in zip(padded, rows, strict=True):
        line[: len(own)] = own
    return padded


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
    q: Float[np.ndarray, "*documents n d"],
    k: Float[np.ndarray, "*documents m d"],
    locked_q: Float[np.ndarray, "*documents n d"],
    locked_k: Float[np.ndarray, "*documents m d"],
    scaling: float,
) -> Float[np.ndarray, "4 *documents n m"]:
    """The four terms of every pair of these queries and keys."""
    score, of_query, of_key, position = (scaling * a @ b.swapaxes(-1, -2) for a in (q, locked_q) for b in (k, locked_k))
    of_terms = np.empty((4, *score.shape))
    of_terms[0] = position
    np.subtract(of_key, position, out=of_terms[1])
    np.subtract(of_query, position, out=of_terms[2])
    np.subtract(score, of_key, out=of_terms[3])
    of_terms[3] -= of_terms[2]
    return of_terms


def four_term_sums(pair: Pair, q: LockedMean, k: LockedMean, scaling: float, visible_keys: VisibleKeys) -> FourTermSums:
    """Sums over pairs of sampled tokens of one document, the key visible to the query."""
    products = np.zeros((N_GROUPS, 5, 5))
    locked_q, locked_k = q.at(pair.q.position), k.at(pair.k.position)
    for tokens in paired_tokens(pair, visible_keys)[0]:
        of_terms = terms(pair.q.x[tokens.q], pair.k.x[tokens.k], locked_q[tokens.q], locked_k[tokens.k], scaling)
        of_terms *= tokens.visible
        columns = np.stack([tokens.visible, *of_terms], 1).reshape(len(tokens.q), 5, -1)
        products += np.einsum("gd,dij->gij", tokens.of_group, columns @ columns.swapaxes(1, 2))
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


def score_parts(
    head: HeadData, visible_keys: VisibleKeys
) -> tuple[Float[np.ndarray, "sets 4"], Float[np.ndarray, "sets"]] | None:
    """The parts of the terms and the variance of scores; None without vectors, or where the rotation is not known.

    Without a document group, its pairs and its share of μ̃ are left out.
    """
    if head.vectors is None or not (head.rotary or head.nope):
        return None
    rotary, scaling = head.rotary, float(head.moments.scaling)
    rope, factor = (None, None) if rotary is None else (rotary.rope, rotary.temperature)
    mean_q, mean_k = (
        coordinates(rope, leave_out_means(moments.mean_x * moments.n[:, None], moments.n))
        for moments in (head.moments.q, head.moments.k)
    )
    if rotary is not None:
        for mean, undone in ((mean_q, rotary.q), (mean_k, rotary.k)):
            mean[:, : rotary.rope.planes] = leave_out_means(undone.total, undone.n)
    sums = part_sums(head.vectors.as_double(), rope, factor, scaling, visible_keys)
    return sums.parts(ALL_AND_WITHOUT, mean_q, mean_k, scaling)


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
    turns_q, turns_k = (_turns(rope, rows.position, n_columns) for rows in (pair.q, pair.k))
    if factor is not None:
        turns_q = turns_q * factor[pair.q.position][:, None]
    for tokens in paired_tokens(pair, visible_keys)[0]:
        q, k, turn_q, turn_k = pair.q.x[tokens.q], pair.k.x[tokens.k], turns_q[tokens.q], turns_k[tokens.k]
        score = scaling * (q @ k.swapaxes(1, 2)) * tokens.visible
        counts += tokens.n, tokens.of_group @ score.sum((1, 2)), tokens.of_group @ (score**2).sum((1, 2))
        both_parts = np.concatenate([turn_k.real, -turn_k.imag], -1)
        for i, weight in enumerate((score, tokens.visible)):
            turned = weight @ both_parts
            of_pairs = (
                _dot(turn_q, coordinates(rope, weight @ k).conj()),
                _dot(turn_k.conj(), coordinates(rope, weight.swapaxes(1, 2) @ q)),
                _dot(turn_q, turned[..., :n_columns] + 1j * turned[..., n_columns:]),
            )
            for total, of_documents in zip(sums[:, :, i], of_pairs, strict=True):
                total += tokens.of_group @ of_documents
    return PartSums(*counts, *sums)


def _dot(
    a: Complex[np.ndarray, "documents n c"], b: Complex[np.ndarray, "documents n c"]
) -> Complex[np.ndarray, "documents c"]:
    return np.asarray(np.einsum("dnc,dnc->dc", a, b))


def coordinates(rope: Rope | None, x: Float[np.ndarray, "*batch d"]) -> Complex[np.ndarray, "*batch c"]:
    """Rotated planes as complex numbers, then the unrotated coordinates."""
    if rope is None:
        return x.astype(complex)
    planes = rope.planes_of(x)
    return planes if 2 * rope.planes == x.shape[-1] else np.concatenate([planes, x[..., rope.rest(x.shape[-1])]], -1)


def _turns(rope: Rope | None, position: Int[np.ndarray, "n"], n_columns: int) -> Complex[np.ndarray, "n c"]:
    if rope is not None and rope.planes == n_columns:
        return rope.turns(position)
    turns = np.ones((len(position), n_columns), dtype=complex)
    if rope is not None:
        turns[:, : rope.planes] = rope.turns(position)
    return turns


def two_way_sums(
    pair: Pair, rope: Rope | None, scaling: float, visible_keys: VisibleKeys
) -> Float[np.ndarray, "groups 3"]:
    """Sums of squares of the two-way tables of some queries: position, content, interaction, by document group."""
    sums = np.zeros((N_GROUPS, 3))
    for tokens in paired_tokens(pair, visible_keys)[1]:
        table = scaling * two_way_tables(pair.q.x[tokens.q], pair.k, tokens.k, rope)
        sums += tokens.of_group @ _squares(table, tokens.real)
    return sums


def two_way_tables(
    q: Float[np.ndarray, "tables d"], keys: Rows, own: Int[np.ndarray, "tables n"], rope: Rope | None
) -> Float[np.ndarray, "tables n n"]:
    """Product of each query with each of its own keys (rows) turned to the position of each of them (columns)."""
    x = keys.x[own]
    if rope is None:
        return np.repeat((x @ q[..., None]), own.shape[1], axis=-1)
    turns = rope.turns(keys.position)[own]
    undone = rope.planes_of(q)[:, None] * (rope.planes_of(x) * turns.conj()).conj()
    rest = rope.rest(q.shape[-1])
    rotated = np.concatenate([undone.real, undone.imag], -1) @ np.concatenate([turns.real, turns.imag], -1).swapaxes(
        1, 2
    )
    return rotated + x[..., rest] @ q[:, rest, None]


def _squares(
    table: Float[np.ndarray, "tables n n"], real: Float[np.ndarray, "tables n"]
) -> Float[np.ndarray, "tables 3"]:
    """Sums of squares of column means, of row means and of the rest; padding has no weight."""
    n = real.sum(-1)
    both = real[:, :, None] * real[:, None]
    away = (table - ((table * both).sum((1, 2)) / n**2)[:, None, None]) * both
    columns, rows = (((away.sum(axis) / n[:, None]) ** 2).sum(-1) * n for axis in (1, 2))
    return np.stack([columns, rows, np.maximum((away**2).sum((1, 2)) - columns - rows, 0.0)], -1)
