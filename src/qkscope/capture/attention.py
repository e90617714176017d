"""See the post-RoPE queries and keys of every self-attention layer of an unmodified transformers model.

Every attention class of transformers looks its attention function up by name when it is called: in the registry
``ALL_ATTENTION_FUNCTIONS`` of its module, or as the module's global ``eager_attention_forward``. While we watch,
that name leads to a function which shows the arguments to us and then calls the original. Nothing else changes:
masks are built for the same name, outputs are bit-identical, and leaving the context undoes everything.
The module's ``apply_rotary*`` functions are shadowed the same way; they say which layers rotate, and with what.
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
    """One call of a model's rotary function: what went in, what came out, and the angles it was given."""

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


@contextmanager
def watching(
    model: nn.Module,
    on_attention: OnAttention,
    on_output: OnOutput | None = None,
    modules: list[nn.Module] | None = None,
) -> Iterator[None]:
    """Call ``on_attention`` at every self-attention of the model's text decoder while the context lasts.

    ``on_output`` is also called, after the attention function, with what it returned; ``modules`` spares finding the
    ``self_attentions`` again. Compiled models run uncompiled meanwhile.
    """
    modules = modules or self_attentions(model)
    watch = _Watch({id(module) for module in modules}, on_attention, on_output)
    with ExitStack() as undo:
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        for source in {type(module).__module__: sys.modules[type(module).__module__] for module in modules}.values():
            names = {implementation(module) for module in modules if type(module).__module__ == source.__name__}
            for name in names:
                undo.enter_context(_shadow_attention(source, name, watch))
            for function in [name for name in vars(source) if name.startswith("apply_rotary")]:
                undo.enter_context(_shadowed(source, function, watch.rotary_function))
        yield


def self_attentions(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules of the text decoder, by layer; an error names a class that cannot be watched."""
    decoder = backbone(model)
    found = {_layer(m): m for m in decoder.modules() if _is_self_attention(m)}
    n_layers = getattr(decoder.config, "num_hidden_layers", None)
    if not found:
        suspects = {type(m).__name__ for m in decoder.modules() if type(m).__name__.endswith("Attention")}
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: its attention ({', '.join(sorted(suspects)) or 'none found'}) "
            f"does not go through transformers' attention registry (expected {n_layers} layers that do)"
        )
    return [found[layer] for layer in sorted(found)]


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
    source = sys.modules.get(type(module).__module__)
    if not isinstance(getattr(module, "layer_idx", None), int) or not hasattr(source, "ALL_ATTENTION_FUNCTIONS"):
        return False
    if not hasattr(module, "config") or getattr(module, "is_cross_attention", False):
        return False
    forward = type(module).forward
    return "Attention" in type(module).__name__ and not _CROSS & set(inspect.signature(forward).parameters)


class _Watch:
    """What the shadowing functions share: whom to watch, whom to tell, and the rotary call under way."""

    def __init__(self, modules: set[int], on_attention: OnAttention, on_output: OnOutput | None) -> None:
        self.modules, self.on_attention, self.on_output = modules, on_attention, on_output
        self.rotary: _Rotary | None = None

    def attention_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function that takes the place of an attention function."""

        @wraps(original)
        def shown(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
            if id(module) not in self.modules:
                return original(module, query, key, *rest, **options)
            rotary, self.rotary = self.rotary, None
            seen = _seen(module, query, key, rotary, rest, options)
            self.on_attention(seen)
            result = original(module, query, key, *rest, **options)
            if self.on_output is not None:
                self.on_output(seen, result[0])
            return result

        return shown

    def rotary_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function that takes the place of a rotary function."""

        @wraps(original)
        def shown(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> Any:
            result = original(q, k, *rest, **options)
            given = [*rest, *options.values()]
            angles = tuple(part for part in given if isinstance(part, torch.Tensor) and not _is_integer(part))
            self.rotary = _Rotary(original, (q, k), (result[0], result[1]), angles)
            return result

        return shown


def _seen(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    rotary: _Rotary | None,
    rest: tuple[Any, ...],
    options: dict[str, Any],
) -> Attention:
    scaling = options.get("scaling")
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    return Attention(
        layer=_layer(module),
        module=module,
        q=query.detach(),
        # A cache puts earlier keys in front; those of this call's tokens are the last ones.
        k=key[..., -query.shape[-2] :, :].detach(),
        scaling=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        sliding_window=None if window is None else int(window),
        rotary=rotary,
        call=((module, query, key, *rest), options),
    )


@contextmanager
def _shadow_attention(source: Any, name: str, watch: _Watch) -> Iterator[None]:
    if name == "eager" and name not in source.ALL_ATTENTION_FUNCTIONS:
        with _shadowed(source, "eager_attention_forward", watch.attention_function):
            yield
        return
    registry = source.ALL_ATTENTION_FUNCTIONS
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
def _shadowed(
    source: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    original = getattr(source, name)
    setattr(source, name, replacement(original))
    try:
        yield
    finally:
        setattr(source, name, original)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
