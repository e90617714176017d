"""Documents with images: the model's own positions, sums over their text tokens, and what is refused."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

import qkscope
from qkscope.capture.images import ImageInputs, image_inputs
from qkscope.capture.options import CaptureOptions
from qkscope.core.layermoments import LayerMoments
from qkscope.core.rope import Rope
from qkscope.errors import CaptureError, ConfigError
from qkscope.files.runfolder import RunFolder
from qkscope.headids import HeadId
from tests.capture.families import build, families
from tests.capture.images import END, IMAGE, START, built, document, hooked, with_temperature, words

pytestmark = [
    pytest.mark.skipif(
        Version(version("transformers")) < Version("5.20"), reason="older versions ask for three positions"
    ),
]
NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SINKS, WINDOW = 4, 96
VIDEOS = ("qwen2_vl", "qwen2_5_vl")


def captured(model: Any, texts: list[Any], folder: Path, **options: Any) -> Path:
    """A run of these documents, every token of it in the sample."""
    chosen = CaptureOptions(**{"window": WINDOW, "sample": 10_000} | options)
    qkscope.capture_model(model, texts, folder=folder, name="tiny", options=chosen, progress=False)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return str(request.param)


@pytest.mark.parametrize(("name", "video"), [*((name, False) for name in NAMES), *((name, True) for name in VIDEOS)])
def test_text_is_at_the_positions_that_the_model_gives_it(name, video, tmp_path):
    model, inputs = built(name), document(1, video=video)
    expected = hooked(model, inputs)
    run = captured(model, [inputs], tmp_path / "run")
    (entry,) = json.loads((run / "run.json").read_text())["documents"]
    positions = np.concatenate([np.arange(*stretch) for stretch in entry["positions"]])
    np.testing.assert_array_equal(positions, expected.position)
    assert (expected.columns - expected.position)[-1] > 10, "images moved what comes after them"
    assert entry["tokens"] == len(positions)
    assert entry["image_tokens"] == inputs["input_ids"].shape[1] - len(positions)
    sampled = qkscope.open(run).sample(HeadId(1, 0, "q")).rows.position
    np.testing.assert_array_equal(np.sort(sampled), positions[positions >= SINKS])


def test_moments_are_those_of_the_text_tokens(name, tmp_path):
    model, documents = built(name), [document(1), document(5, video=name in VIDEOS)]
    moments = RunFolder.open(captured(model, documents, tmp_path / "run", buckets=5)).layer(1)
    assert_moments(moments, [hooked(model, inputs) for inputs in documents], WINDOW)


def assert_moments(moments: LayerMoments, documents: list[Any], window: int) -> None:
    for group, seen in enumerate(documents):
        counts = (seen.position >= SINKS) & (seen.position < window)
        t = seen.position[counts].astype(float)
        for of_kind, undone, turned, plain in zip(
            (moments.q, moments.k), (moments.unrotated_q, moments.unrotated_k), seen.after, seen.before, strict=True
        ):
            for head, x in enumerate(turned[:, counts]):
                z = np.concatenate([x, t[:, None]], 1)
                centred = z - z.mean(0)
                scale = np.outer(centred.std(0), centred.std(0)) * len(z)
                assert of_kind.n[head, group] == len(t)
                np.testing.assert_allclose((of_kind.mean[head, group] - z.mean(0)) / centred.std(0), 0, atol=1e-5)
                np.testing.assert_allclose((of_kind.scatter[head, group] - centred.T @ centred) / scale, 0, atol=1e-5)
                planes = np.stack([plain[head, counts, :8], plain[head, counts, 8:]], -1)
                np.testing.assert_allclose(undone[head, group], planes.sum(0), atol=1e-5 * np.abs(planes).sum())


def test_scores_across_an_image_follow_the_difference_of_positions(name, tmp_path):
    model, inputs = built(name), document(1)
    seen = hooked(model, inputs)
    run = qkscope.open(captured(model, [inputs, document(5), document(9)], tmp_path / "run"))
    entry = json.loads((tmp_path / "run" / "run.json").read_text())["layers"][1]
    rope = Rope(np.array(entry["rope"]["frequencies"]), "half", 0, entry["rope"]["sign"])
    q, k = (run.sample(HeadId(1, 0, kind)).rows.ordered() for kind in ("q", "k"))
    late, early = (np.flatnonzero((q.example_id == 0) & (q.position == at))[0] for at in (seen.position[-1], 10))
    score = float(q.x[late].astype(float) @ k.x[early].astype(float))
    plain_q, plain_k = (rope.planes_of(x[0, [i]]) for x, i in zip(seen.before, (-1, 10), strict=True))

    def turned(distance: int) -> float:
        return float((plain_q * np.exp(1j * rope.sign * distance * rope.frequencies) * plain_k.conj()).sum().real)

    assert score == pytest.approx(turned(int(seen.position[-1]) - 10), abs=1e-5)
    assert score != pytest.approx(turned(int(seen.columns[-1]) - 10), abs=1e-3)
    table = qkscope.distance(run).query("layer == 1 and head == 0")
    pairs = (q.example_id[:, None] == k.example_id) & (q.position[:, None] > k.position)
    distance = (q.position[:, None] - k.position)[pairs]
    scores = entry["scaling"] * (q.x.astype(float) @ k.x.astype(float).T)[pairs]
    assert table["n_pairs"].sum() > 1000
    for row in table.itertuples():
        inside = (distance >= row.distance_low) & (distance <= row.distance_high)
        assert row.n_pairs == inside.sum()
        assert row.measured == pytest.approx(scores[inside].mean(), abs=1e-5)


def test_a_window_is_counted_in_positions(tmp_path):
    model, inputs = built("qwen2_vl"), document(1)
    run = captured(model, [inputs], tmp_path / "run", window=40)
    entry = json.loads((run / "run.json").read_text())["documents"][0]
    assert entry["positions"][-1][1] == 40
    assert_moments(RunFolder.open(run).layer(1), [hooked(model, inputs)], 40)


def test_texts_beside_images_have_the_sums_that_they_have_alone(name, tmp_path):
    model, texts = built(name), [np.array(words(WINDOW, seed)) for seed in (1, 2)]
    options = {"documents_per_shard": 1, "batch": 2}
    alone = RunFolder.open(captured(model, texts, tmp_path / "alone", **options)).layer(1)
    beside = RunFolder.open(captured(model, [*texts, document(1)], tmp_path / "beside", **options)).layer(1)
    for of_text, of_all in ((alone.q, beside.q), (alone.k, beside.k)):
        for part, other in zip(vars(of_text).values(), vars(of_all).values(), strict=True):
            np.testing.assert_array_equal(part[:, :2], other[:, :2])
    np.testing.assert_array_equal(alone.reach[:, :2], beside.reach[:, :2])
    assert beside.q.n[0, 2] > 0
    assert not beside.reach[:, 2].any(), "queries beside images are not followed"


def test_inputs_without_images_are_a_text(tmp_path):
    model, ids = built("qwen2_vl"), words(80, 1)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 80)}
    plain, mapped = (captured(model, [text], tmp_path / str(i)) for i, text in enumerate((ids, inputs)))
    for path, content in contents(plain).items():
        if path not in ("run.json", "checksums.json"):  # which have the digest of what was given
            assert (mapped / path).read_bytes() == content


def test_other_pixels_are_another_document(tmp_path):
    model, inputs = built("qwen2_vl"), document(1)
    other = inputs | {"pixel_values": inputs["pixel_values"] + 0.5}
    captured(model, [inputs], tmp_path / "run")
    digests = [
        json.loads((captured(model, [given], tmp_path / str(i)) / "run.json").read_text())["documents"][0]["digest"]
        for i, given in enumerate((inputs, other))
    ]
    assert digests[0] != digests[1]
    with pytest.raises(qkscope.QkscopeError, match="contains a capture with different settings"):
        captured(model, [other], tmp_path / "run")


def test_a_capture_that_was_stopped_resumes(tmp_path, monkeypatch):
    model, documents = built("qwen3_vl"), [document(1), document(2), document(3)]
    whole = captured(model, documents, tmp_path / "whole", documents_per_shard=1)
    calls, call = [], ImageInputs.call

    def stops(self, given):
        calls.append(1)
        if len(calls) == 7:  # three for positions, two of the gate, and the first document
            raise KeyboardInterrupt
        return call(self, given)

    monkeypatch.setattr(ImageInputs, "call", stops)
    with pytest.raises(KeyboardInterrupt):
        captured(model, documents, tmp_path / "stopped", documents_per_shard=1)
    assert list((tmp_path / "stopped" / "parts").iterdir()), "the first document is saved"
    assert contents(captured(model, documents, tmp_path / "stopped", documents_per_shard=1)) == contents(whole)
    assert len(calls) == 7 + 3 + 2 + 2, "the first document is not measured again"


def test_the_model_is_left_as_it_was(name, tmp_path):
    model = built(name)
    model.model.rope_deltas = marker = torch.tensor([[7]])
    captured(model, [document(1)], tmp_path / "run")
    assert model.model.rope_deltas is marker
    model.model.rope_deltas = None
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_interleaved_planes_and_analyses(tmp_path):
    """GLM-4V turns neighbouring coordinates; every analysis reads a run of documents with images alone."""
    run = captured(built("glm4v"), [document(seed) for seed in range(1, 9)], tmp_path / "run")
    tables = qkscope.tables(qkscope.open(run))
    assert {len(tables[name]) for name in ("heads", "rotated", "position", "scores")} == {12}
    assert len(tables["reach"]) == 0
    assert tables["rotated"]["bias_strength"].notna().all()


@pytest.mark.parametrize("heads", [None, (1, 3)])
def test_models_without_several_positions_and_with_a_temperature(heads, tmp_path):
    ids = torch.tensor([[*words(20, 1), START, *[IMAGE] * 12, END, *words(30, 2)]])
    pixels = torch.randn(1, 3, 32, 24, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor([[32, 24]])}
    run = RunFolder.open(captured(with_temperature(), [inputs], tmp_path / "run", window=64, heads=heads))
    assert run.raw["documents"][0]["positions"] == [[0, 21], [33, 64]]
    total, count = run.layer(1).temperature
    at = np.r_[SINKS:21, 33:64]
    np.testing.assert_array_equal(np.flatnonzero(count), at)
    np.testing.assert_allclose(total[at], 1 + 0.5 * np.log(1 + at // 16), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_ids": torch.zeros(2, 9, dtype=torch.int64)}, r"one row of integers, got int64 of shape \(2, 9\)"),
        ({"input_ids": None}, "expected input_ids as one row of integers, got none"),
        ({"attention_mask": torch.tensor([[0, 1]])}, "expected a document without padding"),
        ({"pixel_values": "a cat"}, "expected a tensor for pixel_values, got str"),
        ({"pixels": torch.zeros(2)}, "text 0: Qwen2VLModel takes no pixels"),
        ({"mm_token_type_ids": None}, "text 0: the model cannot read these inputs .*mm_token_type_ids"),
        ({"pixel_values": torch.zeros(8, 96)}, "text 0: the model cannot read these inputs"),
        ({"input_ids": torch.tensor([words(40, 1)])}, "text 0 has images, but no token in its input_ids stands for"),
    ],
)
def test_what_no_processor_returns_is_refused(change, said, tmp_path):
    with pytest.raises((CaptureError, ConfigError), match=said):
        captured(built("qwen2_vl"), [document(1) | change], tmp_path / "run")


def test_tokens_of_images_without_images_are_refused(tmp_path):
    ids = [*words(30, 1), START, *[IMAGE] * 8, END, *words(30, 2)]
    with pytest.raises(CaptureError, match=r"^text 1 contains token 90, a placeholder for an image.*capture_model"):
        captured(built("qwen2_vl"), [words(40, 3), ids], tmp_path / "run")


def test_models_that_read_no_images_refuse_them(tmp_path):
    with pytest.raises(CaptureError, match=r"takes no image_grid_thw, mm_token_type_ids, pixel_values"):
        captured(build(families()["llama"]), [document(1)], tmp_path / "run")


def test_windows_that_count_tokens_of_images_are_refused(tmp_path):
    sliding = built("qwen2_vl", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    with pytest.raises(CaptureError, match=r"text 0 has images, and layer 1 a sliding window.*full_attention_only"):
        captured(sliding, [document(1)], tmp_path / "run")
    run = captured(sliding, [document(1)], tmp_path / "full", full_attention_only=True)
    assert [layer["layer"] for layer in json.loads((run / "run.json").read_text())["layers"]] == [0]


def test_text_tokens_with_several_positions_are_refused():
    model, inputs = built("qwen2_vl"), document(1)
    length = inputs["input_ids"].shape[1]
    apart = torch.arange(length).expand(3, 1, length).clone()
    apart[2, 0, 5] = 9
    with pytest.raises(CaptureError, match="text 0: expected one position for text token 5, got 5, 5, 9"):
        image_inputs(model, inputs | {"position_ids": apart}, "text 0")
    with pytest.raises(CaptureError, match="expected text tokens at increasing positions"):
        image_inputs(model, inputs | {"position_ids": apart.clamp(max=5)}, "text 0")


def test_the_gate_looks_at_images(monkeypatch, tmp_path):
    """Angles that are not those of the positions stop the capture before anything is measured."""
    moved = image_inputs

    def elsewhere(model, inputs, name):
        found = moved(model, inputs, name)
        text_spans = tuple(type(s)(s.column, s.column, s.length) for s in found.text_spans)
        return type(found)(found.inputs, text_spans, found.image_tokens)

    monkeypatch.setattr("qkscope.capture.corpus.image_inputs", elsewhere)
    with pytest.raises(
        CaptureError, match="layer 0: text between images is not rotated by the angles of its positions"
    ):
        captured(built("qwen2_vl"), [document(1)], tmp_path / "run", window=200)
