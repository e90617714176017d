"""A layer as the first document shows it: heads, scaling, window, rotary encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from qkscope.capture.attention import Attention
from qkscope.capture.options import CaptureOptions
from qkscope.capture.rope import Embedding, LayerRope, describe_rope
from qkscope.errors import CaptureError


@dataclass(frozen=True)
class Layer:
    """One layer as the first document showed it."""

    layer: int
    scaling: float
    sliding_window: int | None
    rope: LayerRope | None
    query_heads: tuple[int, ...]
    key_heads: tuple[int, ...]
    d: int
    kind: str | None
    """What the model's config calls it, such as sliding_attention."""

    @property
    def local(self) -> bool:
        """Whether queries see a part of the earlier keys only."""
        return self.sliding_window is not None or self.kind in ("sliding_attention", "chunked_attention")

    def as_dict(self) -> dict[str, Any]:
        """What the manifest records."""
        return {key: value for key, value in vars(self).items() if key != "rope"} | {
            "rope": None if self.rope is None else self.rope.as_dict()
        }


def describe_layer(
    seen: Attention, decoder: PreTrainedModel, candidates: list[Embedding], options: CaptureOptions
) -> Layer:
    """Describe a layer from one call of its attention, over the heads that were asked for."""
    n_q, length = seen.q.shape[1:3]
    heads = tuple(range(n_q)) if options.heads is None else options.heads
    if not set(heads) <= set(range(n_q)):
        raise CaptureError(f"layer {seen.layer} has query heads 0 to {n_q - 1}, not {max(heads)}")
    positions = torch.arange(length, device=seen.q.device)
    return Layer(
        layer=seen.layer,
        scaling=seen.scaling,
        sliding_window=seen.sliding_window,
        rope=describe_rope(seen, positions, candidates, options.window or length),
        query_heads=heads,
        key_heads=tuple(sorted({head // seen.q_per_kv for head in heads})),
        d=seen.q.shape[-1],
        kind=_kind(decoder, seen.layer),
    )


def _kind(decoder: PreTrainedModel, layer: int) -> str | None:
    kinds = getattr(decoder.config, "layer_types", None)
    return None if not kinds else str(kinds[layer])
