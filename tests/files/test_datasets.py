import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkscope.core.rows import Rows
from qkscope.errors import DatasetError, HeadError
from qkscope.files.dataset import Dataset, derive_q_per_kv, write_dataset
from qkscope.headids import HeadId
from tests.helpers import small_dataset


def heads(layer: int, queries: list[int], keys: list[int]) -> list[HeadId]:
    return [HeadId(layer, q, "q") for q in queries] + [HeadId(layer, k, "k") for k in keys]


@pytest.mark.parametrize("prefix", ["", "one", "two/levels"])
def test_heads_are_found_below_any_prefix(tmp_path, prefix):
    small_dataset(tmp_path / prefix, window=512, scaling=0.1)
    dataset = Dataset.open(tmp_path)
    assert len(dataset.query_heads) == 8
    assert (dataset.q_per_kv, dataset.window, dataset.scaling) == (2, 512, 0.1)
    assert dataset.key_head(HeadId(1, 3, "q")) == HeadId(1, 1, "k")
    assert len(dataset.read(HeadId(1, 1, "k"))) == 200


def test_what_the_caller_says_goes_before_what_the_dataset_says(tmp_path):
    small_dataset(tmp_path, window=512)
    dataset = Dataset.open(tmp_path, q_per_kv=4, window=99)
    assert (dataset.q_per_kv, dataset.window) == (4, 99)


def test_numbers_of_more_than_two_digits(tmp_path):
    rows = Rows(np.ones((2, 2)), np.arange(2), np.arange(2))
    write_dataset(tmp_path, [(HeadId(100, 127, "q"), rows), (HeadId(100, 31, "k"), rows)], q_per_kv=4)
    assert Dataset.open(tmp_path).key_head(HeadId(100, 127, "q")) == HeadId(100, 31, "k")


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 5))
def test_the_ratio_follows_from_complete_layers(ratio, n_k, layers):
    present = [h for layer in range(layers + 1) for h in heads(layer, list(range(ratio * n_k)), list(range(n_k)))]
    assert derive_q_per_kv(present) == ratio


def test_the_ratio_needs_the_highest_indices_of_any_layer_only():
    present = heads(0, [0, 5], [0, 1]) + heads(1, [23], [7])
    assert derive_q_per_kv(present) == 3


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (heads(0, [0, 22], [0, 7]), r"23 query heads and 8 key heads; set data.q_per_kv or --q-per-kv; 3 would fit"),
        (heads(0, [0], [0, 3]), "1 query heads and 4 key heads"),
        # 8/2 = 4 asks for key head 0 of layer 1, which is not there; 5 … 7 read what is.
        (heads(0, [7], [1]) + heads(1, [4], [0]), "8/2 = 4, key heads are missing; .* 5 or 6 or 7 would fit"),
        (heads(0, [0, 1], []), "contains no key heads"),
        (heads(0, [], [0]), "contains no query heads"),
    ],
)
def test_a_ratio_that_cannot_be_told_is_an_error_that_says_what_to_set(present, message):
    with pytest.raises(DatasetError, match=message):
        derive_q_per_kv(present)


def test_a_missing_key_head_is_the_query_heads_error_not_the_datasets(tmp_path):
    small_dataset(tmp_path)
    (tmp_path / "l01h01k" / "data.parquet").unlink()
    dataset = Dataset.open(tmp_path)
    assert dataset.key_head(HeadId(1, 0, "q")) == HeadId(1, 0, "k")
    with pytest.raises(HeadError, match="l01h02q: its key head l01h01k is missing"):
        dataset.key_head(HeadId(1, 2, "q"))


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected a JSON object"),
        ('{"q_per_kv": 2.5}', "expected q_per_kv to be a positive int, got 2.5"),
        ('{"q_per_kv": true}', "expected q_per_kv to be a positive int, got True"),
        ('{"window": -1}', "expected window to be a positive int, got -1"),
        ('{"scaling": "x"}', "expected scaling to be a positive float, got 'x'"),
    ],
)
def test_a_bad_card_is_named(tmp_path, card, message):
    small_dataset(tmp_path)
    (tmp_path / "dataset.json").write_text(card)
    with pytest.raises(DatasetError, match=message):
        Dataset.open(tmp_path)


def test_folders_that_hold_no_one_dataset(tmp_path):
    with pytest.raises(DatasetError, match="contains no heads; expected files such as"):
        Dataset.open(tmp_path)
    small_dataset(tmp_path / "a")
    small_dataset(tmp_path / "b")
    with pytest.raises(DatasetError, match=r"contains 2 datasets \(a, b\); give the path of one of them"):
        Dataset.open(tmp_path)
    with pytest.raises(DatasetError, match="folders have no revisions"):
        Dataset.open(tmp_path / "a", "main")
    with pytest.raises(DatasetError, match="is not a folder"):
        Dataset.open(tmp_path / "a" / "dataset.json")
    with pytest.raises(DatasetError, match="does not exist"):
        Dataset.open(tmp_path / "nowhere")


def test_two_spellings_of_one_head_are_refused(tmp_path):
    small_dataset(tmp_path)
    (tmp_path / "l00h00q").rename(tmp_path / "l0h0q")
    assert HeadId(0, 0, "q") in Dataset.open(tmp_path).heads
    small_dataset(tmp_path)
    with pytest.raises(DatasetError, match="two files for head l00h00q"):
        Dataset.open(tmp_path)


def test_the_card_says_only_what_is_known(tmp_path):
    small_dataset(tmp_path)
    assert json.loads((tmp_path / "dataset.json").read_text()) == {"q_per_kv": 2}
