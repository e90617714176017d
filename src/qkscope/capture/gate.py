"""The gate before every run: watching must not change the model, and what is watched must be what attends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from qkscope.capture.watch import Attention, OnAttention, OnOutput, watching
from qkscope.errors import CaptureError

Watch = Callable[[OnAttention, OnOutput], AbstractContextManager[None]]
"""A replacement for ``watching``, for models that are watched in another way."""

_log = logging.getLogger("qkscope")
_ATTEMPTS = 4
"""Pairs of passes, plain and watched, that may differ before watching is blamed."""
_ROWS = 128
"""Queries whose attention is recomputed."""

_GATE = 256, 1024
"""Smallest and largest number of tokens of the first document that the gate uses."""
_SHARE = 128
"""Between these, the gate uses one in so many of all tokens, so that its passes take little of the whole time."""


def gate_tokens(in_all: int, window: int | None) -> int:
    """Return the number of tokens of the first document that the gate uses.

    >>> gate_tokens(1000, None), gate_tokens(64_000, None), gate_tokens(10**6, 512)
    (256, 500, 512)
    """
    least, most = _GATE
    return min(max(least, in_all // _SHARE), most, window or most)


def check(model: nn.Module, forward: Callable[[], torch.Tensor], watch: Watch | None = None) -> list[Attention]:
    """Run ``forward`` plainly and watched; return the attention calls, or raise if anything differs.

    Hidden states are compared bit for bit, and each layer's attention output is recomputed from q and k by hand. Matrix
    products need not repeat themselves to the last bit (it can depend on where in memory their operands lie), so a
    difference counts only if no watched pass equals any plain one in a few attempts.
    """
    watch = watch or partial(watching, model)
    plain: list[torch.Tensor] = []
    attentions: list[Attention] = []
    errors: dict[int, float] = {}

    def compare(attention: Attention, output: torch.Tensor) -> None:
        errors[attention.layer] = _recomputed_error(attention, output)

    for _ in range(_ATTEMPTS):
        with torch.compiler.set_stance("force_eager"):  # as when it is watched
            plain.append(forward())
        _refuse_non_finite(model, plain[0])
        attentions.clear()
        with watch(attentions.append, compare):
            watched = forward()
        if any(torch.equal(hidden, watched) for hidden in plain):
            break
    else:
        raise CaptureError("parity: the model's hidden states change when its attention is watched")
    _refuse_several_calls(attentions)
    worst = max(errors, key=lambda layer: errors[layer])
    limit = 1e-3 if attentions[0].q.dtype == torch.float32 else 5e-2
    if not errors[worst] < limit:
        raise CaptureError(
            f"parity: attention recomputed from q and k of layer {worst} is off by {errors[worst]:.1e} of its size; "
            "its scores are not products of queries and keys alone"
        )
    _log.info(
        "checked on %d tokens: watching changes no bit, and attention recomputed from q and k is off by at most %.0e",
        attentions[0].q.shape[2], errors[worst],
    )  # fmt: skip
    return attentions


def _refuse_several_calls(attentions: list[Attention]) -> None:
    """Raise an error if a layer attends more than once in a pass, or if no attention was called."""
    if not attentions:
        raise CaptureError("parity: the model's attention layers were not called")
    calls = Counter(attention.layer for attention in attentions)
    layer, most = calls.most_common(1)[0]
    if most > 1:
        raise CaptureError(
            f"layer {layer} attends {most} times in one pass (two maps per layer, or layers that are used again); "
            "such layers are not supported"
        )


def _refuse_non_finite(model: nn.Module, hidden: torch.Tensor) -> None:
    """Raise an error if hidden states are not finite, and name the weights that are not, if any."""
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
    _, query, _, value = attention.call[0][:4]
    length = query.shape[2]
    columns = torch.arange(max(0, length - _ROWS), length, device=query.device)
    values = for_each_query_head(value[0], query[0]).float()
    expected = (attention_weights(attention, columns.expand(len(query), -1)).weights[0] @ values).transpose(0, 1)
    got = output.reshape(output.shape[0], length, query.shape[1], -1)[0, columns].float()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


_HIDDEN = -1e4
"""Masks add less than this to a masked score."""


@dataclass(frozen=True)
class Weights:
    """Attention of some queries: scores before the softmax, −∞ or nearly so where masked, and weights after it."""

    scores: torch.Tensor
    """(B, H, n, S)."""
    weights: torch.Tensor
    """(B, H, n, S); sums to less than 1 over the keys where the layer has learned sinks."""


def attention_weights(attention: Attention, columns: torch.Tensor, mask: torch.Tensor | None = None) -> Weights:
    """Scores and weights of the queries in these columns (B, n) of each document; ``mask`` is their ``mask_of``."""
    (_, query, key, *_), options = attention.call
    (batch, heads, _, d), n, key_heads = query.shape, columns.shape[1], key.shape[1]
    q = query.gather(2, columns[:, None, :, None].expand(-1, heads, -1, d))
    products = _product(
        q.reshape(batch * key_heads, -1, d), key.reshape(batch * key_heads, -1, d).transpose(1, 2)
    ).view(batch, heads, n, -1)
    mask = mask_of(attention, columns).float() if mask is None else mask
    softcap = options.get("softcap")
    if softcap is None:
        scores = torch.add(mask, products, alpha=attention.scaling)
    else:
        scores = mask + torch.tanh(products * (attention.scaling / softcap)) * softcap
    sinks = options.get("s_aux", getattr(attention.module, "sinks", None))
    if sinks is None:
        return Weights(scores, scores.softmax(-1))
    extra = sinks.float().reshape(-1, 1, 1).expand(*scores.shape[:3], 1)
    return Weights(scores, torch.cat([scores, extra], -1).softmax(-1)[..., :-1])


def own_mask(attention: Attention) -> torch.Tensor | None:
    """The mask of a call, if it has one for each query and key."""
    positional, options = attention.call[0][3:], attention.call[1]
    mask = positional[1] if len(positional) > 1 else options.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.ndim == 4 else None


def sees_later(attention: Attention) -> bool:
    """True if queries also see later keys, as in encoders, by the call's mask or, without one, by its module."""
    if own_mask(attention) is None:
        causal = attention.call[1].get("is_causal")
        return not (getattr(attention.module, "is_causal", True) if causal is None else causal)
    first = torch.zeros(len(attention.q), 1, dtype=torch.long, device=attention.q.device)
    later = mask_of(attention, first)[:1, ..., 1:]
    return later.numel() > 0 and bool(later.float().max() > _HIDDEN)


def mask_of(attention: Attention, columns: torch.Tensor) -> torch.Tensor:
    """The mask added to the scores of the queries in these columns (B, n): the model's own, or the one it implies."""
    _, query, key = attention.call[0][:3]
    keys, mask = key.shape[2], own_mask(attention)
    if mask is not None:
        of_queries = mask[..., :keys].expand(len(columns), -1, query.shape[2], -1)
        part = of_queries.gather(2, columns[:, None, :, None].expand(-1, mask.shape[1], -1, of_queries.shape[-1]))
        if part.dtype != torch.bool:
            return part
        return torch.zeros_like(part, dtype=torch.float32).masked_fill(~part, -torch.inf)
    query_at = (columns + keys - query.shape[2])[:, None, :, None]
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


def for_each_query_head(part: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Key or value heads (H, S, d) repeated for the query heads that read them."""
    return part.repeat_interleave(query.shape[0] // part.shape[0], dim=0)
