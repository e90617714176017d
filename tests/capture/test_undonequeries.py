"""The covariance of queries before the rotation, kept on request: exact, merged as all sums are, and nowhere else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import qkscope
from qkscope.capture.assemble import merge
from qkscope.capture.options import CaptureOptions, ModelOptions, Share
from qkscope.capture.plan import estimate
from qkscope.capture.sums import layersums
from qkscope.capture.sums.finish import layer_moments
from qkscope.capture.sums.layersums import LayerSums
from qkscope.capture.sums.tokens import BatchTokens, Plan
from qkscope.capture.sums.undone import UndoneQueries
from qkscope.cli.main import app
from qkscope.core.moments import Moments
from qkscope.errors import CaptureError, DatasetError
from qkscope.files.dataset import Dataset
from qkscope.files.runfolder import RunFolder
from qkscope.headids import HeadId
from qkscope.runs.captured import layer_rope
from tests.capture.families import build, families
from tests.capture.test_halfsums import HEADS, D, passes, rope
from tests.capture.test_run import ALL, all_bytes, do, same_moments
from tests.helpers import n_documents

KEEP = {"keep": "undone-cov"}


def undone(folder: Path, layer: int) -> Moments:
    found = RunFolder.open(folder).layer(layer, undone=True).undone
    assert found is not None
    return found


# ---- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "glm4", "deepseek-v3", "yarn scaling", "cohere2"])
def test_moments_are_those_of_saved_vectors_turned_back(name, ids, tmp_path):
    folder = do(build(families()[name]), ids, tmp_path / "run", vectors=ALL, **KEEP)
    run, vectors = RunFolder.open(folder), Dataset.open(folder / "vectors")
    for entry in run.manifest.layers:
        turns = layer_rope(entry)
        if turns is None:
            assert run.layer(entry.layer, undone=True).undone is None
            continue
        rows = vectors.read(HeadId(entry.layer, 1, "q")).ordered()
        x, back = rows.x.astype(float), turns.unrotated(rows.x.astype(float), rows.position)
        first, second = turns.pairs.T
        x[:, first], x[:, second] = back.real, back.imag
        same_moments(undone(folder, entry.layer)[1], Moments.from_rows(x, rows.position), 2e-5)


@pytest.mark.parametrize("how", [{"batch": 3}, {"prefill": 64}, {"documents_per_shard": 3}])
def test_batches_steps_and_shards_agree(model, ids, tmp_path, how):
    one, two = do(model, ids, tmp_path / "one", **KEEP), do(model, ids, tmp_path / "two", **KEEP, **how)
    for layer in range(4):
        same_moments(undone(one, layer), undone(two, layer), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [("half", 1, 0, 8), ("interleaved", -1, 4, 4)])
def test_a_far_mean_costs_no_precision(options, dtype, monkeypatch):
    """Means of up to 30 standard deviations, and of half-precision vectors as on a GPU."""
    layout, sign, start, planes = options
    plan, turns = Plan(150, 5, 4), rope(layout, sign, start, planes)
    monkeypatch.setattr(layersums, "supports", lambda _q, _k: dtype is torch.bfloat16)
    sums, rows, at = LayerSums(plan, turns, undone=UndoneQueries(turns)), [], []
    first, second = turns.coordinates
    for q, k, tokens in passes(np.random.default_rng(0), dtype):
        t = torch.arange(tokens.first, tokens.first + q.shape[2])[:, None]
        angle = t * 100.0 ** (-torch.arange(planes) / planes)
        sums.add(SimpleNamespace(q=q, k=k), tokens, (1.25 * angle.cos(), 1.25 * angle.sin()))
        x = q.double()
        cos, sin = angle.double().cos(), sign * angle.double().sin()
        u, v = x[..., first].clone(), x[..., second].clone()
        x[..., first], x[..., second] = u * cos + v * sin, v * cos - u * sin
        for row, (begin, end) in enumerate(tokens.counted(plan)):
            rows.append(x[row, :, begin:end].numpy())
            at.append(tokens.first + np.arange(begin, end))
    x, t = np.concatenate(rows, 1), np.concatenate(at)
    found = layer_moments(sums).undone
    assert found is not None
    same_moments(found, Moments.from_rows(x, np.tile(t, (HEADS, 1))), 2e-4)
    assert np.abs(found.mean_x).max() > 10 * np.sqrt(np.diagonal(found.scatter[0] / found.n[0])[:D].min())


@pytest.mark.parametrize("length", [4, 5, 6])
def test_none_one_and_two_tokens(length):
    """The first four enter no statistic."""
    plan, turns = Plan(16, 2, 4), rope()
    tokens = BatchTokens(0, np.array([length]), np.array([0]), [np.arange(0)])
    q, angle = torch.randn(1, 2, length, D), torch.arange(length)[:, None] * torch.full((8,), 0.1)
    sums = LayerSums(plan, turns, undone=UndoneQueries(turns))
    sums.add(SimpleNamespace(q=q, k=q[:, :1]), tokens, (1.25 * angle.cos(), 1.25 * angle.sin()))
    found = layer_moments(sums).undone
    assert found is not None
    assert (found.n == length - 4).all()
    assert np.isfinite(found.mean).all()
    ranks = np.linalg.matrix_rank(found.scatter, tol=1e-3)
    assert (ranks == max(length - 5, 0)).all()


# ---- the run --------------------------------------------------------------------------------------


def test_a_run_differs_by_what_was_asked_for_alone(model, ids, tmp_path):
    plain, kept = all_bytes(do(model, ids, tmp_path / "a")), all_bytes(do(model, ids, tmp_path / "b", **KEEP))
    assert plain.keys() == kept.keys()
    differing = {name for name in plain if plain[name] != kept[name]}
    assert differing == {"run.json", "checksums.json", *(name for name in plain if name.startswith("moments/"))}
    manifests = [json.loads(files["run.json"]) for files in (plain, kept)]
    assert "keep" not in manifests[0]["options"]
    assert manifests[1]["options"].pop("keep") == "undone-cov"
    assert manifests[0] == manifests[1]
    arrays = [load_file(tmp_path / name / "moments" / "layer-002.safetensors") for name in "ab"]
    assert arrays[1].keys() - arrays[0].keys() == {"undone.n", "undone.mean", "undone.scatter"}
    for name, array in arrays[0].items():
        np.testing.assert_array_equal(array, arrays[1][name])


@pytest.mark.slow
def test_stopped_shared_and_sent_to_workers_it_is_the_same_bytes(model_folder, model, ids, tmp_path):
    options = KEEP | {"documents_per_shard": 3}
    whole = all_bytes(do(model, ids, tmp_path / "whole", **options))

    class StoppedError(Exception):
        pass

    def stop(_done, _total, note) -> None:
        if n_documents(note) > 10:
            raise StoppedError

    with pytest.raises(StoppedError):
        do(model, ids, tmp_path / "stopped", stop, **options)
    assert (tmp_path / "stopped" / "parts").is_dir()
    assert all_bytes(do(model, ids, tmp_path / "stopped", **options)) == whole
    for job in (1, 2):
        do(model, ids, tmp_path / f"share{job}", doing={"share": Share(job, 2)}, **options)
    merge([tmp_path / "share1", tmp_path / "share2"], tmp_path / "merged")
    assert all_bytes(tmp_path / "merged") == whole
    loaded = ModelOptions(str(model_folder), dtype="float32", device="cpu", threads=1)
    runs = [
        all_bytes(do(loaded, ids, tmp_path / f"workers{workers}", doing={"workers": workers}, **options))
        for workers in (1, 2)
    ]
    assert runs[0] == runs[1]


def test_shares_with_and_without_are_not_merged(model, ids, tmp_path):
    do(model, ids, tmp_path / "one", doing={"share": Share(1, 2)}, documents_per_shard=5, **KEEP)
    do(model, ids, tmp_path / "two", doing={"share": Share(2, 2)}, documents_per_shard=5)
    with pytest.raises(DatasetError, match=r'options\.keep: expected "undone-cov", got null'):
        merge([tmp_path / "one", tmp_path / "two"], tmp_path / "run")


def test_analyses_do_not_read_it(model, ids, tmp_path):
    folder = do(model, ids, tmp_path / "run", **KEEP)
    assert RunFolder.open(folder).layer(0).undone is None
    plain = qkscope.open(do(model, ids, tmp_path / "plain"), model="m")
    assert qkscope.rotation(qkscope.open(folder, model="m")).equals(qkscope.rotation(plain))


def test_a_run_that_lost_it_says_so(model, ids, tmp_path):
    folder = do(model, ids, tmp_path / "run", **KEEP)
    path = folder / "moments" / "layer-001.safetensors"
    arrays = load_file(path)
    save_file({name: array for name, array in arrays.items() if not name.startswith("undone.")}, path)
    with pytest.raises(DatasetError, match="it has no moments of queries with their rotation undone"):
        undone(folder, 1)
    save_file(arrays | {"undone.n": arrays["undone.n"][:2]}, path)
    with pytest.raises(DatasetError, match="the shapes of undone do not match"):
        undone(folder, 1)


def test_a_plan_counts_it(model_folder, model, ids, tmp_path):
    plain = CaptureOptions(window=160)
    without, with_it = (
        estimate(ModelOptions(str(model_folder)), options, 160) for options in (plain, replace(plain, **KEEP))
    )
    files = (do(model, ids, tmp_path / "run", **KEEP) / "moments").iterdir()
    kept = [array.nbytes for path in files for name, array in load_file(path).items() if name.startswith("undone.")]
    assert with_it.moments - without.moments == sum(kept)
    assert with_it.statistics > without.statistics


def test_what_cannot_be_kept_is_one_line(model_folder, texts, tmp_path):
    with pytest.raises(CaptureError, match="undoes the rotation, which --pre-rope never sees; leave one out"):
        CaptureOptions(pre_rope=True, **KEEP)
    command = ["capture", model_folder, "--texts", texts, "--keep", "everything", "-o", tmp_path / "run"]
    done = CliRunner().invoke(app, [*map(str, command)])
    assert (done.exit_code, done.output.strip()) == (2, "error: unknown keep 'everything'; there are undone-cov")
