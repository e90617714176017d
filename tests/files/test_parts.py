"""Parts of a capture's sums: the tree they merge in, and what a kill or a stranger may leave in its folder."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkscope.core.bucketspread import StoredSpread
from qkscope.core.headmoments import BucketMeans
from qkscope.core.keypairs import TokenPairs
from qkscope.core.layermoments import LayerMoments
from qkscope.core.moments import Moments
from qkscope.errors import DatasetError
from qkscope.files.parts import PARTS, LeftOutDocument, PartMetadata, Parts, Span
from tests.forking import all_bytes

LAYERS = (0, 3)
MANIFEST = {
    "layers": [{"layer": n, "query_heads": [0, 1], "key_heads": [0], "rope": None} for n in LAYERS],
    "options": {"buckets": 2, "documents_per_shard": 1},
    "documents": [{"tokens": 8}] * 11,
    "stage": "post-rope",
    "window": 8,
}


def layer_moments(seed: int) -> LayerMoments:
    rng = np.random.default_rng(seed)

    def moments(*batch: int) -> Moments:
        return Moments.from_rows(rng.standard_normal((*batch, 5, 3)), rng.uniform(0, 8, (*batch, 5)))

    def cells(*batch: int) -> BucketMeans:
        return BucketMeans(np.full(batch, 5.0), rng.standard_normal((*batch, 3)), rng.standard_normal(batch))

    nothing = np.zeros((2, 8, 0, 2)), np.zeros((1, 8, 0, 2)), np.zeros((2, 0))
    return LayerMoments(moments(2, 8), moments(1, 8), moments(2, 2), cells(2, 8, 2), cells(1, 8, 2), *nothing)


def finished_layer(seed: int) -> LayerMoments:
    """Moments of a layer in the form of a finished run."""
    rng = np.random.default_rng(seed)
    pairs = TokenPairs(np.array([[-1, -1], [0, 1]]), np.array([[0, 0], [0, 1]]), np.array([[0, 0], [2, 3]]))
    spread = StoredSpread(pairs, rng.uniform(0, 1, (2, 2, 2)), rng.uniform(0, 1, (2, 2, 3)))
    return replace(layer_moments(seed), q_buckets=None, spread=spread)


def opened(folder) -> Parts:
    parts = Parts(folder, MANIFEST)
    (folder / "kept").mkdir(parents=True, exist_ok=True)
    assert parts.open(folder / "kept") == []
    return parts


def add(parts: Parts, shard: int) -> None:
    layers = {number: lambda n=number: layer_moments(100 * shard + n) for number in LAYERS}
    name, left_out = (
        f"shard-{shard:06d}.safetensors",
        [LeftOutDocument(document=shard, reason="large")] if shard % 5 == 0 else [],
    )
    (parts.folder / "kept" / name).write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    parts.add(Span(shard), layers, PartMetadata(kept={name: empty}, left_out=left_out))


@pytest.fixture(scope="module")
def in_order(tmp_path_factory):
    """Eleven shards, one after the other."""
    folder = tmp_path_factory.mktemp("in-order")
    parts = opened(folder)
    for shard in range(11):
        add(parts, shard)
    return folder


def test_a_tree_of_eleven_has_three_parts(in_order):
    parts = opened(in_order)
    assert sorted(parts.metadata) == [Span(0, 8), Span(8, 2), Span(10, 1)]
    assert parts.done == set(range(11))
    assert [one.document for one in parts.total_metadata.left_out] == [0, 5, 10]
    total = parts.total(3)
    assert total is not None
    expected = layer_moments(3)
    for shard in range(1, 11):
        expected = expected.merge(layer_moments(100 * shard + 3))
    np.testing.assert_allclose(total.q.scatter, expected.q.scatter, rtol=1e-12)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_neither_order_nor_interruption_nor_sharing_changes_a_byte(in_order, tmp_path, seed):
    choice = random.Random(seed)
    shutil.rmtree(tmp_path)
    order = choice.sample(range(11), 11)
    shares = [opened(tmp_path / f"job-{job}") for job in range(choice.randint(1, 3))]
    for number, shard in enumerate(order):
        one = number % len(shares)
        if choice.random() < 0.3:
            shares[one] = opened(shares[one].folder)
        add(shares[one], shard)
    target = opened(tmp_path / "merged")
    for share in choice.sample(shares, len(shares)):
        for span in choice.sample(sorted(share.metadata), len(share.metadata)):
            target.add(span, share.layers(span), share.metadata[span])
    assert all_bytes(target.parts_folder) == all_bytes(in_order / PARTS)


def test_a_part_that_could_not_be_measured_is_no_sum(tmp_path):
    parts = opened(tmp_path)
    parts.add(Span(1), {}, PartMetadata(left_out=[LeftOutDocument(document=1, reason="large")]))
    assert parts.total(0) is None
    add(parts, 0)
    assert sorted(parts.metadata) == [Span(0, 2)]
    total = parts.total(3)
    assert total is not None
    np.testing.assert_array_equal(total.q.mean, layer_moments(3).q.mean)


def test_a_kill_between_writing_and_removing_leaves_one_part(tmp_path):
    parts = opened(tmp_path)
    add(parts, 0)
    shutil.copytree(parts.parts_folder / "000000-000001", tmp_path / "before")
    add(parts, 1)
    (tmp_path / "before").rename(parts.parts_folder / "000000-000001")
    (parts.parts_folder / ".000002-000001.17.tmp").mkdir()
    assert sorted(opened(tmp_path).metadata) == [Span(0, 2)]
    assert [path.name for path in parts.parts_folder.iterdir()] == ["000000-000002"]


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage(note: dict[str, object], place) -> None:
    (place / "part.json").write_text(json.dumps(note))


DAMAGE = {
    "a flipped byte": lambda place, _: flip(place / "layer-003.safetensors"),
    "a layer that is gone": lambda place, _: (place / "layer-000.safetensors").unlink(),
    "no part.json": lambda place, _: (place / "part.json").unlink(),
    "no JSON": lambda place, _: (place / "part.json").write_text("{"),
    "a layer that is not named": lambda place, note: damage(
        note | {"layers": dict([*note["layers"].items()][:1])}, place
    ),
    "kept vectors that are gone": lambda place, _: (place.parents[1] / "kept" / "shard-000001.safetensors").unlink(),
    "names of other files": lambda place, note: damage(note | {"kept": {"../../etc/passwd": "0" * 64}}, place),
    "digests of another kind": lambda place, note: damage(note | {"layers": {"layer-000.safetensors": 5}}, place),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_part_is_named_and_done_again(tmp_path, how):
    parts = opened(tmp_path)
    for shard in range(3):
        add(parts, shard)
    place = parts.parts_folder / "000000-000002"
    DAMAGE[how](place, json.loads((place / "part.json").read_text()))
    again = Parts(tmp_path, MANIFEST)
    (damaged,) = again.open(tmp_path / "kept")
    assert damaged.startswith(f"{place} is damaged (")
    assert again.done == {2}
    assert not place.exists()


def test_what_is_no_part_is_refused_rather_than_removed(tmp_path):
    (tmp_path / "elsewhere" / "000000-000001").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / PARTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        DatasetError, match="parts is a symbolic link, which a capture never creates; choose another folder"
    ):
        Parts(tmp_path / "run", MANIFEST).open(tmp_path / "run" / "kept")
    (tmp_path / "other" / PARTS / "photographs").mkdir(parents=True)
    with pytest.raises(DatasetError, match="photographs is not a part of a capture; move it away or choose another"):
        Parts(tmp_path / "other", MANIFEST).open(tmp_path / "other" / "kept")
    (tmp_path / "third" / PARTS).mkdir(parents=True)
    (tmp_path / "third" / PARTS / "000000-000001").symlink_to(tmp_path / "elsewhere" / "000000-000001")
    with pytest.raises(DatasetError, match="is not a part of a capture"):
        Parts(tmp_path / "third", MANIFEST).open(tmp_path / "third" / "kept")
    assert (tmp_path / "elsewhere" / "000000-000001").is_dir()


@pytest.mark.parametrize("name", ["000001-000002", "000000-000003", "0-1", "0000000-000001", "x", "000000-000000"])
def test_names_that_no_part_has(name):
    assert Span.parse(name) is None


def test_names_of_parts():
    assert Span.parse("000012-000004") == Span(12, 4)
    assert Span.parse(Span(3_000_000, 64).name) == Span(3_000_000, 64)
