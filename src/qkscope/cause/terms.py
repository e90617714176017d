"""Recompute attention calls with a term removed or a window cut, with and without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qkscope.capture.gate import own_mask
from qkscope.capture.rope import LayerRope, temperature
from qkscope.capture.watch import Attention, AttentionFunction, Rewrite, implementation
from qkscope.cause.lockedmodel import LockedModel, rotated
from qkscope.errors import CaptureError
from qkscope.options import MOST_TOKENS


class ModuleProxy:
    """A module as an attention function sees it, with some attributes replaced."""

    def __init__(self, module: nn.Module, **replaced: Any) -> None:
        vars(self).update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


def of_heads(attention: Attention, heads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of these query heads, each with its own key head: (B, n, T or S, d)."""
    _, query, key, value = attention.call[0][:4]
    index = torch.as_tensor(list(heads), device=query.device)
    of_key = index // (query.shape[1] // key.shape[1])
    return query.index_select(1, index), key.index_select(1, of_key), value.index_select(1, of_key)


def with_heads(
    original: AttentionFunction,
    attention: Attention,
    heads: Sequence[int],
    changed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None = None,
) -> Any:
    """Return the result of the call in which these heads have other queries, keys and values, and another mask."""
    (module, query, key, value, *more_arguments), options = attention.call
    q, k, v = changed
    if q.shape[-1] > v.shape[-1] and not (q.is_cuda and q.dtype == torch.float32):
        # Most kernels need one length for all three.
        v = nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
    index = torch.as_tensor(list(heads), device=query.device)
    options = dict(options)
    if mask is None:
        mask = mask_of_heads(more_arguments[0] if more_arguments else options.pop("attention_mask", None), index)
    proxy, options = of_query_heads(module, options, index, num_key_value_groups=1)
    options["scaling"] = attention.scaling
    output, weights = original(proxy, q, k, v, mask, *more_arguments[1:], **options)[:2]
    output = output[..., : value.shape[-1]]
    if len(heads) == query.shape[1]:
        return _in_order(output, heads), weights
    plain = original(module, query, key, value, *more_arguments, **attention.call[1])
    return _put(plain[0], index, output), *plain[1:]


def of_query_heads(
    module: nn.Module, options: dict[str, Any], index: torch.Tensor, **replaced: Any
) -> tuple[ModuleProxy, dict[str, Any]]:
    """Return the module and the options of a call, without its mask, for some of the query heads."""
    proxy = ModuleProxy(module, **replaced)
    options = {name: value for name, value in options.items() if name != "attention_mask"}
    for name, sinks in (("s_aux", options.get("s_aux")), ("sinks", getattr(module, "sinks", None))):
        if isinstance(sinks, torch.Tensor):
            vars(proxy)[name] = sinks[index]
            if name in options:
                options[name] = sinks[index]
    return proxy, options


def mask_of_heads(mask: Any, index: torch.Tensor) -> Any:
    """Return the mask of these heads, if each head has its own; otherwise the mask itself."""
    has_heads = isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[1] > 1
    return mask.index_select(1, index) if has_heads else mask


def mask_as_read(module: nn.Module, query: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """Return a mask that is added to the scores of queries (B, H, T, d) as the module's attention function reads it.

    Of such a tensor, flex attention would read the mask of the first head alone, and one for every text.
    """
    if mask is None or implementation(module) != "flex_attention":
        return mask
    from torch.nn.attention.flex_attention import create_block_mask

    (texts, heads), (queries, keys) = query.shape[:2], mask.shape[2:]
    visible = (mask > torch.finfo(mask.dtype).min / 2).expand(texts, heads, queries, keys)
    return create_block_mask(
        lambda b, h, i, j: visible[b, h, i, j], texts, heads, queries, keys, device=str(query.device)
    )


def _own_block_mask(attention: Attention) -> torch.Tensor | None:
    """Return what the queries of a call see (B, 1, T, S) where its mask is one of flex attention."""
    if implementation(attention.module) != "flex_attention":
        return None
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    (_, query, key, *_), options = attention.call
    more_arguments = attention.call[0][4:]
    mask = more_arguments[0] if more_arguments else options.get("attention_mask")
    if not isinstance(mask, BlockMask):
        return None
    return create_mask(mask.mask_mod, len(query), 1, query.shape[2], key.shape[2], device=str(query.device))


def _in_order(output: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    order = torch.argsort(torch.as_tensor(list(heads), device=output.device))
    return output.index_select(2, order)


def _put(plain: torch.Tensor, index: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the plain output (B, T, H, d) with the heads at ``index`` replaced."""
    heads = plain.reshape(*output.shape[:2], -1, output.shape[-1])
    return heads.index_copy(2, index, output.to(heads.dtype)).reshape(plain.shape)


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cos and sin (T, planes)."""
_SAME_ANGLES = 1e-3
"""Mean squared difference of angles up to which two positions are equal, large enough for half precision."""


@dataclass(frozen=True)
class Placed:
    """The positions of a call, and the angles at them."""

    at_queries: Angles | None
    """None without a rotary encoding."""
    at_keys: Angles | None
    first: int | None
    """Position of the first query; None if it is unknown, without a rotary encoding."""
    offset: int
    """Position of the first key."""

    def key_positions(self, keys: int, device: torch.device) -> torch.Tensor:
        """Positions of the keys."""
        return torch.arange(self.offset, self.offset + keys, device=device)

    def query_positions(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """Positions of the queries; if unknown, those of the last keys."""
        first = keys - queries if self.first is None else self.first
        return torch.arange(first, first + queries, device=device)


@dataclass
class Placement:
    """Finds the positions of a layer's calls.

    A call contains the angles of its queries alone; their row in the embedding's table is their position. Keys end with
    the queries, unless the cache has room for more; they begin later than 0 if the cache drops keys, as with sliding
    windows.
    """

    rope: LayerRope | None
    _tables: dict[int, Angles] = field(default_factory=dict, repr=False)

    def place(self, attention: Attention) -> Placed:
        """Return the positions of a call; an error if they are not consecutive."""
        _, query, key = attention.call[0][:3]
        queries, keys, device = query.shape[2], key.shape[2], query.device
        if self.rope is None or attention.rotary is None:
            return Placed(None, None, None, 0)
        if self.rope.depends_on_length and queries < keys:
            raise CaptureError("the rotary encoding of this model depends on the length of a text; use no cache")
        size = keys
        while (first := _first_position(attention, self._angles(size, device), queries)) is None:
            size *= 2
            if size > MOST_TOKENS:
                raise CaptureError(
                    "an intervention needs tokens at consecutive positions; pad on the right, or use one text at a time"
                )
        offset = max(first + queries - keys, 0)
        cos, sin = self._angles(max(size, first + queries), device)
        at_queries, at_keys = slice(first, first + queries), slice(offset, offset + keys)
        return Placed((cos[at_queries], sin[at_queries]), (cos[at_keys], sin[at_keys]), first, offset)

    def _angles(self, size: int, device: torch.device) -> Angles:
        """Return cos and sin at the first ``size`` positions."""
        assert self.rope is not None
        if size not in self._tables:
            self._tables.clear()  # they may depend on the length
            cos, sin = self.rope.embedding.angles(torch.arange(size, device=self.rope.embedding.device))
            self._tables[size] = cos.to(device), sin.to(device)
        return self._tables[size]


def _first_position(attention: Attention, table: Angles, queries: int) -> int | None:
    """Return the position of a call's first query, by its angles; None if the table does not contain them all."""
    assert attention.rotary is not None
    angles = attention.rotary.angles
    cos, sin = (angles[0].real, angles[0].imag) if angles[0].is_complex() else angles[:2]
    cos, sin = (part.float().reshape(-1, queries, part.shape[-1]) for part in (cos, sin))
    planes = table[0].shape[-1]
    if cos.shape[-1] != planes:  # every plane twice, as two halves or interleaved
        half = torch.equal(cos[..., :planes], cos[..., planes:])
        cos, sin = (part[..., :planes] if half else part[..., 0::2] for part in (cos, sin))
    first = int(_away(table, (cos[:1, :1], sin[:1, :1])).argmin(-1))
    rows = slice(first, first + queries)
    if len(table[0][rows]) < queries:
        return None
    return first if float(_away((table[0][rows], table[1][rows]), (cos, sin)).max()) < _SAME_ANGLES * planes else None


def _away(a: Angles, b: Angles) -> torch.Tensor:
    return ((a[0] - b[0]).square() + (a[1] - b[1]).square()).sum(-1)


@dataclass
class ScaledLayer:
    """The heads of one layer whose terms are scaled."""

    heads: list[int]
    query_mean: torch.Tensor
    """μ̃_q (n, d)."""
    key_mean: torch.Tensor
    """μ̃_k of the key head that each of them reads (n, d)."""
    factors: torch.Tensor
    """Factors on position, key, query and content (n, 4), or for each text (B, n, 4)."""
    placement: Placement
    skip_first: int

    @classmethod
    def of(cls, locked: LockedModel, layer: int, heads: list[int], factors: torch.Tensor) -> ScaledLayer:
        """Return the scaling of these query heads of a layer."""
        means = locked.means(layer)
        keys = [locked.key_head(head) for head in heads]
        placement = Placement(locked.layers[layer].rope)
        return cls(heads, means.queries(heads), means.keys(keys), factors, placement, locked.skip_first)

    def rewrite(self, attention: Attention) -> Callable[[AttentionFunction], Any]:
        """Return the call with the terms of these heads scaled."""
        q, k, v = of_heads(attention, self.heads)
        rope, placed = self.placement.rope, self.placement.place(attention)
        mean_q = rotated(self.query_mean.to(q.device), rope, placed.at_queries)[None]
        mean_k = rotated(self.key_mean.to(k.device), rope, placed.at_keys)
        query_factor = None if rope is None else temperature(attention, rope)
        mean_q = (mean_q if query_factor is None else mean_q * query_factor[:, None, :, None]).expand(q.shape)
        position, key, query, content = self.factors.to(q.device)[..., None, None].unbind(-3)
        key_rest = k.float() - mean_k
        sinks = placed.key_positions(k.shape[2], k.device)[:, None] < self.skip_first
        seen_by_mean = torch.where(sinks, k.float(), position * mean_k + key * key_rest)
        seen_by_rest = torch.where(sinks, k.float(), query * mean_k + content * key_rest)
        long_q, long_k = torch.cat([mean_q, q.float() - mean_q], -1), torch.cat([seen_by_mean, seen_by_rest], -1)
        changed = long_q.to(q.dtype), long_k.to(k.dtype), v
        return lambda original: with_heads(original, attention, self.heads, changed)


def cut(windows: dict[int, int], sinks: int, placement: Placement) -> Rewrite:
    """Rewrite calls so that the query heads of some key heads see only a window and the first keys."""

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
        changed = of_heads(attention, heads)
        mask = mask_as_read(attention.module, changed[0], _with_own_mask(attention, hidden, distance))
        return lambda original: with_heads(original, attention, heads, changed, mask)

    return rewrite


def without_coordinates(mask: torch.Tensor) -> Rewrite:
    """Rewrite calls with some coordinates of the queries set to zero, which removes them from every score."""

    def rewrite(attention: Attention) -> Callable[[AttentionFunction], Any]:
        (module, query, *more_arguments), options = attention.call
        return lambda original: original(
            module, query * mask.to(query.device, query.dtype)[:, None], *more_arguments, **options
        )

    return rewrite


def remove_key_drift(
    heads: list[int], beta: torch.Tensor, mean: torch.Tensor, skip_first: int, placement: Placement
) -> Rewrite:
    """Rewrite calls so that the keys of some query heads lose β(t − t̄), with β (n, d) and t̄ (n,) of each."""

    def rewrite(attention: Attention) -> Callable[[AttentionFunction], Any]:
        q, k, v = of_heads(attention, heads)
        positions = placement.place(attention).key_positions(k.shape[2], k.device)
        offset = (positions - mean.to(k.device)[:, None]) * (positions >= skip_first)
        straight = k.float() - offset[..., None] * beta.to(k.device)[:, None]
        return lambda original: with_heads(original, attention, heads, (q, straight.to(k.dtype), v))

    return rewrite


def _with_own_mask(attention: Attention, hidden: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Return a mask that also hides what the call's own mask or sliding window hides."""
    dtype, smallest = attention.q.dtype, torch.finfo(attention.q.dtype).min
    call_mask = own_mask(attention)
    if call_mask is None:
        call_mask = _own_block_mask(attention)
    if call_mask is None and attention.sliding_window is not None:
        hidden = hidden | (distance >= attention.sliding_window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, smallest)[None]
    if call_mask is None:
        return mask
    call_mask = call_mask[..., : mask.shape[-1]]
    if call_mask.dtype == torch.bool:
        return mask.masked_fill(~call_mask, smallest)
    return torch.clamp(mask + call_mask, min=smallest)
