"""The bundled model family: tinyrope, checkpoints of one small language model, and texts it was not trained on.

Trained by examples/tinyrope/train.py; the weights, the tokenizer and the texts are package data. A checkout has all ten
checkpoints; the wheel bundles four of them (pyproject.toml lists the excluded ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from qkscope.errors import ConfigError

FAMILY_TITLE = "tinyrope: one small model through two context extensions"
NAME = "tinyrope"


@dataclass(frozen=True)
class Checkpoint:
    """One training checkpoint, and the options with which the demo captures it."""

    name: str
    phase: str
    step: int
    window: int
    documents: int
    """Number of bundled texts to read: the same for every checkpoint, one per document group of the jackknife."""

    @property
    def is_bundled(self) -> bool:
        """True if this installation has its weights."""
        return _checkpoint_folder(self.name).is_dir()

    @property
    def folder(self) -> Path:
        """Folder of its weights."""
        return _present(_checkpoint_folder(self.name))


_PRETRAIN, _TO_4K, _TO_8K = "pre-training, 1K", "extension to 4K", "extension to 8K"
CHECKPOINTS = (
    *(Checkpoint(f"pretrain-step-{step:04d}", _PRETRAIN, step, 1024, 8) for step in (1, 20, 100, 400, 1000, 3000)),
    *(Checkpoint(f"extend-4k-step-{step:04d}", _TO_4K, 3000 + step, 4096, 8) for step in (50, 500)),
    *(Checkpoint(f"extend-8k-step-{step:04d}", _TO_8K, 3500 + step, 8192, 8) for step in (50, 300)),
)
"""All checkpoints saved in training, bundled or not."""


def data() -> Path:
    """The folder of weights, tokenizer and texts."""
    return Path(str(files("qkscope"))) / "data" / NAME


def _checkpoint_folder(name: str) -> Path:
    return data() / "checkpoints" / name


def _present(folder: Path) -> Path:
    """Return the folder; raise an error if this installation does not have it."""
    if not folder.is_dir():
        names = ", ".join(checkpoint.name for checkpoint in bundled_checkpoints()) or "no checkpoint"
        raise ConfigError(
            f"{folder.name} of {NAME} is not part of this installation, which has {names}; "
            "it is in a checkout of the repository and in the source distribution"
        )
    return folder


def bundled_checkpoints() -> tuple[Checkpoint, ...]:
    """The checkpoints that this installation has."""
    return tuple(checkpoint for checkpoint in CHECKPOINTS if checkpoint.is_bundled)


def nope_variant() -> Path:
    """Folder of a model trained alike whose every fourth layer has no rotary encoding."""
    return _present(data() / "variants" / "nope")


def demo_checkpoints() -> tuple[Checkpoint, ...]:
    """An early checkpoint, the end of pre-training and of both extensions: those that a wheel bundles."""
    return tuple(CHECKPOINTS[index] for index in (1, 5, 7, 9))


def fast_checkpoints() -> tuple[Checkpoint, ...]:
    """The same without the first extension, with fewer documents."""
    return tuple(replace(checkpoint, documents=4) for checkpoint in demo_checkpoints() if checkpoint.window != 4096)


def other_windows(checkpoint: Checkpoint, among: Sequence[Checkpoint]) -> list[int]:
    """Windows at which a checkpoint is also captured: the smallest, to compare; for the last checkpoint, all.

    >>> [other_windows(checkpoint, CHECKPOINTS) for checkpoint in (CHECKPOINTS[0], CHECKPOINTS[-2], CHECKPOINTS[-1])]
    [[], [1024], [1024, 4096]]
    """
    windows = sorted({other.window for other in among})
    chosen = windows if checkpoint == among[-1] else windows[:1]
    return [window for window in chosen if window < checkpoint.window]


def texts() -> Path:
    """Folder of old State of the Union addresses, in the public domain, that the model was not trained on."""
    return data() / "texts"


def some_texts(count: int) -> list[Path]:
    """Return paths of ``count`` texts, evenly spaced over the years."""
    files = sorted(texts().iterdir())
    return [files[i * len(files) // count] for i in range(count)]


def other_texts(count: int) -> list[Path]:
    """Return paths of ``count`` texts, evenly spaced, that are not among ``some_texts(count)``."""
    excluded = set(some_texts(count))
    files = [path for path in sorted(texts().iterdir()) if path not in excluded]
    return [files[i * len(files) // count] for i in range(count)]


def tokenizer() -> Path:
    """Folder of the family's tokenizer."""
    return data() / "tokenizer"
