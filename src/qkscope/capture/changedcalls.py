"""How the attention calls of a layer are changed by each intervention of intervene.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qkscope.capture.attention import Attention, AttentionFunction, Rewrite
from qkscope.capture.headcalls import of_heads, with_heads
from qkscope.capture.lockedmodel import LockedModel, turned
from qkscope.capture.placement import Placement
from qkscope.capture.rope import temperature
from qkscope.capture.weights import own_mask


@dataclass
class ScaledLayer:
    """The heads of one layer whose terms are scaled."""

    heads: list[int]
    query_mean: torch.Tensor
    """μ̃_q (n, d)."""
    key_mean: torch.Tensor
    """μ̃_k of the key head that each of them reads (n, d)."""
    factors: torch.Tensor
    """On position, key, query and content (n, 4), or for each text (B, n, 4)."""
    placement: Placement
    skip_first: int

    @classmethod
    def of(cls, locked: LockedModel, layer: int, heads: list[int], factors: torch.Tensor) -> ScaledLayer:
        """Of these query heads of a layer."""
        means = locked.means(layer)
        keys = [locked.key_head(head) for head in heads]
        placement = Placement(locked.layers[layer].rope)
        return cls(heads, means.queries(heads), means.keys(keys), factors, placement, locked.skip_first)

    def rewrite(self, attention: Attention) -> Callable[[AttentionFunction], Any]:
        """The call with the terms of these heads scaled."""
        q, k, v = of_heads(attention, self.heads)
        rope, placed = self.placement.rope, self.placement.place(attention)
        mean_q = turned(self.query_mean.to(q.device), rope, placed.at_queries)[None]
        mean_k = turned(self.key_mean.to(k.device), rope, placed.at_keys)
        heat = None if rope is None else temperature(attention, rope)
        mean_q = (mean_q if heat is None else mean_q * heat[:, None, :, None]).expand(q.shape)
        position, key, query, content = self.factors.to(q.device)[..., None, None].unbind(-3)
        rest = k.float() - mean_k
        sinks = placed.key_positions(k.shape[2], k.device)[:, None] < self.skip_first
        of_mean = torch.where(sinks, k.float(), position * mean_k + key * rest)
        of_rest = torch.where(sinks, k.float(), query * mean_k + content * rest)
        long_q, long_k = torch.cat([mean_q, q.float() - mean_q], -1), torch.cat([of_mean, of_rest], -1)
        changed = long_q.to(q.dtype), long_k.to(k.dtype), v
        return lambda original: with_heads(original, attention, self.heads, changed)


def cut(windows: dict[int, int], sinks: int, placement: Placement) -> Rewrite:
    """Calls in which the query heads of some key heads see a window and the first keys alone."""

    def rewrite(attention: Attention) -> Callable[[AttentionFunction], Any] | None:
        _, query, key = attention.call[0][:3]
        keys, per_key = key.shape[2], query.shape[1] // key.shape[1]
        shorter = {head: w for head, w in windows.items() if w < keys}
        if not shorter:
            return None
        placed = placement.place(attention)
        key_at = placed.key_positions(keys, query.device)
        query_at = placed.query_positions(query.shape[2], keys, query.device)
        distance = query_at[:, None] - key_at
        width = torch.tensor([w for w in shorter.values() for _ in range(per_key)], device=query.device)
        width = (width if len(set(shorter.values())) > 1 else width[:1])[:, None, None]
        hidden = (distance < 0) | ((distance >= width) & (key_at >= sinks))
        heads = [head * per_key + i for head in shorter for i in range(per_key)]
        changed, mask = of_heads(attention, heads), _with_own_mask(attention, hidden, distance)
        return lambda original: with_heads(original, attention, heads, changed, mask)

    return rewrite


def without_coordinates(kept: torch.Tensor) -> Rewrite:
    """Calls with some coordinates (H, d) of their queries set to zero, which takes them out of every score."""

    def rewrite(attention: Attention) -> Callable[[AttentionFunction], Any]:
        (module, query, *rest), options = attention.call
        return lambda original: original(module, query * kept.to(query.device, query.dtype)[:, None], *rest, **options)

    return rewrite


def straightened(
    heads: list[int], beta: torch.Tensor, mean: torch.Tensor, skip_first: int, placement: Placement
) -> Rewrite:
    """Calls in which the keys of some query heads lose β(t − t̄), with β (n, d) and t̄ (n,) of each."""

    def rewrite(attention: Attention) -> Callable[[AttentionFunction], Any]:
        q, k, v = of_heads(attention, heads)
        at = placement.place(attention).key_positions(k.shape[2], k.device)
        away = (at - mean.to(k.device)[:, None]) * (at >= skip_first)
        straight = k.float() - away[..., None] * beta.to(k.device)[:, None]
        return lambda original: with_heads(original, attention, heads, (q, straight.to(k.dtype), v))

    return rewrite


def _with_own_mask(attention: Attention, hidden: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """A mask that also hides what the call's own mask or sliding window hides."""
    dtype, smallest = attention.q.dtype, torch.finfo(attention.q.dtype).min
    own = own_mask(attention)
    if own is None and attention.sliding_window is not None:
        hidden = hidden | (distance >= attention.sliding_window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, smallest)[None]
    if own is None:
        return mask
    own = own[..., : mask.shape[-1]]
    if own.dtype == torch.bool:
        return mask.masked_fill(~own, smallest)
    return torch.clamp(mask + own, min=smallest)
