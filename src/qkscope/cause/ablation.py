"""The cost of an intervention: the loss and the predictions of documents with and without it.

Predictions are computed a few tokens at a time: with a vocabulary of 262,144, those of 8,192 tokens take 8 GiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from qkscope.capture.loss import OutputHead, output_head
from qkscope.capture.watch import backbone
from qkscope.progress import duration

Intervention = Callable[[], AbstractContextManager[None]]
_CHECKED_TOKENS = 16
_LOGITS = 2**25
"""Logits that are held at once, for one or more tokens."""
_STATES = 2**28
"""Hidden states that are held at once, of one or more interventions."""
MEASURES = ("kl", "delta_nll", "nll", "tokens")


@dataclass(frozen=True)
class NextTokens:
    """The predictions of a model for the next token, from its last hidden states."""

    model: PreTrainedModel
    head: OutputHead | None
    """None if the model computes its logits in an unknown way: then the states are its logits themselves."""

    @classmethod
    def of(cls, model: PreTrainedModel, document: torch.Tensor) -> NextTokens:
        """Return the predictions of a model, whose way to its logits is checked on a few tokens."""
        ids = document.reshape(-1)[None, :_CHECKED_TOKENS]
        with torch.no_grad():
            return cls(
                model, output_head(model, ids, backbone(model)(input_ids=ids, use_cache=False).last_hidden_state)
            )

    def states(self, documents: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state of every token of documents (B, T): (B·T, d)."""
        if self.head is None:
            return self.model(input_ids=documents, use_cache=False).logits.flatten(0, 1)
        states: torch.Tensor = backbone(self.model)(input_ids=documents, use_cache=False).last_hidden_state
        return states.flatten(0, 1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of some states, in float32."""
        return states.float() if self.head is None else self.head.logits(states)

    def losses(self, document: torch.Tensor) -> torch.Tensor:
        """Return −log p of each token of a document (T,) but the first, float64."""
        with torch.no_grad():
            states, following = self.states(document[None])[:-1], document[1:, None]
            parts = [
                -self.logits(states[rows]).log_softmax(-1).gather(-1, following[rows])[:, 0]
                for rows in self.rows(len(states))
            ]
        return torch.cat(parts).double()

    def rows(self, n: int) -> Iterator[slice]:
        """Yield the rows of states whose logits are computed at once."""
        embeddings: Any = self.model.get_input_embeddings()
        size = max(1, _LOGITS // int(embeddings.weight.shape[0]))
        return (slice(first, first + size) for first in range(0, n, size))


def costs(
    model: PreTrainedModel,
    document: torch.Tensor,
    interventions: Mapping[str, Intervention],
    on_pass: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Return sums over the tokens of a document (T,) by octave of position: MEASURES of each intervention (octaves, 4).

    Predictions are compared at all tokens but the last, which no token follows.
    """
    next_tokens = NextTokens.of(model, document)
    sums: dict[str, np.ndarray] = {}
    with torch.no_grad():
        plain = next_tokens.states(document[None])[:-1]
        on_pass()
        at_once = max(1, _STATES // max(plain.numel(), 1))  # the plain logits are computed once for all of them
        for first in range(0, len(interventions), at_once):
            changed = {}
            for name in list(interventions)[first : first + at_once]:
                with interventions[name]():
                    changed[name] = next_tokens.states(document[None])[:-1]
                on_pass()
            sums |= _sums(next_tokens, plain, changed, document)
    return sums


@dataclass(frozen=True)
class PassPlan:
    """The passes of some measurement, before it is made."""

    passes: dict[str, float]
    """Forward passes of each step."""
    length: int
    """Mean number of tokens of a pass."""
    seconds: float
    """Time of one pass."""

    def __str__(self) -> str:
        """The time in all, and the passes of each step."""
        steps = ", ".join(f"{count:,.0f} {step}" for step, count in self.passes.items())
        total = sum(self.passes.values()) * self.seconds
        return (
            f"about {duration(total)}: forward passes over {self.length:,} tokens of {self.seconds:.2g} s each, {steps}"
        )


def seconds_of_a_pass(model: PreTrainedModel, document: torch.Tensor) -> float:
    """Return the time of the loss of a document (T,), the second time: at first, memory is taken."""
    document, times = document.to(model.device), []
    next_tokens = NextTokens.of(model, document)
    for part in (document[: len(document) // 4 + 2], document):
        started = time.perf_counter()
        float(next_tokens.losses(part).sum())
        times.append(time.perf_counter() - started)
    return times[-1]


def octaves(length: int) -> np.ndarray:
    """Return the octave of each position 0 … length − 1: ⌊log₂ t⌋, and 0 for the first.

    >>> octaves(5).tolist()
    [0, 0, 1, 1, 2]
    """
    return np.log2(np.maximum(np.arange(length), 1)).astype(int)


def _sums(
    next_tokens: NextTokens, plain: torch.Tensor, changed: Mapping[str, torch.Tensor], document: torch.Tensor
) -> dict[str, np.ndarray]:
    following, values = document[1:, None], {name: list[torch.Tensor]() for name in changed}
    for rows in next_tokens.rows(len(plain)):
        p = next_tokens.logits(plain[rows]).log_softmax(-1)
        chances, nll = p.exp(), -p.gather(-1, following[rows])[:, 0].double()
        for name, states in changed.items():
            c = next_tokens.logits(states[rows]).log_softmax(-1)
            divergence = (chances * (p - c)).sum(-1).double()
            rise = -c.gather(-1, following[rows])[:, 0].double() - nll
            values[name].append(torch.stack([divergence, rise, nll, torch.ones_like(nll)], -1).cpu())
    octave = octaves(len(plain))
    sums = {name: np.zeros((int(octave.max(initial=0)) + 1, len(MEASURES))) for name in changed}
    for name, parts in values.items():
        np.add.at(sums[name], octave, torch.cat(parts).numpy())
    return sums
