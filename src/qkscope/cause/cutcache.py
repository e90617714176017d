"""A transformers cache that is smaller: cut key heads store only the first tokens of a text and a window.

``cut_cache(model, "cut.json")`` is given to ``model.generate(…, past_key_values=cache)``. The result is that of
``intervene.windowed``, which hides the same keys but stores all of them. The model's weights, modules and config stay
as they are; two hooks on its decoder tell the cache when it runs, and are removed when the cache is closed or
collected. Only while the model runs with this cache is its attention function replaced.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from qkscope.capture.layers import Layer
from qkscope.capture.watch import (
    AttentionFunction,
    attention_replaced,
    backbone,
    implementation,
    numbered,
    plain_model,
    self_attentions,
)
from qkscope.cause.cutlayer import CutLayer, TextState, stored_of
from qkscope.cause.intervene import LayerHead, by_layer, check_free, check_key_heads, resolved_cut
from qkscope.cause.lockedmodel import describe
from qkscope.errors import CaptureError, ConfigError
from qkscope.options import MOST_TOKENS


def cut_cache(model: Any, windows: Mapping[Any, int] | str | Path, *, sinks: int = 4) -> CutCache:
    """Return a cache for ``model.generate(…, past_key_values=cache)`` that stores less of the key heads that are cut.

    ``windows`` gives w by (layer, key head), or is a cut.json as written by ``qkscope reach``. A cut head stores its
    first ``sinks`` tokens and its last w. One cache serves one batch of texts; ``cache.reset()`` empties it for others.
    ``cache.close()``, leaving it as a context, or forgetting it removes its hooks from the model.
    """
    model = plain_model(model)
    windows, sinks = resolved_cut(model, windows, sinks)
    _check_supported(model)
    check_free(model)
    layers = describe(model, MOST_TOKENS)
    check_key_heads(layers, windows)
    for number, layer in layers.items():
        if layer.both:
            raise ConfigError(f"layer {number} also sees later keys, as in encoders: there is no cache to cut")
        if layer.rope is not None and layer.rope.depends_on_length:
            raise CaptureError(
                "the rotary encoding of this model depends on the length of a text; cached keys do not fit a longer one"
            )
    return CutCache(model, layers, windows, sinks)


def _check_supported(model: PreTrainedModel) -> None:
    """Raise an error about models whose cache cannot be cut."""
    attention, generation = implementation(self_attentions(model)[0]), getattr(model, "generation_config", None)
    kind = getattr(generation, "cache_implementation", None)
    if kind is not None:
        raise ConfigError(
            f"the model's generation_config asks for a {kind} cache, and a cut cache is dynamic; "
            "set model.generation_config.cache_implementation = None"
        )
    if "flash" in attention or "paged" in attention:
        raise ConfigError(f"a cut cache does not work with {attention}; load the model with attn_implementation='sdpa'")
    if model.config.is_encoder_decoder:
        raise ConfigError("a cut cache is for models that only decode; this one has an encoder")
    if any(getattr(part, "_compiled_call_impl", None) is not None for part in (model, backbone(model))):
        raise ConfigError("a cut cache needs a model that is not compiled; leave out model.compile()")


class CutCache(Cache):
    """A cache in which some key heads store only their first tokens and a window; see ``cut_cache``."""

    def __init__(
        self, model: PreTrainedModel, layers: Mapping[int, Layer], windows: Mapping[LayerHead, int], sinks: int
    ) -> None:
        self._text, self._rows, self._decoding = TextState(), 0, False
        self._seam = ExitStack()
        self._modules = self_attentions(model)
        self._numbers = {id(module): number for number, module in numbered(self._modules)}
        self._name = type(model).__name__
        self._model, self._cut = weakref.ref(model), (layers, windows, sinks)
        super().__init__(layers=_cache_layers(model, layers, windows, sinks, self._text))
        decoder, this = backbone(model), weakref.ref(self)

        def begin(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if (cache := this()) is not None and cache._is_among(args, options):
                cache._begin(args, options)

        def end(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], _result: Any) -> None:
            if (cache := this()) is not None and cache._is_among(args, options):
                cache._end()

        handles = [
            decoder.register_forward_pre_hook(begin, with_kwargs=True),
            decoder.register_forward_hook(end, with_kwargs=True, always_call=True),
        ]
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    def __deepcopy__(self, memo: dict[int, Any]) -> CutCache:
        """Return a cache of its own with the same content, to continue one prompt in several ways."""
        model = self._model()
        if model is None:
            raise CaptureError("this cut cache cannot be copied: its model is gone")
        other = CutCache(model, *self._cut)
        other._text.pads, other._rows, other._decoding = self._text.pads, self._rows, self._decoding
        memo[id(self)], memo[id(self._text)] = other, other._text
        other.layers = copy.deepcopy(self.layers, memo)
        return other

    def __enter__(self) -> CutCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks from the model, and forget all keys; the cache cannot be used any more."""
        self._end()
        self._remove_hooks()
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are stored."""
        layers: list[Any] = self.layers
        stored = [x for layer in layers for x in (layer.stored if isinstance(layer, CutLayer) else stored_of(layer))]
        return sum(x.numel() * x.element_size() for x in stored)

    def reset(self) -> None:
        """Forget the texts, to read others."""
        super().reset()
        self._text.pads, self._rows, self._decoding = None, 0, False
        self._text.pending.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put the rows of the batch into another order, as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        self.batch_select_indices(torch.arange(self._rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        layers: list[Any] = self.layers
        for layer in layers:
            (layer.select if isinstance(layer, CutLayer) else layer.reorder_cache)(indices)
        if self._text.pads is not None:
            self._text.pads = self._text.pads[indices.to(self._text.pads.device)]
        self._rows = len(torch.arange(self._rows)[indices.cpu()])

    def crop(self, tokens_to_remove: int) -> None:  # noqa: ARG002  the name is transformers'
        """Refuse to take back tokens: keys that have left a window are not stored."""
        raise CaptureError(
            "a cut cache cannot take back tokens, as assisted generation does; generate without assistant_model and "
            "prompt_lookup_num_tokens"
        )

    @property
    def is_croppable(self) -> bool:
        """False: keys that have left a window are not stored."""
        return False

    def _is_among(self, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        return any(value is self for value in (*args, *options.values()))

    def _begin(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Check the input of a pass, and let the layers attend to what is stored."""
        self._end()  # of a pass that was interrupted
        model = self._model()
        if model is not None:
            check_free(model)
        tokens = next(x for x in (options.get("input_ids"), options.get("inputs_embeds"), *args) if x is not None)
        if options.get("output_attentions"):
            raise ConfigError("a cut cache has no attention weights to return; leave out output_attentions")
        self._check_text(tokens.shape[0], tokens.shape[1], options.get("attention_mask"))
        self._seam.enter_context(torch.compiler.set_stance("force_eager"))  # as when a model is watched
        self._seam.enter_context(attention_replaced(self._modules, self._attention_function))
        self._text.active = True

    def _end(self) -> None:
        self._text.active = False
        self._text.pending.clear()
        self._seam.close()

    def _check_text(self, rows: int, tokens: int, mask: Any) -> None:
        """Raise an error unless these tokens follow those that were read; note the padding of a prompt."""
        read = self.get_seq_length()
        other = "make a new one with qkscope.cut_cache for another text, or empty it with cache.reset()"
        if read and rows != self._rows:
            raise CaptureError(f"this cut cache holds a batch of {self._rows}, got {rows}; {other}")
        if tokens > 1 and self._decoding:
            raise CaptureError(f"this cut cache was used already, for a text of {read} tokens; {other}")
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            raise CaptureError("a cut cache needs an attention_mask of rows × tokens, or none, to know the padding")
        if mask is not None and mask.shape[1] != read + tokens:
            raise CaptureError(
                f"expected an attention_mask of {read + tokens} tokens, {read} in this cut cache and {tokens} new "
                f"ones, got {mask.shape[1]}; {other}"
            )
        if mask is not None and (tokens > 1 or not read):
            pads = (mask == 0).long().cumprod(1).sum(1).cpu()
            if bool(((mask == 0).sum(1).cpu() != pads).any()):
                raise CaptureError("a cut cache needs texts without gaps, padded on the left; set padding_side='left'")
            self._text.pads = pads if bool(pads.any()) else None
        self._rows, self._decoding = rows, read > 0 and tokens == 1

    def _attention_function(self, original: AttentionFunction) -> AttentionFunction:
        """Return the replacement of an attention function, which computes cut layers on what they store."""

        @wraps(original)
        def wrapper(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
            layer = self._numbers.get(id(module), -1)
            pending = self._text.pending.pop(layer, None)
            if pending is None:
                return original(module, query, key, *args, **options)
            if pending.key is not key:
                raise CaptureError(f"layer {layer} changes its keys after they are stored; a cut cache cannot be used")
            return pending.attend(original, module, query, args, options)

        return wrapper


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _cache_layers(
    model: PreTrainedModel,
    layers: Mapping[int, Layer],
    windows: Mapping[LayerHead, int],
    sinks: int,
    text: TextState,
) -> list[Any]:
    """Return the layers of the model's own kind of cache, those with cut heads replaced."""
    cache_layers: list[Any] = list(DynamicCache(config=model.config).layers)
    shared = [number for number in layers if isinstance(cache_layers[number], DummyLayer)]
    if windows and shared:
        raise CaptureError(
            f"layer {shared[0]} reads the keys of an earlier layer, which a cut cache does not support; "
            "use qkscope.intervene.windowed"
        )
    for number, heads in by_layer(windows).items():
        whole = cache_layers[number]
        if type(whole) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise CaptureError(
                f"layer {number} is cached as a {type(whole).__name__}, which cannot be cut; leave it out of the cut"
            )
        of_layer = {head: int(windows[number, head]) for head in heads}
        cache_layers[number] = CutLayer(number, len(layers[number].key_heads), of_layer, sinks, whole, text)
    return cache_layers
