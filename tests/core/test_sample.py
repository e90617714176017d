import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qkscope.core.rows import Rows
from qkscope.core.sample import Sample, ordered_sample, priority


def rows(n: int, documents: int = 5) -> Rows:
    x = np.arange(n, dtype=float)[:, None] * np.ones((1, 2))
    return Rows(x, np.arange(n) // documents, np.arange(n) % documents)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 80), st.integers(0, 100), st.integers(0, 2**32), st.data())
def test_order_and_merging_do_not_matter_and_the_size_is_exact(n, size, seed, data):
    whole = Sample.from_rows(rows(n), size, seed)
    assert len(whole.rows) == min(n, size)
    shuffled = rows(n).take(np.array(data.draw(st.permutations(range(n))), dtype=int))
    cut = data.draw(st.integers(0, n))
    head, tail = (shuffled.take(np.arange(n)[part]) for part in (slice(None, cut), slice(cut, None)))
    merged = Sample.from_rows(head, size, seed).merge(Sample.from_rows(tail, size, seed))
    np.testing.assert_array_equal(merged.rows.x, whole.rows.x)
    assert merged.n_seen == n


def test_every_row_is_equally_likely():
    counts = np.zeros(200)
    for seed in range(400):
        counts[Sample.from_rows(rows(200), 50, seed).rows.x[:, 0].astype(int)] += 1
    # Inclusion is 50 in 200 for each row; a sample of fixed size has a slightly smaller spread.
    expected = 400 * 50 / 200
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - 50 / 200))
    assert 0.001 < stats.chi2(199).cdf(statistic) < 0.999


def test_neighbouring_tokens_have_unrelated_priorities():
    keys = priority(np.zeros(20_000, dtype=int), np.arange(20_000), seed=0) / 2.0**64
    assert stats.kstest(keys, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(keys[1:], keys[:-1])[0, 1]) < 0.03


def test_a_token_is_sampled_in_every_head_or_in_none():
    other = Rows(rows(100).x * 3 + 1, rows(100).position, rows(100).example_id)
    first, second = (Sample.from_rows(r, 10, 7).rows for r in (rows(100), other))
    np.testing.assert_array_equal(first.position, second.position)
    np.testing.assert_array_equal(first.example_id, second.example_id)


def test_repeated_tokens_are_ordered_by_content():
    x = np.array([[2.0, 1.0], [1.0, 1.0], [1.0, 0.5], [3.0, 0.0]])
    same = Rows(x, np.full(4, 9), np.zeros(4, dtype=int))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        ordered = same.take(np.array(order)).ordered()
        np.testing.assert_array_equal(np.sort(ordered.x[:, 0]), [1, 1, 2, 3])
        np.testing.assert_array_equal(ordered.x, same.ordered().x)


def test_unlike_samples_do_not_merge():
    with pytest.raises(ValueError, match="equal size and seed"):
        Sample.from_rows(rows(3), 2, 0).merge(Sample.from_rows(rows(3), 2, 1))


def test_finite_drops_exactly_the_bad_rows():
    x = rows(6).x.copy()
    x[1, 0], x[4, 1] = np.nan, np.inf
    x[5] = [np.inf, -np.inf]
    np.testing.assert_array_equal(Rows(x, rows(6).position, rows(6).example_id).finite().x[:, 0], [0, 2, 3])
    huge = Rows(np.full((2, 2), 1e308), np.arange(2), np.zeros(2, dtype=int))
    assert len(huge.finite()) == 2


@pytest.mark.parametrize("kinds", [(np.int64, np.int32), (np.int32, np.int64), (np.int32, np.int32)])
def test_the_type_of_documents_and_positions_does_not_matter(kinds):
    rng = np.random.default_rng(0)
    documents, positions = rng.integers(0, 5, 60), rng.permutation(60)
    x = rng.standard_normal((60, 2))
    plain = Rows(x, positions, documents)
    other = Rows(x, positions.astype(kinds[1]), documents.astype(kinds[0]))
    np.testing.assert_array_equal(other.ordered().x, plain.ordered().x)
    np.testing.assert_array_equal(ordered_sample(other, 20).x, ordered_sample(plain, 20).x)
