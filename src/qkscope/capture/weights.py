"""Attention scores and weights of some queries, recomputed from one attention call as the model computes them.

The model's own mask, scaling, softcap and learned sinks are respected. The parity gate compares what follows from these
weights with the model's own output, so whatever is measured with them rests on the same check.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qkscope.capture.attention import Attention

_HIDDEN = -1e4
"""What is added to a score that is masked is less than this."""


@dataclass(frozen=True)
class Weights:
    """Of one document: scores as the softmax sees them, −∞ or nearly so where masked, and what it makes of them."""

    scores: torch.Tensor
    """(H, n, S)."""
    weights: torch.Tensor
    """(H, n, S); sums to less than 1 over the keys where the layer has learned sinks."""


def attention_weights(
    attention: Attention, row: int, columns: torch.Tensor, mask: torch.Tensor | None = None
) -> Weights:
    """Scores and weights of the queries in these columns of one document of a call; ``mask`` is its ``mask_of``."""
    (_, query, key, *_), options = attention.call
    q, k = query[row].index_select(1, columns), key[row]
    products = _product(q.reshape(len(k), -1, q.shape[-1]), k.transpose(1, 2)).view(len(q), len(columns), -1)
    mask = mask_of(attention, row, columns).float() if mask is None else mask
    softcap = options.get("softcap")
    if softcap is None:
        scores = torch.add(mask, products, alpha=attention.scaling)
    else:
        scores = mask + torch.tanh(products * (attention.scaling / softcap)) * softcap
    sinks = options.get("s_aux", getattr(attention.module, "sinks", None))
    if sinks is None:
        return Weights(scores, scores.softmax(-1))
    extra = sinks.float().reshape(-1, 1, 1).expand(*scores.shape[:2], 1)
    return Weights(scores, torch.cat([scores, extra], -1).softmax(-1)[..., :-1])


def own_mask(attention: Attention) -> torch.Tensor | None:
    """The mask of a call, if it has one for each query and key."""
    rest, options = attention.call[0][3:], attention.call[1]
    mask = rest[1] if len(rest) > 1 else options.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.ndim == 4 else None


def sees_later(attention: Attention) -> bool:
    """Whether queries also see later keys, as in encoders: as the call's mask says or, without one, its module."""
    if own_mask(attention) is None:
        causal = attention.call[1].get("is_causal")
        return not (getattr(attention.module, "is_causal", True) if causal is None else causal)
    first = torch.zeros(1, dtype=torch.long, device=attention.q.device)
    later = mask_of(attention, 0, first)[..., 1:]
    return later.numel() > 0 and bool(later.float().max() > _HIDDEN)


def mask_of(attention: Attention, row: int, columns: torch.Tensor) -> torch.Tensor:
    """What is added to the scores of these queries: the model's own mask, or the one it implies."""
    _, query, key = attention.call[0][:3]
    keys, mask = key.shape[2], own_mask(attention)
    if mask is not None:
        of_row = mask[min(row, len(mask) - 1)]
        of_row = of_row.expand(-1, query.shape[2], -1) if of_row.shape[1] == 1 else of_row
        part = of_row.index_select(1, columns)[..., :keys]
        return torch.zeros_like(part, dtype=torch.float32).masked_fill(~part, -torch.inf) if _is_bool(part) else part
    query_at = (columns + keys - query.shape[2])[:, None]
    key_at = torch.arange(keys, device=columns.device)
    distance = query_at - key_at
    if sees_later(attention):
        distance = distance.abs()
    hidden = (distance < 0) | (distance >= (attention.sliding_window or keys))
    return torch.zeros(hidden.shape, device=columns.device).masked_fill(hidden, -torch.inf)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched product in float32; of half-precision vectors on a GPU without converting them."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _is_bool(mask: torch.Tensor) -> bool:
    return mask.dtype == torch.bool


def for_each_query_head(part: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Key or value heads (H, S, d) repeated for the query heads that read them."""
    return part.repeat_interleave(query.shape[0] // part.shape[0], dim=0)
