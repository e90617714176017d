"""The cost of cutting key heads to a window: the loss on plain text, and on the second copy of a repeated text.

Plain text alone is not enough: a long reach serves copying, and a head that seldom attends far may be the one that is
needed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from qkscope.capture.layers import Layer
from qkscope.cause.ablation import NextTokens, PassPlan, seconds_of_a_pass
from qkscope.cause.choice import Cut
from qkscope.cause.intervene import LayerHead, check_free, windowed_layers
from qkscope.cause.lockedmodel import describe
from qkscope.errors import CaptureError
from qkscope.progress import plural
from qkscope.results.effects import mean_with_interval
from qkscope.results.schema import column_names

PLAIN, COPY = "plain", "copy"
_LEAST = 64


def cut_losses(
    model: PreTrainedModel,
    documents: Sequence[torch.Tensor],
    cuts: Mapping[str, Mapping[LayerHead, int]],
    sinks: int,
    on_pass: Callable[[int, int], None] = lambda _done, _in_all: None,
    layers: Mapping[int, Layer] | None = None,
) -> dict[tuple[str, str], np.ndarray]:
    """Return Σ loss and number of tokens of each document (documents, 2), by cut and kind of text."""
    check_lengths(documents, max((w for windows in cuts.values() for w in windows.values()), default=0))
    texts = {PLAIN: [(document, 0) for document in documents], COPY: [_twice(document) for document in documents]}
    check_free(model)
    layers = layers or describe(model)
    next_tokens = NextTokens.of(model, documents[0].to(model.device))
    done, in_all = 0, len(cuts) * sum(map(len, texts.values()))
    losses: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for name, windows in cuts.items():
        with windowed_layers(model, layers, windows, sinks):
            for kind, of_kind in texts.items():
                for document, first in of_kind:
                    losses.setdefault((name, kind), []).append(_loss(next_tokens, document, first))
                    done += 1
                    on_pass(done, in_all)
    return {key: np.array(values, dtype=float) for key, values in losses.items()}


def plan_of(model: PreTrainedModel, documents: Sequence[torch.Tensor], cuts: Sequence[Cut]) -> PassPlan:
    """Return the passes that ``cut_table`` makes, after timing one."""
    length = round(float(np.mean([len(document) for document in documents])))
    passes = {f"to measure {plural(len(cuts), 'cut')} on text and on copies": 2.0 * len(cuts) * len(documents)}
    return PassPlan(passes, length, seconds_of_a_pass(model, documents[0]))


def cost_without_sinks(
    locked: Any, documents: Sequence[torch.Tensor], cut: Cut, sinks: int, on_pass: Callable[[int, int], None]
) -> dict[str, float]:
    """Return the rise of the loss on each kind of text if a cut keeps no first tokens instead of ``sinks``."""
    losses = {
        kept: cut_losses(locked.model, documents, {"": cut.windows}, kept, on_pass, locked.layers)
        for kept in (0, sinks)
    }
    mean = {
        (kept, text): sums[:, 0].sum() / sums[:, 1].sum() for kept in losses for (_, text), sums in losses[kept].items()
    }
    return {text: float(mean[0, text] - mean[sinks, text]) for text in (PLAIN, COPY)}


def check_lengths(documents: Sequence[torch.Tensor], window: int) -> None:
    """Raise an error if a document is too short to be repeated, or if its first copy lies within the window."""
    shortest = min(map(len, documents))
    if shortest // 2 <= window:
        raise CaptureError(
            f"a text of {shortest} tokens is too short for a window of {window}: the first copy is within it; "
            "give texts of more than twice the window (and --window), or a smaller --cut"
        )
    if shortest < _LEAST:
        raise CaptureError(f"expected documents of {_LEAST} tokens or more, got one of {shortest}; give longer --texts")


def _twice(document: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the first half of a document twice, and the index from which the second copy is predicted."""
    half = document[: len(document) // 2]
    return torch.cat([half, half]), len(half)


def _loss(next_tokens: NextTokens, document: torch.Tensor, first: int) -> tuple[float, int]:
    """Return Σ −log p over the tokens that follow token ``first``, and their number."""
    losses = next_tokens.losses(document.to(next_tokens.model.device))[first:]
    return float(losses.sum()), len(losses)


def cut_table(
    locked: Any, documents: Sequence[Any], cuts: Sequence[Cut], model: str, on_pass: Callable[[int, int], None]
) -> pd.DataFrame:
    """Measure the cuts on a loaded model."""
    named = {f"{number:03d}": cut.windows for number, cut in enumerate(cuts)}
    losses = cut_losses(locked.model, documents, named, cuts[0].sinks, on_pass, locked.layers)
    in_all = max(len(cut.heads) for cut in cuts)
    length = float(np.mean([len(document) for document in documents]))
    entries = locked.entries
    visible_keys = {layer: min(length, entry.sliding_window or length) for layer, entry in entries.items()}
    cache = sum(visible_keys[layer] * len(entry.key_heads) for layer, entry in entries.items())
    rows, draw = [], 0
    for number, cut in enumerate(cuts):
        share = len(cut.heads) / max(in_all, 1)
        saved = sum(max(0.0, visible_keys[layer] - cut.window - cut.sinks) for layer, _ in cut.heads) / cache
        for text in ("plain", "copy"):
            sums = losses[f"{number:03d}", text]
            nll, low, high = mean_with_interval(sums[:, 0], sums[:, 1])
            rows.append(
                {"model": model, "family": "", "order": cut.order, "draw": draw if cut.order == "random" else 0}
                | {"text": text, "w": cut.window, "share_cut": share, "cache_saved": saved}
                | {"nll": nll, "nll_low": low, "nll_high": high}
            )
        draw += cut.order == "random"
    return pd.DataFrame(rows, columns=column_names("cuts"))
