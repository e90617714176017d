"""Remove a term from the scores of chosen heads of a model, or shorten their reach, while it runs.

Each intervention is a context manager that replaces attention calls (capture/watch.py): the model's weights, modules
and config are never changed, and leaving the context undoes it. With x = R_t(μ̃ + δ) the score of a query and a key is
position + key + query + content (docs/method.md §8); ``scaled`` multiplies these terms:

    s' = [R_i μ̃_q, q_i − R_i μ̃_q] · [p·k̄_j + k·δk_j, q·k̄_j + c·δk_j],   k̄_j = R_j μ̃_k, δk_j = k_j − k̄_j

which is attention with vectors twice as long, for any kernel, and without a T × T matrix. The first ``skip_first`` keys
of a document, the sinks, keep their scores, and so do masks, sliding windows, softcaps and learned sinks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from transformers import PreTrainedModel

from qkscope.capture.layers import Layer
from qkscope.capture.model import describe_model
from qkscope.capture.watch import Attention, AttentionFunction, Rewrite, plain_model, watching
from qkscope.cause.lockedmodel import LockedModel, describe, other_model, other_weights
from qkscope.cause.terms import Placement, ScaledLayer, cut, remove_key_drift, without_coordinates
from qkscope.errors import CaptureError, ConfigError
from qkscope.headids import TERMS, Kind, head_name
from qkscope.options import head_pair, head_pairs, is_whole

LayerHead = tuple[int, int]
"""Layer, and number of the head within the layer."""
NamedHead = LayerHead | str
"""The same, or a name such as ``l04h01``."""
Factors = tuple[float, float, float, float]
"""Factors on the terms position, key, query and content."""
_T = TypeVar("_T")
_active: WeakSet[PreTrainedModel] = WeakSet()


@contextmanager
def scaled(model: PreTrainedModel, run: Any, factors: Mapping[Any, Factors]) -> Iterator[None]:
    """Multiply the terms (position, key, query, content) of these query heads' scores, within the context.

    ``run`` is a captured run of this model, whose means define the terms: its folder, or ``qkscope.open(…)``.
    """
    factors = _by_head(factors)
    for (layer, head), values in factors.items():
        if np.shape(values) != (len(TERMS),) or not all(isinstance(x, Real) and np.isfinite(x) for x in values):
            got = f"got {values!r} for layer {layer}, head {head}"
            raise ConfigError(f"expected four factors, for {', '.join(TERMS[:-1])} and {TERMS[-1]}, {got}")
    check_free(model)
    locked = run if isinstance(run, LockedModel) else LockedModel.of(model, run)
    locked.check_heads(factors)
    changed = {head: values for head, values in factors.items() if tuple(values) != (1, 1, 1, 1)}
    rewrites = {
        layer: ScaledLayer.of(locked, layer, heads, torch.tensor([changed[layer, head] for head in heads])).rewrite
        for layer, heads in by_layer(changed).items()
    }
    with rewriting(model, rewrites):
        yield


@contextmanager
def windowed(model: PreTrainedModel, windows: Mapping[Any, int] | str | Path, *, sinks: int = 4) -> Iterator[None]:
    """Let the query heads of these key heads see only keys less than w back, and the first ``sinks`` of a text.

    ``windows`` gives w by (layer, key head), or is a cut.json as written by ``qkscope reach``.
    """
    windows, sinks = resolved_cut(model, windows, sinks)
    check_free(model)
    with windowed_layers(model, describe(model), windows, sinks):
        yield


@contextmanager
def windowed_layers(
    model: PreTrainedModel, layers: Mapping[int, Layer], windows: Mapping[LayerHead, int], sinks: int
) -> Iterator[None]:
    """Do the same for a model whose layers are described already."""
    check_key_heads(layers, windows)
    rewrites = {
        layer: cut({head: int(windows[layer, head]) for head in heads}, sinks, Placement(layers[layer].rope))
        for layer, heads in by_layer(windows).items()
    }
    with rewriting(model, rewrites):
        yield


@contextmanager
def without_planes(model: PreTrainedModel, planes: Mapping[Any, Sequence[int]]) -> Iterator[None]:
    """Remove these RoPE planes from the scores of these query heads, within the context."""
    planes = _by_head(planes)
    check_free(model)
    layers = describe(model)
    masks: dict[int, torch.Tensor] = {}
    for (number, head), chosen in planes.items():
        layer = layers.get(number)
        if layer is None or layer.rope is None or head not in layer.query_heads:
            raise CaptureError(f"the model has no head {head_name(number, head)} with RoPE planes")
        chosen = chosen if isinstance(chosen, Iterable) and not isinstance(chosen, str) else [chosen]
        wrong = [plane for plane in chosen if not is_whole(plane) or not 0 <= plane < layer.rope.planes]
        if wrong:
            raise CaptureError(
                f"expected planes 0 to {layer.rope.planes - 1} of head {head_name(number, head)}, got {wrong[0]!r}"
            )
        mask = masks.setdefault(number, torch.ones(len(layer.query_heads), layer.d))
        for coordinates in layer.rope.coordinates:
            mask[head, torch.arange(layer.d)[coordinates][list(chosen)]] = 0.0
    with rewriting(model, {number: without_coordinates(mask) for number, mask in masks.items()}):
        yield


def random_planes(
    model: PreTrainedModel, planes: Mapping[Any, Sequence[int]], seed: int = 0
) -> dict[LayerHead, list[int]]:
    """Return a control for ``without_planes``: for each head the same number of planes, drawn from those not chosen."""
    generator = torch.Generator().manual_seed(seed)
    layers, drawn = describe(model), {}
    for (number, head), chosen in _by_head(planes).items():
        rope = layers[number].rope if number in layers else None
        others = [plane for plane in range(0 if rope is None else rope.planes) if plane not in set(chosen)]
        if len(others) < len(chosen):
            raise CaptureError(
                f"{head_name(number, head)} has only {len(others)} other planes, too few for a control of {len(chosen)}"
            )
        order = torch.randperm(len(others), generator=generator)[: len(chosen)].tolist()
        drawn[number, head] = sorted(others[i] for i in order)
    return drawn


@contextmanager
def without_drift(
    model: PreTrainedModel, run: Any, heads: Sequence[NamedHead] | str | None = None, *, control: int | None = None
) -> Iterator[None]:
    """Subtract the linear drift β_K(t − t̄) from the keys that these query heads read; by default all heads.

    With a seed as ``control``, a random direction of the same size is subtracted instead.
    """
    check_free(model)
    locked = run if isinstance(run, LockedModel) else LockedModel.of(model, run)
    heads = locked.heads if heads is None else head_pairs(heads)
    locked.check_heads(heads)
    generator = None if control is None else torch.Generator().manual_seed(control)
    rewrites = {}
    for layer, numbers in by_layer(dict.fromkeys(heads)).items():
        beta, mean = locked.means(layer).drift([locked.key_head(head) for head in numbers])
        if generator is not None:
            random = torch.randn(beta.shape, generator=generator)
            beta = random / random.norm(dim=-1, keepdim=True) * beta.norm(dim=-1, keepdim=True)
        placement = Placement(locked.layers[layer].rope)
        rewrites[layer] = remove_key_drift(numbers, beta, mean, locked.skip_first, placement)
    with rewriting(model, rewrites):
        yield


def resolved_cut(
    model: PreTrainedModel, windows: Mapping[Any, int] | str | Path, sinks: int
) -> tuple[dict[LayerHead, int], int]:
    """Return the windows by layer and key head, and the sinks, of a cut or of its file; an error if they are wrong."""
    source = "the cut"
    if isinstance(windows, str | Path):
        source, (windows, sinks, recorded) = str(windows), read_cut(Path(windows))
        check_recorded(Path(source), recorded, describe_model(plain_model(model)))
    by_head = _by_head(windows, "k")
    for (layer, head), width in by_head.items():
        if not is_whole(width) or width < 1:
            raise ConfigError(f"expected windows of 1 token or more, got {width!r} for layer {layer}, key head {head}")
        if not is_whole(sinks) or not 0 <= sinks <= width:
            raise ConfigError(
                f"{source} keeps the first {sinks} tokens and a window of {width} (layer {layer}, key head {head}); "
                f"expected 0 to {width} first tokens, no more than the window"
            )
    return by_head, sinks


def read_cut(path: Path) -> tuple[dict[LayerHead, int], int, dict[str, Any]]:
    """Return the windows, the sinks and the model of a cut.json; an error names the file if it is not valid."""
    try:
        content = json.loads(path.read_text())
        windows = {(int(layer), int(head)): int(content["window"]) for layer, head in content["heads"]}
        return windows, int(content["sinks"]), content
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{path} is not a cut of key heads ({error}); write one with qkscope reach") from None


def check_recorded(path: Path, recorded: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Raise an error unless a cut.json was made from a run of the loaded model."""
    if "weights" not in recorded:
        raise CaptureError(f"{path} does not record its model's weights; write it again with qkscope reach")
    other = other_model(recorded, loaded)
    if other:
        raise CaptureError(f"{path} is a cut of another model ({other}); choose heads from a run of this model")
    if other_weights(path, recorded, loaded):
        raise CaptureError(
            f"{path} is a cut of other weights of this model (another revision or checkpoint); choose heads from a "
            "run of these"
        )


@contextmanager
def rewriting(model: PreTrainedModel, layers: Mapping[int, Rewrite]) -> Iterator[None]:
    """Change the calls of these layers, within the context."""
    check_free(model)

    def rewrite(attention: Attention) -> Callable[[AttentionFunction], Any] | None:
        return layers[attention.layer](attention) if attention.layer in layers else None

    _active.add(model)
    try:
        with watching(model, lambda _: None, rewrite=rewrite):
            yield
    finally:
        _active.discard(model)


def check_free(model: PreTrainedModel) -> None:
    """Raise an error if an intervention on this model is active."""
    if model in _active:
        raise CaptureError("one intervention at a time: leave the first context before entering another")


def _by_head(values: Mapping[Any, _T], kind: Kind = "q") -> dict[LayerHead, _T]:
    """Return values by layer and number of the head, whose keys may be names."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected a dict of heads, such as {{(4, 1): …}}, got {values!r:.60}")
    return {head_pair(head, kind): value for head, value in values.items()}


def by_layer(heads: Mapping[LayerHead, Any]) -> dict[int, list[int]]:
    """Return the heads of each layer, in order."""
    layers: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        layers.setdefault(layer, []).append(head)
    return layers


def check_key_heads(layers: Mapping[int, Layer], heads: Iterable[LayerHead]) -> None:
    """Raise an error if the model does not have one of these key heads."""
    for layer, head in heads:
        if layer not in layers:
            raise CaptureError(f"the model has no layer {layer} with attention; it has {sorted(layers)}")
        keys = len(layers[layer].key_heads)
        if not 0 <= head < keys:
            raise CaptureError(f"expected key heads 0 to {keys - 1} in layer {layer}, got {head}")
