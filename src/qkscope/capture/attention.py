"""Watch the post-RoPE queries and keys of every self-attention layer of an unmodified transformers model.

Every attention class of transformers looks up its attention function by name on each call: in the registry
``ALL_ATTENTION_FUNCTIONS`` of its module, or as the module's global ``eager_attention_forward``. While a model is
watched, that name refers to a wrapper that passes the arguments on to a callback and then calls the original. Nothing
else changes: masks are built for the same name, outputs are bit-identical, and leaving the context undoes everything.
The module's ``apply_rotary*`` functions are wrapped the same way; they show which layers rotate, and by which angles.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from qkscope.errors import CaptureError

_CROSS = {"cross_attention_states", "encoder_hidden_states", "key_value_states"}


@dataclass(frozen=True)
class _Rotary:
    """One call of a model's rotary function: its inputs, its outputs and the angles."""

    function: Callable[..., Any]
    before: tuple[torch.Tensor, torch.Tensor]
    after: tuple[torch.Tensor, torch.Tensor]
    angles: tuple[torch.Tensor, ...]
    """(cos, sin), or one complex tensor."""


@dataclass(frozen=True)
class Attention:
    """One call of a self-attention function: q (B, Hq, T, d) and the k (B, Hkv, T, d) of the same tokens."""

    layer: int
    module: nn.Module
    q: torch.Tensor
    k: torch.Tensor
    scaling: float
    sliding_window: int | None
    rotary: _Rotary | None
    """None where the layer applies no rotary encoding (NoPE)."""
    call: tuple[tuple[Any, ...], dict[str, Any]]
    """All arguments of the attention function."""

    @property
    def q_per_kv(self) -> int:
        """Query heads per key head."""
        return int(self.q.shape[1] // self.k.shape[1])


OnAttention = Callable[[Attention], None]
OnOutput = Callable[[Attention, torch.Tensor], None]
AttentionFunction = Callable[..., Any]
Rewrite = Callable[[Attention], Callable[[AttentionFunction], Any] | None]
"""Given a call, what is done instead of it with the attention function; None: the call as it is."""


@contextmanager
def watching(
    model: nn.Module,
    on_attention: OnAttention,
    on_output: OnOutput | None = None,
    modules: list[nn.Module] | None = None,
    rewrite: Rewrite | None = None,
) -> Iterator[None]:
    """Call ``on_attention`` at every self-attention call of the model's text decoder, within the context.

    ``on_output`` is also called, after the attention function, with its output; ``modules`` are the model's
    ``self_attentions`` if the caller has them already; ``rewrite`` may put something else in the place of a call.
    Compiled models run uncompiled within the context.
    """
    modules = modules or self_attentions(model)
    watch = _Watch({id(module) for module in modules}, on_attention, on_output, rewrite)
    with ExitStack() as replacements:
        replacements.enter_context(torch.compiler.set_stance("force_eager"))
        for source_module in [sys.modules[name] for name in dict.fromkeys(type(m).__module__ for m in modules)]:
            names = {implementation(module) for module in modules if type(module).__module__ == source_module.__name__}
            for name in names:
                replacements.enter_context(_replace_attention(source_module, name, watch))
            for function in [name for name in vars(source_module) if name.startswith("apply_rotary")]:
                replacements.enter_context(_replaced(source_module, function, watch.rotary_function))
        yield


def self_attentions(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules of the text decoder, by layer; an error if none of them can be watched."""
    decoder = backbone(model)
    by_layer = {_layer(module): module for module in decoder.modules() if _is_self_attention(module)}
    n_layers = getattr(decoder.config, "num_hidden_layers", None)
    if not by_layer:
        suspects = {
            type(module).__name__ for module in decoder.modules() if type(module).__name__.endswith("Attention")
        }
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: its attention ({', '.join(sorted(suspects)) or 'none found'}) "
            f"does not go through transformers' attention registry (expected {n_layers} layers that do)"
        )
    return [by_layer[layer] for layer in sorted(by_layer)]


def backbone(model: nn.Module) -> PreTrainedModel:
    """The text decoder without its language-model head: the deepest model whose config is the text config."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel):
        raise CaptureError(f"expected a transformers model, got {type(model).__name__}")
    text = model.config.get_text_config(decoder=True)
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is text][-1]


def implementation(module: nn.Module) -> str:
    """The attention implementation a module uses, such as ``sdpa``."""
    config: Any = module.config
    return str(config._attn_implementation or "eager")


def _layer(module: nn.Module) -> int:
    index: Any = module.layer_idx
    return int(index)


def _is_self_attention(module: nn.Module) -> bool:
    source_module = sys.modules.get(type(module).__module__)
    if not isinstance(getattr(module, "layer_idx", None), int) or not hasattr(source_module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    if not hasattr(module, "config") or getattr(module, "is_cross_attention", False):
        return False
    forward = type(module).forward
    return "Attention" in type(module).__name__ and not _CROSS & set(inspect.signature(forward).parameters)


class _Watch:
    """What the wrappers share: the watched modules, the callbacks, and the last rotary call."""

    def __init__(
        self, modules: set[int], on_attention: OnAttention, on_output: OnOutput | None, rewrite: Rewrite | None
    ) -> None:
        self.modules, self.on_attention, self.on_output, self.rewrite = modules, on_attention, on_output, rewrite
        self.rotary: _Rotary | None = None

    def attention_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapper that replaces an attention function."""

        @wraps(original)
        def wrapper(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
            if id(module) not in self.modules:
                return original(module, query, key, *args, **options)
            rotary, self.rotary = self.rotary, None
            attention = _attention_call(module, query, key, rotary, args, options)
            self.on_attention(attention)
            instead = None if self.rewrite is None else self.rewrite(attention)
            result = original(module, query, key, *args, **options) if instead is None else instead(original)
            if self.on_output is not None:
                self.on_output(attention, result[0])
            return result

        return wrapper

    def rotary_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapper that replaces a rotary function."""

        @wraps(original)
        def wrapper(q: torch.Tensor, k: torch.Tensor, *args: Any, **options: Any) -> Any:
            result = original(q, k, *args, **options)
            arguments = [*args, *options.values()]
            angles = tuple(
                argument for argument in arguments if isinstance(argument, torch.Tensor) and not _is_integer(argument)
            )
            self.rotary = _Rotary(original, (q, k), (result[0], result[1]), angles)
            return result

        return wrapper


def _attention_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    rotary: _Rotary | None,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Attention:
    scaling = options.get("scaling")
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    return Attention(
        layer=_layer(module),
        module=module,
        q=query.detach(),
        # With a cache, the keys of earlier tokens come first; those of this call's tokens are the last ones.
        k=key[..., -query.shape[-2] :, :].detach(),
        scaling=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        sliding_window=None if window is None else int(window),
        rotary=rotary,
        call=((module, query, key, *args), options),
    )


@contextmanager
def _replace_attention(module: Any, name: str, watch: _Watch) -> Iterator[None]:
    if name == "eager" and name not in module.ALL_ATTENTION_FUNCTIONS:
        with _replaced(module, "eager_attention_forward", watch.attention_function):
            yield
        return
    registry = module.ALL_ATTENTION_FUNCTIONS
    local = registry._local_mapping
    before = local.get(name)
    registry[name] = watch.attention_function(registry[name])
    try:
        yield
    finally:
        if before is None:
            del registry[name]
        else:
            registry[name] = before


@contextmanager
def _replaced(
    module: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, replacement(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
