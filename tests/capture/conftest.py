"""A tiny model with its tokenizer on disk, and texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from qkscope.cli.main import app
from tests.capture.families import Family, build, families, tf, torch

WORDS = [f"w{number:02d}" for number in range(90)]


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """Twenty documents of different length."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for number in range(20):
        words = rng.choice(WORDS, rng.integers(60, 200))
        (folder / f"doc{number:02d}.txt").write_text(" ".join(words))
    return folder


def save(family: Family, folder: Path, attention: str = "sdpa") -> Path:
    build(family, attention).save_pretrained(folder)
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, **{word: 3 + i for i, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    return folder


def captured_with_vectors(folder: Path, family: Family, documents: int, *more: str) -> Path:
    """A run of a small model on random words, every token of it in its sample and in the dataset beside it."""
    rng, model = np.random.default_rng(0), save(family, folder / "model")
    for number in range(documents):
        (folder / f"{number:02d}.txt").write_text(" ".join(rng.choice(WORDS, rng.integers(60, 200))))
    command = ["capture", str(model), "--texts", str(folder / "*.txt"), "--save-vectors", "1.0", "--sampler", "all"]
    command += ["--dtype", "float32", "--sample", "100000", *more, "-o", str(folder / "run"), "--quiet"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Llama of four layers on disk."""
    return save(families()["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model() -> tf.PreTrainedModel:
    return build(families()["llama"])


@pytest.fixture(scope="session")
def ids() -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(5)
    lengths = np.random.default_rng(1).integers(60, 200, 20)
    return [torch.randint(3, 93, (int(n),), generator=generator).numpy() for n in lengths]
