"""Watch the post-RoPE queries and keys of every self-attention layer of an unmodified transformers model.

Every attention class of transformers looks up its attention function by name on each call: in the registry
``ALL_ATTENTION_FUNCTIONS`` of its module, or as the module's global ``eager_attention_forward``. While a model is
watched, that name refers to a wrapper that passes the arguments on to a callback and then calls the original. Nothing
else changes: masks are built for the same name, outputs are bit-identical, and leaving the context undoes everything.
The module's ``apply_…rotary…`` functions are wrapped the same way; they show which tensors are rotated, and by which
angles. A rotated tensor that then attends is the layer's own; others, such as those of an indexer, are ignored.
"""

from __future__ import annotations

import inspect
import re
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
_ROTARY = re.compile(r"apply_\w*(rotary|rope)")
_REGISTRY = {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"}
_KEPT = 8
"""Largest number of rotated tensors that are kept until the next attention call."""


@dataclass(frozen=True)
class Attention:
    """One call of a self-attention function: q (B, Hq, T, d) and the k (B, Hkv, T, d) of the same tokens."""

    layer: int
    module: nn.Module
    q: torch.Tensor
    k: torch.Tensor
    scaling: float
    sliding_window: int | None
    rotary: Rotary | None
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
"""A function from a call to its replacement, which takes the attention function; None: the call is not changed."""


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
    ``self_attentions`` if the caller has them already; ``rewrite`` may replace a call.
    Compiled models run uncompiled within the context.
    """
    modules = modules or self_attentions(model)
    watch = _Watch({id(module): number for number, module in numbered(modules)}, on_attention, on_output, rewrite)
    with ExitStack() as replacements:
        replacements.enter_context(torch.compiler.set_stance("force_eager"))
        replacements.enter_context(attention_replaced(modules, watch.attention_function))
        for source_module in _source_modules(modules):
            for function in [name for name in vars(source_module) if _ROTARY.match(name)]:
                replacements.enter_context(_replaced(source_module, function, watch.rotary_function))
        yield


@contextmanager
def attention_replaced(modules: list[nn.Module], replacement: Callable[[AttentionFunction], Any]) -> Iterator[None]:
    """Replace the attention function that these modules look up, within the context; others may look it up as well."""
    with ExitStack() as replacements:
        for source_module in _source_modules(modules):
            for name in {implementation(m) for m in modules if type(m).__module__ == source_module.__name__}:
                replacements.enter_context(_replace_attention(source_module, name, replacement))
        yield


def _source_modules(modules: list[nn.Module]) -> list[Any]:
    return [sys.modules[name] for name in dict.fromkeys(type(module).__module__ for module in modules)]


def self_attentions(model: nn.Module) -> list[nn.Module]:
    """Return the self-attention modules of the text decoder, by layer; an error if none can be watched."""
    decoder = backbone(model)
    by_layer: dict[int, nn.Module] = {}
    for number, module in numbered([module for module in decoder.modules() if _is_self_attention(module)]):
        by_layer.setdefault(number, module)  # attention to an encoder comes after that to the text itself
    if not by_layer:
        raise CaptureError(f"{type(model).__name__} cannot be captured: {_why_not(decoder)}")
    return [by_layer[layer] for layer in sorted(by_layer)]


def numbered(modules: list[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
    """Yield attention modules with their layer number: their own or, if they have none, in order."""
    for n, module in enumerate(modules):
        own_number: Any = getattr(module, "layer_idx", None)
        yield (own_number if isinstance(own_number, int) and own_number >= 0 else n), module


def _why_not(decoder: nn.Module) -> str:
    """Return the reason why no module of a model can be watched."""
    suspects = [module for module in decoder.modules() if re.search(r"Attention|MLA|Attn", type(module).__name__)]
    if not suspects:
        return "it has no attention layers"
    names = ", ".join(sorted({type(module).__name__ for module in suspects}))
    return f"its attention ({names}) computes by itself, without the attention functions of transformers"


def backbone(model: nn.Module) -> PreTrainedModel:
    """Return the text decoder without its language-model head: the deepest model whose config is the text config."""
    model = plain_model(model)
    text = model.config.get_text_config(decoder=True)
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is text][-1]


def plain_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a wrapper: compiled, adapted (PEFT, adapters included) or parallel."""
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if callable(base := getattr(inner, "get_base_model", None)):
            inner = base()
        elif isinstance(wrapped := getattr(inner, "_orig_mod", getattr(inner, "module", None)), nn.Module):
            inner = wrapped
        else:
            raise CaptureError(f"expected a transformers model, got {type(model).__name__}")
    return inner


def head_size(config: Any) -> int | None:
    """Return the length of a head's vectors from a config; None if it does not say."""
    heads, size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    return getattr(config, "head_dim", None) or (size // heads if heads and size else None)


def is_split(model: PreTrainedModel) -> bool:
    """True if each of several processes has only a part of the model's weights."""
    if (getattr(model, "tp_size", None) or 1) > 1:
        return True
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def implementation(module: nn.Module) -> str:
    """Return the attention implementation of a module, such as ``sdpa``."""
    config: Any = module.config
    return str(config._attn_implementation or "eager")


def _is_self_attention(module: nn.Module) -> bool:
    if not hasattr(module, "config") or getattr(module, "is_cross_attention", False) or not _through_registry(module):
        return False
    # Attention whose encoder states are optional is self-attention; where they are required, it is not.
    parameters = inspect.signature(type(module).forward).parameters
    required = {name for name in _CROSS & set(parameters) if parameters[name].default is inspect.Parameter.empty}
    return not required and "cross_attention_states" not in parameters


def _through_registry(module: nn.Module) -> bool:
    """True if the forward function of a module looks up its attention function."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    source_module = sys.modules.get(type(module).__module__)
    return (
        code is not None and bool(_REGISTRY & set(code.co_names)) and hasattr(source_module, "ALL_ATTENTION_FUNCTIONS")
    )


class _Watch:
    """State of the wrappers: layers of watched modules, callbacks, and tensors rotated since the last attention."""

    def __init__(
        self, modules: dict[int, int], on_attention: OnAttention, on_output: OnOutput | None, rewrite: Rewrite | None
    ) -> None:
        self.modules, self.on_attention, self.on_output, self.rewrite = modules, on_attention, on_output, rewrite
        self.rotated: list[RotatedTensor] = []

    def attention_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapper that replaces an attention function."""

        @wraps(original)
        def wrapper(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
            if id(module) not in self.modules:
                return original(module, query, key, *args, **options)
            rotated, self.rotated = self.rotated, []
            layer, rotary = self.modules[id(module)], rotary_of(query, key, rotated)
            attention = _attention_call(layer, module, query, key, rotary, args, options)
            self.on_attention(attention)
            replacement = None if self.rewrite is None else self.rewrite(attention)
            result = original(module, query, key, *args, **options) if replacement is None else replacement(original)
            if self.on_output is not None:
                self.on_output(attention, result[0])
            return result

        return wrapper

    def rotary_function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapper that replaces a rotary function."""

        @wraps(original)
        def wrapper(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            after = [result] if isinstance(result, torch.Tensor) else [x for x in result if is_real(x)]
            arguments = [x for x in (*args, *options.values()) if is_real(x)]
            before, angles = arguments[: len(after)], tuple(arguments[len(after) :])
            rotated = [RotatedTensor(x, y, angles) for x, y in zip(before, after, strict=False)]
            self.rotated = [*self.rotated, *rotated][-_KEPT:]  # modules that are not watched may rotate as well
            return result

        return wrapper


def _attention_call(
    layer: int,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    rotary: Rotary | None,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Attention:
    scaling = options.get("scaling")
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    return Attention(
        layer=layer,
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
def _replace_attention(module: Any, name: str, replacement: Callable[[AttentionFunction], Any]) -> Iterator[None]:
    if name == "eager" and name not in module.ALL_ATTENTION_FUNCTIONS:
        with _replaced(module, "eager_attention_forward", replacement):
            yield
        return
    registry = module.ALL_ATTENTION_FUNCTIONS
    local = registry._local_mapping
    before = local.get(name)
    registry[name] = replacement(registry[name])
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


_COMPARED = 16
"""Tokens by which rotated tensors are compared."""


@dataclass(frozen=True)
class RotatedTensor:
    """A tensor before and after a model's rotary function, and the angles."""

    before: torch.Tensor
    after: torch.Tensor
    angles: tuple[torch.Tensor, ...]
    """(cos, sin), or one complex tensor."""


@dataclass(frozen=True)
class Rotary:
    """The rotation of a call's queries, and of its keys if they are from the same layer."""

    q: RotatedTensor
    k: RotatedTensor | None
    """None: the keys come from an earlier layer."""

    @property
    def angles(self) -> tuple[torch.Tensor, ...]:
        """The angles of the queries."""
        return self.q.angles


def rotary_of(query: torch.Tensor, key: torch.Tensor, rotated: list[RotatedTensor]) -> Rotary | None:
    """Return the rotated tensors that attend in this call; None if its queries are not among them."""
    q = _own(query, rotated)
    return None if q is None else Rotary(q, _own(key[..., -query.shape[-2] :, :], rotated, shared=True))


def _own(x: torch.Tensor, rotated: list[RotatedTensor], *, shared: bool = False) -> RotatedTensor | None:
    """Return the rotated tensor that x, (B, H, T, d), is or contains; it may have a single head if ``shared``."""
    heads, tokens, d = x.shape[1:]
    allowed = {heads, 1} if shared else {heads}
    fitting = [
        candidate
        for candidate in rotated
        if candidate.after.ndim == 4
        and candidate.after.shape[-1] <= d
        and any(candidate.after.shape[a] in allowed and candidate.after.shape[b] == tokens for a, b in ((1, 2), (2, 1)))
    ]
    identical = [candidate for candidate in fitting if candidate.after.data_ptr() == x.data_ptr()]
    if identical:
        return identical[-1]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return max(fitting, key=lambda candidate: alike(x, candidate.after))


def alike(x: torch.Tensor, after: torch.Tensor) -> float:
    """Return mean cosine of the first tokens of x (B, H, T, d), in its first or last coordinates, to ``after``."""
    size, first_tokens = after.shape[-1], slice(0, min(_COMPARED, x.shape[2]))
    parts = [after] if after.shape[2] == x.shape[2] else []
    parts += [after.transpose(1, 2)] if after.shape[1] == x.shape[2] else []
    slices = [x[:1, :, first_tokens, :size]] + ([x[:1, :, first_tokens, -size:]] if size < x.shape[-1] else [])
    return max(
        float(nn.functional.cosine_similarity(vectors.float(), part[:1, :, first_tokens].float(), dim=-1).mean())
        for vectors in slices
        for part in parts
    )


def is_real(value: object) -> bool:
    """True for a tensor of real or complex numbers, not of indices."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
