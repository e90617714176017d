"""From the attention calls of a forward pass to the sums of each layer: chosen heads, angles, stretches of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from qkscope.capture.attention import Attention, OnAttention
from qkscope.capture.imageinputs import TextStretch
from qkscope.capture.layers import Layer
from qkscope.capture.options import CaptureOptions
from qkscope.capture.rope import Embedding, by_heads
from qkscope.capture.stretches import stretch_of
from qkscope.capture.sums.layersums import LayerSums
from qkscope.capture.sums.tokens import BatchTokens
from qkscope.errors import CaptureError

_Angle = tuple[torch.Tensor, torch.Tensor]
_Angles = dict[Embedding, _Angle]


@dataclass(frozen=True)
class CallPart:
    """Tokens of a forward pass at consecutive positions."""

    tokens: BatchTokens
    angles: _Angles
    """Cos and sin of each embedding in use, at these positions."""
    stretch: TextStretch | None = None
    """Which columns of the call they are; None: all."""

    def of(self, attention: Attention, layer: Layer) -> Attention:
        """The call of these tokens alone."""
        if self.stretch is None:
            return attention
        scaled = layer.rope is not None and layer.rope.temperature
        return stretch_of(attention, self.stretch, self.tokens, temperature=scaled)

    def angles_of(self, layer: Layer, device: torch.device) -> _Angle | None:
        """The angles of a layer on its device, copied there once per forward pass; None without any."""
        if layer.rope is None or layer.rope.embedding not in self.angles:
            return None
        embedding = layer.rope.embedding
        cos, sin = self.angles[embedding]
        return self.tokens.once(("angles", embedding, device), lambda: (cos.to(device), sin.to(device)))


@dataclass(frozen=True)
class LayerCalls:
    """The layers that are measured, and what is measured of their calls."""

    layers: Mapping[int, Layer]
    options: CaptureOptions

    def part(self, tokens: BatchTokens, end: int, stretch: TextStretch | None = None) -> CallPart:
        """The tokens at positions from their first on, with the angles there."""
        ropes = [] if self.options.pre_rope else [layer.rope for layer in self.layers.values()]
        used = {rope.embedding for rope in ropes if rope is not None}
        first = tokens.first
        return CallPart(
            tokens, {rotary: rotary.angles(torch.arange(first, end, device=rotary.device)) for rotary in used}, stretch
        )

    def adding(self, sums: Mapping[int, LayerSums], parts: list[CallPart]) -> OnAttention:
        """Adds the parts of a forward pass to the sums of each layer."""

        def add(attention: Attention) -> None:
            layer = self.layers.get(attention.layer)
            if layer is not None:
                chosen = self.chosen(attention, layer)
                for part in parts:
                    call = part.of(chosen, layer)
                    sums[attention.layer].add(call, part.tokens, part.angles_of(layer, attention.q.device))

        return add

    def chosen(self, attention: Attention, layer: Layer) -> Attention:
        """The call with only the chosen heads, before the rotation if ``pre_rope``."""
        q, k = attention.q, attention.k
        if self.options.pre_rope and attention.rotary is not None:
            turned_q, turned_k = attention.rotary.q.before, attention.rotary.k
            reason = "rotates only some coordinates of its vectors" if turned_q.shape[-1] != q.shape[-1] else ""
            reason = reason or ("reads the keys of an earlier layer" if turned_k is None else "")
            if turned_k is None or reason:
                advice = "leave out --pre-rope, or choose other --layers"
                raise CaptureError(f"layer {attention.layer} {reason}, which --pre-rope does not support; {advice}")
            q, k = by_heads(turned_q, q), by_heads(turned_k.before, k)
        if self.options.heads is None:
            return replace(attention, q=q, k=k)
        rotary, heads = attention.rotary, list(layer.query_heads)
        if rotary is not None and layer.rope is not None and layer.rope.temperature:
            after = by_heads(rotary.q.after, attention.q)[:, heads]
            rotary = replace(rotary, q=replace(rotary.q, after=after))
        return replace(attention, q=q[:, heads], k=k[:, list(layer.key_heads)], rotary=rotary)
