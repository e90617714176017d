"""Attention scores and weights of some queries, recomputed from one attention call as the model computes them.

The model's own mask, scaling, softcap and learned sinks are respected. The parity gate compares what follows from these
weights with the model's own output, so whatever is measured with them rests on the same check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qkscope.capture.attention import Attention


@dataclass(frozen=True)
class Weights:
    """Of one document: scores as the softmax sees them, −∞ or nearly so where masked, and what it makes of them."""

    scores: torch.Tensor
    """(H, n, S)."""
    weights: torch.Tensor
    """(H, n, S); sums to less than 1 over the keys where the layer has learned sinks."""


HIDDEN = -1e30
"""Scores below this are masked."""


def attention_weights(attention: Attention, row: int, columns: torch.Tensor) -> Weights:
    """Scores and weights of the queries in these columns of one document of a call."""
    (_, query, key, *rest), options = attention.call
    mask = rest[1] if len(rest) > 1 else options.get("attention_mask")
    q, k = query[row].index_select(1, columns).float(), spread(key[row], query[row]).float()
    scores = q @ k.transpose(-1, -2) * attention.scaling
    softcap = options.get("softcap")
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    query_at = columns + key.shape[2] - query.shape[2]
    scores = scores + _mask(mask, attention, row, columns, query_at, key.shape[2])
    sinks = options.get("s_aux", getattr(attention.module, "sinks", None))
    if sinks is None:
        return Weights(scores, scores.softmax(-1))
    extra = sinks.float().reshape(-1, 1, 1).expand(*scores.shape[:2], 1)
    return Weights(scores, torch.cat([scores, extra], -1).softmax(-1)[..., :-1])


def _mask(
    mask: Any, attention: Attention, row: int, columns: torch.Tensor, query_at: torch.Tensor, keys: int
) -> torch.Tensor:
    """What is added to the scores: the model's own mask, or the causal one it implies."""
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        part = mask[min(row, len(mask) - 1)].index_select(1, columns)[..., :keys]
        return torch.zeros_like(part, dtype=torch.float32).masked_fill(~part, -torch.inf) if _is_bool(part) else part
    key_at = torch.arange(keys, device=columns.device)
    hidden = key_at > query_at[:, None]
    if attention.sliding_window is not None:
        hidden = hidden | (query_at[:, None] - key_at >= attention.sliding_window)
    return torch.zeros(hidden.shape, device=columns.device).masked_fill(hidden, -torch.inf)


def _is_bool(mask: torch.Tensor) -> bool:
    return mask.dtype == torch.bool


def spread(part: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Key or value heads (H, S, d) repeated for the query heads that read them."""
    return part.repeat_interleave(query.shape[0] // part.shape[0], dim=0)
