"""Datasets and captured runs offer the same: heads, moments, vectors, notes, extent, identity."""

from __future__ import annotations

import numpy as np
import pytest

from qkscope.capture.options import VectorSampling
from qkscope.errors import ConfigError, DatasetError
from qkscope.files.dataset import Dataset
from qkscope.files.runfolder import RunFolder
from qkscope.headids import HeadId
from qkscope.runs.captured import CapturedSource
from qkscope.runs.dataset import DatasetSource
from qkscope.runs.run import open_run
from qkscope.runs.selection import Selection
from qkscope.runs.source import WHOLE, LoadSpec, Source
from tests.capture.families import build, families
from tests.capture.test_run import do
from tests.helpers import small_dataset

LENGTH = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    ids = [(np.arange(LENGTH) + 5 * i) % 90 + 3 for i in range(8)]
    place = tmp_path_factory.mktemp("sources") / "run"
    return do(build(families()["smollm3"]), ids, place, vectors=VectorSampling(1.0, "all"), sample=200)


@pytest.fixture(scope="module")
def both(folder) -> tuple[Source, Source]:
    return CapturedSource(RunFolder.open(folder)), DatasetSource(Dataset.open(folder / "vectors"))


def test_heads_and_key_heads_agree(both):
    captured, dataset = both
    assert captured.query_heads == dataset.query_heads
    assert captured.q_per_kv == dataset.q_per_kv
    assert captured.window == dataset.window
    for head in captured.query_heads:
        assert captured.key_head(head) == dataset.key_head(head)
        assert captured.layer_notes(head).nope == dataset.layer_notes(head).nope


def test_moments_agree(both):
    captured, dataset = both
    head = captured.query_heads[1]
    (a,), (b,) = (source.load([head], LoadSpec(rotary=True))[0] for source in both)
    assert (a.head, a.key_head) == (b.head, b.key_head)
    np.testing.assert_array_equal(a.moments.q.n, b.moments.q.n)
    scale = np.abs(b.moments.q.scatter).max()
    np.testing.assert_allclose(a.moments.q.scatter, b.moments.q.scatter, atol=1e-5 * scale)
    assert a.nope == b.nope
    assert captured.buckets == 16
    assert dataset.buckets is None


def test_a_run_offers_its_sample_and_a_dataset_all_there_is(both):
    captured, dataset = both
    head = captured.query_heads[0]
    sampled, whole = captured.rows(head, WHOLE), dataset.rows(head, WHOLE)
    assert len(sampled) == 200
    assert len(whole) == 8 * (LENGTH - 4)
    assert captured.extent([head]).n_documents == 8
    assert dataset.extent([head]).n_tokens == len(whole)


def test_a_run_holds_moments_and_says_so_where_vectors_are_asked_for(both):
    captured, _ = both
    for reading in (LoadSpec(paired=True), LoadSpec(max_samples=10)):
        heads, failed = captured.load(captured.query_heads[:1], reading)
        assert not heads
        assert "contains moments" in str(failed[0])


def test_sources_say_what_they_are(both, folder):
    captured, dataset = both
    assert captured.identity()["kind"] == "run"
    assert str(captured) == str(folder)
    assert dataset.identity()["path"].endswith("vectors")
    assert captured.file(captured.query_heads[0]).endswith("layer-000.safetensors")
    assert dataset.file(dataset.query_heads[0]).endswith("data.parquet")


def test_a_selection_is_the_published_draw(tmp_path):
    run = open_run(small_dataset(tmp_path / "data", layers=3))
    import random

    assert Selection(sample=4, seed=42).of(run) == sorted(random.Random(42).sample(run.heads, 4))
    assert Selection(layers=frozenset({1}), heads=frozenset({0, 2})).of(run) == [HeadId(1, 0, "q"), HeadId(1, 2, "q")]
    assert Selection(exactly=frozenset({(2, 3)})).of(run) == [HeadId(2, 3, "q")]
    with pytest.raises(ConfigError, match="none of its 12 query heads"):
        Selection(heads=frozenset({9})).of(run)
    with pytest.raises(ConfigError, match="data has no layer 7, 9; its layers are 0–2"):
        Selection(layers=frozenset({1, 7, 9})).of(run)


def test_what_is_opened_is_told_by_what_it_holds(folder, tmp_path):
    assert isinstance(open_run(folder).source, CapturedSource)
    assert isinstance(open_run(folder / "vectors").source, DatasetSource)
    with pytest.raises(ConfigError, match="whose window was fixed at capture"):
        open_run(folder, window=8)
    (tmp_path / "moments").mkdir()
    with pytest.raises(DatasetError, match=r"run\.json"):
        open_run(tmp_path)
