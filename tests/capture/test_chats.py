"""Texts in JSON arrays, and conversations, which the tokenizer's chat template turns into tokens."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from qkscope.capture.corpus import Bos, tokenize
from qkscope.capture.texts import read_documents
from qkscope.errors import CaptureError
from tests.capture.conftest import save
from tests.capture.families import families

TEMPLATE = "{% for m in messages %}w0{{ loop.index }} {{ m['content'] }} {% endfor %}"
CHAT = [{"role": "user", "content": "w05"}, {"role": "assistant", "content": "w06"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = AutoTokenizer.from_pretrained(save(families()["llama"], tmp_path_factory.mktemp("model")))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_an_array_holds_texts_and_objects(tmp_path):
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(["one", {"text": "two"}, {"text": None}, {"text": "", "n": 1}]))
    assert [(d.name, d.text) for d in read_documents([str(path)])] == [("texts.json:0", "one"), ("texts.json:1", "two")]
    path.write_text(json.dumps([{"body": "three"}]))
    assert [d.text for d in read_documents([str(path)], "body")] == ["three"]


def test_a_field_that_is_not_there_is_told_with_those_that_are(tmp_path):
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([{"body": "three", "id": 1}]))
    with pytest.raises(CaptureError, match=r"entry 0: expected .* field 'text', got 'body', 'id'; choose with --field"):
        read_documents([str(path)])


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_conversations_go_through_the_chat_template(tmp_path, tokenizer, kind):
    path = tmp_path / f"chats.{kind}"
    if kind == "json":
        path.write_text(json.dumps([{"messages": CHAT}]))
    elif kind == "jsonl":
        path.write_text(json.dumps({"messages": CHAT}) + "\n")
    else:
        pq.write_table(pa.table({"messages": [CHAT]}), path)
    (document,) = read_documents([str(path)], "messages" if kind == "parquet" else "text")
    (ids,) = tokenize([document], tokenizer, Bos(7))
    assert ids.tolist() == tokenizer("w01 w05 w02 w06", add_special_tokens=False)["input_ids"]
    (other,) = tokenize([document], tokenizer, None)
    assert other.tolist() == ids.tolist()


def test_the_same_words_in_other_roles_are_another_document(tmp_path):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"messages": CHAT}, {"messages": [CHAT[0] | {"role": "system"}, CHAT[1]]}]))
    one, other = read_documents([str(path)])
    assert one.digest != other.digest
