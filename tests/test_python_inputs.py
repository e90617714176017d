"""Inputs from Python: those that work, and the messages for those that do not."""

from __future__ import annotations

import logging
import re
import shutil

import numpy as np
import pandas as pd
import pytest

import qkscope
from qkscope.analyses.options import PcaOptions
from qkscope.errors import QkscopeError
from qkscope.options import without_flags
from tests.badinputs import PYTHON
from tests.capture.conftest import WORDS, save
from tests.capture.families import build, families, tf, torch  # skips this file where there is no torch

from qkscope.cause.effects import EffectOptions  # isort: skip

pytest.importorskip("torch")
ROWS = [np.random.default_rng(seed).integers(3, 93, 60 + seed) for seed in range(4)]
OTHERS = [np.random.default_rng(seed).integers(3, 93, 70) for seed in range(10, 14)]
STRINGS = [" ".join(WORDS[token - 3] for token in row) for row in ROWS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(families()["llama"], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model():
    return build(families()["llama"])


@pytest.fixture(scope="module")
def tokenizer(folder):
    return tf.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    return qkscope.capture_model(model, ROWS, window=64, folder=tmp_path_factory.mktemp("run") / "run", progress=False)


class Rows:
    """A dataset as the package datasets has it: a length, rows by number."""

    def __init__(self, rows: list[dict[str, object]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, object]:
        return self.rows[number]

    def __iter__(self):
        return iter(self.rows)


def tokens_of(run: qkscope.Run) -> str:
    return run.source.run.manifest.tokens


@pytest.mark.parametrize(
    "texts",
    [
        STRINGS,
        tuple(STRINGS),
        [{"text": text} for text in STRINGS],
        Rows([{"id": number, "text": text} for number, text in enumerate(STRINGS)]),
        {"id": [1, 2, 3, 4], "text": STRINGS},
        [{"input_ids": row.tolist()} for row in ROWS],
        {"input_ids": [row.tolist() for row in ROWS]},
        ROWS,
        [torch.from_numpy(row) for row in ROWS],
    ],
    ids=["strings", "tuple", "dicts", "dataset", "columns", "dicts of ids", "rows of ids", "arrays", "tensors"],
)
def test_texts_in_every_form_are_the_same_tokens(model, tokenizer, texts, run):
    found = qkscope.capture_model(model, texts, tokenizer, window=64, progress=False)
    assert tokens_of(found) == tokens_of(run)


@pytest.mark.parametrize("tensors", [None, "np", "pt"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_tokenizers_output_is_read_without_padding(model, tokenizer, run, tensors, side):
    encoding = tokenizer(STRINGS, padding=True, return_tensors=tensors, padding_side=side)
    assert len({len(row) for row in encoding["input_ids"]}) == 1
    assert tokens_of(qkscope.capture_model(model, encoding, window=64, progress=False)) == tokens_of(run)


def test_one_row_of_a_tokenizers_output_is_one_document(model, tokenizer):
    found = qkscope.capture_model(model, tokenizer(STRINGS[0]), window=64, progress=False)
    assert [document.tokens for document in found.source.run.manifest.documents] == [60]


MESSAGES = [
    (
        "arguments in the wrong order",
        lambda m, _t: qkscope.capture_model(ROWS, m),
        "capture_model(model, texts, tokenizer): expected model to be a loaded transformers model, got a list",
    ),
    (
        "a model's name",
        lambda _m, _t: qkscope.capture_model("gpt2", ROWS),
        "capture_model(model, texts, tokenizer): expected model to be a loaded transformers model, got a string; load "
        "it first, as with AutoModelForCausalLM.from_pretrained",
    ),
    (
        "a tokenizer as texts",
        lambda m, t: qkscope.capture_model(m, t, STRINGS),
        "expected tokenizer to be a tokenizer, got a list",
    ),
    (
        "a tokenizer as texts, and no texts",
        lambda m, t: qkscope.capture_model(m, t),
        "expected a list of texts, each a string or token ids, got a tokenizer (TOKENIZER) as texts; the order is "
        "model, texts, tokenizer",
    ),
    (
        "a tokenizer's name",
        lambda m, _t: qkscope.capture_model(m, STRINGS, "gpt2"),
        "expected tokenizer to be a tokenizer, got a string; load it first, as with AutoTokenizer.from_pretrained",
    ),
    (
        "one string",
        lambda m, t: qkscope.capture_model(m, STRINGS[0], t),
        "expected a list of texts, each a string or token ids, got a string as texts; put it into a list",
    ),
    (
        "no texts",
        lambda m, t: qkscope.capture_model(m, [], t),
        "expected a list of texts, each a string or token ids, got none: texts is empty",
    ),
    (
        "a generator",
        lambda m, t: qkscope.capture_model(m, (text for text in STRINGS), t),
        "expected a list of texts, each a string or token ids, got a generator as texts; give list(texts)",
    ),
    (
        "None",
        lambda m, t: qkscope.capture_model(m, None, t),
        "expected a list of texts, each a string or token ids, got None as texts",
    ),
    (
        "strings without a tokenizer",
        lambda m, _t: qkscope.capture_model(m, STRINGS),
        "texts as strings need a tokenizer; give one, or token ids",
    ),
    (
        "dicts without a text",
        lambda m, t: qkscope.capture_model(m, [{"text": STRINGS[0]}, {"id": 1, "body": "a"}], t),
        "expected text 1 to have a field 'text' or 'input_ids', got a dict with the keys id, body",
    ),
    (
        "several datasets",
        lambda m, t: qkscope.capture_model(m, {"train": STRINGS, "test": STRINGS}, t),
        "expected a list of texts, each a string or token ids, got a dict with the keys train, test; give one of its "
        "values, as texts['train']",
    ),
    (
        "numbers that are no token ids",
        lambda m, _t: qkscope.capture_model(m, [ROWS[0], [0.5, 1.5]]),
        "text 1: expected token ids as one row of integers, got float64 of shape (2,)",
    ),
    (
        "tokens outside the vocabulary",
        lambda m, _t: qkscope.capture_model(m, [ROWS[0], [5, 500] * 20]),
        "text 1 has token 500, but the model has tokens 0 to 95; give token ids of the model's own tokenizer",
    ),
    (
        "negative tokens",
        lambda m, t: qkscope.capture_model(m, [ROWS[0], [5, -100] * 20], t),
        "text 1 has token -100, but the model has tokens 0 to 95; give its own tokenizer",
    ),
    (
        "a negative window",
        lambda m, _t: qkscope.capture_model(m, ROWS, window=-5),
        "expected window of 16 or more, got -5",
    ),
    (
        "half a token",
        lambda m, _t: qkscope.capture_model(m, ROWS, window=64.5),
        "expected window to be a whole number, got 64.5",
    ),
    (
        "a window as text",
        lambda m, _t: qkscope.capture_model(m, ROWS, window="64"),
        "expected window to be a whole number, got '64'",
    ),
    (
        "windows as text",
        lambda m, _t: qkscope.capture_model(m, ROWS, window=64, compare_at="32"),
        "expected compare_at of whole numbers, got '32'",
    ),
    (
        "texts that are too short",
        lambda m, _t: qkscope.capture_model(m, [row[:5] for row in ROWS]),
        "no document has two tokens after the first 4; use longer texts or a smaller skip_first",
    ),
    (
        "a model in training mode",
        lambda _m, _t: qkscope.capture_model(build(families()["llama"]).train(), ROWS),
        "the model is in training mode, in which dropout changes what it computes; call model.eval()",
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in MESSAGES], ids=[case[0] for case in MESSAGES])
def test_messages(model, tokenizer, call, message):
    with pytest.raises(QkscopeError) as error:
        call(model, tokenizer)
    assert str(error.value) == message.replace("TOKENIZER", type(tokenizer).__name__)


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        empty = tf.LlamaForCausalLM(families()["llama"].config).eval()
    with pytest.raises(QkscopeError) as error:
        qkscope.capture_model(empty, ROWS)
    assert str(error.value) == (
        "capture_model(model, texts, tokenizer): model is on the meta device, so it has no weights; load it with "
        "from_pretrained, without device_map='meta' or torch.device('meta')"
    )


@pytest.mark.parametrize("call", PYTHON)
def test_a_call_that_cannot_work(model, run, tmp_path, monkeypatch, call):
    from qkscope.integrations.trainer import QkScopeCallback

    shutil.copytree(run.source.run.folder, tmp_path / "run")
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    names = {"qkscope": qkscope, "QkScopeCallback": QkScopeCallback, "np": np, "place": tmp_path}
    names |= {"model": model, "run": run, "texts": ROWS}
    with pytest.raises(QkscopeError) as error:
        exec(f"{call}: pass" if call.startswith("with ") else call, names)
    message = str(error.value).replace(str(run.source.run.folder.parent), "{place}").replace(str(tmp_path), "{place}")
    assert message == PYTHON[call]
    assert not re.search(r"(?<!qkscope analyze )--[a-z]", message), "an option is named as on the command line"


def test_heads_may_be_given_by_name(model, run):
    """Everywhere that a pair of numbers may be given."""
    assert run.head("l01h02").id == run.head((1, 2)).id == run.head(1, np.int64(2)).id
    for draw in (qkscope.plot.distance, qkscope.plot.ab_plane, qkscope.plot.pc_plane):
        pictures = [draw(run, heads) for heads in (["l01h02", (2, 3)], "l01h02,l02h03", [(1, 2), (2, 3)])]
        assert len({tuple(axes.get_title(loc="left") for axes in picture.axes) for picture in pictures}) == 1
    assert qkscope.plot.card(run, "l01h02").texts[0].get_text() == "layer 1, head 2"
    assert qkscope.plot.complement(run, "l01h02").axes
    estimated = qkscope.effects(model, run, OTHERS, heads="l01h02", options=EffectOptions(passes=4, measure=0))
    assert set(zip(*(estimated["effects"][name] for name in ("layer", "head")), strict=True)) == {(1, 2)}
    logits = []
    for named, pair in (("l01h02", (1, 2)), ("l01h01k", (1, 1))):
        inside = [
            (qkscope.intervene.windowed(model, {head: 4}) if named[-1] == "k" else
             qkscope.intervene.scaled(model, run, {head: (0, 1, 1, 1)})) for head in (named, pair)
        ]  # fmt: skip
        logits.append([_logits(model, context) for context in inside])
    logits.append([_logits(model, qkscope.intervene.without_planes(model, {head: [0]})) for head in ("l01h02", (1, 2))])
    logits.append([_logits(model, qkscope.intervene.without_drift(model, run, [h])) for h in ("l01h02", (1, 2))])
    for by_name, by_pair in logits:
        assert torch.equal(by_name, by_pair)
    assert qkscope.intervene.random_planes(model, {"l01h02": [0]}) == qkscope.intervene.random_planes(
        model, {(1, 2): [0]}
    )


def _logits(model, context):
    with context, torch.no_grad():
        return model(input_ids=torch.from_numpy(ROWS[0])[None]).logits


@pytest.mark.slow
def test_a_cut_takes_a_run_or_its_path(model, run):
    folder = str(run.source.run.folder)
    assert qkscope.cut(folder, 16).heads == qkscope.cut(run, 16).heads
    tables = [qkscope.cut_costs(model, given, OTHERS, window=16, length=70, draws=1) for given in (folder, run)]
    pd.testing.assert_frame_equal(*(table.drop(columns="model") for table in tables))


def test_heads_has_the_columns_of_all_analyses(model, run, tmp_path):
    table = qkscope.heads(run)
    full = qkscope.analyze(run)["heads"]
    pd.testing.assert_frame_equal(table, full, check_dtype=False)
    for column in ("head_class", "part_position", "decay", "ap_fixed_overall"):
        assert table[column].notna().all(), column
    assert qkscope.heads(run, intervals=False)["part_position_low"].isna().all()
    kept = qkscope.capture_model(model, ROWS, window=64, folder=tmp_path / "kept", progress=False)
    qkscope.top(kept)
    read = qkscope.heads(kept)
    pd.testing.assert_frame_equal(read.assign(model="run"), table.assign(model="run"), rtol=1e-12, check_dtype=False)
    tables = tmp_path / "kept" / "tables"
    assert qkscope.heads(kept, PcaOptions(high=0.9))["taxonomy_published"].notna().all()
    changed = pd.read_parquet(tables / "heads.parquet").assign(decay=7.0)
    changed.to_parquet(tables / "heads.parquet", index=False)
    assert (qkscope.heads(kept)["decay"] == 7.0).all(), "the tables are used again"
    assert (qkscope.heads(kept, PcaOptions(high=0.9))["decay"] != 7.0).all()


def test_flags_become_names_of_arguments():
    assert without_flags("leave out --bos (bos=True), or --no-resume") == "leave out bos=True, or resume=False"
    assert without_flags("choose --layers 0,1; qkscope reach --cut 64") == "choose layers 0,1; qkscope reach --cut 64"
    assert without_flags("a -- b, x--y") == "a -- b, x--y"


def test_the_length_of_the_window_is_said_if_it_is_cut(model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("qkscope"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="qkscope"):
        run = qkscope.capture_model(model, ROWS, window=100_000, progress=False)
    assert run.source.window == 63
    assert "the window of 100000 is cut to 63" in caplog.text
