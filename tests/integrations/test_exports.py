"""Exports against plain hooks on the model, their readers' own conventions, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import qkscope
from qkscope.capture.options import CaptureOptions
from qkscope.capture.watch import self_attentions
from qkscope.cause.choice import key_head_scores, query_head_table
from qkscope.cli.main import app
from qkscope.core.rope import base_of
from qkscope.errors import ConfigError, DatasetError
from qkscope.files.checksums import write_checksums
from qkscope.integrations.exports.mha2mla import NOT_ROTATED
from tests.capture.families import build, families

SKIP_FIRST, WINDOW = 4, 160
FAMILIES = ("llama", "qwen3", "gpt-neox", "yarn scaling", "glm4", "gemma3", "ministral3")
"""GQA, QK-norm, partial rotary, a factor of the encoding, interleaved planes, sliding windows, a temperature."""
CLOSE = 1e-5


@dataclass
class Measured:
    """A run, and queries and keys of the same tokens as hooks see them before the rotation."""

    model: Any
    run: qkscope.Run
    q: list[np.ndarray]
    """(tokens, Hq, d) of each layer, float64."""
    k: list[np.ndarray]

    @property
    def folder(self) -> Path:
        return Path(str(self.run.source))

    @property
    def layers(self) -> list[dict[str, Any]]:
        return json.loads((self.folder / "run.json").read_text())["layers"]

    def pairs(self, layer: int) -> np.ndarray:
        """Coordinates of each plane (planes, 2), from the config's words alone."""
        rope = self.layers[layer]["rope"]
        planes, m = len(rope["frequencies"]), np.arange(len(rope["frequencies"]))
        return np.stack([m, m + planes] if rope["layout"] == "half" else [2 * m, 2 * m + 1], -1)

    def planes(self, vectors: list[np.ndarray], layer: int) -> np.ndarray:
        both = vectors[layer][..., self.pairs(layer)]
        return both[..., 0] + 1j * both[..., 1]


def documents() -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(5)
    lengths = np.random.default_rng(1).integers(60, 200, 12)
    return [torch.randint(3, 93, (int(n),), generator=generator).numpy() for n in lengths]


@contextmanager
def hooked(model: Any, kind: str, *, with_norm: bool) -> Iterator[list[list[torch.Tensor]]]:
    """Output of the last module before the rotation, layer by layer: q_norm if there is one, else q_proj."""
    modules = [
        (getattr(attention, f"{kind}_norm", None) if with_norm else None)
        or getattr(attention, f"{kind}_proj", None)
        or attention.query_key_value
        for attention in self_attentions(model)
    ]
    found: list[list[torch.Tensor]] = [[] for _ in modules]
    handles = [
        module.register_forward_hook(lambda _m, _i, output, kept=kept: kept.append(output[0]))
        for module, kept in zip(modules, found, strict=True)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def by_heads(output: torch.Tensor, kind: str, length: int, d: int, heads: int) -> np.ndarray:
    """Return (tokens, heads, d) from outputs (T, H·d), (T, H, d), (H, T, d) or, of fused projections, (T, H·3d)."""
    if output.ndim == 3 and output.shape[:2] != (length, heads):
        output = output.transpose(0, 1)
    rows = output.reshape(length, heads, -1)
    if rows.shape[-1] == 3 * d:
        rows = rows[..., :d] if kind == "q" else rows[..., d : 2 * d]
    assert rows.shape == (length, heads, d)
    return rows.double().numpy()


def by_hooks(model: Any, kind: str = "q", *, with_norm: bool = True) -> list[np.ndarray]:
    """Queries or keys before the rotation (tokens, heads, d) of each layer, of all documents, without the first."""
    config, texts = model.config.get_text_config(), [ids[:WINDOW] for ids in documents()]
    heads = config.num_attention_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    heads = heads if kind == "q" else getattr(config, "num_key_value_heads", None) or heads
    with hooked(model, kind, with_norm=with_norm) as found, torch.no_grad():
        for ids in texts:
            model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    return [
        np.concatenate(
            [by_heads(x, kind, len(ids), d, heads)[SKIP_FIRST:] for x, ids in zip(layer, texts, strict=True)]
        )
        for layer in found
    ]


def captured(family: str, folder: Path, **options: Any) -> Measured:
    model = build(families()[family])
    chosen = CaptureOptions(skip_first=SKIP_FIRST, documents_per_shard=5, **options)
    run = qkscope.capture_model(model, documents(), window=WINDOW, folder=folder, options=chosen, progress=False)
    return Measured(model, run, by_hooks(model), by_hooks(model, "k"))


@pytest.fixture(scope="module", params=FAMILIES)
def measured(request, tmp_path_factory) -> Measured:
    return captured(request.param, tmp_path_factory.mktemp("exports") / "run", keep="undone-cov")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Measured:
    return captured("qwen3", tmp_path_factory.mktemp("qwen3") / "run")


def assert_close(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < CLOSE * np.abs(expected).max()


# ---- the numbers ----------------------------------------------------------------------------------


def test_triattention_has_the_centres_and_lengths_that_hooks_see(measured, tmp_path):
    qkscope.export_run(measured.run, "triattention", tmp_path / "stats.pt")
    content = torch.load(tmp_path / "stats.pt", weights_only=True)
    heads = [tuple(head) for head in content["metadata"]["sampled_heads"]]
    assert heads == [(head.layer, head.head) for head in measured.run.heads]
    for layer in range(len(measured.q)):
        planes = measured.planes(measured.q, layer)
        stats = [content["stats"][f"layer{layer:02d}_head{head:02d}"] for head in range(planes.shape[1])]
        assert_close([one["q_mean_real"] + 1j * one["q_mean_imag"] for one in stats], planes.mean(0))
        assert_close([one["q_abs_mean"] for one in stats], np.abs(planes).mean(0))
    read = qkscope.read_export(measured.run, "triattention", tmp_path / "stats.pt")
    assert set(read) == set(heads)
    np.testing.assert_array_equal(read[3, 1].length, content["stats"]["layer03_head01"]["q_abs_mean"])


def test_mha2mla_ranks_planes_as_hooks_do(measured, tmp_path):
    qkscope.export_run(measured.run, "mha2mla", tmp_path / "ranks.pth")
    ranks = torch.load(tmp_path / "ranks.pth", weights_only=True)
    assert ranks.dtype == torch.uint8
    assert ranks.shape == (4, measured.k[0].shape[1], measured.q[0].shape[-1])
    for layer in range(4):
        q, k = (np.abs(measured.planes(part, layer)).mean(0) for part in (measured.q, measured.k))
        weights = q.reshape(len(k), -1, k.shape[-1]).sum(1) * k
        for head, of_planes in enumerate(weights):
            first, second = (ranks[layer, head].numpy()[measured.pairs(layer)[:, side]] for side in (0, 1))
            np.testing.assert_array_equal(first, second)
            np.testing.assert_array_equal(np.sort(first), np.arange(len(first)))
            assert (np.diff(of_planes[np.argsort(first)]) <= CLOSE * of_planes.max()).all()
            rest = np.setdiff1d(np.arange(ranks.shape[-1]), measured.pairs(layer))
            assert (ranks[layer, head].numpy()[rest] == NOT_ROTATED).all()
    np.testing.assert_array_equal(qkscope.read_export(measured.run, "mha2mla", tmp_path / "ranks.pth"), ranks.numpy())


def test_kvpress_stats_are_the_mean_and_covariance_that_hooks_see(measured, tmp_path):
    qkscope.export_run(measured.run, "kvpress-stats", tmp_path / "stats")
    found = load_file(tmp_path / "stats" / "model.safetensors")
    assert_close(found["query_mean"], np.stack([layer.mean(0) for layer in measured.q]))
    cov = [[np.cov(layer[:, head], rowvar=False) for head in range(layer.shape[1])] for layer in measured.q]
    assert_close(found["query_cov"], cov)
    config = json.loads((tmp_path / "stats" / "config.json").read_text())
    assert (config["num_layers"], config["num_heads"], config["n_sink"]) == (4, 4, SKIP_FIRST)
    read = qkscope.read_export(measured.run, "kvpress-stats", tmp_path / "stats")
    np.testing.assert_array_equal(read.cov, found["query_cov"])


@pytest.mark.parametrize("by", ["far", "area"])
def test_duo_attention_gates_are_ranks_of_the_reach_table(measured, tmp_path, by):
    qkscope.export_run(measured.run, "duo-attention", tmp_path, by=by, recent=64)
    gates = np.loadtxt(tmp_path / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["sink_size"], config["recent_size"]) == (SKIP_FIRST, 64)
    tables = {"reach": qkscope.reach(measured.run), "position": qkscope.position(measured.run)}
    scores = key_head_scores(query_head_table(tables, 64), by).unstack().to_numpy()
    cut = [layer for layer, entry in enumerate(measured.layers) if (entry["sliding_window"] or WINDOW) > 64]
    assert gates.shape == scores.shape
    assert (gates[[layer for layer in range(4) if layer not in cut]] == 1).all()
    order = np.argsort(scores[cut].ravel())
    np.testing.assert_allclose(gates[cut].ravel()[order], np.linspace(0, 1, len(order)), atol=6e-5)


def test_gates_are_read_back(qwen3, tmp_path):
    qkscope.export_run(qwen3.run, "duo-attention", tmp_path, by="area")
    pattern = qkscope.read_export(qwen3.run, "duo-attention", tmp_path)
    np.testing.assert_array_equal(pattern.gates, np.loadtxt(tmp_path / "full_attention_heads.tsv"))
    # Somebody else's, whose training left values just outside of 0 … 1.
    (tmp_path / "config.json").write_text('{"sink_size": 128, "recent_size": 256}')
    (tmp_path / "full_attention_heads.tsv").write_text("\n".join(["-9.5e-05\t1.0"] * 4))
    assert qkscope.read_export(qwen3.run, "duo-attention", tmp_path) == (
        pytest.approx(np.array([[0, 1]] * 4)),
        128,
        256,
    )


def test_a_calibration_that_skips_the_norm_is_far_off(qwen3, tmp_path):
    """Compute q_proj(hidden) like public scripts, without the q_norm that Qwen3 and Gemma apply to it."""
    qkscope.export_run(qwen3.run, "triattention", tmp_path / "stats.pt")
    ours = qkscope.read_export(qwen3.run, "triattention", tmp_path / "stats.pt")
    without = by_hooks(qwen3.model, with_norm=False)
    errors = []
    for (layer, head), centre in ours.items():
        skipped = np.abs(qwen3.planes(without, layer)[:, head]).mean(0)
        errors.append(np.abs(skipped - centre.length).max() / centre.length.max())
        assert_close(centre.length, np.abs(qwen3.planes(qwen3.q, layer)[:, head]).mean(0))
    assert min(errors) > 0.5


# ---- what is said of the run ----------------------------------------------------------------------


def test_metadata_says_whose_the_numbers_are(measured, tmp_path):
    qkscope.export_run(measured.run, "triattention", tmp_path / "stats.pt")
    said = torch.load(tmp_path / "stats.pt", weights_only=True)["metadata"]
    manifest = json.loads((measured.folder / "run.json").read_text())
    assert said["weights"] == manifest["model"]["weights"]
    assert said["model"] == manifest["model"]["id"]
    assert (said["skip_first"], said["documents"]) == (SKIP_FIRST, 12)
    first = manifest["layers"][0]
    assert said["head_dim"] == first["d"]
    assert said["rope_style"] == first["rope"]["layout"]
    assert said["rotary_dim"] == 2 * len(first["rope"]["frequencies"])
    ropes = {json.dumps(layer["rope"]["frequencies"]) for layer in manifest["layers"]}
    assert ("inv_freq" in said) == (len(ropes) == 1)
    if len(ropes) > 1:
        assert len(said["rope_theta"]) == len(said["inv_freq_by_layer"]) == 4


def test_the_base_is_that_of_the_config(qwen3, tmp_path):
    qkscope.export_run(qwen3.run, "mha2mla", tmp_path / "ranks.pth")
    said = json.loads((tmp_path / "ranks.pth.json").read_text())
    assert said["rope_theta"] == qwen3.model.config.rope_parameters["rope_theta"]
    assert (said["layers"], said["query_heads"], said["key_heads"], said["head_dim"]) == (4, 4, 2, 32)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1e6, 150_000.0])
def test_a_base_is_found_in_single_precision(base):
    powers = (base ** (-np.arange(64, dtype=np.float32) / 64)).tolist()
    assert base_of(powers) == base
    powers[40] *= 0.5
    assert base_of(powers) is None


def test_a_file_is_the_same_bytes_wherever_it_is_written(qwen3, tmp_path):
    for to in ("triattention", "mha2mla"):
        for name in ("one.pt", "another.pt"):
            qkscope.export_run(qwen3.run, to, tmp_path / to / name)
        assert (tmp_path / to / "one.pt").read_bytes() == (tmp_path / to / "another.pt").read_bytes()


def test_layers_are_in_order_however_a_manifest_lists_them(qwen3, tmp_path):
    shutil.copytree(qwen3.folder, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(manifest | {"layers": manifest["layers"][::-1]}))
    write_checksums(tmp_path / "run")
    for number, run in enumerate((qwen3.run, tmp_path / "run")):
        qkscope.export_run(run, "mha2mla", tmp_path / f"{number}.pth")
    assert (tmp_path / "0.pth").read_bytes() == (tmp_path / "1.pth").read_bytes()


# ---- what is refused ------------------------------------------------------------------------------

OUTPUTS = {
    "triattention": "stats.pt",
    "triattention-flat": "flat.pt",
    "duo-attention": "duo",
    "kvpress-stats": "stats",
    "mha2mla": "ranks.pth",
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Path:
    """A run in all formats, a run of the same model with one weight matrix changed, and a run of another model."""
    place = tmp_path_factory.mktemp("others")
    model = build(families()["qwen3"])
    options, given = CaptureOptions(keep="undone-cov"), {"window": 64, "progress": False}
    run = qkscope.capture_model(model, documents(), folder=place / "run", options=options, **given)
    for to, name in OUTPUTS.items():
        qkscope.export_run(run, to, place / name)
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight.mul_(1.5)
    qkscope.capture_model(model, documents(), folder=place / "tuned", **given)
    qkscope.capture_model(build(families()["llama"]), documents(), folder=place / "llama", **given)
    return place


@pytest.mark.parametrize("to", OUTPUTS)
def test_an_export_of_another_model_is_refused(exports, to):
    path = exports / OUTPUTS[to]
    assert qkscope.read_export(exports / "run", to, path) is not None
    for other in ("tuned", "llama"):
        words = r"is of another model \(.*weights [0-9a-f]{16}; .*weights [0-9a-f]{16}\); export it from this run$"
        with pytest.raises(DatasetError, match=words):
            qkscope.read_export(exports / other, to, path)


def test_an_export_of_another_shape_is_refused(qwen3, tmp_path):
    """Even if it says that it is of these weights."""
    for to, name in OUTPUTS.items():
        if to != "kvpress-stats":
            qkscope.export_run(qwen3.run, to, tmp_path / name)
    (tmp_path / "duo" / "full_attention_heads.tsv").write_text("0.5\t1\t0\n0.5\t1\t0\n")
    with pytest.raises(DatasetError, match="expected 4 × 2, got 2 × 3"):
        qkscope.read_export(qwen3.run, "duo-attention", tmp_path / "duo")
    torch.save(torch.zeros(4, 2, 16, dtype=torch.uint8), tmp_path / "ranks.pth")
    with pytest.raises(DatasetError, match="expected 4 × 2 × 32, got 4 × 2 × 16"):
        qkscope.read_export(qwen3.run, "mha2mla", tmp_path / "ranks.pth")
    content = torch.load(tmp_path / "stats.pt", weights_only=True)
    content["stats"]["layer01_head00"]["q_abs_mean"] = torch.zeros(7)
    torch.save(content, tmp_path / "stats.pt")
    with pytest.raises(DatasetError, match="expected 16, got 7"):
        qkscope.read_export(qwen3.run, "triattention", tmp_path / "stats.pt")


def test_damaged_exports_are_one_line(qwen3, tmp_path):
    for to, name in OUTPUTS.items():
        with pytest.raises((DatasetError, ConfigError)) as error:
            qkscope.read_export(qwen3.run, to, tmp_path / name)
        assert "\n" not in str(error.value)
        (tmp_path / name).write_bytes(b"nothing of that kind")
        (tmp_path / f"{name}.json").write_text("{}")
        with pytest.raises((DatasetError, ConfigError)) as error:
            qkscope.read_export(qwen3.run, to, tmp_path / name)
        assert "\n" not in str(error.value)


class Executed:
    """An object that runs code when it is unpickled, which no reader may do."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_nothing_in_a_file_is_executed(qwen3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"metadata": Executed(), "stats": {}}, tmp_path / "stats.pt")
    with pytest.raises(DatasetError, match="is not a file of tensors"):
        qkscope.read_export(qwen3.run, "triattention", tmp_path / "stats.pt")
    assert not (tmp_path / "executed").exists()


def said(*command: object, code: int) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, command)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_writes_or_refuses_in_one_line(qwen3, tmp_path):
    run, out = qwen3.folder, tmp_path / "out"
    written = said(run, "--to", "triattention", "-o", out / "stats.pt", code=0)
    assert written.splitlines() == [f"wrote {out / 'stats.pt'}"]
    both = said(run, "--to", "duo-attention", "--recent", 64, "-o", out / "duo", "--workers", 1, code=0)
    assert both.splitlines() == [f"wrote {out / 'duo' / name}" for name in ("full_attention_heads.tsv", "config.json")]
    refused = {
        ("--to", "kvpress-stats", "-o", out / "kv"): f"error: {run} has no covariance of queries before the rotation; "
        "capture it with --keep undone-cov",
        (
            "--to",
            "sparse",
            "-o",
            out / "x",
        ): "error: unknown format 'sparse'; choose from triattention, triattention-flat, duo-attention, "
        "kvpress-stats, mha2mla",
        (
            "--to",
            "mha2mla",
            "--by",
            "far",
            "-o",
            out / "x",
        ): "error: a score and a window apply only to duo-attention; remove them for mha2mla",
        (
            "--to",
            "duo-attention",
            "--by",
            "lock",
            "-o",
            out / "x",
        ): "error: unknown score 'lock'; choose from far, area",
        ("--to", "duo-attention", "--recent", 48, "-o", out / "x"): "error: reach is known for windows of 64; got 48",
        ("--to", "mha2mla", "-o", out): f"error: {out} is a folder, and mha2mla is a file; choose another --output",
    }
    for command, line in refused.items():
        assert said(run, *command, code=2).splitlines() == [line]
        assert sorted(path.name for path in out.iterdir()) == ["duo", "stats.pt"]


@pytest.mark.parametrize(
    ("family", "options", "to", "words"),
    [
        ("qwen3", {"layers": (0, 2)}, "mha2mla", "lacks layer 1, and this format needs the whole model"),
        ("qwen3", {"heads": (0, 1)}, "duo-attention", "lacks some heads, and this format needs the whole model"),
        ("qwen3", {"pre_rope": True}, "triattention", "was captured before the rotation"),
        ("smollm3", {}, "mha2mla", "layer 3 of .* has no rotary encoding"),
    ],
)
def test_what_a_run_does_not_have_is_refused(tmp_path, family, options, to, words):
    run = captured_only(family, tmp_path / "run", **options)
    with pytest.raises(ConfigError, match=words):
        qkscope.export_run(run, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def captured_only(family: str, folder: Path, **options: Any) -> qkscope.Run:
    chosen = CaptureOptions(**options)
    model = build(families()[family])
    return qkscope.capture_model(model, documents(), window=64, folder=folder, options=chosen, progress=False)


def test_triattention_takes_some_heads_and_leaves_out_layers_without_rotary(tmp_path):
    run = captured_only("smollm3", tmp_path / "run", layers=(2, 3), heads=(1, 2))
    qkscope.export_run(run, "triattention", tmp_path / "stats.pt")
    assert set(qkscope.read_export(run, "triattention", tmp_path / "stats.pt")) == {(2, 1), (2, 2)}


def test_runs_of_earlier_versions_lack_lengths(qwen3, tmp_path):
    shutil.copytree(qwen3.folder, tmp_path / "old")
    path = tmp_path / "old" / "moments" / "layer-000.safetensors"
    save_file({name: array for name, array in load_file(path).items() if not name.startswith("sizes")}, path)
    write_checksums(tmp_path / "old")
    with pytest.raises(ConfigError, match="has no lengths in planes, since an earlier version captured it; capture"):
        qkscope.export_run(tmp_path / "old", "triattention", tmp_path / "stats.pt")


# ---- the flat form, and somebody's calibration ------------------------------------------------------


def test_the_flat_form_has_the_same_numbers_and_the_frequencies(measured, tmp_path):
    full = measured.layers[0]["rope"]["layout"] == "half"
    full &= 2 * len(measured.layers[0]["rope"]["frequencies"]) == measured.layers[0]["d"]
    same = len({json.dumps(layer["rope"]["frequencies"]) for layer in measured.layers}) == 1
    if not (full and same):
        with pytest.raises(ConfigError, match=r"one omega for all|rotate all coordinates in two halves"):
            qkscope.export_run(measured.run, "triattention-flat", tmp_path / "flat.pt")
        return
    qkscope.export_run(measured.run, "triattention-flat", tmp_path / "flat.pt")
    content = torch.load(tmp_path / "flat.pt", weights_only=True)
    assert set(content) == {"E_q", "E_q_norm", "omega", "freq_scale_sq"}
    assert (content["E_q"].dtype, content["E_q_norm"].dtype) == (torch.complex64, torch.float32)
    for layer in range(4):
        planes = measured.planes(measured.q, layer)
        assert_close(content["E_q"][layer], planes.mean(0))
        assert_close(content["E_q_norm"][layer], np.abs(planes).mean(0))
    rotary = measured.model.model.rotary_emb
    torch.testing.assert_close(content["omega"], rotary.inv_freq)
    torch.testing.assert_close(content["freq_scale_sq"], torch.full_like(content["omega"], rotary.attention_scaling**2))
    read = qkscope.read_export(measured.run, "triattention-flat", tmp_path / "flat.pt")
    assert_close(read[3, 1].length, content["E_q_norm"][3, 1])


def changed(path: Path, change: Any) -> Path:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    return path


def test_a_calibration_is_compared_with_a_run(qwen3, tmp_path):
    run, path = qwen3.folder, tmp_path / "stats.pt"

    def written(change: Any = dict, to: str = "triattention") -> Path:
        qkscope.export_run(qwen3.run, to, path)
        return changed(path, change)

    assert said(run, "--check", written(), code=0).startswith(f"{path}: 16 of 16 heads agree; median cosine")
    assert "16 of 16 heads agree" in said(run, "--check", written(to="triattention-flat"), code=0)

    def mirror(content):
        for head in content["stats"].values():
            head["q_mean_imag"] = -head["q_mean_imag"]

    def another(content):
        content["metadata"] |= {"weights": "0", "rope_style": "interleaved"}
        content["metadata"] = {key: value for key, value in content["metadata"].items() if key != "inv_freq"}
        content["metadata"]["rope_theta"] = 500_000.0
        del content["stats"]["layer02_head03"]

    def shorten(content):
        for head in content["stats"].values():
            head["q_mean_real"] *= 0.2
            head["q_mean_imag"] *= 0.0

    def turns(content):
        content["omega"] /= 2 * torch.pi

    assert "centres are mirrored" in said(run, "--check", written(mirror), code=1)
    found = said(run, "--check", written(another), code=1)
    for line in (
        "weights: 0 (",
        "rope_style: interleaved in the file, half in the run",
        "heads not in the file: 1, such as l02h03",
        "rotary base: 500000 in the file, 10000 in the run", "15 of 15 heads agree",
    ):  # fmt: skip
        assert line in found
    assert "rotary frequencies are in turns per token" in said(
        run, "--check", written(turns, "triattention-flat"), code=1
    )
    written(shorten)
    found = said(run, "--check", path, "-o", tmp_path / "heads.csv", code=1)
    assert re.search(r"16 of 16 heads disagree, most l\d\dh\d\d \(cosine", found)
    assert "the mean was probably taken after the rotation" in found
    assert len((tmp_path / "heads.csv").read_text().splitlines()) == 17


def test_a_calibration_without_the_norm_is_recognised(qwen3, tmp_path):
    qkscope.export_run(qwen3.run, "triattention", tmp_path / "stats.pt")
    without = by_hooks(qwen3.model, with_norm=False)

    def skip_norm(content):
        for layer in range(4):
            planes = qwen3.planes(without, layer)
            for head in range(4):
                content["stats"][f"layer{layer:02d}_head{head:02d}"] = {
                    "q_mean_real": torch.from_numpy(planes[:, head].mean(0).real),
                    "q_mean_imag": torch.from_numpy(planes[:, head].mean(0).imag),
                    "q_abs_mean": torch.from_numpy(np.abs(planes[:, head]).mean(0)),
                }

    found = said(qwen3.folder, "--check", changed(tmp_path / "stats.pt", skip_norm), code=1)
    assert "a norm on queries, or the encoding's factor, was probably left out" in found


def test_calibrations_of_other_shapes_and_other_files_are_refused_in_one_line(qwen3, exports, tmp_path):
    path = exports / OUTPUTS["triattention"]
    assert "planes in layer 0, head 0" in said(exports / "llama", "--check", path, code=2)
    other = tmp_path / "other.pt"
    torch.save({"a": 1}, other)
    assert "is not a calibration of TriAttention" in said(qwen3.folder, "--check", other, code=2)
    torch.save({"stats": {"layer77_head00": {}}}, other)
    assert "is not a calibration of TriAttention" in said(qwen3.folder, "--check", other, code=2)
    assert "give --to and --output" in said(qwen3.folder, code=2)
    assert "leave out --to, --by and --recent" in said(qwen3.folder, "--check", path, "--to", "mha2mla", code=2)
