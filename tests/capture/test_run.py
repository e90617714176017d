import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from typer.testing import CliRunner

import qkscope
from qkscope.capture.corpus import Corpus
from qkscope.capture.model import _override
from qkscope.capture.options import CaptureOptions, ExecutionOptions, VectorSampling
from qkscope.capture.run import capture
from qkscope.capture.sampling import sample_tokens, vector_tokens
from qkscope.capture.texts import Document
from qkscope.cli.main import app
from qkscope.core.bucketspread import BucketSpread
from qkscope.core.headmoments import bucket_moments
from qkscope.core.keypairs import KeyPairs
from qkscope.core.moments import Moments
from qkscope.engine import IN_PROCESS
from qkscope.errors import CaptureError, ConfigError, DatasetError, HeldError, TableError
from qkscope.files import layerfiles
from qkscope.files.dataset import Dataset
from qkscope.files.runfolder import RunFolder
from qkscope.headids import HeadId
from qkscope.options import from_values
from qkscope.results.analyze import analyze
from qkscope.results.job import Job, Selection
from tests.capture.families import build, families, matrix
from tests.files.hub_server import FakeHub
from tests.helpers import n_documents

WINDOW = 160
LENGTH_DEPENDENT = ("phi3 longrope", "dynamic scaling")
"""Their frequencies follow the length of the document, so a mean over lengths has no one frequency to be undone by."""
ALL = VectorSampling(sampler="all")


def do(model, ids, folder: Path, on_progress=None, doing: dict[str, object] | None = None, **options: object) -> Path:
    documents = [Document(f"d{i}", f"text {i}") for i in range(len(ids))]
    settings = {
        "window": WINDOW,
        "sample": 100,
        "documents_per_shard": 8,
        "batch": 1,
    } | options  # eight documents to a shard, one to a pass
    how = ExecutionOptions(on_progress=on_progress, **(doing or {}))  # type: ignore[arg-type]
    return capture(model, Corpus(documents, ids), folder, CaptureOptions(**settings), {"id": "tiny"}, how)  # type: ignore[arg-type]


def same_moments(a: Moments, b: Moments, rtol: float) -> None:
    """Relative to the spread of each coordinate."""
    np.testing.assert_array_equal(a.n, b.n)
    spread = np.sqrt(np.einsum("...ii->...i", b.scatter))
    scale = np.maximum(spread[..., :, None] * spread[..., None, :], 1e-30)
    assert np.abs((a.scatter - b.scatter) / scale).max() < rtol
    sd = spread / np.sqrt(np.maximum(b.n, 1))[..., None]
    assert np.abs((a.mean - b.mean) / np.maximum(sd, 1e-30)).max() < rtol


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "name", matrix(["llama", "smollm3", "gemma3", "deepseek-v3", "ministral3", "glm4"], ["smollm3", "glm4"])
)
def test_captured_moments_are_those_of_the_saved_vectors(name, ids, tmp_path):
    folder = do(build(families()[name]), ids, tmp_path / "run", vectors=ALL)
    run, vectors = qkscope.open(folder), qkscope.open(folder / "vectors")
    assert run.heads == vectors.heads
    for head in run.heads[::3]:
        captured, saved = run.moments(head), vectors.moments(head)
        same_moments(captured.total_q, saved.total_q, 1e-6)
        same_moments(captured.total_k, saved.total_k, 1e-6)
        same_moments(captured.q, saved.q, 5e-6)  # a group is two or three short documents
        same_moments(captured.k, saved.k, 5e-6)
        np.testing.assert_allclose(captured.k_buckets.mean_x, saved.k_buckets.mean_x, atol=1e-6)
        assert captured.scaling == pytest.approx(saved.scaling)
    for table in (qkscope.rotation, qkscope.pca):
        ours, theirs = table(run), table(vectors)
        numbers = ["r_k_a", "bias_full", "plane_var_fraction"] if "r_k_a" in ours else ["explained_variance", "var_q"]
        np.testing.assert_allclose(ours[numbers], theirs[numbers], rtol=1e-4, atol=1e-9)
        assert list(ours.columns) == list(theirs.columns)


def test_single_precision_on_disk_changes_no_table(model, ids, tmp_path, monkeypatch):
    """Values to 1e-6 of their column, standard errors and intervals to 1e-4, against the same run in float64."""
    names = ("pca", "rotation", "position", "distance", "scores", "plasticity", "planes")
    tables = []
    for name, single in (("single", layerfiles._SINGLE), ("double", ())):
        monkeypatch.setattr(layerfiles, "_SINGLE", single)
        run = qkscope.open(do(model, ids, tmp_path / name, documents_per_shard=3))
        tables.append(analyze([Job(run, Selection())], names, target=IN_PROCESS)[0].tables.frames)
    stored, exact = tables
    assert sum(map(len, stored.values())) > 100
    for table, frame in exact.items():
        numbers = frame.select_dtypes("float")
        for column in numbers:
            one, two = stored[table][column].to_numpy(float), numbers[column].to_numpy(float)
            np.testing.assert_array_equal(np.isnan(one), np.isnan(two), err_msg=f"{table}.{column}")
            size = np.sqrt(np.nanmean(two**2)) if np.isfinite(two).any() else 0.0
            least = 1e-4 if column.endswith(("_se", "_low", "_high")) else 2e-6
            np.testing.assert_allclose(one, two, rtol=0, atol=max(least * size, 1e-6), err_msg=f"{table}.{column}")


def test_every_token_past_the_first_ones_counts_once(model, ids, tmp_path):
    run = qkscope.open(do(model, ids, tmp_path / "run", skip_first=7))
    expected = sum(min(len(one), WINDOW) - 7 for one in ids)
    assert run.moments(run.heads[0]).total_q.n == expected
    assert run.moments(run.heads[0]).total_k.n == expected


@pytest.mark.parametrize("per_shard", [3, 1000], ids=["merged", "one shard"])
def test_spread_of_queries_by_bucket_is_that_of_the_vectors(per_shard, model, ids, tmp_path):
    """Variances along differences of sampled keys and along the axes of the published model, on host and device."""
    folder = do(model, ids, tmp_path / "run", vectors=ALL, buckets=5, documents_per_shard=per_shard)
    layer = RunFolder.open(folder).layer(2)
    q, k = (Dataset.open(folder / "vectors").read(HeadId(2, head, kind)) for head, kind in ((3, "q"), (1, "k")))
    pairs = KeyPairs.of(k.ordered(), layer.spread.pairs, WINDOW)
    expected = BucketSpread.of(bucket_moments(q, WINDOW, 5), Moments.from_rows(q.x, q.position), pairs.delta)
    found = layer.spread.head(3, layer.q_cells[3])
    assert pairs.n[1:].min() > 10
    np.testing.assert_array_equal(found.n, expected.n)
    np.testing.assert_allclose(found.mean_x, expected.mean_x, atol=1e-5)
    np.testing.assert_allclose(found.along_pairs, expected.along_pairs, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(found.along_axes, expected.along_axes, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "yarn scaling", "glm4", "deepseek-v3", "llama4", "ministral3"])
def test_sums_with_the_rotation_undone(name, ids, tmp_path):
    folder = do(build(families()[name]), ids, tmp_path / "run", vectors=ALL)
    manifest = RunFolder.open(folder).raw
    described, moments = manifest["layers"][0]["rope"], RunFolder.open(folder).layer(0)
    rows = Dataset.open(folder / "vectors").read(HeadId(0, 1, "k"))
    planes, start = len(described["frequencies"]), described["start"]
    part = rows.x[:, start : start + 2 * planes].astype(float)
    if described["layout"] == "half":
        z = part[:, :planes] + 1j * part[:, planes:]
    else:
        z = part[:, 0::2] + 1j * part[:, 1::2]
    undone = z * np.exp(-1j * np.outer(rows.position, described["frequencies"]))
    got = moments.unrotated_k[1].sum(0)
    np.testing.assert_allclose(got[:, 0] + 1j * got[:, 1], undone.sum(0), rtol=2e-3, atol=2e-3 * np.abs(z).sum())


def test_the_temperature_of_queries_is_recorded_by_position(ids, tmp_path):
    moments = RunFolder.open(do(build(families()["ministral3"]), ids, tmp_path / "run")).layer(0)
    total, count = moments.temperature
    assert (count[4:100] > 0).all()
    assert not count[:4].any()
    at = np.arange(WINDOW)[count > 0]
    np.testing.assert_allclose((total / np.maximum(count, 1))[at], 1 + 0.1 * np.log(1 + at // 16), rtol=1e-5)
    plain = RunFolder.open(do(build(families()["llama"]), ids, tmp_path / "plain")).layer(0)
    assert plain.temperature.shape == (2, 0)
    some = RunFolder.open(do(build(families()["ministral3"]), ids, tmp_path / "some", heads=(1, 3))).layer(0)
    np.testing.assert_allclose(some.temperature, moments.temperature, rtol=1e-5)
    np.testing.assert_allclose(some.unrotated_q, moments.unrotated_q[[1, 3]], rtol=1e-4, atol=1e-3)


def test_a_layer_without_rotary_has_no_planes_and_says_so(ids, tmp_path):
    folder = RunFolder.open(do(build(families()["smollm3"]), ids, tmp_path / "run"))
    assert [layer["rope"] is None for layer in folder.raw["layers"]] == [False, False, False, True]
    assert folder.layer(3).unrotated_q.shape[2] == 0


@pytest.mark.parametrize("batch", [3, 8, None])
@pytest.mark.parametrize("name", matrix(["llama", "gemma3", "glm4"], ["gemma3"]))
def test_padding_enters_no_statistic(name, ids, tmp_path, batch):
    """Neither the passes that were asked for nor those chosen by length change a number, but for rounding."""
    model, told = build(families()[name]), list[str]()
    one = qkscope.open(do(model, ids, tmp_path / "one"))
    many = qkscope.open(
        do(model, ids, tmp_path / "many", lambda *now: told.append(now[2]), batch=batch, documents_per_shard=20)
    )
    assert told[-1] == "20 of 20 documents"
    losses = [run.source.run.raw["loss"]["mean"] for run in (many, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for layer in (0, 1):
        found, expected = (run.source.run.layer(layer).reach for run in (many, one))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for head in one.heads[::5]:
        same_moments(many.moments(head).q, one.moments(head).q, 1e-4)
        same_moments(many.moments(head).k, one.moments(head).k, 1e-4)


@pytest.mark.parametrize("name", matrix(["llama", "gemma3", "mistral"], ["gemma3"]))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prefilling_in_steps_gives_the_same_numbers(name, attention, ids, tmp_path):
    model = build(families()[name], attention)
    whole = qkscope.open(do(model, ids, tmp_path / "whole", prefill=0))
    steps = qkscope.open(do(model, ids, tmp_path / "steps", prefill=40))
    for head in whole.heads[::5]:
        same_moments(steps.moments(head).q, whole.moments(head).q, 1e-4)
        same_moments(steps.moments(head).k, whole.moments(head).k, 1e-4)


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [8, *(pytest.param(after, marks=pytest.mark.slow) for after in (1, 9, 17, 20))])
def test_a_run_that_was_stopped_ends_with_the_bytes_of_one_that_was_not(model, ids, tmp_path, after):
    do(model, ids, tmp_path / "whole", vectors=VectorSampling(0.2))

    def stop(_done, _total, note) -> None:
        if n_documents(note) == after:
            raise Stop

    with pytest.raises(Stop):
        do(model, ids, tmp_path / "stopped", stop, vectors=VectorSampling(0.2))
    notes = []
    do(model, ids, tmp_path / "stopped", lambda _done, _total, note: notes.append(note), vectors=VectorSampling(0.2))
    assert n_documents(notes[0]) == (after - 1) // 8 * 8 + 1, "finished shards were done again"
    assert all_bytes(tmp_path / "stopped") == all_bytes(tmp_path / "whole")


def test_an_unfinished_run_cannot_be_analysed_and_a_finished_one_knows_its_window(model, ids, tmp_path):
    def stop(_done, _total, note) -> None:
        if n_documents(note) == 12:
            raise Stop

    with pytest.raises(Stop):
        do(model, ids, tmp_path / "run", stop)
    with pytest.raises(DatasetError, match="rerun the same capture command to resume"):
        qkscope.open(tmp_path / "run")
    do(model, ids, tmp_path / "run")
    with pytest.raises(ConfigError, match="is a captured run, whose window was fixed at capture"):
        qkscope.open(tmp_path / "run", window=99)
    broken = tmp_path / "run" / "moments" / "layer-001.safetensors"
    broken.write_bytes(broken.read_bytes()[:1000])
    done = run_cli("analyze", tmp_path / "run", "-o", tmp_path / "tables")
    assert done.exit_code == 1
    assert "12 of 16 heads" in done.output
    assert "layer-001.safetensors cannot be read as a layer's moments" in done.output


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"manifest": 5}'])
def test_a_progress_file_that_is_not_one_is_named(model, ids, tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "progress.json").write_text(content)
    with pytest.raises(DatasetError, match=r"progress.json cannot be read"):
        do(model, ids[:2], tmp_path / "run")


def test_a_finished_run_is_left_alone_and_other_settings_are_shown(model, ids, tmp_path):
    do(model, ids, tmp_path / "run")
    before = all_bytes(tmp_path / "run")
    do(model, ids, tmp_path / "run", lambda _: pytest.fail("nothing was left to do"))
    assert all_bytes(tmp_path / "run") == before
    with pytest.raises(DatasetError, match=r"options.skip_first: expected 5, got 4.*choose another folder"):
        do(model, ids, tmp_path / "run", skip_first=5)


def test_layers_heads_and_stage_can_be_chosen(ids, tmp_path):
    model = build(families()["gemma3"])
    run = qkscope.open(do(model, ids, tmp_path / "some", layers=(1, 3), heads=(1, 2)))
    assert [str(h) for h in run.heads] == ["l01h01q", "l01h02q", "l03h01q", "l03h02q"]
    everything = qkscope.open(do(model, ids, tmp_path / "all"))
    for head in run.heads:
        same_moments(run.moments(head).q, everything.moments(head).q, 1e-6)
        same_moments(run.moments(head).k, everything.moments(head).k, 1e-6)
    full = qkscope.open(do(model, ids, tmp_path / "full", full_attention_only=True))
    assert {h.layer for h in full.heads} == {1, 3}
    before = do(model, ids, tmp_path / "pre", pre_rope=True)
    assert RunFolder.open(before).raw["stage"] == "pre-rope"
    pre, post = (qkscope.open(f).moments(HeadId(0, 0, "q")).total_q for f in (before, tmp_path / "all"))
    # A rotation keeps lengths: the mean square stays, the mean does not.
    power = [np.trace(m.cov_x) + m.mean_x @ m.mean_x for m in (pre, post)]
    assert power[0] == pytest.approx(power[1], rel=1e-4)
    assert np.linalg.norm(pre.mean_x - post.mean_x) > 0.01
    with pytest.raises(CaptureError, match="the model has"):
        do(model, ids, tmp_path / "none", layers=(9,))
    with pytest.raises(CaptureError, match="query heads 0 to 3 in layer 0, got 7"):
        do(model, ids, tmp_path / "none", heads=(7,))


def test_the_sample_is_the_same_tokens_in_every_head_and_can_be_projected(model, ids, tmp_path):
    run = qkscope.open(do(model, ids, tmp_path / "run", sample=150))
    q, k = (run.sample(head).rows for head in (HeadId(0, 3, "q"), HeadId(2, 1, "k")))
    assert len(q) == len(k) == 150
    np.testing.assert_array_equal(q.position, k.position)
    assert q.position.min() >= 4
    assert len(run.head(1, 2).projections("k")) == 150


def test_token_choices():
    documents = [((0, 50),), ((0, 3),), ((0, 60), (70, 90))]
    chosen = sample_tokens(documents, 40, 0, 4)
    assert sum(map(len, chosen)) == 40
    assert len(chosen[1]) == 0
    everything = sample_tokens(documents, 10_000, 0, 4)
    assert sum(map(len, everything)) == 46 + 76
    assert everything[2].tolist() == [*range(4, 60), *range(70, 90)]
    assert vector_tokens(0, ((0, 6), (9, 11)), VectorSampling(sampler="all"), 4).tolist() == [4, 5, 9, 10]
    uniform = np.concatenate([vector_tokens(i, ((0, 1000),), VectorSampling(0.1), 0) for i in range(50)])
    assert len(uniform) == pytest.approx(5000, rel=0.1)
    log = np.concatenate([vector_tokens(i, ((0, 1000),), VectorSampling(0.1, "log_uniform"), 0) for i in range(50)])
    early, late = ((log < 30).sum(), (log >= 500).sum())
    assert early > 2 * late
    with pytest.raises(CaptureError, match="rate above 0"):
        VectorSampling(0.0)
    with pytest.raises(CaptureError, match="unknown sampler 'loguniform'"):
        VectorSampling(0.1, "loguniform")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="expected sample of 1 or more, got 0"):
        CaptureOptions(sample=0)


def test_head_sampling_of_saved_vectors(model, ids, tmp_path):
    folder = do(model, ids, tmp_path / "run", vectors=VectorSampling(0.3, "uniform", 42, heads=3))
    import random

    targets = [HeadId(layer, head, "q") for layer in range(4) for head in range(4)]
    dataset = Dataset.open(folder / "vectors")
    assert dataset.query_heads == sorted(random.Random(42).sample(targets, 3))
    assert all(dataset.key_head(head) in dataset.heads for head in dataset.query_heads)


def test_an_offloaded_model(model, ids, tmp_path):
    from accelerate import cpu_offload

    plain = qkscope.open(do(model, ids[:8], tmp_path / "plain"))
    offloaded = build(families()["llama"])
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    run = qkscope.open(do(offloaded, ids[:8], tmp_path / "offloaded"))
    same_moments(run.moments(run.heads[3]).q, plain.moments(plain.heads[3]).q, 1e-9)


def test_numbers_that_are_not_finite_stop_the_run(model, ids, tmp_path):
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(CaptureError, match=r"parity|not finite|non-finite"):
        do(model, ids, tmp_path / "run")


def test_documents_that_are_too_short_are_left_out_and_counted(model, ids, tmp_path):
    with pytest.raises(CaptureError, match="no document has two tokens after the first 4"):
        do(model, [np.arange(3, 7)], tmp_path / "none")
    folder = do(model, [np.arange(3, 7), *ids[:8]], tmp_path / "run")
    manifest = RunFolder.open(folder).raw
    assert manifest["documents_too_short"] == 1
    assert [d["name"] for d in manifest["documents"]] == [f"d{i}" for i in range(1, 9)]


@pytest.mark.parametrize("name", ["phi3 longrope", "dynamic scaling"])
def test_where_frequencies_follow_the_length_there_is_no_padding_and_no_stepping(name, ids, tmp_path):
    family = families()[name]
    family.config.max_position_embeddings = 64
    model = build(family)
    for options in ({"batch": 4}, {"prefill": 40}):
        with pytest.raises(CaptureError, match="depends on the length of the document"):
            do(model, ids, tmp_path / "run", **options)
    folder = do(model, ids, tmp_path / "run", vectors=ALL)
    assert RunFolder.open(folder).raw["layers"][0]["rope"]["depends_on_length"]
    run, vectors = qkscope.open(folder), qkscope.open(folder / "vectors")
    same_moments(run.moments(run.heads[1]).total_k, vectors.moments(run.heads[1]).total_k, 1e-6)
    # Nor does a document depend on longer ones before it.
    alone = qkscope.open(do(build(family), ids[3:4], tmp_path / "alone", vectors=ALL) / "vectors")
    together = vectors.source.rows(HeadId(1, 0, "k"), vectors.reading)
    chosen = together.example_id == 3
    np.testing.assert_allclose(together.x[chosen], alone.source.rows(HeadId(1, 0, "k"), alone.reading).x, atol=1e-5)


def test_other_weights_are_another_run(ids, tmp_path):
    do(build(families()["llama"]), ids[:8], tmp_path / "run")
    other = build(families()["llama"])
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    with pytest.raises(DatasetError, match=r"model.weights: "):
        do(other, ids[:8], tmp_path / "run")


def test_a_second_process_is_told_that_the_folder_is_taken(model, ids, tmp_path):
    def meddle(*_) -> None:
        with pytest.raises(
            HeldError, match=rf"is in use by process {os.getpid()} on .*, since 20.* UTC; wait until it ends"
        ):
            do(model, ids[:2], tmp_path / "run")

    do(model, ids[:2], tmp_path / "run", meddle)


def test_a_run_wants_a_folder_of_its_own(model, ids, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(TableError, match="is not a writable directory"):
        do(model, ids, tmp_path / "file")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "qk.csv").write_text("x")
    with pytest.raises(DatasetError, match=r"contains other files \(qk.csv\)"):
        do(model, ids, tmp_path / "results")


def test_what_cannot_be_shown_before_the_rotation(ids, tmp_path):
    with pytest.raises(CaptureError, match="rotates only some coordinates of its vectors"):
        do(build(families()["deepseek-v3"]), ids, tmp_path / "run", pre_rope=True)


def test_chunked_attention_is_not_full_attention(ids, tmp_path):
    run = qkscope.open(do(build(families()["llama4"]), ids, tmp_path / "run", full_attention_only=True))
    assert {head.layer for head in run.heads} == {3}
    with pytest.raises(CaptureError, match="none of the chosen layers has full attention"):
        do(build(families()["mistral"]), ids, tmp_path / "none", full_attention_only=True)


# ---- the command --------------------------------------------------------------------------------


def run_cli(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_capture_and_analyze_from_the_command_line(model_folder, texts, tmp_path):
    done = run_cli("capture", model_folder, "--texts", texts, "--sample", 64, "-o", tmp_path / "run", "--window", 128)
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["window"] == 128
    assert len(manifest["documents"]) == 20
    assert manifest["model"]["class"] == "LlamaForCausalLM"
    assert str(tmp_path) not in json.dumps(manifest)
    done = run_cli("analyze", tmp_path / "run", "-o", tmp_path / "tables", "--model", "tiny")
    assert done.exit_code == 0, done.output
    assert len(pd.read_csv(tmp_path / "tables" / "rotated.csv")) == 16


def test_a_config_file_holds_the_options_and_the_command_line_goes_first(model_folder, texts, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {model_folder}\ntexts: [{texts}]\nwindow: 64\nmax_docs: 9\nsample: 10\n")
    assert run_cli("capture", "--config", config, "-o", tmp_path / "run", "--window", 96).exit_code == 0
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (manifest["window"], len(manifest["documents"])) == (96, 9)
    config.write_text(f"model: {model_folder}\ntexts: {texts}\nbatch: 4\nsample: 10\nmax_docs: 3\n")
    assert run_cli("capture", "--config", config, "-o", tmp_path / "typed", "--batch", 1).exit_code == 0
    assert json.loads((tmp_path / "typed" / "run.json").read_text())["options"]["batch"] == 1
    config.write_text("modle: x\n")
    done = run_cli("capture", "--config", config)
    assert done.exit_code == 2
    assert "unknown key 'modle'" in done.output


def test_config_overrides_reach_the_model(model_folder, texts, tmp_path):
    scaling = "{rope_parameters: {rope_type: linear, rope_theta: 10000.0, factor: 4.0}}"
    done = run_cli(
        "capture",
        model_folder,
        "--texts",
        texts,
        "--max-docs",
        8,
        "--config-overrides",
        scaling,
        "-o",
        tmp_path / "run",
    )
    assert done.exit_code == 0, done.output
    layer = json.loads((tmp_path / "run" / "run.json").read_text())["layers"][0]
    assert layer["rope"]["frequencies"][0] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "overrides",
    ["{rope_parameters: {rope_theta: 200000}}", "{rope_theta: 200000}", '{"rope_theta": 2e5}'],
)
def test_overrides_are_merged_into_dicts_and_the_base_is_recorded(model_folder, texts, tmp_path, overrides):
    chosen = ["--max-docs", 2, "--config-overrides", overrides, "-o", tmp_path / "run"]
    done = run_cli("capture", model_folder, "--texts", texts, *chosen)
    assert done.exit_code == 0, done.output
    for layer in json.loads((tmp_path / "run" / "run.json").read_text())["layers"]:
        assert layer["rope"]["theta"] == 200_000
        planes = len(layer["rope"]["frequencies"])
        np.testing.assert_allclose(layer["rope"]["frequencies"], 2e5 ** (-np.arange(planes) / planes), rtol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "local", "full"),
    [
        ({"rope_theta": 200_000}, 200_000, 200_000),
        ({"rope_parameters": {"rope_theta": 200_000}}, 200_000, 200_000),
        ({"rope_parameters": {"full_attention": {"rope_theta": 200_000}}}, 10_000, 200_000),
    ],
)
def test_overrides_of_parameters_by_layer_type(overrides, local, full):
    kinds = {name: {"rope_type": "default", "rope_theta": 1e4} for name in ("sliding_attention", "full_attention")}
    config = tf.Gemma3TextConfig(rope_parameters=kinds)
    for key, value in overrides.items():
        _override(config, key, value)
    found = config.rope_parameters
    assert [found[kind]["rope_theta"] for kind in kinds] == [local, full]
    assert all(entry["rope_type"] == "default" for entry in found.values())


def test_a_scaled_encoding_has_no_base(ids, tmp_path):
    bases = {}
    for name in ("llama", "linear scaling", "yarn scaling", "glm4"):
        run = RunFolder.open(do(build(families()[name]), ids[:3], tmp_path / name))
        bases[name] = run.manifest.layers[0].rope.theta
    assert bases == {"llama": 10_000.0, "linear scaling": None, "yarn scaling": None, "glm4": 10_000.0}


def test_heads_of_vectors_that_are_not_written(model_folder, texts, tmp_path):
    done = run_cli("capture", model_folder, "--texts", texts, "--vector-heads", "2", "-o", tmp_path / "run")
    assert done.exit_code == 2
    assert "error: --vector-heads chooses heads for --save-vectors, which was not given" in done.output


def test_texts_of_every_kind(tmp_path):
    from qkscope.capture.texts import read_documents

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.md").write_text("two")
    (tmp_path / "c.jsonl").write_text('{"body": "three"}\n\n{"body": "four"}\n')
    pd.DataFrame({"body": ["five", None, "six"]}).to_parquet(tmp_path / "d.parquet")
    (tmp_path / "ignored.bin").write_bytes(b"\x00")
    found = [d.text for d in read_documents([str(tmp_path)], "body")]
    assert found == ["one", "two", "three", "four", "five", "six"]
    assert [d.text for d in read_documents([str(tmp_path / "*.txt"), str(tmp_path / "b.md")])] == ["one", "two"]
    assert len(read_documents([str(tmp_path)], "body", limit=2)) == 2


def test_texts_of_a_hub_dataset(tmp_path, texts):
    """The real client, in a process of its own, against a server on loopback."""
    probe = (
        "from qkscope.capture.texts import read_documents\n"
        "found = read_documents(['hf://datasets/someone/texts@main/part'])\n"
        "print(len(found), found[0].name, found[0].text == open(PATH).read())\n"
    )
    shutil.copytree(texts, tmp_path / "served" / "part")
    (tmp_path / "served" / "README.md").write_text("not a text of this part")
    with FakeHub("someone/texts", "main", tmp_path / "served").serving() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
        code = probe.replace("PATH", repr(str(texts / "doc00.txt")))
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "20 part/doc00.txt True\n", done.stderr


def test_plan_says_what_it_will_take(model_folder, texts, tmp_path):
    """The size within a fifth of what the capture then writes, saved vectors included."""
    options = "--texts", texts, "--window", 128, "--device", "cpu", "--dtype", "float32", "--save-vectors", 0.5
    done = run_cli("plan", model_folder, *options)
    assert done.exit_code == 0, done.output
    for word in ("parameters", "weights", "statistics", "disk", "tokens/s", "second"):
        assert word in done.output
    captured = run_cli("capture", model_folder, *options, "-o", tmp_path / "run", "--quiet")
    assert captured.exit_code == 0, captured.output
    arrays = [*(tmp_path / "run").rglob("layer-*.safetensors"), *(tmp_path / "run").rglob("data.parquet")]
    said = float(re.search(r"disk +([\d,.]+) MB", done.output)[1].replace(",", ""))
    assert said == pytest.approx(sum(path.stat().st_size for path in arrays) / 1e6, rel=0.2)


def test_a_plan_for_a_model_that_cannot_be_timed_has_sizes(model_folder, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("qkscope.capture.plan._timed", fails)
    done = run_cli("plan", model_folder, "--device", "cpu")
    assert done.exit_code == 0
    assert "disk" in done.output
    assert "tokens/s" not in done.output


def test_without_torch_the_way_out_is_named(tmp_path):
    probe = (
        "import sys\nsys.modules['torch'] = None\nfrom qkscope.cli.main import app\n"
        f"app(['capture', 'm', '--texts', {str(tmp_path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'qkscope[capture]'" in done.stderr


@pytest.mark.parametrize(
    "name", matrix(sorted(families()), ["llama", "yarn scaling", "glm4", "deepseek-v3", "ministral3", "smollm3"])
)
def test_undoing_the_rotation_of_saved_vectors_gives_the_means_that_the_capture_kept(name, ids, tmp_path):
    """Every family of the matrix: scaling types, layouts, partial rotary, layers without any, temperatures."""
    lengths_matter = name in LENGTH_DEPENDENT
    same = [one for one in ids if len(one) >= WINDOW][:4] if lengths_matter else ids
    folder = do(build(families()[name], "eager"), same, tmp_path / "run", vectors=ALL)
    run, vectors = qkscope.open(folder), qkscope.open(folder / "vectors")
    seen = 0
    for head in run.heads[::3]:
        (loaded,), _ = run.source.load([head], run.reading)
        if loaded.rotary is None:
            assert run.source.layer_notes(head).nope
            continue
        rope = loaded.rotary.rope
        for kind, mean in ((head, loaded.rotary.mean_q), (run.source.key_head(head), loaded.rotary.mean_k)):
            rows = vectors.source.rows(kind, vectors.reading)
            back = rope.unrotated(rows.x.astype(float), rows.position)
            if kind is head and loaded.rotary.temperature is not None:
                back = back / loaded.rotary.temperature[rows.position][:, None]
            scale = np.abs(back).mean()
            np.testing.assert_allclose(back.mean(0) / scale, mean / scale, atol=2e-5)
        seen += 1
    assert seen


def test_planes_and_distance_curves_of_a_captured_run(ids, tmp_path):
    folder = do(build(families()["smollm3"]), ids, tmp_path / "run", sample=400)
    run = qkscope.open(folder)
    tables = qkscope.tables(run)
    nope = {3}
    rope = tables["planes"].query("view == 'rope'")
    assert set(rope["layer"]) == set(range(4)) - nope
    parts = rope.groupby(["layer", "head"])["bias_part"].sum()
    whole = tables["rotated"].set_index(["layer", "head"])["bias_full"]
    np.testing.assert_allclose(parts, whole.loc[parts.index], rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(rope.groupby(["layer", "head"])["var_share"].sum(), 1)
    assert set(tables["distance"]["layer"]) == set(range(4)) - nope
    heads = tables["heads"].set_index("layer")
    assert heads.loc[3, "distance_r2"].isna().all()
    assert heads.loc[[0, 1, 2], "position_share_of_score"].between(0, 1).all()
    pd.testing.assert_frame_equal(qkscope.distance(run), tables["distance"])


def test_an_empty_share_is_none():
    values = {"workers": None, "engine": "local", "ray_address": None, "shard": "", "keep_going": False, "resume": True}
    assert from_values(ExecutionOptions, values).share is None
