"""The measured layers, each described by a call on the first document: heads, scaling, window, rotary encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from qkscope.capture.gate import sees_later
from qkscope.capture.options import CaptureOptions
from qkscope.capture.rope import Embedding, LayerRope, describe_rope
from qkscope.capture.watch import Attention
from qkscope.errors import CaptureError, NotNestedError


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
    """True if queries also see later keys, as in encoders."""
    kind: str | None
    """Layer type in the model's config, such as sliding_attention."""

    @property
    def local(self) -> bool:
        """True if queries see only some of the earlier keys."""
        return self.sliding_window is not None or self.kind in ("sliding_attention", "chunked_attention")

    def as_dict(self) -> dict[str, Any]:
        """Return the entry in the manifest."""
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
    """Descriptions of the measured layers, by number."""

    layers: dict[int, Layer]
    q_per_kv: int
    """Query heads per key head, the same in all layers."""
    any_local: bool
    """True if any layer of the model sees only some of the earlier keys."""
    encoder: bool
    """True if any layer of the model also sees later keys."""
    one_pass: bool
    """True if a document must go through the model in one pass."""

    @classmethod
    def of(
        cls, attentions: list[Attention], decoder: PreTrainedModel, candidates: list[Embedding], options: CaptureOptions
    ) -> ChosenLayers:
        """Describe the layers from the calls of a pass, one for each; an error if they do not support the options."""
        calls = _with_keys_of_tokens(attentions, options)
        layers = {call.layer: describe_layer(call, decoder, candidates, options) for call in calls}
        encoder = any(layer.both for layer in layers.values())
        by_length = any(layer.rope is not None and layer.rope.depends_on_length for layer in layers.values())
        _check_passes(options, encoder=encoder, by_length=by_length)
        _check_nested(options, encoder=encoder, by_length=by_length)
        chosen = _chosen(layers, options)
        return cls(
            {layer: layers[layer] for layer in sorted(chosen)},
            _agreed({call.layer: call.q_per_kv for call in calls if call.layer in chosen}),
            any(layer.local for layer in layers.values()),
            encoder,
            encoder or by_length,
        )


def _with_keys_of_tokens(attentions: list[Attention], options: CaptureOptions) -> list[Attention]:
    """Return the calls whose keys are those of single tokens; an error if other layers were chosen."""
    supported = [a for a in attentions if a.call[0][2].shape[2] == a.q.shape[2]]
    unsupported = {a.layer for a in attentions} - {a.layer for a in supported}
    rejected = unsupported if options.layers is None else unsupported & set(options.layers)
    if rejected:
        alternatives = ",".join(str(attention.layer) for attention in supported)
        raise CaptureError(
            f"layer {min(rejected)} attends to keys that are not those of single tokens, such as compressed ones; "
            + (f"choose others: --layers {alternatives}" if alternatives else "the model cannot be captured")
        )
    return supported


def _check_passes(options: CaptureOptions, *, encoder: bool, by_length: bool) -> None:
    """Reject ``--prefill`` and ``--batch`` for models that do not allow them."""
    if by_length and ((options.batch or 1) > 1 or options.prefill):
        raise CaptureError(
            "the rotary encoding of this model depends on the length of the document (dynamic or longrope); "
            "padding and steps would change it, so use --batch 1 and no --prefill"
        )
    if encoder and options.prefill:
        raise CaptureError(
            "the queries of this model also see later keys, so documents cannot be read in steps; leave out --prefill"
        )


def _check_nested(options: CaptureOptions, *, encoder: bool, by_length: bool) -> None:
    """Reject ``--compare-at`` where vectors of a document's first tokens depend on those that follow."""
    reason = "its queries also see later keys" if encoder else ""
    reason = reason or ("its rotary encoding depends on the length of the document" if by_length else "")
    if options.compare_at and reason:
        raise NotNestedError(
            f"--compare-at needs vectors that do not depend on what follows, but {reason}; leave it out, and capture "
            f"again with --window {options.compare_at[0]}"
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
    """Return the query heads per key head of all these layers; an error names the layers that agree."""
    first = next(iter(q_per_kv.values()))
    same = [layer for layer, number in q_per_kv.items() if number == first]
    if len(same) < len(q_per_kv):
        listed = ", ".join(map(str, sorted(set(q_per_kv.values()))))
        raise CaptureError(
            f"layers differ in query heads per key head ({listed}), and a run has one number; capture layers that "
            f"agree, such as --layers {','.join(map(str, same))}"
        )
    return first
