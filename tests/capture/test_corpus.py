"""One reader for texts: every command and function gets the same tokens, and begins documents in the same way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from torch.utils.data import Dataset
from typer.testing import CliRunner

import qkscope
from qkscope.capture.corpus import Corpus
from qkscope.capture.options import CaptureOptions, ModelOptions, TextOptions
from qkscope.cause.effects import EffectOptions
from qkscope.cli.main import app
from qkscope.errors import ConfigError
from qkscope.integrations import QkScopeCallback, TrainingStudy
from tests.capture.test_bos import BOS, model_with

WINDOW = 64
TEXTS = [" ".join(f"w{(7 * start + i) % 90:02d}" for i in range(100)) for start in range(9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose tokenizer file says that texts begin with BOS, while its tokenizer drops it."""
    return model_with(tmp_path_factory.mktemp("bos") / "model", stated=True)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(TEXTS):
        (place / f"{number}.txt").write_text(text)
    return place


class _Rows(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(3, 43)
        return {"input_ids": ids, "labels": ids}


def _loaded(folder: Path) -> tuple[tf.PreTrainedModel, tf.PreTrainedTokenizerBase]:
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, tf.AutoTokenizer.from_pretrained(folder)


def by_command(folder: Path, texts: Path, output: Path) -> Path:
    command = ["capture", folder, "--texts", texts, "--window", WINDOW, "--device", "cpu", "-o", output, "--quiet"]
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 0, done.output
    return output


def by_function(folder: Path, _: Path, output: Path) -> Path:
    model, tokenizer = _loaded(folder)
    qkscope.capture_model(model, TEXTS, tokenizer, window=WINDOW, folder=output, progress=False)
    return output


def by_study(folder: Path, _: Path, output: Path) -> Path:
    model, tokenizer = _loaded(folder)
    study = TrainingStudy(output, TEXTS, tokenizer, every=1, window=WINDOW, max_share=None, options=CaptureOptions())
    study.at(1, model)
    return output / "step-0000001"


def by_trainer(folder: Path, _: Path, output: Path) -> Path:
    model, tokenizer = _loaded(folder)
    arguments = tf.TrainingArguments(
        str(output), max_steps=1, learning_rate=0.0, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    callback = QkScopeCallback(TEXTS, every=1, window=WINDOW, max_share=None, options=CaptureOptions())
    tf.Trainer(model, arguments, train_dataset=_Rows(), callbacks=[callback], processing_class=tokenizer).train()
    return output / "qkscope" / "step-0000001"


@pytest.fixture(scope="module")
def expected(folder, texts, tmp_path_factory) -> Path:
    return by_command(folder, texts, tmp_path_factory.mktemp("run") / "run")


@pytest.mark.parametrize("way", [by_function, by_study, by_trainer])
def test_every_way_gives_the_same_tokens_bos_and_tables(way, folder, texts, expected, tmp_path):
    run = way(folder, texts, tmp_path / "out")
    one, other = (json.loads((place / "run.json").read_text()) for place in (expected, run))
    assert one["model"]["bos"] == {"token": BOS, "source": "add_bos_token"}
    for key in ("tokens", "corpus", "window", "options", "layers", "passage"):
        assert one[key] == other[key], key
    assert one["model"]["bos"] == other["model"]["bos"]
    tables = [qkscope.tables(qkscope.open(place, model="m")) for place in (expected, run)]
    assert tables[0].keys() == tables[1].keys()
    for name in tables[0]:
        pd.testing.assert_frame_equal(tables[0][name], tables[1][name])


def test_bos_can_be_decided_from_python(folder):
    model, tokenizer = _loaded(folder)
    texts = ["w00 w01"]
    assert Corpus.of(texts, tokenizer, model).ids[0].tolist() == [BOS, 3, 4]
    assert Corpus.of(texts, tokenizer, model, bos=False).ids[0].tolist() == [3, 4]
    decided = Corpus.of(texts, tokenizer, model, bos=True)
    assert (decided.ids[0].tolist(), decided.about("m")["bos"]) == ([BOS, 3, 4], {"token": BOS, "source": "asked for"})


def test_effects_and_cuts_read_texts_as_captures_do(folder, expected, monkeypatch):
    model, tokenizer = _loaded(folder)
    texts = [" ".join(f"w{(11 * i + 5) % 90:02d}" for i in range(300))]
    read = []
    plain = Corpus.cut
    monkeypatch.setattr(
        Corpus, "cut", lambda corpus, *given: read.append(corpus.ids[0][:2].tolist()) or plain(corpus, *given)
    )
    run = qkscope.open(expected)
    options = EffectOptions(passes=1, measure=0)
    qkscope.effects(model, expected, texts, tokenizer, options=options)
    qkscope.effects(model, expected, texts, tokenizer, options=options, bos=False)
    qkscope.cut_costs(model, run, texts, tokenizer, window=32, keep=(0.5,), draws=0, length=256)
    assert read == [[BOS, 8], [8, 19], [BOS, 8]]


def test_token_ids_stay_as_they_are(folder):
    model, tokenizer = _loaded(folder)
    corpus = Corpus.of([np.array([5, 6, 7])], tokenizer, model)
    assert corpus.ids[0].tolist() == [5, 6, 7]
    assert corpus.about("m")["bos"] is None
    assert Corpus.of([[5, 6]], None, model).passage is None


def test_a_command_and_python_read_the_same_passage(folder, texts):
    model, tokenizer = _loaded(folder)
    read = Corpus.read(TextOptions((str(texts),)), ModelOptions(str(folder)))
    given = Corpus.of(TEXTS, tokenizer, model)
    assert read.bos == given.bos
    assert read.passage.tokens == given.passage.tokens
    assert [ids.tolist() for ids in read.ids] == [ids.tolist() for ids in given.ids]
    assert [document.digest for document in read.documents] == [document.digest for document in given.documents]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one text", "expected a list of texts"),
        ([], "expected a list of texts"),
        (["a string"], "texts as strings need a tokenizer"),
        ([np.zeros(4)], "expected token ids as one row of integers, got float64"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(texts, message):
    with pytest.raises(ConfigError, match=message):
        Corpus.of(texts, None, None)
