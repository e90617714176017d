"""The mean loss of the captured documents, which shows at once if the input is not what the model expects.

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
_AT_ONCE = 1024
"""Tokens whose logits are in memory at once."""
GATE_TOKENS = 16
"""Tokens on which computed logits are compared with the model's own."""


@dataclass(frozen=True)
class OutputHead:
    """The map from hidden states to logits."""

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
    """Return the model's map to logits, checked on a few tokens; None if it computes them in an unknown way."""
    head = model.get_output_embeddings()
    if head is None:
        return None
    config = backbone(model).config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    candidate = OutputHead(head, scale, getattr(config, "final_logit_softcapping", None))
    try:
        with torch.no_grad():
            expected = model(input_ids=ids[:, :GATE_TOKENS].to(hidden.device), use_cache=False).logits[0].float()
            computed = candidate.logits(hidden[0, :GATE_TOKENS])
    except (TypeError, ValueError, AttributeError):
        return None
    close = expected.shape == computed.shape and float((expected - computed).norm()) <= 0.02 * float(expected.norm())
    return candidate if close else None


def loss_positions(length: int) -> np.ndarray:
    """Return the positions of a document whose next-token loss is computed.

    >>> loss_positions(4).tolist()
    [0, 1, 2]
    """
    return np.unique(np.linspace(0, length - 2, min(LOSS_TOKENS, max(length - 1, 0))).astype(int))


@dataclass
class LossSums:
    """Sum of the losses of each document, and their number; empty if logits cannot be computed."""

    head: OutputHead | None
    _passes: list[tuple[list[int], list[int], torch.Tensor]] = field(default_factory=list)
    """Documents of each pass, their tokens, and the losses of these, on their device: a pass does not wait for them."""
    _counts: dict[int, int] = field(default_factory=dict)

    @property
    def of(self) -> dict[int, tuple[float, int]]:
        """Sum and number of each document."""
        sums = dict.fromkeys(self._counts, 0.0)
        for documents, counts, losses in self._passes:
            parts = np.split(losses.cpu().numpy(), np.cumsum(counts)[:-1])
            for number, part in zip(documents, parts, strict=True):
                sums[number] += float(part.sum())
        return {number: (sums[number], count) for number, count in self._counts.items()}

    @torch.no_grad()
    def add(self, documents: dict[int, np.ndarray], hidden: torch.Tensor, first: int) -> None:
        """Add one forward pass: hidden states of documents, by number, at positions from ``first`` on."""
        if self.head is None:
            return
        chosen = [loss_positions(len(ids)) for ids in documents.values()]
        chosen = [at[(at >= first) & (at < first + hidden.shape[1])] for at in chosen]
        counts = [len(positions) for positions in chosen]
        for number, count in zip(documents, counts, strict=True):
            self._counts[number] = self._counts.get(number, 0) + count
        rows = np.repeat(np.arange(len(counts)), counts)
        index = on_device(np.stack([rows, np.concatenate(chosen) - first]), hidden.device)
        targets = np.concatenate([ids[at + 1] for ids, at in zip(documents.values(), chosen, strict=True)])
        losses = [
            self.head.losses(hidden[tuple(index[:, part])], targets[part])
            for part in (slice(start, start + _AT_ONCE) for start in range(0, len(rows), _AT_ONCE))
        ]
        if losses:
            self._passes.append((list(documents), counts, torch.cat(losses)))
