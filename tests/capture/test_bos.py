"""Documents begin as the model's own files say, and the mean loss is that of the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from gguf import GGUFWriter
from typer.testing import CliRunner

from qkscope.capture.corpus import Bos, find_bos, tokenize
from qkscope.capture.loss import loss_positions
from qkscope.capture.model import forget_parsed, parsed_once
from qkscope.capture.options import ModelOptions
from qkscope.capture.texts import Document
from qkscope.cli.main import app
from qkscope.errors import CaptureError
from tests.capture.conftest import WORDS, save
from tests.capture.families import families

BOS = 1


def model_with(folder: Path, *, stated: bool | None = None, template: bool = False, named: bool = True) -> Path:
    """A tiny model whose tokenizer file says, and whose tokenizer does, what is asked for."""
    save(families()["llama"], folder)
    file = folder / "tokenizer_config.json"
    said = json.loads(file.read_text()) | ({"bos_token": "[BOS]"} if named else {})
    file.write_text(json.dumps(said | ({} if stated is None else {"add_bos_token": stated})))
    if template:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        special = {"[BOS]": {"id": "[BOS]", "ids": [BOS], "tokens": ["[BOS]"]}}
        single = [{"SpecialToken": {"id": "[BOS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": processor}))
    return folder


def found(folder: Path, asked: bool | None = None) -> Bos:
    return find_bos(ModelOptions(str(folder)), tf.AutoTokenizer.from_pretrained(folder), asked)


def tokens(folder: Path, asked: bool | None = None) -> list[int]:
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    return tokenize([Document("a", "w00 w01")], tokenizer, found(folder, asked))[0].tolist()


def test_a_tokenizer_file_that_says_so_is_believed_though_the_tokenizer_drops_it(tmp_path, caplog):
    folder = model_with(tmp_path / "m", stated=True)
    assert tf.AutoTokenizer.from_pretrained(folder)("w00 w01")["input_ids"] == [3, 4]
    with caplog.at_level(logging.WARNING, "qkscope"):
        assert tokens(folder) == [BOS, 3, 4]
    assert "add_bos_token says yes, the tokenizer says no" in caplog.text
    assert found(folder).source == "add_bos_token"
    assert tokens(folder, asked=False) == [3, 4]


def test_a_tokenizer_that_begins_texts_itself_is_not_followed_by_a_second_one(tmp_path, caplog):
    folder = model_with(tmp_path / "m", template=True)
    with caplog.at_level(logging.WARNING, "qkscope"):
        assert tokens(folder) == tokens(folder, asked=True) == [BOS, 3, 4]
    assert not [record for record in caplog.records if record.name.startswith("qkscope")]
    assert tokens(folder, asked=False) == [3, 4]


def test_where_nothing_says_so_there_is_none(tmp_path):
    folder = model_with(tmp_path / "m")
    assert tokens(folder) == [3, 4]
    assert found(folder) == Bos(None, "the tokenizer")
    assert tokens(folder, asked=True) == [BOS, 3, 4]


def test_a_token_that_nobody_names_cannot_be_asked_for(tmp_path):
    folder = model_with(tmp_path / "m", named=False)
    (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(CaptureError, match="names a BOS token"):
        found(folder, asked=True)
    tf.GenerationConfig(bos_token_id=BOS).save_pretrained(folder)
    assert found(folder, asked=True) == Bos(BOS, "asked for")


def test_the_metadata_of_a_gguf_file_decide(tmp_path, caplog):
    """Transformers converts the tokenizer of such a file and drops what it says about BOS."""
    file = tmp_path / "tiny.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_add_bos_token(True)
    writer.add_bos_token_id(7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = tf.AutoTokenizer.from_pretrained(model_with(tmp_path / "m"))
    with caplog.at_level(logging.WARNING, "qkscope"):
        bos = find_bos(ModelOptions(str(file)), tokenizer)
    assert bos == Bos(7, "GGUF metadata")
    assert "GGUF metadata says yes, the tokenizer says no" in caplog.text
    assert tokenize([Document("a", "w00")], tokenizer, bos)[0].tolist() == [7, 3]


def test_a_gguf_file_is_parsed_once(tmp_path, monkeypatch):
    parsed, plain = [], gguf.GGUFReader

    class Counted(plain):
        def __init__(self, path, mode="r"):
            parsed.append(path)
            super().__init__(path, mode)

    def write(token: int) -> Path:
        writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
        writer.add_bos_token_id(token)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / "tiny.gguf"

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    file = write(7)
    for _ in range(3):
        with parsed_once():
            assert gguf.GGUFReader(str(file)).fields["tokenizer.ggml.bos_token_id"].contents() == 7
    assert len(parsed) == 1
    write(70_000)
    with parsed_once():
        assert gguf.GGUFReader(file).fields["tokenizer.ggml.bos_token_id"].contents() == 70_000
    assert len(parsed) == 2
    forget_parsed()
    with parsed_once():
        gguf.GGUFReader(file)
    assert len(parsed) == 3
    assert gguf.GGUFReader is Counted, "as it was"


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_the_loss_of_a_run_is_that_of_the_model(tmp_path, family):
    """Softcapped and scaled logits too; counted token by token."""
    folder = tmp_path / "m"
    save(families()[family], folder, "eager")
    rng = np.random.default_rng(0)
    lengths = (40, 90, 150)
    for number, length in enumerate(lengths):
        (tmp_path / f"{number}.txt").write_text(" ".join(rng.choice(WORDS, length)))
    command = [
        "capture",
        str(folder),
        "--texts",
        str(tmp_path / "*.txt"),
        "--dtype",
        "float32",
        "--attn",
        "eager",
        "--bos",
    ]
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.train(False)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    bos = manifest["model"]["bos"]["token"]
    losses = []
    for number in range(len(lengths)):
        ids = tokenizer((tmp_path / f"{number}.txt").read_text())["input_ids"]
        ids = torch.tensor(ids if bos is None else [bos, *ids])
        with torch.no_grad():
            chances = model(ids[None]).logits[0].float().log_softmax(-1)
        losses += [-float(chances[at, ids[at + 1]]) for at in loss_positions(len(ids))]
    assert manifest["loss"]["mean"] == pytest.approx(np.mean(losses), abs=2e-5)
    assert manifest["loss"]["tokens"] == len(losses)
    assert manifest["loss"]["se"] > 0
    assert f"mean loss {manifest['loss']['mean']:.3f}" in done.output


def test_a_run_records_how_its_documents_begin(tmp_path):
    folder = model_with(tmp_path / "m", stated=True)
    (tmp_path / "a.txt").write_text(" ".join(WORDS))
    for option, token in ((None, BOS), ("--no-bos", None)):
        run = tmp_path / f"run{option}"
        command = ["capture", str(folder), "--texts", str(tmp_path / "a.txt"), "-o", str(run), "--dtype", "float32"]
        done = CliRunner().invoke(app, [*command, *([option] if option else [])])
        assert done.exit_code == 0, done.output
        manifest = json.loads((run / "run.json").read_text())
        assert manifest["model"]["bos"]["token"] == token
        assert manifest["documents"][0]["tokens"] == len(WORDS) + (token is not None)
