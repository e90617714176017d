"""The four terms of the score: an oracle by hand, planted shares, invariances and degenerate heads."""

from __future__ import annotations

import numpy as np
import pytest

from qkscope.analyses.fourterms import (
    LockedMean,
    four_term_sums,
    score_parts,
    shares,
    terms,
    two_way_sums,
    two_way_tables,
)
from qkscope.analyses.scores import FLAT, head_classes, locked_means
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import ALL_AND_WITHOUT, bucket_moments, undone_sums
from qkscope.core.rope import HeadRotary, Rope
from qkscope.core.rows import Pair, Rows
from qkscope.core.visible import VisibleKeys
from qkscope.headids import TERMS
from tests.helpers import head_data, one_head, tables_of

D, WINDOW = 16, 256
SIGHT = VisibleKeys(WINDOW)
ROPE = Rope(10_000.0 ** (-np.arange(D // 2) / (D // 2)))


def planted(seed: int, noise_q: float, noise_k: float, documents: int = 16, rope: Rope = ROPE) -> HeadData:
    """Queries and keys R_t(μ̃ + δ) with white δ of known size, at random tokens."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(2, D))
    rows = []
    for mean, noise in zip(means, (noise_q, noise_k), strict=True):
        drawn = [np.sort(rng.choice(np.arange(4, WINDOW), 80, replace=False)) for _ in range(documents)]
        position = np.concatenate(drawn)
        example = np.repeat(np.arange(documents), 80)
        plain = mean + noise * rng.normal(size=(len(position), D))
        turned = rope.planes_of(plain) * np.exp(1j * position[:, None] * rope.frequencies)
        x = np.empty_like(plain)
        x[:, rope.pairs[:, 0]], x[:, rope.pairs[:, 1]] = turned.real, turned.imag
        rows.append(Rows(x, position, example))
    rotary = HeadRotary(rope, undone_sums(rows[0], rope), undone_sums(rows[1], rope))
    buckets = bucket_moments(rows[0], WINDOW)
    return head_data(one_head(rows[0], rows[1], WINDOW), vectors=Pair(*rows), rotary=rotary, q_buckets=buckets)


def table(*heads: HeadData):
    return tables_of(list(heads), "scores")["scores"]


def test_terms_sum_to_the_score_and_each_is_what_it_says():
    head = planted(0, 0.5, 0.8)
    pair = head.vectors
    q, k = locked_means(head)
    four = terms(pair.q.x, pair.k.x, q.at(pair.q.position), k.at(pair.k.position), 0.25)
    assert np.allclose(four.sum(0), 0.25 * pair.q.x @ pair.k.x.T)
    field = head.rotary.mean_q * head.rotary.mean_k.conj()
    distance = pair.q.position[:7, None] - pair.k.position[:5]
    curve = 0.25 * (field * np.exp(1j * distance[..., None] * ROPE.frequencies)).sum(-1).real
    assert np.allclose(four[0, :7, :5], curve), "the position term is the distance curve"


def planted_variances(seed: int, sigma_q: float, sigma_k: float) -> dict[str, float]:
    """Of the terms, from the planted means and white δ: Var K = σ_k²‖μ_q‖², Var Q = σ_q²‖μ_k‖², Var C = d σ_q² σ_k²."""
    mean_q, mean_k = np.random.default_rng(seed).normal(size=(2, D))
    field = ROPE.planes_of(mean_q) * ROPE.planes_of(mean_k).conj()
    position = np.arange(4, WINDOW)
    distance = (position[:, None] - position)[np.tril_indices(len(position), -1)]
    curve = (field * np.exp(1j * distance[:, None] * ROPE.frequencies)).sum(-1).real
    return {
        "position": curve.var(),
        "key": sigma_k**2 * (mean_q**2).sum(),
        "query": sigma_q**2 * (mean_k**2).sum(),
        "content": D * sigma_q**2 * sigma_k**2,
    }


NOISES = [(0.1, 0.15), (0.6, 0.9), (1.5, 0.3), (0.3, 1.5), (2.0, 2.0)]


@pytest.mark.parametrize(("sigma_q", "sigma_k"), NOISES)
@pytest.mark.parametrize("seed", [3, 17, 29])
def test_planted_parts_are_recovered_within_two_percent(seed, sigma_q, sigma_k):
    row = table(planted(seed, sigma_q, sigma_k, documents=96)).iloc[0]
    variance = planted_variances(seed, sigma_q, sigma_k)
    for term in TERMS:
        assert row[f"part_{term}"] == pytest.approx(variance[term] / sum(variance.values()), abs=0.02), term
    first, second = sorted(variance.values())[-1:-3:-1]
    if first - second > 0.1 * sum(variance.values()):
        assert row["head_class"] == max(variance, key=variance.get)


def test_parts_of_several_noises_have_every_class_first():
    assert {max(v := planted_variances(3, *noise), key=v.get) for noise in NOISES} == set(TERMS)


def test_a_positional_head_whose_queries_turn_is_plastic_only_with_the_turning_counted():
    """All planes turn by radians inside a bucket: ap_overall takes that for freedom of the query."""
    fast = Rope(np.linspace(0.2, 1.2, D // 2))
    row = tables_of([planted(5, 0.05, 0.05, rope=fast)], "pca", "scores", "plasticity")
    scores, plastic = row["scores"].iloc[0], row["plasticity"].iloc[0]
    assert scores["part_position"] > 0.9
    assert scores["head_class"] == "position"
    assert plastic["ap_overall"] > 0.6
    assert plastic["ap_fixed_overall"] < 0.2
    content = tables_of([planted(5, 2.0, 2.0, rope=fast)], "plasticity")["plasticity"].iloc[0]
    assert content["ap_fixed_overall"] > 0.8, "content leaves the order to the query either way"


def test_planted_shares_are_recovered():
    sigma_q, sigma_k = 0.6, 0.9
    head = planted(3, sigma_q, sigma_k, documents=48)
    variance = planted_variances(3, sigma_q, sigma_k)
    row = table(head).iloc[0]
    for term, expected in variance.items():
        share = expected / sum(variance.values())
        assert row[f"score_{term}_low"] - 0.02 < share < row[f"score_{term}_high"] + 0.02
        assert row[f"score_{term}"] == pytest.approx(share, abs=0.03)
        assert row[f"part_{term}"] == pytest.approx(share, abs=0.02), "terms that are independent share nothing"
        assert row[f"part_{term}_low"] - 0.02 < share < row[f"part_{term}_high"] + 0.02
    assert sum(row[f"part_{term}"] for term in TERMS) == pytest.approx(1.0, abs=1e-12)
    assert row["logit_sd"] == pytest.approx(np.sqrt(sum(variance.values()) / D), rel=0.05), "scaled by 1/√d"
    assert row["head_class"] == max(variance, key=variance.get)
    ends = ("_se", "_low", "_high")
    shares = [row[name] for name in row.index if name.startswith("score_") and not name.endswith(ends)]
    assert sum(shares) == pytest.approx(1.0)


def test_parts_are_those_of_all_pairs_and_their_replicates_leave_out_the_means_too():
    """The sums that are linear in μ̃ against the four terms of every pair."""
    head = planted(6, 0.7, 0.5)
    row = tables_of([head], "scores")["scores"].iloc[0]
    for group in (None, 3):
        kept = [rows.take(np.flatnonzero(rows.example_id % 8 != group)) if group is not None else rows
                for rows in (head.vectors.q, head.vectors.k)]  # fmt: skip
        means = [LockedMean(ROPE, undone_sums(rows, ROPE).mean, np.zeros(D)) for rows in kept]
        covariance = four_term_sums(Pair(*kept), *means, 0.25, SIGHT).covariance(np.ones((1, 8)))[0]
        expected = covariance.sum(-1) / covariance.sum()
        if group is None:
            assert [row[f"part_{term}"] for term in TERMS] == pytest.approx(expected, abs=1e-9)
        else:
            parts, _ = score_parts(head, SIGHT)
            assert parts[1 + group] == pytest.approx(expected, abs=1e-9)


def classed(parts: list[float], spread: float, sd: float = 1.0) -> object:
    """The class of a head with these parts, whose replicates of the first differ by ``spread``."""
    per_head = {f"part_{term}": np.array([part]) for term, part in zip(TERMS, parts, strict=True)}
    replicates = {name: np.repeat(value[:, None], 8, 1) for name, value in per_head.items()}
    replicates["part_position"] = replicates["part_position"] + spread * np.linspace(-1, 1, 8)
    return head_classes(per_head | {"logit_sd": np.array([sd])}, replicates, np.ones((1, 8)))[0]


def test_the_class_is_the_largest_part_beyond_the_interval_of_its_lead():
    assert classed([0.5, 0.2, 0.2, 0.1], 0.01) == "position"
    assert classed([0.2, 0.2, 0.1, 0.5], 0.01) == "content"
    assert classed([0.4, 0.39, 0.1, 0.11], 0.05) == "mixed"
    assert classed([0.4, 0.39, 0.1, 0.11], 0.0) == "position", "a lead without spread is a lead"
    assert classed([0.9, 0.05, 0.05, 0.0], 0.01, sd=0.99 * FLAT) == "flat", "even attention has no class"
    assert classed([np.nan] * 4, 0.01) is None


def test_random_weights_are_flat_and_a_head_without_rotation_has_no_class():
    head = planted(5, 0.5, 0.5)
    small = [Rows(rows.x * 0.02, rows.position, rows.example_id) for rows in (head.vectors.q, head.vectors.k)]
    rotary = HeadRotary(ROPE, *(undone_sums(rows, ROPE) for rows in small))
    flat = head_data(one_head(*small, WINDOW), vectors=Pair(*small), rotary=rotary)
    assert table(flat)["head_class"].tolist() == ["flat"]
    unknown = tables_of([head_data(head.moments, vectors=head.vectors)], "pca", "scores")
    assert len(unknown.get("scores", [])) == 0


def test_shares_do_not_depend_on_scale_or_on_a_common_rotation_of_planes():
    head = planted(1, 0.5, 0.5)
    q, k = locked_means(head)
    plain = shares(four_term_sums(head.vectors, q, k, 1.0, SIGHT).covariance(ALL_AND_WITHOUT))
    assert np.allclose(plain, shares(four_term_sums(head.vectors, q, k, 7.0, SIGHT).covariance(ALL_AND_WITHOUT)))
    turn = np.exp(0.7j)
    turned = []
    for rows, mean in ((head.vectors.q, q), (head.vectors.k, k)):
        x, planes = rows.x.copy(), ROPE.planes_of(rows.x) * turn
        x[:, ROPE.pairs[:, 0]], x[:, ROPE.pairs[:, 1]] = planes.real, planes.imag
        turned.append((Rows(x, rows.position, rows.example_id), LockedMean(ROPE, mean.planes * turn, mean.mean)))
    (rows_q, mean_q), (rows_k, mean_k) = turned
    again = shares(four_term_sums(Pair(rows_q, rows_k), mean_q, mean_k, 1.0, SIGHT).covariance(ALL_AND_WITHOUT))
    assert np.allclose(plain, again)


def test_a_two_way_table_has_the_plain_scores_on_its_diagonal():
    head = planted(2, 0.5, 0.5)
    keys = head.vectors.k.take(np.arange(9))
    q = head.vectors.q.x[3]
    two_way = two_way_tables(q[None], keys, np.arange(9)[None], ROPE)[0]
    assert np.allclose(np.diag(two_way), keys.x @ q)
    moved = Rows(keys.x[[4]], keys.position[[4]], keys.example_id[[4]])
    turned = ROPE.planes_of(moved.x) * np.exp(1j * (keys.position[7] - moved.position)[:, None] * ROPE.frequencies)
    assert two_way[4, 7] == pytest.approx(float((ROPE.planes_of(q) * turned.conj()).sum().real))


def test_equal_keys_are_all_position_and_unrotated_ones_all_content():
    rng = np.random.default_rng(0)
    head = planted(4, 0.5, 0.0)
    position, content, rest = two_way_sums(head.vectors, ROPE, 1.0, SIGHT).sum(0)
    assert content < 1e-9 * position
    assert rest < 1e-9 * position
    rows = head.vectors.k
    loose = Pair(head.vectors.q, Rows(rng.normal(size=rows.x.shape), rows.position, rows.example_id))
    position, content, rest = two_way_sums(loose, None, 1.0, SIGHT).sum(0)
    assert position < 1e-9 * content
    assert rest < 1e-9 * content


def test_a_layer_without_rotary_has_no_position_and_a_head_without_vectors_no_row():
    plain = planted(5, 0.5, 0.5)
    row = table(plain._replace(rotary=None, nope=True)).iloc[0]
    assert row["score_position"] == pytest.approx(0.0, abs=1e-12)
    assert row["positional"] == pytest.approx(0.0, abs=1e-9)
    assert "scores" not in tables_of([plain._replace(vectors=None), plain._replace(rotary=None)], "scores")


def test_one_document_and_few_tokens_give_what_there_is():
    head = planted(6, 0.5, 0.5, documents=1)
    row = table(head).iloc[0]
    assert np.isfinite(row["score_content"])
    assert np.isnan(row["score_content_low"])
    two = Pair(*(rows.take(np.array([0, 1])) for rows in (head.vectors.q, head.vectors.k)))
    assert np.isnan(table(head._replace(vectors=two)).iloc[0]["positional"])
