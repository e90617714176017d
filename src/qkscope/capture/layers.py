"""The layers that are measured, and each as the first document shows it: heads, scaling, window, rotary encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from qkscope.capture.gate import sees_later
from qkscope.capture.options import CaptureOptions
from qkscope.capture.rope import Embedding, LayerRope, describe_rope
from qkscope.capture.watch import Attention
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


@dataclass(frozen=True)
class ChosenLayers:
    """Descriptions by layer, of those that are measured."""

    layers: dict[int, Layer]
    q_per_kv: int
    """Query heads per key head, the same in all of them."""
    any_local: bool
    """Whether any layer of the model sees only some of the earlier keys."""
    encoder: bool
    """Whether any also sees later ones."""
    one_pass: bool
    """Whether a document must go through the model at once."""

    @classmethod
    def of(
        cls, attentions: list[Attention], decoder: PreTrainedModel, candidates: list[Embedding], options: CaptureOptions
    ) -> ChosenLayers:
        """From the calls of a pass, one for each layer; an error if options ask for what the layers cannot give."""
        usual = _with_keys_of_tokens(attentions, options)
        layers = {call.layer: describe_layer(call, decoder, candidates, options) for call in usual}
        encoder = any(layer.both for layer in layers.values())
        by_length = any(layer.rope is not None and layer.rope.depends_on_length for layer in layers.values())
        _check_passes(options, encoder=encoder, by_length=by_length)
        chosen = _chosen(layers, options)
        return cls(
            {layer: layers[layer] for layer in sorted(chosen)},
            _agreed({call.layer: call.q_per_kv for call in usual if call.layer in chosen}),
            any(layer.local for layer in layers.values()),
            encoder,
            encoder or by_length,
        )


def _with_keys_of_tokens(attentions: list[Attention], options: CaptureOptions) -> list[Attention]:
    """The calls whose keys are those of single tokens; an error if others are asked for."""
    usual = [a for a in attentions if a.call[0][2].shape[2] == a.q.shape[2]]
    other = {a.layer for a in attentions} - {a.layer for a in usual}
    wanted = other if options.layers is None else other & set(options.layers)
    if wanted:
        rest = ",".join(str(attention.layer) for attention in usual)
        raise CaptureError(
            f"layer {min(wanted)} attends to keys that are not those of single tokens, such as compressed ones; "
            + (f"choose others: --layers {rest}" if rest else "the model cannot be captured")
        )
    return usual


def _check_passes(options: CaptureOptions, *, encoder: bool, by_length: bool) -> None:
    """Raise an error if documents must be read at once, or without padding, and are not to be."""
    if by_length and (options.batch > 1 or options.prefill):
        raise CaptureError(
            "the rotary encoding of this model depends on the length of the document (dynamic or longrope); "
            "padding and steps would change it, so use --batch 1 and no --prefill"
        )
    if encoder and options.prefill:
        raise CaptureError(
            "the queries of this model also see later keys, so documents cannot be read in steps; leave out --prefill"
        )


def _chosen(layers: dict[int, Layer], options: CaptureOptions) -> set[int]:
    chosen = set(layers) if options.layers is None else set(options.layers)
    if not chosen <= set(layers):
        raise CaptureError(f"the model has no layers {sorted(chosen - set(layers))}; it has {sorted(layers)}")
    if options.full_attention_only:
        chosen = {layer for layer in chosen if not layers[layer].local}
    if not chosen:
        raise CaptureError("none of the chosen layers has full attention; choose others or drop --full-attention-only")
    return chosen


def _agreed(q_per_kv: dict[int, int]) -> int:
    """Query heads per key head of all these layers; an error says which layers agree."""
    first = next(iter(q_per_kv.values()))
    same = [layer for layer, number in q_per_kv.items() if number == first]
    if len(same) < len(q_per_kv):
        listed = ", ".join(map(str, sorted(set(q_per_kv.values()))))
        raise CaptureError(
            f"layers differ in query heads per key head ({listed}), and a run has one number; capture layers that "
            f"agree, such as --layers {','.join(map(str, same))}"
        )
    return first
