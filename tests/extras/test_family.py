"""The bundled model family is complete, small, loadable and honest about where it comes from."""

import json
import re

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from qkscope.extras import family
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
    import torch

    last = family.CHECKPOINTS[-1]
    model = AutoModelForCausalLM.from_pretrained(last.folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(family.tokenizer())
    assert sum(p.numel() for p in model.parameters()) == 1_230_432
    ids = tokenizer((sorted(family.texts().iterdir())[0]).read_text(), return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    # Its held-out loss at 1,024 tokens is 2.3 over all kinds of text; a unigram model's is 6.5.
    assert loss < 3.2


def test_the_texts_are_long_enough_for_the_longest_window_and_old_enough_to_be_free():
    texts = sorted(family.texts().iterdir())
    assert len(texts) == 32
    assert all(int(re.match(r"\d{4}", text.name)[0]) < 1929 for text in texts)
    tokenizer = AutoTokenizer.from_pretrained(family.tokenizer())
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
    config = json.loads((family.data() / "variants" / "nope" / "config.json").read_text())
    assert config["no_rope_layers"] == [1, 1, 1, 0, 1, 1, 1, 0]


def test_the_fast_demo_takes_three_of_them_with_enough_documents_for_intervals():
    chosen = family.fast_checkpoints()
    assert [one.name for one in chosen] == ["pretrain-step-0020", "pretrain-step-3000", "extend-8k-step-0300"]
    assert all(one.documents >= 4 for one in chosen)
