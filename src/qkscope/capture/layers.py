"""Description of a layer, from its attention call on the first document: heads, scaling, window, rotary encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from qkscope.capture.attention import Attention
from qkscope.capture.options import CaptureOptions
from qkscope.capture.rope import Embedding, LayerRope, describe_rope
from qkscope.capture.weights import sees_later
from qkscope.errors import CaptureError


@dataclass(frozen=True)
class Layer:
    """One layer, described from its attention call on the first document."""

    layer: int
    scaling: float
    sliding_window: int | None
    rope: LayerRope | None
    query_heads: tuple[int, ...]
    key_heads: tuple[int, ...]
    d: int
    both: bool
    """Whether queries also see later keys, as in encoders."""
    kind: str | None
    """Layer type in the model's config, such as sliding_attention."""

    @property
    def local(self) -> bool:
        """Whether queries see only some of the earlier keys."""
        return self.sliding_window is not None or self.kind in ("sliding_attention", "chunked_attention")

    def as_dict(self) -> dict[str, Any]:
        """What the manifest records."""
        return {key: value for key, value in vars(self).items() if key != "rope"} | {
            "rope": None if self.rope is None else self.rope.as_dict()
        }


def describe_layer(
    attention: Attention, decoder: PreTrainedModel, candidates: list[Embedding], options: CaptureOptions
) -> Layer:
    """Describe a layer from one call of its attention, for the chosen heads."""
    n_q, length = attention.q.shape[1:3]
    heads = tuple(range(n_q)) if options.heads is None else options.heads
    if not set(heads) <= set(range(n_q)):
        raise CaptureError(f"expected query heads 0 to {n_q - 1} in layer {attention.layer}, got {max(heads)}")
    positions = torch.arange(length, device=attention.q.device)
    return Layer(
        layer=attention.layer,
        scaling=attention.scaling,
        sliding_window=attention.sliding_window,
        rope=describe_rope(attention, positions, candidates, options.window or length),
        query_heads=heads,
        key_heads=tuple(sorted({head // attention.q_per_kv for head in heads})),
        d=attention.q.shape[-1],
        both=sees_later(attention),
        kind=_kind(decoder, attention.layer),
    )


def _kind(decoder: PreTrainedModel, layer: int) -> str | None:
    kinds = getattr(decoder.config, "layer_types", None)
    return None if not kinds else str(kinds[layer])
