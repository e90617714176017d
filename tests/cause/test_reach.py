"""Pairs in a layer with a sliding window: only pairs within reach count, compared with a direct count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import qkscope
from qkscope.analyses.distancecurve import bin_edges
from qkscope.files.dataset import Dataset
from qkscope.headids import HeadId
from tests.capture.conftest import captured_with_vectors
from tests.capture.families import families

REACH = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3: layers that see 16 tokens and layers that see all, each kind with a rotary base of its own."""
    return captured_with_vectors(tmp_path_factory.mktemp("reach"), families()["gemma3"], 8)


def pairs(run: Path, layer: int, head: int, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances and scores of every pair of a document that the query can reach, one by one."""
    vectors = Dataset.open(run / "vectors")
    query = HeadId(layer, head, "q")
    q, k = (vectors.read(part).ordered() for part in (query, vectors.key_head(query)))
    scaling = json.loads((run / "run.json").read_text())["layers"][layer]["scaling"]
    distances, scores = [], []
    for i in range(len(q)):
        gap = q.position[i] - k.position
        seen = (k.example_id == q.example_id[i]) & (gap > 0) & (gap < reach)
        distances.append(gap[seen])
        scores.append(scaling * (k.x[seen].astype(float) @ q.x[i].astype(float)))
    return np.concatenate(distances), np.concatenate(scores)


@pytest.mark.parametrize("layer", [0, 1])
def test_pairs_within_reach_are_those_that_count(run: Path, layer: int):
    opened = qkscope.open(run)
    window = int(opened.source.window or 0)
    reach = REACH if layer == 0 else window
    rotated = qkscope.rotation(opened).query("layer == @layer")
    assert set(rotated["reach"]) == {reach}
    for per_token, over_reach in (("bias_strength", "bias_window"), ("bias_causal", "bias_causal_window")):
        np.testing.assert_allclose(rotated[over_reach], rotated[per_token] * reach)
    table = qkscope.distance(opened).query("layer == @layer and head == 1").reset_index()
    distance, score = pairs(run, layer, 1, reach)
    bins = np.searchsorted(bin_edges(reach), distance, side="right") - 1
    counts = np.bincount(bins)
    kept = [b for b in range(len(counts)) if counts[b] >= 10]
    assert table["distance_high"].max() < reach
    assert table["n_pairs"].tolist() == [counts[b] for b in kept]
    np.testing.assert_allclose(table["measured"], [score[bins == b].mean() for b in kept], rtol=1e-6, atol=1e-9)
    assert qkscope.position(opened).query("layer == @layer")["decay_range"].unique().tolist() == [reach // 2]


def test_the_two_kinds_of_layers_turn_at_speeds_of_their_own(run: Path):
    planes = qkscope.planes(qkscope.open(run)).query("view == 'rope' and head == 0")
    slowest = planes.groupby("layer")["theta"].min()
    assert slowest[0] == slowest[2]
    assert slowest[1] == slowest[3]
    assert slowest[0] != slowest[1]
