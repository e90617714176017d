"""Try a capture of every causal language model and masked encoder of the installed transformers, tiny and random.

python -m tools.families [NAME …] [--write]    # about ten minutes on two cores; --write writes docs/models.md

A model is built from its config class with everything small. It goes through the gate, a capture, and a check of the
rotation: on a text of one repeated token, queries and keys with the rotation undone must be the same at every position.
This module knows no architecture; models that cannot be built small this way are listed as not built.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.tinymodels import built

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
TOKENS, WINDOW = 120, 128
UNDONE = 1e-3
"""Largest difference between positions after the rotation is undone, relative to the vectors (half precision)."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one model."""

    name: str
    kind: str
    """supported, partly, refused, not built, failed."""
    why: str = ""
    layers: int = 0
    captured: int = 0
    rotary: int = 0
    """Layers with rotary encoding."""
    undone: float | None = None
    """Largest difference between positions after the rotation is undone."""


def tried(name: str, *, encoder: bool = False) -> Outcome:
    """Build one model, capture it, check its rotation."""
    from qkscope.errors import QkscopeError

    try:
        model = built(name, encoder=encoder)
    except Exception as error:
        return Outcome(name, "not built", _line(error))
    try:
        with tempfile.TemporaryDirectory() as folder:
            return captured(name, model, Path(folder) / "run")
    except QkscopeError as error:
        return Outcome(name, "refused", _line(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return Outcome(name, "failed", f"{type(error).__name__}: {_line(error)} ({place})")


def captured(name: str, model: Any, folder: Path) -> Outcome:
    """Capture a model into a folder, and check its rotation."""
    from qkscope.capture.corpus import Corpus, Passage
    from qkscope.capture.options import CaptureOptions
    from qkscope.capture.run import capture
    from qkscope.capture.texts import Document
    from qkscope.files.runfolder import RunFolder

    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 90, TOKENS) for _ in range(3)]
    documents = [Document(f"d{i}", f"text {i}") for i in range(3)]
    passage = Passage(np.full(48, 7), tuple("a" * 48))
    corpus = Corpus(documents, ids, passage=passage)
    capture(model, corpus, folder, CaptureOptions(window=WINDOW, sample=64), {"id": name})
    layers = RunFolder.open(folder).raw["layers"]
    in_all = _layers(model)
    rotary = sum(layer["rope"] is not None for layer in layers)
    error = undone_error(folder)
    few = len(layers) < in_all
    why = f"{len(layers)} of its {in_all} layers have softmax attention" if few else ""
    if error is not None and error > UNDONE:
        why = f"its keys are changed after the rotation: undoing it leaves {error:.2g} of them, so means predict less"
        return Outcome(name, "partly", why, in_all, len(layers), rotary, error)
    return Outcome(name, "partly" if few else "supported", why, in_all, len(layers), rotary, error)


def undone_error(folder: Path) -> float | None:
    """Return how far keys of layer 0 differ between positions after the rotation is undone, on a text of one token.

    None if it does not rotate; what later layers get can depend on the position in other ways.
    """
    from qkscope.runs.run import open_run
    from qkscope.runs.source import LoadSpec

    source = open_run(folder).source
    (data,), _ = source.load([source.query_heads[0]], LoadSpec(passage=True, rotary=True))
    if data.head.layer != 0 or data.rotary is None or data.passage is None:
        return None
    undone = data.rotary.rope.unrotated(data.passage.k, np.arange(len(data.passage.tokens)))
    return float(np.abs(undone - undone[0]).max() / np.abs(undone).max())


def _layers(model: Any) -> int:
    from qkscope.capture.watch import backbone

    config = backbone(model).config
    names = ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
    return int(next((getattr(config, name) for name in names if getattr(config, name, None)), 0))


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:200] or type(error).__name__


def names() -> tuple[list[str], list[str]]:
    """Model types of causal language models, and of masked encoders that are not among them."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    causal = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return causal, [name for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if name not in causal]


def page(outcomes: Iterable[Outcome]) -> str:
    """Return the text of docs/models.md."""
    found = sorted(outcomes, key=lambda outcome: outcome.name)
    groups = {
        kind: [o for o in found if o.kind == kind] for kind in ("supported", "partly", "refused", "not built", "failed")
    }
    version = importlib.metadata.version("transformers")
    lines = [
        "# Models",
        f"Written by `python -m tools.families --write` with transformers {version}: every causal language model and "
        "masked encoder class that it lists is built as a tiny model with random weights and goes through the gate, "
        "a capture and a check of the rotation. The code of qkscope names no architecture.",
        f"{len(groups['supported'])} supported, {len(groups['partly'])} partly supported, "
        f"{len(groups['refused'])} refused, {len(groups['not built'])} not built, {len(groups['failed'])} failed.",
        "## Supported",
        "Every layer is captured. *rotary*: layers with rotary encoding. *rotation undone*: on a "
        "text of one repeated token, the largest difference between keys of layer 0 at different positions after the "
        "rotation is undone, relative to the keys, which are stored in half precision.",
        "| model type | layers | rotary | rotation undone |\n|---|---|---|---|",
    ]
    lines[-1] += "".join(_row(o) for o in groups["supported"])
    lines += [
        "## Partly supported",
        "| model type | captured | rotary | rotation undone | reason |\n|---|---|---|---|---|",
    ]
    lines[-1] += "".join(
        f"\n| `{o.name}` | {o.captured} of {o.layers} | {o.rotary} | {_error(o)} | {_cell(o.why)} |"
        for o in groups["partly"]
    )
    for title, kind in (("Refused", "refused"), ("Not built", "not built"), ("Failed", "failed")):
        if groups[kind]:
            lines += [f"## {title}", "| model type | reason |\n|---|---|" + "".join(
                f"\n| `{o.name}` | {_cell(o.why)} |" for o in groups[kind]
            )]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def _row(outcome: Outcome) -> str:
    return f"\n| `{outcome.name}` | {outcome.captured} | {outcome.rotary or '–'} | {_error(outcome)} |"


def _error(outcome: Outcome) -> str:
    return "–" if outcome.undone is None else f"{outcome.undone:.0e}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _quietly(name: str, encoder: bool) -> Outcome:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    return tried(name, encoder=encoder)


def main() -> None:
    """Try all models, or the given ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    causal, encoders = names()
    chosen = [(name, name in encoders) for name in (given.names or [*causal, *encoders])]
    outcomes = []
    with ProcessPoolExecutor(2) as pool:
        for outcome in pool.map(_quietly, *zip(*chosen, strict=True)):
            outcomes.append(outcome)
            print(f"{outcome.kind:10} {outcome.name:28} {outcome.captured}/{outcome.layers} {outcome.why}", flush=True)
    if given.write:
        PAGE.write_text(page(outcomes))


if __name__ == "__main__":
    main()
