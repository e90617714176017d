"""The gate before every run: watching must not change the model, and what is watched must be what attends."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qkscope.capture.attention import Attention, watching
from qkscope.errors import CaptureError

_ATTEMPTS = 4
"""Pairs of passes, plain and watched, that may differ before watching is blamed."""
_ROWS = 128
"""Queries whose attention is recomputed."""


def check(model: nn.Module, forward: Any) -> list[Attention]:
    """Run ``forward`` plainly and watched; returns what was seen, or raises if anything differs.

    Hidden states are compared bit for bit, and each layer's attention output is recomputed from q and k by hand. Matrix
    products need not repeat themselves to the last bit (it can depend on where in memory their operands lie), so a
    difference counts only if no watched pass equals any plain one in a few attempts.
    """
    plain: list[torch.Tensor] = []
    seen: list[Attention] = []
    errors: dict[int, float] = {}

    def compare(attention: Attention, output: torch.Tensor) -> None:
        errors[attention.layer] = _recomputed_error(attention, output)

    for _ in range(_ATTEMPTS):
        plain.append(forward())
        _refuse_non_finite(model, plain[0])
        seen.clear()
        with watching(model, seen.append, compare):
            watched = forward()
        if any(torch.equal(one, watched) for one in plain):
            break
    else:
        raise CaptureError("parity: the model's hidden states change when its attention is watched")
    if len({attention.layer for attention in seen}) != len(seen) or not seen:
        raise CaptureError(f"parity: saw {len(seen)} attention calls of {len({a.layer for a in seen})} layers")
    worst = max(errors, key=lambda layer: errors[layer])
    limit = 1e-3 if seen[0].q.dtype == torch.float32 else 5e-2
    if not errors[worst] < limit:
        raise CaptureError(
            f"parity: attention recomputed from q and k of layer {worst} is off by {errors[worst]:.1e} of its size"
        )
    return seen


def _refuse_non_finite(model: nn.Module, hidden: torch.Tensor) -> None:
    """Tell weights that are not finite, and states that overflow, from a model that changes when it is watched."""
    if torch.isfinite(hidden).all():
        return
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CaptureError(
                f"the model's weights contain non-finite values, first in {name}; choose another checkpoint"
            )
    raise CaptureError("the model's hidden states contain non-finite values; try --dtype float32 or bfloat16")


def _recomputed_error(attention: Attention, output: torch.Tensor) -> float:
    """Relative error of softmax(scaling · qkᵀ + mask)v, for the last queries, against the model's own output."""
    (_, query, key, value, *rest), options = attention.call
    mask = rest[0] if rest else options.get("attention_mask")
    n = min(_ROWS, query.shape[2])
    q, k, v = query[:, :, -n:].float(), _spread(key, query).float(), _spread(value, query).float()
    scores = q @ k.transpose(-1, -2) * attention.scaling
    softcap = options.get("softcap")
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + _mask(mask, attention, n, k.shape[2], scores)
    sinks = options.get("s_aux", getattr(attention.module, "sinks", None))
    if sinks is not None:
        extra = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:2], n, 1)
        scores = torch.cat([scores, extra], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    expected = (weights @ v).transpose(1, 2)
    got = output.reshape(output.shape[0], query.shape[2], query.shape[1], -1)[:, -n:].float()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


def _mask(mask: Any, attention: Attention, n: int, keys: int, scores: torch.Tensor) -> torch.Tensor:
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        part = mask[:, :, -n:, :keys]
        return torch.zeros_like(scores).masked_fill(~part, -torch.inf) if part.dtype == torch.bool else part.float()
    query_at = torch.arange(keys - n, keys, device=scores.device)[:, None]
    key_at = torch.arange(keys, device=scores.device)
    hidden = key_at > query_at
    if attention.sliding_window is not None:
        hidden = hidden | (query_at - key_at >= attention.sliding_window)
    return torch.zeros(n, keys, device=scores.device).masked_fill(hidden, -torch.inf)


def _spread(part: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Key or value heads repeated for the query heads that read them."""
    return part.repeat_interleave(query.shape[1] // part.shape[1], dim=1)
