"""Attention by distance and on repeats, and lengths in planes, against the model's own attention weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qkscope.capture.corpus import Corpus
from qkscope.capture.options import CaptureOptions
from qkscope.capture.repeats import RepeatedTokens
from qkscope.capture.run import capture
from qkscope.capture.texts import Document
from qkscope.capture.watch import watching
from qkscope.core.reach import REACH_COUNTS, bin_starts, query_positions
from qkscope.files.runfolder import RunFolder
from qkscope.runs.run import open_run
from tests.capture.families import build, families

FAMILIES = families()
SKIP, WINDOW, QUERIES = 3, 96, 5


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 93, n) for n in (96, 70, 50, 96)]


def captured(name: str, folder: Path, **options) -> RunFolder:
    model, ids = build(FAMILIES[name], "eager"), documents()
    given = {"window": WINDOW, "skip_first": SKIP, "reach_queries": QUERIES, "buckets": 4} | options
    names = [Document(str(n), f"text {n}") for n in range(len(ids))]
    capture(model, Corpus(names, ids), folder, CaptureOptions(**given), {"id": name})
    return RunFolder.open(folder)


def by_hand(name: str) -> dict[int, np.ndarray]:
    """The sums from the weights that the model itself reports."""
    model = build(FAMILIES[name], "eager")
    starts, sums = bin_starts(WINDOW), {}
    for number, ids in enumerate(documents()):
        calls = []
        with torch.no_grad(), watching(model, calls.append):
            weights = model(torch.from_numpy(ids)[None], output_attentions=True).attentions
        for call in calls:
            layer, of_layer = call.layer, weights[call.layer][0].double().numpy()
            query, key = (x[0].double().numpy() for x in call.call[0][1:3])
            group = query.shape[0] // key.shape[0]
            total = sums.setdefault(layer, np.zeros((len(query), 8, len(REACH_COUNTS) + len(starts))))[:, number % 8]
            for i in query_positions(len(ids), QUERIES, SKIP).tolist():
                seen = np.flatnonzero(of_layer[0, i] > 0)
                total[:, 0] += 1
                total[:, 1] += of_layer[:, i, :SKIP].sum(-1)
                for head in range(len(query)):
                    scores = call.scaling * key[head // group] @ query[head, i]
                    sink, other = seen[seen < SKIP], seen[seen >= SKIP]
                    if len(sink) and len(other):
                        total[head, 2] += scores[sink].mean() - scores[other].mean()
                        total[head, 3] += 1
                for j in range(SKIP, i + 1):
                    place = len(REACH_COUNTS) + np.searchsorted(starts, i - j, side="right") - 1
                    total[:, place] += of_layer[:, i, j]
    return sums


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_entropy_and_the_largest_score_are_those_of_the_same_queries(name, tmp_path):
    run, model = captured(name, tmp_path / "run"), build(FAMILIES[name], "eager")
    for number, ids in enumerate(documents()):
        calls = []
        with torch.no_grad(), watching(model, calls.append):
            weights = model(torch.from_numpy(ids)[None], output_attentions=True).attentions
        queries = query_positions(len(ids), QUERIES, SKIP)
        for call in calls:
            moments, of_queries = run.layer(call.layer), weights[call.layer][0, :, queries].double().numpy()
            if number == 0:
                entropy, largest = np.zeros_like(moments.entropy), np.full(len(of_queries), -np.inf)
            else:
                entropy, largest = sums[call.layer]
            positive = np.where(of_queries > 0, of_queries, 1.0)
            entropy[:, number % 8] -= (positive * np.log(positive)).sum((1, 2))
            query, key = (x[0].double().numpy() for x in call.call[0][1:3])
            key = key.repeat(len(query) // len(key), 0)
            scores = call.scaling * query[:, queries] @ key.swapaxes(1, 2)
            largest = np.maximum(largest, np.where(of_queries > 0, scores, -np.inf).max((1, 2)))
            sums = (sums if number or call.layer else {}) | {call.layer: (entropy, largest)}
    for layer, (entropy, largest) in sums.items():
        assert np.allclose(run.layer(layer).entropy, entropy, atol=1e-5)
        assert np.allclose(run.layer(layer).max_logit, largest, atol=1e-5)


def on_repeats(name: str, draws: np.ndarray, begin: int) -> dict[int, np.ndarray]:
    """Mean weights of the second copy on the earlier copy of its tokens, and on the tokens after that, by hand."""
    model, copy, sums = build(FAMILIES[name], "eager"), (draws.shape[1] - begin) // 2, {}
    for number, ids in enumerate(draws):
        with torch.no_grad():
            weights = model(torch.from_numpy(ids)[None], output_attentions=True).attentions
        for layer, of_layer in enumerate(weights):
            of_layer = of_layer[0].double().numpy()
            total = sums.setdefault(layer, np.zeros((len(of_layer), 8, 3)))
            total[:, number, 0] = 1
            for i in range(begin + copy, begin + 2 * copy - 1):
                assert ids[i] == ids[i - copy]
                total[:, number, 1] += of_layer[:, i, i - copy] / (copy - 1)
                total[:, number, 2] += of_layer[:, i, i - copy + 1] / (copy - 1)
    return sums


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_attention_on_repeats_is_that_of_the_models_own_weights(name, tmp_path):
    run, repeated = captured(name, tmp_path / "run"), RepeatedTokens()
    draws = repeated.draws(FAMILIES[name].config.vocab_size, 512)
    for layer, sums in on_repeats(name, draws, repeated.begin).items():
        assert np.allclose(run.layer(layer).repeats, sums, atol=1e-5)
        assert bool(sums[..., 1:].max() > 0) is (layer not in FAMILIES[name].sliding), "16 tokens back there is no copy"


def test_repeats_begin_as_documents_do_and_hold_no_special_token():
    repeated = RepeatedTokens(bos=1, special=(0, 1, 2, 40), n_tokens=90)
    draws = repeated.draws(96, 512)
    assert draws.shape == (8, 1 + 2 * 64)
    assert (draws[:, 0] == 1).all()
    assert not np.isin(draws[:, 1:], [0, 1, 2, 40]).any()
    assert draws.max() < 90
    assert (draws[:, 1:65] == draws[:, 65:]).all()
    assert all(len(np.unique(row[1:65])) == 64 for row in draws)
    assert len(np.unique(draws[:, 1])) > 1, "each draw has tokens of its own"
    assert repeated.draws(96, 21).shape == (8, 1 + 2 * 10), "as long as the model's context allows"
    assert RepeatedTokens().draws(10, 512).shape == (8, 20), "as long as the vocabulary allows"
    assert RepeatedTokens().draws(3, 512) is None


def test_a_window_inside_another_has_the_same_repeats(tmp_path):
    run = captured("llama", tmp_path / "run", compare_at=(48,))
    nested = RunFolder.open(tmp_path / "run-at-48")
    for layer in range(4):
        assert (run.layer(layer).repeats == nested.layer(layer).repeats).all()
        assert (nested.layer(layer).max_logit <= run.layer(layer).max_logit + 20).all()


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_sums_are_those_of_the_models_own_weights(name, tmp_path):
    run, expected = captured(name, tmp_path / "run"), by_hand(name)
    for layer, sums in expected.items():
        assert np.allclose(run.layer(layer).reach, sums, atol=1e-5)


@pytest.mark.parametrize("options", [{"batch": 4}, {"prefill": 24}, {"documents_per_shard": 1}])
def test_batches_steps_and_shards_give_the_same_sums(options, tmp_path):
    plain, other = captured("mistral", tmp_path / "plain"), captured("mistral", tmp_path / "other", **options)
    for layer in range(4):
        a, b = plain.layer(layer), other.layer(layer)
        assert np.allclose(a.reach, b.reach, atol=1e-4)
        assert np.allclose(a.sizes_q, b.sizes_q, rtol=1e-4)
        assert np.allclose(a.entropy, b.entropy, atol=1e-4)
        assert np.allclose(a.max_logit, b.max_logit, atol=1e-5)
        assert np.allclose(a.repeats, b.repeats, atol=1e-6)
        assert np.allclose(a.sizes_k, b.sizes_k, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "ministral3", "deepseek-v3"])
def test_lengths_are_those_of_all_vectors(name, tmp_path):
    run = captured(name, tmp_path / "run", sample=10_000)
    opened = open_run(tmp_path / "run")
    for head in [h for h in opened.heads if h.head == 1]:
        rows = opened.sample(head, 10_000).rows
        entry = next(e for e in run.raw["layers"] if e["layer"] == head.layer)
        if entry["rope"] is None:
            continue
        moments = run.layer(head.layer)
        (loaded,), _ = opened.source.load([head], opened.reading)
        x = rows.x if loaded.rotary.temperature is None else rows.x / loaded.rotary.temperature[rows.position][:, None]
        sizes = np.abs(loaded.rotary.rope.planes_of(x))
        expected = np.stack([sizes[rows.example_id % 8 == g].sum(0) for g in range(8)])
        assert np.allclose(moments.sizes_q[1], expected, rtol=1e-4)


def test_no_queries_no_reach_and_an_old_run_without_the_sums_is_read(tmp_path):
    run = captured("llama", tmp_path / "run", reach_queries=0)
    moments = run.layer(0)
    assert moments.reach is moments.entropy is moments.max_logit is moments.repeats is None
    (head, *_), _ = open_run(tmp_path / "run").source.load(
        open_run(tmp_path / "run").heads[:1], open_run(tmp_path / "run").reading
    )
    assert head.reach is None
