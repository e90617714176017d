"""Over forty families, tiny and random: what is captured, what in part, what is refused and for which reason."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest
import torch
from packaging.version import Version
from tools import families, tinymodels
from tools.families import UNDONE, Outcome, page
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

from qkscope.capture.measure import Measurement
from qkscope.capture.model import load_model, location
from qkscope.capture.options import CaptureOptions, ModelOptions
from qkscope.errors import CaptureError
from tests.capture.families import matrix

OLD = Version(version("transformers")) < Version("5.20")
"""Older versions lack some models and build others otherwise; some of their attention computes by itself."""
GATE = np.random.default_rng(0).integers(3, 90, 120)
SUPPORTED = (
    "apertus", "arcee", "bart", "bert", "biogpt", "bitnet", "cohere", "deepseek_v3", "deepseek_v32", "ernie4_5",
    "exaone4", "gemma3n_text", "gemma4_text", "glm4_moe", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_oss", "granite",
    "jetmoe", "llama4_text", "longcat_flash", "nanochat", "nemotron", "olmoe", "opt", "persimmon", "phi", "qwen3_moe",
    "stablelm", "starcoder2",
)  # fmt: skip
PARTLY = {"bamba": (2, 4), "jamba": (2, 4), "qwen3_next": (1, 4)}
REFUSED = {
    "bloom": "its attention (BloomAttention) computes by itself, without the attention functions of transformers",
    "deepseek_v4": "layer 3 attends to keys that are not those of single tokens, such as compressed ones",
    "diffllama": "layer 0 attends 2 times in one pass (two maps per layer, or layers that are used again)",
    "inkling_text": "its scores are not products of queries and keys alone",
    "mamba": "MambaForCausalLM cannot be captured: it has no attention layers",
    "mimo_v2_flash": "layers differ in query heads per key head (1, 2), and a run has one number",
}
ENCODERS = ("modernbert", "eurobert", "distilbert")


def built(name: str) -> PreTrainedModel:
    """A tiny model; skipped where the installed transformers has none of its kind."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    model: PreTrainedModel = tinymodels.built(name)
    return model


def tried(name: str, *, encoder: bool = False) -> Outcome:
    """Outcome of a model; skipped if the installed transformers is old and lacks it, or has it in another form."""
    outcome = families.tried(name, encoder=encoder)
    if OLD and (outcome.kind == "not built" or "computes by itself" in outcome.why):
        pytest.skip(f"{name}: {outcome.why}")
    return outcome


@pytest.mark.parametrize("name", matrix(SUPPORTED, ["bart", "bert", "cohere", "gpt2", "gpt_oss", "phi"]))
def test_every_layer_is_captured_and_its_rotation_is_known(name):
    outcome = tried(name)
    assert (outcome.kind, outcome.why) == ("supported", "")
    assert outcome.captured == outcome.layers
    assert (outcome.undone is None) == (outcome.rotary == 0)
    assert outcome.undone is None or outcome.undone < UNDONE


@pytest.mark.parametrize("name", PARTLY)
def test_of_hybrids_the_layers_with_attention_are_captured(name):
    outcome = tried(name)
    assert (outcome.kind, (outcome.captured, outcome.layers)) == ("partly", PARTLY[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_for_its_reason(name):
    outcome = tried(name)
    assert outcome.kind == "refused", outcome.why
    assert REFUSED[name] in outcome.why


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_captured_whole(name):
    outcome = tried(name, encoder=True)
    assert (outcome.kind, outcome.captured, outcome.why) == ("supported", outcome.layers, "")
    assert (outcome.rotary > 0) == (name != "distilbert")


def test_layers_that_are_used_again_are_refused():
    assert "layer 0 attends 4 times in one pass" in tried("albert", encoder=True).why


@pytest.mark.parametrize(
    ("name", "planes", "start"),
    [("gemma3n_text", 8, 0), ("gemma4_text", 8, 0), ("deepseek_v32", 4, 16), ("glm_moe_dsa", 4, 16)],
)
def test_the_rotation_is_that_of_what_attends(name, planes, start):
    """Rotary functions of one tensor at a time, and an indexer that rotates its own vectors."""
    layers = Measurement(built(name), GATE, CaptureOptions(window=128)).layers
    assert len(layers) == 4
    for layer in layers.values():
        assert layer.rope is not None
        assert layer.rope.planes in (planes, planes // 2, layer.d // 2)
        assert layer.rope.start == start


def test_models_without_rotary_encoding_have_none():
    layers = Measurement(built("gpt2"), GATE, CaptureOptions(window=128)).layers
    assert [layer.rope for layer in layers.values()] == [None] * 4


def test_layers_that_do_not_agree_can_be_captured_in_turn():
    model = built("mimo_v2_flash")
    with pytest.raises(CaptureError, match=r"capture layers that agree, such as --layers 0$"):
        Measurement(model, GATE, CaptureOptions(window=128))
    assert list(Measurement(model, GATE, CaptureOptions(window=128, layers=(0,))).layers) == [0]
    rest = Measurement(model, GATE, CaptureOptions(window=128, layers=(1, 2, 3)))
    assert (list(rest.layers), rest.chosen.q_per_kv) == ([1, 2, 3], 1)


def test_compressed_keys_are_refused_only_where_they_are_asked_for():
    model = built("deepseek_v4")
    with pytest.raises(CaptureError, match="not a known rotation of planes"):
        Measurement(model, GATE, CaptureOptions(window=128, layers=(0, 2)))
    with pytest.raises(CaptureError, match="layer 3 attends to keys that are not those of single tokens"):
        Measurement(model, GATE, CaptureOptions(window=128, layers=(3,)))


def test_the_page_lists_each_where_it_belongs():
    text = page(
        [
            Outcome("b", "supported", layers=4, captured=4, rotary=4, undone=1e-7),
            Outcome("a", "supported", layers=2, captured=2),
            Outcome("h", "partly", "1 of its 4 layers", 4, 1, 1, 2e-7),
            Outcome("r", "refused", "because | of"),
        ]
    )
    assert "2 supported, 1 partly supported, 1 refused, 0 not built, 0 failed." in text
    assert text.index("| `a` | 2 | – | – |") < text.index("| `b` | 4 | 4 | 1e-07 |")
    assert "| `h` | 1 of 4 | 1 | 2e-07 | 1 of its 4 layers |" in text
    assert "| `r` | because \\| of |" in text


@pytest.mark.skipif(OLD, reason="older versions ask for three positions, and are refused")
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_of_models_that_also_read_images_the_text_decoder_is_captured(name, tmp_path):
    """M-RoPE gives a token three positions, which are equal on text: then the rotation is the plain one."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"head_dim": 16, "intermediate_size": 96, "vocab_size": 96, "max_position_embeddings": 512}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
    eyes = {"depth": 2, "embed_dim": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    eyes |= {"hidden_size": 64 if name == "qwen2_vl" else 32, "deepstack_visual_indexes": [0]}
    config = CONFIG_MAPPING[name](text_config=sizes | more | rope, vision_config=eyes)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    model = load_model(ModelOptions(str(tmp_path / "model"), dtype="float32", device="cpu"))
    outcome = families.captured(name, model, tmp_path / "run")
    assert (outcome.kind, outcome.captured, outcome.rotary, outcome.why) == ("supported", 4, 4, "")
    assert outcome.undone < UNDONE


def test_a_gguf_file_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("qkscope.capture.model.find_spec", lambda _: None)
    with pytest.raises(
        CaptureError, match=r"reading model\.gguf needs the package gguf; install it with: pip install 'qksc"
    ):
        location(ModelOptions(str(tmp_path / "model.gguf")))
