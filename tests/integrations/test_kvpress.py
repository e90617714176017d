"""Exports in the hands of kvpress itself: its loader, its collector, its presses in its pipeline.

kvpress allows only transformers and pandas that are older than those that qkscope is tested with, so it is not one of
the packages of the tests; ``make kvpress`` installs it beside them and runs this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from typer.testing import CliRunner

import qkscope
from qkscope.capture.options import CaptureOptions
from qkscope.cli.main import app
from tests.capture.conftest import WORDS, save
from tests.capture.families import families

kvpress = pytest.importorskip("kvpress", reason="make kvpress installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other versions

SKIP_FIRST, WINDOW = 4, 160


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def place(request, tmp_path_factory) -> Path:
    """A model with its tokenizer, a run of it, and all that kvpress can use of the run."""
    folder = tmp_path_factory.mktemp("kvpress")
    save(families()[request.param], folder / "model")
    run = qkscope.capture_model(
        loaded(folder), documents(), window=WINDOW, folder=folder / "run", progress=False,
        options=CaptureOptions(skip_first=SKIP_FIRST, keep="undone-cov"),
    )  # fmt: skip
    qkscope.export_run(run, "kvpress-stats", folder / "stats")
    qkscope.export_run(run, "duo-attention", folder / "duo", recent=64)
    command = ["reach", folder / "run", "--cut", 64, "--keep", 0.5, "-o", folder / "reach", "--workers", 1]
    assert CliRunner().invoke(app, [*map(str, command)]).exit_code == 0
    return folder


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 93, rng.integers(80, 200)) for _ in range(9)]


def loaded(folder: Path):
    return tf.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa").eval()


def answer(folder: Path, press) -> str:
    """The answer of kvpress' own pipeline on a long context."""
    tokenizer = tf.AutoTokenizer.from_pretrained(folder / "model", bos_token="[BOS]")
    pipe = kvpress.KVPressTextGenerationPipeline(model=loaded(folder), tokenizer=tokenizer)
    context = " ".join(np.random.default_rng(0).choice(WORDS, 150))
    return pipe(context, question="w01 w02", press=press, max_new_tokens=4)["answer"]


def cache_lengths(folder: Path, press) -> list[int]:
    model, cache = loaded(folder), tf.DynamicCache()
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, 93, (1, 150)))
    with torch.no_grad(), press(model):
        model(ids, past_key_values=cache)
    return [layer.keys.shape[2] for layer in cache.layers]


def test_its_loader_reads_the_statistics_that_its_collector_collects(place):
    from kvpress.presses.expected_attention_with_stats import ExpectedAttentionStats, patch_rotary_embedding

    stats = ExpectedAttentionStats.from_pretrained(place / "stats")
    assert (stats.n_sink, stats.num_samples, stats.sample_seq_len) == (SKIP_FIRST, 9, WINDOW)
    model, parts = loaded(place), []
    for ids in documents():
        with patch_rotary_embedding(model) as queries, torch.no_grad():
            model(torch.from_numpy(ids[:WINDOW])[None])
        parts.append(torch.cat(queries)[:, :, SKIP_FIRST:].double())
    rows = torch.cat(parts, 2)
    mean = rows.mean(2)
    apart = rows - mean[:, :, None]
    cov = apart.transpose(-1, -2) @ apart / (rows.shape[2] - 1)
    for got, expected in ((stats.query_mean, mean), (stats.query_cov, cov)):
        assert float((got - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_a_press_of_the_statistics_runs_in_its_pipeline(place):
    press = kvpress.ExpectedAttentionStatsPress(compression_ratio=0.4, stats_folder=str(place / "stats"))
    assert cache_lengths(place, press) == [90] * 4
    assert answer(place, press).split()


class CutPress(kvpress.DuoAttentionPress):
    """DuoAttention's press with the heads, the window and the sinks of a cut.json, as in docs/exports.md."""

    cut: Path

    def post_init_from_model(self, model) -> None:
        cut = json.loads(self.cut.read_text())
        self.sink_size, self.recent_size = cut["sinks"], cut["window"]
        self.streaming_mask = torch.zeros(model.config.num_hidden_layers, model.config.num_key_value_heads, dtype=bool)
        self.streaming_mask[tuple(zip(*cut["heads"], strict=True))] = True


def test_a_press_of_a_cut_runs_in_its_pipeline(place):
    press = CutPress(head_compression_ratio=0.5)
    press.cut = place / "reach" / "cut.json"
    assert cache_lengths(place, press) == [150] * 4
    assert press.compression_ratio == pytest.approx(0.5 * (1 - (64 + SKIP_FIRST) / 150))
    assert answer(place, press).split()


def test_gates_are_read_by_its_own_reader(place, monkeypatch):
    """Let kvpress' reader, which downloads gates from DuoAttention's repository, read ours."""
    from kvpress.presses import duo_attention_press as duo

    def get(url: str) -> SimpleNamespace:
        text = (place / "duo" / url.rsplit("/", 1)[1]).read_text()
        return SimpleNamespace(text=text, json=lambda: json.loads(text))

    model = loaded(place)
    monkeypatch.setitem(duo.PATTERNS_DICT, model.config.name_or_path, "tiny")
    monkeypatch.setattr(duo.requests, "get", get)
    press = kvpress.DuoAttentionPress(head_compression_ratio=0.5)
    press.post_init_from_model(model)
    assert (press.sink_size, press.recent_size) == (SKIP_FIRST, 64)
    cut = json.loads((place / "reach" / "cut.json").read_text())["heads"]
    assert sorted(map(list, zip(*np.nonzero(press.streaming_mask.numpy()), strict=True))) == cut
