"""From files to the moments of heads: what is kept, what is shared, and which head is to blame."""

from __future__ import annotations

import numpy as np
import pytest

from qkscope.core.headmoments import bucket_moments, cell_means, group_moments
from qkscope.core.rows import Rows
from qkscope.errors import HeadError
from qkscope.files.dataset import Dataset, write_dataset
from qkscope.files.vectors import write_rows
from qkscope.heads import HeadId
from qkscope.runs.loading import load_key_group, read_head
from qkscope.runs.source import Reading
from tests.helpers import small_dataset

Q = [HeadId(0, head, "q") for head in range(2)]


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return Dataset.open(small_dataset(tmp_path / "data", layers=1, rope={"theta": 10_000.0}))


def load(dataset: Dataset, **reading: object):
    return load_key_group(dataset, Q, Reading(**reading))  # type: ignore[arg-type]


def test_moments_are_those_of_the_rows(dataset):
    heads, failed = load(dataset, buckets=4)
    assert not failed
    assert [one.head for one in heads] == Q
    for one in heads:
        rows = dataset.read(one.head).ordered()
        window = int(one.moments.window)
        np.testing.assert_allclose(one.moments.q.scatter, group_moments(rows).scatter, rtol=1e-9, atol=1e-9)
        assert one.moments.q_buckets is not None
        np.testing.assert_allclose(one.moments.q_buckets.n, bucket_moments(rows, window, 4).n)
        keys = dataset.read(one.key_head).ordered()
        np.testing.assert_allclose(one.moments.k_cells.mean_x, cell_means(keys, window).mean_x, atol=1e-9)


def test_what_is_not_asked_for_is_not_loaded(dataset):
    (one, _), _ = load(dataset)
    assert one.vectors is None
    assert one.rotary is None
    assert one.moments.q_buckets is None
    assert one.moments.cross is None


def test_heads_that_read_one_key_head_share_what_is_made_of_it(dataset):
    (first, second), _ = load(dataset, sample=50, rotary=True, paired=True)
    assert first.moments.k is second.moments.k
    assert first.vectors is not None
    assert second.vectors is not None
    assert first.vectors.k is second.vectors.k
    assert first.rotary is not None
    assert second.rotary is not None
    np.testing.assert_array_equal(first.rotary.mean_k, second.rotary.mean_k)
    assert first.moments.cross is not None
    assert len(first.vectors.q) == 50


def test_the_mean_with_the_rotation_undone_is_that_of_the_rows(dataset):
    (one, _), _ = load(dataset, rotary=True)
    assert one.rotary is not None
    rows = dataset.read(one.head).ordered()
    expected = one.rotary.rope.unrotated(rows.x, rows.position).mean(0)
    np.testing.assert_allclose(one.rotary.mean_q, expected, rtol=1e-6)


def test_a_key_head_that_cannot_be_read_fails_its_query_heads_and_names_itself(dataset):
    dataset.path(HeadId(0, 0, "k")).write_bytes(b"not parquet")
    heads, failed = load(dataset)
    assert not heads
    assert [error.head for error in failed] == Q
    assert all("l00h00k" in str(error) for error in failed)


def test_one_query_head_that_cannot_be_read_costs_no_other(dataset):
    dataset.path(Q[0]).write_bytes(b"not parquet")
    heads, failed = load(dataset)
    assert [one.head for one in heads] == [Q[1]]
    assert [error.head for error in failed] == [Q[0]]


@pytest.mark.parametrize(
    ("x", "position", "words"),
    [
        (np.ones((1, 4)), np.zeros(1, int), "at least 2 rows"),
        (np.full((5, 4), np.nan), np.arange(5), "after dropping 5 non-finite"),
        (np.ones((5, 4)), np.full(5, 3), "position 3"),
        (np.ones((5, 1)), np.arange(5), "length 2 or more"),
    ],
)
def test_rows_that_say_nothing_are_refused(tmp_path, x, position, words):
    rows = Rows(x, position, np.zeros(len(position), int))
    data = Dataset.open(write_dataset(tmp_path / "d", [(Q[0], rows), (HeadId(0, 0, "k"), rows)], q_per_kv=1))
    _, failed = load_key_group(data, [Q[0]], Reading())
    with pytest.raises(HeadError, match=words):
        raise failed[0]


def test_non_finite_rows_are_dropped_and_counted(dataset):
    rows = dataset.read(Q[0])
    x = rows.x.copy()
    x[3] = np.inf
    write_rows(dataset.path(Q[0]), Rows(x, rows.position, rows.example_id))
    kept = read_head(dataset, Q[0], Reading())
    assert kept.dropped == 1
    assert len(kept.rows) == len(rows) - 1
    (one, _), _ = load(dataset)
    assert int(one.moments.dropped_q) == 1


def test_at_most_so_many_rows_are_the_same_ones_each_time(dataset):
    a, b = (read_head(dataset, Q[0], Reading(max_samples=40, seed=3)).rows for _ in range(2))
    other = read_head(dataset, Q[0], Reading(max_samples=40, seed=4)).rows
    assert len(a) == 40
    np.testing.assert_array_equal(a.x, b.x)
    assert not np.array_equal(a.x, other.x)


def test_a_window_that_no_position_comes_near_is_refused(tmp_path):
    folder = small_dataset(tmp_path / "data", layers=1, window=2**24)
    _, failed = load_key_group(Dataset.open(folder), Q, Reading())
    assert "16,777,216" in str(failed[0])
