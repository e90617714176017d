"""From files to the moments of heads: which rows are kept, what is shared, and which head an error names."""

from __future__ import annotations

import numpy as np
import pytest

from qkscope.core.headmoments import bucket_moments, cell_means, group_moments
from qkscope.core.rows import Rows
from qkscope.core.sample import Sample
from qkscope.errors import ConfigError, HeadError
from qkscope.files.dataset import Dataset, write_dataset
from qkscope.files.runfolder import MANIFEST
from qkscope.files.vectors import write_rows
from qkscope.headids import HeadId
from qkscope.runs.loading import load_key_group, read_head
from qkscope.runs.run import open_run
from qkscope.runs.source import LoadSpec
from tests.helpers import small_dataset

Q = [HeadId(0, head, "q") for head in range(2)]


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return Dataset.open(small_dataset(tmp_path / "data", layers=1, rope={"theta": 10_000.0}))


def load(dataset: Dataset, **reading: object):
    return load_key_group(dataset, Q, LoadSpec(**reading))  # type: ignore[arg-type]


def test_moments_are_those_of_the_rows(dataset):
    heads, failed = load(dataset, buckets=4)
    assert not failed
    assert [one.head for one in heads] == Q
    for one in heads:
        rows = dataset.read(one.head).ordered()
        window = int(one.moments.window)
        np.testing.assert_allclose(one.moments.q.scatter, group_moments(rows).scatter, rtol=1e-9, atol=1e-9)
        assert one.q_buckets is not None
        np.testing.assert_allclose(one.q_buckets.n, bucket_moments(rows, window, 4).n)
        keys = dataset.read(one.key_head).ordered()
        np.testing.assert_allclose(one.moments.k_cells.mean_x, cell_means(keys, window).mean_x, atol=1e-9)


def test_what_is_not_asked_for_is_not_loaded(dataset):
    (one, _), _ = load(dataset)
    assert one.vectors is None
    assert one.rotary is None
    assert one.q_buckets is None
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
    _, failed = load_key_group(data, [Q[0]], LoadSpec())
    with pytest.raises(HeadError, match=words):
        raise failed[0]


def test_non_finite_rows_are_dropped_and_counted(dataset):
    rows = dataset.read(Q[0])
    x = rows.x.copy()
    x[3] = np.inf
    write_rows(dataset.path(Q[0]), Rows(x, rows.position, rows.example_id))
    kept = read_head(dataset, Q[0], LoadSpec())
    assert kept.dropped == 1
    assert len(kept.rows) == len(rows) - 1
    (one, _), _ = load(dataset)
    assert int(one.moments.dropped_q) == 1


def test_at_most_so_many_rows_are_the_same_ones_each_time(dataset):
    a, b = (read_head(dataset, Q[0], LoadSpec(max_samples=40, seed=3)).rows for _ in range(2))
    other = read_head(dataset, Q[0], LoadSpec(max_samples=40, seed=4)).rows
    assert len(a) == 40
    np.testing.assert_array_equal(a.x, b.x)
    assert not np.array_equal(a.x, other.x)


def without_first(dataset: Dataset, skip_first: int) -> None:
    """Remove the first positions from every file."""
    for head in dataset.heads:
        rows = dataset.read(head)
        write_rows(dataset.path(head), rows.take(np.flatnonzero(rows.position >= skip_first)))


@pytest.mark.parametrize("skip_first", [1, 40, 100])
def test_skipped_positions_are_as_if_the_files_did_not_hold_them(tmp_path, skip_first):
    whole, rest = (
        Dataset.open(small_dataset(tmp_path / name, layers=1, window=512, rope={"theta": 10_000.0}))
        for name in ("whole", "rest")
    )
    without_first(rest, skip_first)
    reading = {"buckets": 4, "sample": 40, "rotary": True, "paired": True}
    (one, _), _ = load(whole, skip_first=skip_first, **reading)
    (expected, _), _ = load(rest, **reading)
    for name, array in vars(expected.moments.q).items():
        np.testing.assert_array_equal(getattr(one.moments.q, name), array)
    np.testing.assert_array_equal(one.moments.k_cells.mean_x, expected.moments.k_cells.mean_x)
    np.testing.assert_array_equal(one.q_buckets.n, expected.q_buckets.n)
    np.testing.assert_array_equal(one.moments.cross.n, expected.moments.cross.n)
    np.testing.assert_array_equal(one.vectors.k.x, expected.vectors.k.x)
    np.testing.assert_array_equal(one.rotary.mean_q, expected.rotary.mean_q)


def test_skipping_none_changes_nothing(dataset):
    kept = read_head(dataset, Q[0], LoadSpec(skip_first=0))
    np.testing.assert_array_equal(kept.rows.x, dataset.read(Q[0]).ordered().x)


def test_the_window_stays_where_positions_are_skipped(dataset):
    whole, skipped = (read_head(dataset, Q[0], LoadSpec(skip_first=first)) for first in (0, 500))
    assert skipped.last == whole.last
    assert len(skipped.rows) < len(whole.rows)
    assert int(load(dataset, skip_first=300)[0][0].moments.window) == int(load(dataset)[0][0].moments.window)


def test_positions_are_skipped_before_rows_are_sampled(dataset):
    rows = dataset.read(Q[0])
    counted = rows.take(np.flatnonzero(rows.position >= 300))
    expected = Sample.from_rows(counted, 40, seed=3).rows.ordered()
    kept = read_head(dataset, Q[0], LoadSpec(max_samples=40, seed=3, skip_first=300)).rows
    assert len(kept) == 40
    np.testing.assert_array_equal(kept.x, expected.x)


def test_skipped_rows_do_not_count_as_dropped(dataset):
    rows = dataset.read(Q[0]).ordered()
    x = rows.x.copy()
    early, late = rows.position.argmin(), rows.position.argmax()
    x[[early, late]] = np.nan
    write_rows(dataset.path(Q[0]), Rows(x, rows.position, rows.example_id))
    kept = read_head(dataset, Q[0], LoadSpec(skip_first=100))
    assert kept.dropped == 1
    assert len(kept.rows) == (rows.position >= 100).sum() - 1


def test_a_head_of_which_too_little_is_left_says_what_was_skipped(dataset):
    heads, failed = load(dataset, skip_first=10_000)
    assert not heads
    assert "expected at least 2 rows from position 10000 on, got 0" in str(failed[0])


@pytest.mark.parametrize("skip_first", [-1, 2**31])
def test_how_many_positions_can_be_skipped(tmp_path, skip_first):
    with pytest.raises(ConfigError, match=f"expected skip_first .* got {skip_first}"):
        open_run(small_dataset(tmp_path / "data", layers=1), skip_first=skip_first)


def test_a_captured_run_has_skipped_what_it_skipped(tmp_path):
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match="is a captured run, whose skip_first was fixed at capture"):
        open_run(tmp_path, skip_first=4)


def test_a_run_skips_in_its_samples_too(tmp_path):
    run = open_run(small_dataset(tmp_path / "data", layers=1), skip_first=100)
    assert run.sample(Q[0], 50).rows.position.min() >= 100


def test_a_window_that_no_position_comes_near_is_refused(tmp_path):
    folder = small_dataset(tmp_path / "data", layers=1, window=2**24)
    _, failed = load_key_group(Dataset.open(folder), Q, LoadSpec())
    assert "16,777,216" in str(failed[0])
