"""Attention of some query heads of a call, computed again with other queries, keys or masks.

The model's own attention function computes them, through a stand-in for its module on which every query head has a key
head of its own. All other heads keep the output of the plain call, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from qkscope.capture.attention import Attention, AttentionFunction


class Stand:
    """A module as an attention function sees it, with some attributes replaced."""

    def __init__(self, module: nn.Module, **replaced: Any) -> None:
        vars(self).update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


def of_heads(attention: Attention, heads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of these query heads, each with a key head of its own: (B, n, T or S, d)."""
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
    """The result of the call with these heads attending by other queries, keys and values, and by another mask."""
    (module, query, key, value, *rest), options = attention.call
    q, k, v = changed
    if q.shape[-1] > v.shape[-1] and not (q.is_cuda and q.dtype == torch.float32):
        # Most kernels want one length for all three.
        v = nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
    index = torch.as_tensor(list(heads), device=query.device)
    options = dict(options)
    if mask is None:
        mask = _mask_of(rest[0] if rest else options.pop("attention_mask", None), index)
    options.pop("attention_mask", None)
    stand = Stand(module, num_key_value_groups=1)
    for name, sinks in (("s_aux", options.get("s_aux")), ("sinks", getattr(module, "sinks", None))):
        if isinstance(sinks, torch.Tensor):
            vars(stand)[name] = sinks[index]
            if name in options:
                options[name] = sinks[index]
    options["scaling"] = attention.scaling
    output, weights = original(stand, q, k, v, mask, *rest[1:], **options)[:2]
    output = output[..., : value.shape[-1]]
    if len(heads) == query.shape[1]:
        return _in_order(output, heads), weights
    plain = original(module, query, key, value, *rest, **attention.call[1])
    return _put(plain[0], index, output), *plain[1:]


def _mask_of(mask: Any, index: torch.Tensor) -> Any:
    """The mask of these heads, where each head has one of its own."""
    has_heads = isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[1] > 1
    return mask.index_select(1, index) if has_heads else mask


def _in_order(output: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
    order = torch.argsort(torch.as_tensor(list(heads), device=output.device))
    return output.index_select(2, order)


def _put(plain: torch.Tensor, index: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The plain output (B, T, H, d) with the heads at ``index`` replaced."""
    heads = plain.reshape(*output.shape[:2], -1, output.shape[-1])
    return heads.index_copy(2, index, output.to(heads.dtype)).reshape(plain.shape)
