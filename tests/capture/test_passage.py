"""The passage of a run: what is kept of it, its scores in four terms, and files that were damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from qkscope.analyses.options import PointOptions
from qkscope.api import tables
from qkscope.capture.corpus import OWN_TOKENS, PASSAGE_TOKENS, Corpus, Passage, bundled_passage
from qkscope.capture.watch import watching
from qkscope.cli.main import app
from qkscope.data.family import CHECKPOINTS, some_texts, tokenizer
from qkscope.errors import QkscopeError
from qkscope.files.runfolder import PASSAGE, PASSAGE_FILE, is_bundled
from qkscope.headids import TERMS
from qkscope.results.side import PASSAGES
from qkscope.runs.run import open_run
from tests.capture.families import build, families
from tests.capture.test_run import do

TOKENS = Passage(np.arange(3, 43), tuple(f"t{i % 7}" for i in range(40)))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A capture of a bundled checkpoint."""
    folder, last = tmp_path_factory.mktemp("passage"), CHECKPOINTS[-1]
    chosen = [argument for path in some_texts(2) for argument in ("--texts", str(path))]
    command = ["capture", str(last.folder), "--tokenizer", str(tokenizer()), *chosen, "--window", "256", "--dtype"]
    done = CliRunner().invoke(app, [*command, "float32", "--layers", "0,5", "-o", str(folder / "run"), "--quiet"])
    assert done.exit_code == 0, done.output
    return folder / "run"


def test_the_passage_is_read_in_the_models_own_tokens(run):
    from transformers import AutoTokenizer

    passage = bundled_passage(AutoTokenizer.from_pretrained(tokenizer()))
    assert len(passage.tokens) == PASSAGE_TOKENS
    assert PASSAGE.startswith("".join(passage.tokens))
    assert passage.tokens.count(" Monday") == 2 or "".join(passage.tokens).count("Monday") == 2, "it has a copy"
    assert json.loads((run / "run.json").read_text())["passage"]["tokens"] == list(passage.tokens)


@pytest.mark.parametrize("name", ["llama", "glm4", "gemma3", "deepseek-v3"])
def test_the_vectors_that_are_kept_are_those_that_attend(name, ids, tmp_path):
    from qkscope.capture import run as running
    from qkscope.capture.options import CaptureOptions
    from qkscope.capture.texts import Document

    model, seen = build(families()[name]), {}
    documents = [Document(f"d{i}", f"text {i}") for i in range(len(ids))]
    corpus = Corpus(documents, ids, passage=TOKENS)
    folder = running.capture(model, corpus, tmp_path / "run", CaptureOptions(window=160), {"id": "tiny"})
    with torch.no_grad(), watching(model, lambda attention: seen.update({attention.layer: attention})):
        model(torch.from_numpy(TOKENS.ids)[None])
    kept = load_file(folder / PASSAGE_FILE)
    assert len(kept) == 2 * len(seen)
    for layer, attention in seen.items():
        for kind, x in (("q", attention.q), ("k", attention.k)):
            assert kept[f"{layer}.{kind}"].dtype == np.float16
            np.testing.assert_allclose(kept[f"{layer}.{kind}"], x[0].transpose(0, 1).numpy(), rtol=2e-3, atol=2e-3)


def test_the_four_terms_sum_to_the_score(run):
    frame = tables(open_run(run), points=PointOptions(rows=50))["passage"]
    assert set(frame["layer"]) == {0, 5}
    one = frame[(frame["layer"] == 5) & (frame["head"] == 3)]
    assert len(one) == PASSAGE_TOKENS * (PASSAGE_TOKENS + 1) // 2
    vectors = load_file(run / PASSAGE_FILE)
    q, k = (vectors[f"5.{kind}"].astype(float) for kind in "qk")
    scaling = json.loads((run / "run.json").read_text())["layers"][1]["scaling"]
    score = scaling * (q[:, 3] @ k[:, 3 // (q.shape[1] // k.shape[1])].T)[one["q_token"], one["k_token"]]
    total = one[list(TERMS)].astype(float).sum(axis=1) * one["unit"]
    assert (np.abs(total - score) <= 2.001 * one["unit"]).all(), "half a level for each of four terms"
    levels = one[list(TERMS)].abs().groupby(one["q_token"]).max().max(axis=1)
    assert (levels == 127).all(), "each query uses all of its eight bits"
    # The position term knows nothing but the distance.
    position = one["position"] * one["unit"]
    by_distance = position.groupby(one["q_token"] - one["k_token"])
    assert (by_distance.max() - by_distance.min()).max() <= 2 * one["unit"].max()


def test_what_is_captured_before_the_rotation_has_no_passage(model, ids, tmp_path):
    from qkscope.capture import run as running
    from qkscope.capture.options import CaptureOptions
    from qkscope.capture.texts import Document

    documents = [Document(f"d{i}", f"text {i}") for i in range(len(ids))]
    options = CaptureOptions(window=160, pre_rope=True)
    folder = running.capture(model, Corpus(documents, ids, passage=TOKENS), tmp_path / "run", options, {"id": "tiny"})
    assert not (folder / PASSAGE_FILE).exists()
    assert "passage" not in json.loads((folder / "run.json").read_text())


def test_a_passage_is_cut_to_what_documents_have(model, tmp_path):
    from qkscope.capture import run as running
    from qkscope.capture.options import CaptureOptions
    from qkscope.capture.texts import Document

    short = [np.arange(3, 20), np.arange(30, 47)]
    documents = [Document(f"d{i}", f"text {i}") for i in range(2)]
    folder = running.capture(
        model, Corpus(documents, short, passage=TOKENS), tmp_path / "run", CaptureOptions(), {"id": "t"}
    )
    assert len(json.loads((folder / "run.json").read_text())["passage"]["tokens"]) == 17
    assert len(load_file(folder / PASSAGE_FILE)["0.q"]) == 17


def loaded():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    last = AutoModelForCausalLM.from_pretrained(CHECKPOINTS[-1].folder, dtype=torch.float32)
    return last.eval(), AutoTokenizer.from_pretrained(tokenizer())


def test_a_text_of_ones_own_takes_the_place_of_the_bundled_one(run, tmp_path):
    """From the command line and from Python: the same vectors, at every window, and nothing else of the run changes."""
    import qkscope
    from qkscope.capture.options import CaptureOptions

    own = "The keeper counted ships. " * 20 + "Then the keeper counted again."
    (tmp_path / "own.txt").write_text(own)
    chosen = [argument for path in some_texts(2) for argument in ("--texts", str(path))]
    command = ["capture", str(CHECKPOINTS[-1].folder), "--tokenizer", str(tokenizer()), *chosen, "--window", "256"]
    command += ["--dtype", "float32", "--layers", "0,5", "--compare-at", "64", "--passage", str(tmp_path / "own.txt")]
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "typed")])
    assert done.exit_code == 0, done.output
    assert f"the first {OWN_TOKENS} are read" in done.output
    model, words = loaded()
    texts = [path.read_text() for path in some_texts(2)]
    folder, options = tmp_path / "given", CaptureOptions(layers=(0, 5), compare_at=(64,))
    given = qkscope.capture_model(
        model, texts, words, window=256, folder=folder, options=options, passage=own, progress=False
    )
    assert given.source.window == 256
    manifests = {
        name: json.loads((tmp_path / name / "run.json").read_text()) for name in ("typed", "given", "typed-at-64")
    }
    tokens = manifests["typed"]["passage"]["tokens"]
    assert len(tokens) == OWN_TOKENS
    assert own.startswith("".join(tokens))
    assert not is_bundled(tokens)
    assert manifests["given"]["passage"] == manifests["typed"]["passage"]
    assert manifests["typed-at-64"]["passage"]["tokens"] == tokens[:64]
    assert "passage" not in manifests["typed"]["options"]
    vectors = {name: load_file(tmp_path / name / PASSAGE_FILE) for name in ("typed", "given")}
    for key, x in vectors["typed"].items():
        np.testing.assert_allclose(vectors["given"][key], x, atol=2e-3, rtol=2e-3)
    bundled = json.loads((run / "run.json").read_text())
    assert is_bundled(bundled["passage"]["tokens"])
    assert {k: v for k, v in manifests["typed"].items() if k != "passage"} == {
        k: v for k, v in bundled.items() if k != "passage"
    }
    frame = tables(open_run(tmp_path / "typed"), points=PointOptions(rows=50))["passage"]
    assert frame["k_token"].max() == OWN_TOKENS - 1
    done = CliRunner().invoke(app, [*command[:-2], "-o", str(tmp_path / "typed")])
    assert done.exit_code != 0, "another passage is another run"


@pytest.mark.parametrize(
    ("passage", "said"),
    [
        ("one", r"the passage has \d tokens?; give a text of 3 or more"),
        (" ", "expected passage to be a text of two words or more, got ' '"),
        (["a", "b"], "expected passage to be a text of two words or more"),
    ],
)
def test_passages_that_are_none_are_refused(passage, said):
    import qkscope

    model, words = loaded()
    with pytest.raises(QkscopeError, match=said):
        qkscope.capture_model(model, [PASSAGE], words, passage=passage, progress=False)


def test_a_passage_needs_a_tokenizer():
    import qkscope

    model, _ = loaded()
    with pytest.raises(QkscopeError, match="a passage needs a tokenizer; give one, or leave the passage out"):
        qkscope.capture_model(model, [np.arange(3, 40)], passage="two words and more", progress=False)


def test_a_run_without_a_passage_is_analysed_as_before(model, ids, tmp_path):
    folder = do(model, ids, tmp_path / "run")
    assert not (folder / PASSAGE_FILE).exists()
    assert "passage" not in tables(open_run(folder), points=PointOptions(rows=50))


def _without(tensors):
    del tensors["5.k"]


def _short(tensors):
    tensors["5.q"] = tensors["5.q"][:7].copy()


def _flat(tensors):
    tensors["5.q"] = tensors["5.q"][0].copy()


def _not_finite(tensors):
    tensors["5.q"][0, 0, 0] = np.nan


@pytest.mark.parametrize("damage", [_without, _short, _flat, _not_finite, None])
def test_a_damaged_passage_names_its_file(run, tmp_path, damage):
    copy = shutil.copytree(run, tmp_path / "run")
    if damage is None:
        (copy / PASSAGE_FILE).unlink()
    else:
        tensors = {name: value.copy() for name, value in load_file(copy / PASSAGE_FILE).items()}
        damage(tensors)
        save_file(tensors, copy / PASSAGE_FILE)
    done = CliRunner().invoke(app, ["view", str(copy), "-o", str(tmp_path / "x.html"), "--no-open", "--workers", "1"])
    assert PASSAGE_FILE in done.output.replace("\n", ""), done.output
    assert "Traceback" not in done.output


def test_tables_of_passages_are_replaced_by_model_and_checked(tmp_path):
    rows = pd.DataFrame({"layer": 0, "head": 0, "q_token": [0, 1, 1], "k_token": [0, 0, 1], "text": list("aab"),
                         "unit": 0.5, **dict.fromkeys(TERMS, 3)})  # fmt: skip
    (tmp_path / PASSAGES.file).write_bytes(PASSAGES.content(tmp_path, [rows.assign(model="a")]))
    (tmp_path / PASSAGES.file).write_bytes(PASSAGES.content(tmp_path, [rows.assign(model="b")]))
    (tmp_path / PASSAGES.file).write_bytes(PASSAGES.content(tmp_path, [rows.assign(model="a", unit=0.25)]))
    frame = PASSAGES.read(tmp_path)
    assert frame is not None
    assert frame.groupby("model")["unit"].first().to_dict() == {"a": 0.25, "b": 0.5}
    assert len(frame) == 6
    for wrong, said in (
        (rows.drop(columns="unit"), "has no column model, unit"),
        (rows.assign(model="a", unit=np.nan), "expected finite numbers"),
        (rows.assign(model="a", key="x"), "column key must contain numbers"),
        (rows.assign(model="a", q_token=2**20), "below 4096"),
    ):
        wrong.to_parquet(tmp_path / PASSAGES.file)
        with pytest.raises(Exception, match=said):
            PASSAGES.read(tmp_path)
