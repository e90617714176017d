"""Encoders, whose queries also see later keys: every number about pairs, counted directly on both sides."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from packaging.version import Version
from typer.testing import CliRunner

import qkscope
from qkscope.analyses.distancecurve import distance_bins
from qkscope.cli.main import app
from qkscope.core.visible import VisibleKeys
from qkscope.errors import CaptureError
from qkscope.files.dataset import Dataset
from qkscope.headids import HeadId
from tests.capture.conftest import captured_with_vectors
from tests.capture.families import BASE, Family

LOCAL = 17
"""A query of a local layer sees keys less than this far away: local_attention / 2 tokens on each side."""
ENCODER = {**{name: value for name, value in BASE.items() if name != "num_key_value_heads"}, "hidden_size": 64}
KINDS = ["sliding_attention", "full_attention"] * 2
SINKS = 4


def modernbert(**more: object) -> Family:
    """Layers that see 16 tokens on each side and layers that see all, each kind with a rotary base of its own."""
    return Family(tf.ModernBertConfig(**ENCODER, local_attention=32, layer_types=KINDS, **more))


needs_modernbert = pytest.mark.skipif(
    Version(version("transformers")) < Version("5.20"),
    reason="in older versions ModernBERT's attention computes by itself",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured_with_vectors(tmp_path_factory.mktemp("encoder"), modernbert(), 8, "--reach-queries", "5")


def vectors(run: Path, layer: int, head: int):
    dataset, query = Dataset.open(run / "vectors"), HeadId(layer, head, "q")
    return tuple(dataset.read(part).ordered() for part in (query, dataset.key_head(query)))


def scores(run: Path, layer: int, head: int, *, own: bool = False):
    """Position of query and key, document and score of every pair in sight, one by one."""
    q, k = vectors(run, layer, head)
    entry = json.loads((run / "run.json").read_text())["layers"][layer]
    reach = entry["sliding_window"] or 10**6
    found = []
    for i in range(len(q)):
        away = np.abs(q.position[i] - k.position)
        seen = (k.example_id == q.example_id[i]) & (away < reach) & ((away > 0) | own)
        score = entry["scaling"] * (k.x[seen].astype(float) @ q.x[i].astype(float))
        found.append((np.full(seen.sum(), q.position[i]), k.position[seen], k.example_id[seen], score))
    return tuple(np.concatenate(part) for part in zip(*found, strict=True))


@needs_modernbert
@pytest.mark.parametrize("layer", [0, 1])
def test_the_distance_curve_has_both_signs(run: Path, layer: int):
    opened = qkscope.open(run)
    at_q, at_k, _, score = scores(run, layer, 1)
    distance = at_q - at_k
    table = qkscope.distance(opened).query("layer == @layer and head == 1").reset_index()
    low, high = distance_bins(VisibleKeys(LOCAL if layer == 0 else int(opened.source.window or 0), both=True))
    bins = [(a, b) for a, b in zip(low, high, strict=True) if ((distance >= a) & (distance <= b)).sum() >= 10]
    assert list(zip(table["distance_low"], table["distance_high"], strict=True)) == bins
    assert (table["distance_low"] < 0).sum() == (table["distance_low"] > 0).sum() > 5
    inside = [(distance >= a) & (distance <= b) for a, b in bins]
    assert table["n_pairs"].tolist() == [part.sum() for part in inside]
    np.testing.assert_allclose(table["measured"], [score[part].mean() for part in inside], rtol=1e-5, atol=1e-8)


@needs_modernbert
@pytest.mark.parametrize("layer", [0, 1])
def test_the_prediction_is_that_of_means_on_both_sides(run: Path, layer: int):
    """Return the product of mean query and mean key, with the rotation undone by hand, turned to each distance."""
    opened = qkscope.open(run)
    entry = json.loads((run / "run.json").read_text())["layers"][layer]
    theta, sign, d = np.array(entry["rope"]["frequencies"]), entry["rope"]["sign"], entry["d"]
    means = []
    for rows in vectors(run, layer, 1):
        kept = rows.position >= SINKS
        x, t = rows.x[kept].astype(float), rows.position[kept, None]
        means.append(((x[:, : d // 2] + 1j * x[:, d // 2 :]) * np.exp(-1j * sign * t * theta)).mean(0))

    def predicted(distance: np.ndarray) -> np.ndarray:
        turn = np.exp(1j * sign * distance[:, None] * theta)
        return entry["scaling"] * (turn * means[0] * means[1].conj()).sum(-1).real

    table = qkscope.distance(opened).query("layer == @layer and head == 1")
    single = table[table["distance_low"] == table["distance_high"]]
    assert (single["distance_low"] < 0).sum() > 2
    np.testing.assert_allclose(single["predicted"], predicted(single["distance_low"].to_numpy(float)), rtol=2e-3)
    row = qkscope.position(opened).query("layer == @layer and head == 1").iloc[0]
    at = 2.0 ** (np.arange(int(16 * np.log2(row["decay_range"])) + 1) / 16)
    earlier, later = predicted(at), predicted(-at)
    assert row["lean"] == pytest.approx((earlier - later).mean(), rel=2e-3)
    assert row["decay"] == pytest.approx(-np.polyfit(np.log2(at), (earlier + later) / 2, 1)[0], rel=2e-3)


@needs_modernbert
@pytest.mark.parametrize("layer", [0, 1])
def test_the_bias_is_over_all_keys_in_sight(run: Path, layer: int):
    at_q, at_k, document, score = scores(run, layer, 1, own=True)
    entry = json.loads((run / "run.json").read_text())["layers"][layer]
    top = bottom = 0.0
    for query in np.unique((document << 32) | at_q):
        mine = ((document << 32) | at_q) == query
        away = at_k[mine] - at_k[mine].mean()
        top, bottom = top + away @ score[mine], bottom + away @ away
    row = qkscope.rotation(qkscope.open(run)).query("layer == @layer and head == 1").iloc[0]
    assert row["bias_causal"] == pytest.approx(top / bottom / entry["scaling"], rel=1e-4)


@needs_modernbert
def test_attention_weights_are_summed_on_both_sides(run: Path):
    """Against the attention that the model itself returns."""
    from qkscope.core.reach import query_positions

    manifest = json.loads((run / "run.json").read_text())
    model = tf.ModernBertModel.from_pretrained(run.parent / "model", attn_implementation="eager").eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(run.parent / "model")
    beyond = np.zeros((4, 4))
    sinks, n = np.zeros((4, 4)), 0
    for document in sorted(run.parent.glob("*.txt")):
        ids = tokenizer(document.read_text(), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            weights = model(ids, output_attentions=True).attentions
        at = query_positions(ids.shape[1], 5, SINKS)
        far = np.abs(at[:, None] - np.arange(ids.shape[1])) >= 64
        far[:, :SINKS] = False
        n += len(at)
        for layer, part in enumerate(weights):
            of_queries = part[0][:, torch.from_numpy(at)].numpy()
            beyond[layer] += (of_queries * far).sum((1, 2))
            sinks[layer] += of_queries[..., :SINKS].sum((1, 2))
    table = qkscope.reach(qkscope.open(run)).query("w == 64").set_index(["layer", "head"])
    assert manifest["window"] >= 128
    for (layer, head), row in table.iterrows():
        assert row["mass_beyond"] == pytest.approx(beyond[layer, head] / n, abs=1e-5)
        assert row["mass_sink"] == pytest.approx(sinks[layer, head] / n, abs=1e-5)
    assert (table["mass_beyond"].xs(0) == 0).all(), "a local layer sees nothing there"
    assert (table["predicted_beyond"].xs(0) == 0).all()
    assert table["mass_beyond"].xs(1).min() > 0.05
    assert ((table["predicted_beyond"] - table["share_beyond"]).abs() < 0.1).all()


@needs_modernbert
def test_all_analyses_and_the_report_take_it(run: Path, tmp_path: Path):
    done = CliRunner().invoke(app, ["analyze", str(run), "-o", str(tmp_path), "--quiet"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "report"), "--quiet"])
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "report" / "figures" / "distance").glob("*/figure.png")
    assert len(list(drawn)) == 2


@needs_modernbert
def test_batches_give_the_same_numbers(run: Path, tmp_path: Path):
    command = ["capture", str(run.parent / "model"), "--texts", str(run.parent / "*.txt"), "--dtype", "float32"]
    command += ["--sample", "100000", "--reach-queries", "5", "--batch", "4", "-o", str(tmp_path / "run"), "--quiet"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for table in (qkscope.reach, qkscope.distance, qkscope.position):
        one, other = (table(qkscope.open(folder)) for folder in (run, tmp_path / "run"))
        numbers = one.select_dtypes("number").columns
        np.testing.assert_allclose(one[numbers].astype(float), other[numbers].astype(float), rtol=1e-3, atol=1e-4)


@needs_modernbert
def test_what_makes_no_sense_for_encoders_is_refused(run: Path, tmp_path: Path):
    model, texts = str(run.parent / "model"), str(run.parent / "*.txt")
    for command, reason in (
        (["capture", model, "--texts", texts, "--prefill", "64", "-o", str(tmp_path / "run")], "leave out --prefill"),
        (["reach", str(run), "--cut", "64", "-o", str(tmp_path / "reach")], "there is nothing to cut"),
        (["effects", model, str(run), "--texts", texts, "-o", str(tmp_path / "e")], "predict the next token"),
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2, done.output
        assert reason in " ".join(done.output.split())


@pytest.mark.parametrize("kind", ["eurobert", "bert", "nomic_bert"])
def test_encoders_pass_the_gate(tmp_path: Path, kind: str):
    if kind not in tf.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    config = tf.AutoConfig.for_model(kind, **ENCODER)
    made = captured_with_vectors(tmp_path, Family(config), 2)
    layers = json.loads((made / "run.json").read_text())["layers"]
    assert [layer["both"] for layer in layers] == [True] * 4
    assert all((layer["rope"] is None) == (kind == "bert") for layer in layers)
    source = qkscope.open(made).source
    assert source.extent(source.query_heads).loss is None, "it predicts no next token"


def test_a_decoder_is_still_one(tmp_path: Path):
    made = captured_with_vectors(tmp_path, Family(tf.LlamaConfig(**BASE)), 2)
    assert not any(layer["both"] for layer in json.loads((made / "run.json").read_text())["layers"])
    assert qkscope.position(qkscope.open(made))["lean"].isna().all()


def test_a_classifier_head_is_no_reason_to_refuse(tmp_path: Path):
    """The class that is loaded depends on how the checkpoint was made; missing weights would be random."""
    config = tf.ModernBertConfig(**ENCODER)
    torch.manual_seed(0)
    tf.ModernBertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    from qkscope.capture.model import load_model
    from qkscope.capture.options import ModelOptions

    assert type(load_model(ModelOptions(str(tmp_path / "model")))).__name__ == "ModernBertModel"
    whole = tf.ModernBertForMaskedLM(config)
    state = {name: weight for name, weight in whole.state_dict().items() if "layers.1.attn" not in name}
    whole.save_pretrained(tmp_path / "cut", state_dict=state)
    with pytest.raises(CaptureError, match="missing weights"):
        load_model(ModelOptions(str(tmp_path / "cut")))
