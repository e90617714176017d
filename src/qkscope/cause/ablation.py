"""The cost of an intervention: the loss and the predictions of documents with and without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import numpy as np
import torch
from transformers import PreTrainedModel

Intervention = Callable[[], AbstractContextManager[None]]
_ROWS = 1024
"""Tokens whose predictions are compared at once."""
MEASURES = ("kl", "delta_nll", "nll", "tokens")


def costs(
    model: PreTrainedModel,
    document: torch.Tensor,
    interventions: Mapping[str, Intervention],
    on_pass: Callable[[], None] = lambda: None,
    first: int = 0,
) -> dict[str, np.ndarray]:
    """Return sums over the tokens of a document (T,) by octave of position: MEASURES of each intervention (octaves, 4).

    Predictions are compared at all tokens from ``first`` on except the last, which no token follows.
    """
    plain = predictions(model, document)
    on_pass()
    sums = {}
    for name, intervention in interventions.items():
        with intervention():
            changed = predictions(model, document)
        sums[name] = _sums(plain, changed, document, first)
        on_pass()
    return sums


def predictions(model: PreTrainedModel, document: torch.Tensor) -> torch.Tensor:
    """Return log probabilities of the next token at every token but the last (T − 1, vocabulary)."""
    with torch.no_grad():
        logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
        return torch.cat([rows.float().log_softmax(-1) for rows in logits.split(_ROWS)])


def octaves(length: int) -> np.ndarray:
    """Return the octave of each position 0 … length − 1: ⌊log₂ t⌋, and 0 for the first.

    >>> octaves(5).tolist()
    [0, 0, 1, 1, 2]
    """
    return np.log2(np.maximum(np.arange(length), 1)).astype(int)


def _sums(plain: torch.Tensor, changed: torch.Tensor, document: torch.Tensor, first: int) -> np.ndarray:
    following = document[1:, None]
    nll, changed_nll = (-part.gather(-1, following)[:, 0].double() for part in (plain, changed))
    divergence = torch.cat(
        [(p.exp() * (p - c)).sum(-1).double() for p, c in zip(plain.split(_ROWS), changed.split(_ROWS), strict=True)]
    )
    values = torch.stack([divergence, changed_nll - nll, nll, torch.ones_like(nll)], -1).cpu().numpy()
    octave = octaves(len(values))
    counted = np.arange(len(values)) >= first
    sums = np.zeros((int(octave.max(initial=0)) + 1, len(MEASURES)))
    np.add.at(sums, octave[counted], values[counted])
    return sums
