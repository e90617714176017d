"""The bundled model family is complete, small, loadable and honest about where it comes from."""

import json
import re
import tomllib

import numpy as np
import pytest
from tools import dist

from qkscope.cli import demo
from qkscope.data import family
from qkscope.errors import ConfigError
from tests.test_docs import ROOT


def test_ten_checkpoints_in_twenty_five_megabytes_as_safetensors():
    assert len(family.CHECKPOINTS) == 10
    files = [file for one in family.CHECKPOINTS for file in one.folder.iterdir()]
    assert {file.name for file in files} == {"config.json", "model.safetensors"}
    assert sum(file.stat().st_size for file in files) < 25e6
    assert {folder.name for folder in (family.data() / "checkpoints").iterdir()} == {c.name for c in family.CHECKPOINTS}


@pytest.mark.parametrize("checkpoint", family.CHECKPOINTS, ids=lambda one: one.name)
def test_each_checkpoint_loads_and_was_made_for_its_window(checkpoint):
    config = json.loads((checkpoint.folder / "config.json").read_text())
    assert config["max_position_embeddings"] == checkpoint.window
    theta = {1024: 1e4, 4096: 2e5, 8192: 1e6}[checkpoint.window]
    assert config["rope_parameters"]["rope_theta"] == theta


def test_the_last_one_predicts_text_it_has_not_seen():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    last = family.CHECKPOINTS[-1]
    model = transformers.AutoModelForCausalLM.from_pretrained(last.folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(family.tokenizer())
    assert sum(p.numel() for p in model.parameters()) == 1_230_432
    ids = tokenizer((sorted(family.texts().iterdir())[0]).read_text(), return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    # Its held-out loss at 1,024 tokens is 2.3 over all kinds of text; a unigram model's is 6.5.
    assert loss < 3.2


def test_the_texts_are_long_enough_for_the_longest_window_and_old_enough_to_be_free():
    transformers = pytest.importorskip("transformers")
    texts = sorted(family.texts().iterdir())
    assert len(texts) == 32
    assert all(int(re.match(r"\d{4}", text.name)[0]) < 1929 for text in texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(family.tokenizer())
    assert min(len(tokenizer(text.read_text()).input_ids) for text in family.some_texts(8)) > 8192
    assert len(set(family.some_texts(8))) == 8


def test_the_record_says_what_the_docs_say():
    record = json.loads((family.data() / "record.json").read_text())
    by_position = record["held_out_loss_by_position"]
    assert np.mean(by_position["extend-8k at 8192"]) < 0.5 * record["unigram_loss"]
    assert by_position["extend-8k at 8192"][-1] < by_position["extend-8k at 8192"][0]
    assert by_position["pretrain at 4096"][-1] > 2 * by_position["extend-4k at 4096"][-1]
    docs = (ROOT / "docs" / "tinyrope.md").read_text()
    for name, values in by_position.items():
        assert f"| {name} | {values[0]:.2f} | {values[-1]:.2f} | {np.mean(values):.2f} |" in docs
    assert f"{record['seconds']} s, seed {record['seed']}" in (ROOT / "examples" / "tinyrope" / "README.md").read_text()


def test_the_variant_leaves_every_fourth_layer_without_rotary_encoding():
    config = json.loads((family.nope_variant() / "config.json").read_text())
    assert config["no_rope_layers"] == [1, 1, 1, 0, 1, 1, 1, 0]


def test_the_fast_demo_takes_three_of_them_with_enough_documents_for_intervals():
    chosen = family.fast_checkpoints()
    assert [one.name for one in chosen] == ["pretrain-step-0020", "pretrain-step-3000", "extend-8k-step-0300"]
    assert all(one.documents >= 4 for one in chosen)


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> list[str]:
    """The family as a wheel installs it, by links to what pyproject.toml does not exclude; names of its checkpoints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    excluded = [ROOT / path for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]]
    assert all(path.is_dir() for path in excluded)
    (tmp_path / "checkpoints").mkdir()
    whole, left = family.data(), []
    for folder in (whole / "checkpoints").iterdir():
        if folder not in excluded:
            (tmp_path / "checkpoints" / folder.name).symlink_to(folder)
            left.append(folder.name)
    for name in ("texts", "tokenizer"):
        (tmp_path / name).symlink_to(whole / name)
    monkeypatch.setattr(family, "data", lambda: tmp_path)
    return sorted(left)


def test_a_wheel_has_four_checkpoints_and_those_of_the_fast_demo(wheel):
    four = ["pretrain-step-0020", "pretrain-step-3000", "extend-4k-step-0500", "extend-8k-step-0300"]
    assert [one.name for one in family.bundled_checkpoints()] == four
    assert wheel == sorted(four) == sorted(dist.IN_WHEEL)
    assert all(one.folder.is_dir() for one in family.fast_checkpoints())


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize(
    ("folder", "name"),
    [(lambda: family.CHECKPOINTS[0].folder, "pretrain-step-0001"), (lambda: family.nope_variant(), "nope")],
)
def test_what_a_wheel_does_not_have_is_named(folder, name):
    said = f"{name} of tinyrope is not part of this installation, which has pretrain-step-0020, .*in a checkout"
    with pytest.raises(ConfigError, match=said) as error:
        folder()
    assert "\n" not in str(error.value)


@pytest.fixture
def said(caplog, monkeypatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(demo.log, "propagate", True)
    caplog.set_level("INFO", logger="qkscope")
    return caplog


@pytest.mark.usefixtures("wheel")
def test_the_demo_of_all_checkpoints_says_that_a_wheel_has_four(said):
    assert len(demo.chosen_checkpoints(fast=True, everything=False)) == 3
    assert demo.chosen_checkpoints(fast=False, everything=False) == family.bundled_checkpoints()
    assert said.messages == []
    assert demo.chosen_checkpoints(fast=False, everything=True) == family.bundled_checkpoints()
    assert said.messages == ["4 of the 10 checkpoints of tinyrope are installed; a checkout has all of them"]


def test_the_demo_of_a_checkout_says_nothing_of_the_kind(said):
    assert demo.chosen_checkpoints(fast=False, everything=True) == family.CHECKPOINTS
    assert said.messages == []
