"""The training script and the corpus builder, on a handful of tokens."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from qkscope.config import load_study_config
from tests.test_docs import ROOT

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file


def script(name: str):
    path = ROOT / "examples" / "tinyrope" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"tinyrope_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(monkeypatch):
    module = script("train")
    phases = (
        module.Phase("pretrain", 32, 1e4, 60, 3e-3, (1, 60)),
        module.Phase("extend", 64, 2e5, 4, 1e-3, (4,)),
    )
    monkeypatch.setattr(module, "PHASES", phases)
    monkeypatch.setattr(module, "TOKENS_PER_STEP", 256)
    monkeypatch.setattr(module, "EVALUATED", 64)
    monkeypatch.setattr(module, "SHAPE", module.SHAPE | {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 16})
    return module


@pytest.fixture
def data(tmp_path) -> Path:
    """A text that repeats itself: any model learns it."""
    tokens = np.tile(np.arange(1, 9), 400).astype(np.uint16)
    for name in ("train", "held_out"):
        np.savez(tmp_path / f"{name}.npz", tokens=tokens, starts=np.arange(0, 3200, 400))
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("nope", [False, True])
def test_training_learns_keeps_its_checkpoints_and_repeats_itself(train, data, tmp_path, monkeypatch, nope):
    results = []
    for name, share in (("one", "1e-9"), ("two", "1")):
        argv = ["train.py", "--data", str(data), "--output", str(tmp_path / name), "--device", "cpu"]
        argv += ["--every", "30", "--max-share", share]
        monkeypatch.setattr(sys, "argv", [*argv, "--nope"] if nope else argv)
        with torch.backends.mkldnn.flags(enabled=False):
            train.main()
        results.append(json.loads((tmp_path / name / "record.json").read_text()))
    kept = sorted(config.parent.name for config in (tmp_path / "one").glob("*/config.json"))
    assert kept == ["extend-step-0004", "pretrain-step-0001", "pretrain-step-0060"]
    one, two = (result["held_out_loss_by_position"] for result in results)
    assert one == two, "measurements change nothing"
    measured = {
        name: [(run.phase, run.step) for run in load_study_config(tmp_path / name / "qkscope" / "study.yaml").runs]
        for name in ("one", "two")
    }
    assert measured["one"] == [("pretrain", 1), ("pretrain", 60), ("extend", 64)], "the ends, whatever the share"
    assert measured["two"] == [("pretrain", 1), ("pretrain", 30), ("pretrain", 60), ("extend", 64)]
    assert np.mean(one["pretrain at 32"]) < results[0]["unigram_loss"]
    weights = load_file(tmp_path / "one" / "extend-step-0004" / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert json.loads((tmp_path / "one" / "extend-step-0004" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_schedule_warms_up_stays_level_and_decays(train):
    rates = [train.schedule(step, 1000) for step in range(1, 1001)]
    assert rates[0] < 0.05
    assert rates[300] == 1
    assert rates[-1] == pytest.approx(0.1)
    assert max(rates) == 1


def test_documents_are_split_as_wholes_and_the_shipped_ones_never_train():
    corpus = script("corpus")
    texts = {f"sotu/{year}-Nobody-1.txt-00000000": "x" * 40_000 for year in range(1800, 1960)}
    texts |= {f"linux/{i}": "y" * 2000 for i in range(500)}
    shipped = corpus.shipped_documents(texts)
    training, held_out = corpus.split(texts, shipped)
    assert len(shipped) == 32
    assert all(len(text) == 32_000 for text in shipped.values())
    assert max(int(name[5:9]) for name in shipped) < 1929
    assert not set(training) & set(shipped)
    assert not set(training) & set(held_out)
    assert set(training) | set(held_out) | set(shipped) == set(texts)
    assert 10 < len(held_out) < 50
    assert (training, held_out) == corpus.split(texts, shipped)


def test_the_stream_marks_where_documents_begin():
    corpus = script("corpus")
    tokenizer = corpus.train_tokenizer(["the cat sat on the mat " * 50])
    tokens, starts = corpus.encode(tokenizer, {"a": "the cat", "b": "the mat"})
    end = tokenizer.token_to_id(corpus.END)
    assert tokens[starts].tolist() == [end, end]
    assert tokenizer.decode(tokens[starts[1] + 1 :].tolist()) == "the mat"
