"""The mean loss of the documents as they are captured: it tells at once if the input is not what the model reads.

Logits at every token would cost as much as several layers, so a few tokens of each document stand for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from qkscope.capture.sums.tokens import on_device
from qkscope.capture.watch import backbone

LOSS_TOKENS = 64
"""Tokens of each document whose loss is computed, at most: evenly spaced over it."""
GATE_TOKENS = 16
"""Tokens on which the logits are compared with the model's own."""


@dataclass(frozen=True)
class OutputHead:
    """From hidden states to logits."""

    project: Callable[[torch.Tensor], torch.Tensor]
    scale: float
    softcap: float | None

    def losses(self, hidden: torch.Tensor, targets: np.ndarray) -> torch.Tensor:
        """−log p of each target, in float64."""
        logits = self.logits(hidden)
        return torch.nn.functional.cross_entropy(logits, on_device(targets, logits.device), reduction="none").double()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in float32."""
        logits = self.project(hidden).float() * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def output_head(model: PreTrainedModel, ids: torch.Tensor, hidden: torch.Tensor) -> OutputHead | None:
    """How the model computes logits, checked on a few tokens; None if it does so in a way that is not known here."""
    head = model.get_output_embeddings()
    if head is None:
        return None
    config = backbone(model).config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    found = OutputHead(head, scale, getattr(config, "final_logit_softcapping", None))
    try:
        with torch.no_grad():
            own = model(input_ids=ids[:, :GATE_TOKENS].to(hidden.device), use_cache=False).logits[0].float()
            ours = found.logits(hidden[0, :GATE_TOKENS])
    except (TypeError, ValueError, AttributeError):
        return None
    close = own.shape == ours.shape and float((own - ours).norm()) <= 0.02 * float(own.norm())
    return found if close else None


def loss_positions(length: int) -> np.ndarray:
    """Positions of a document whose next token is predicted for the loss.

    >>> loss_positions(4).tolist()
    [0, 1, 2]
    """
    return np.unique(np.linspace(0, length - 2, min(LOSS_TOKENS, max(length - 1, 0))).astype(int))


@dataclass
class LossSums:
    """Sum of the losses of each document, and their number; empty if logits are not known."""

    head: OutputHead | None
    _sums: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """The sums of each document's passes, on their device: a pass does not wait for them."""
    _counts: dict[int, int] = field(default_factory=dict)

    @property
    def of(self) -> dict[int, tuple[float, int]]:
        """Sum and number of each document."""
        return {
            number: (sum(float(part) for part in self._sums[number]), count) for number, count in self._counts.items()
        }

    def add(self, documents: dict[int, np.ndarray], hidden: torch.Tensor, first: int) -> None:
        """Add what one forward pass says: hidden states of documents, by number, at the positions from ``first`` on."""
        if self.head is None:
            return
        for row, (number, ids) in enumerate(documents.items()):
            at = loss_positions(len(ids))
            at = at[(at >= first) & (at < first + hidden.shape[1])]
            self._counts[number] = self._counts.get(number, 0) + len(at)
            sums = self._sums.setdefault(number, [])
            if len(at):
                index = on_device(at - first, hidden.device)
                sums.append(self.head.losses(hidden[row, index], ids[at + 1]).sum())
