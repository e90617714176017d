"""Documents with images or video, as a processor returns them: the inputs of the model, and where the text is.

The model itself places images among the text. Its rotary embedding is called with these positions, several for each
token (M-RoPE); on text tokens they are equal, and only those tokens are measured. No model is treated by name.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from qkscope.capture.rope import embeddings
from qkscope.capture.sampling import TextSpans
from qkscope.capture.watch import backbone, plain_model
from qkscope.errors import CaptureError, ConfigError

_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")
_OF_TEXT = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
"""Inputs that a document without images has as well."""


@dataclass(frozen=True)
class TextSpan:
    """Consecutive text tokens: their columns of the call, and their positions."""

    column: int
    position: int
    length: int

    @property
    def positions(self) -> tuple[int, int]:
        """First position and the one after the last."""
        return self.position, self.position + self.length


@dataclass(frozen=True)
class ImageInputs:
    """The inputs of the model for one document, and where its text tokens are."""

    inputs: dict[str, torch.Tensor]
    text_spans: tuple[TextSpan, ...]
    image_tokens: int
    """Tokens that stand for images or video; they have several positions, and are not measured."""

    @property
    def ids(self) -> np.ndarray:
        """Ids of the text tokens in the spans."""
        row = self.inputs["input_ids"][0].cpu().numpy()
        return np.concatenate([row[:0], *(row[span.column : span.column + span.length] for span in self.text_spans)])

    @property
    def positions(self) -> TextSpans:
        """Positions of the text tokens in the spans."""
        return tuple(span.positions for span in self.text_spans)

    @property
    def columns_and_positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the text tokens in the call, and their positions."""
        beginnings = [(span.column, span.length) for span in self.text_spans]
        columns = torch.cat([torch.arange(first, first + length) for first, length in beginnings])
        return columns, torch.cat([torch.arange(*span.positions) for span in self.text_spans])

    @property
    def shifted(self) -> bool:
        """True if a text token's position is not its number in the document."""
        return any(span.column != span.position for span in self.text_spans)

    def cut(self, window: int) -> ImageInputs:
        """Return the same call, with only the text tokens at positions within the window."""
        within = [replace(span, length=min(span.length, window - span.position)) for span in self.text_spans]
        return replace(self, text_spans=tuple(span for span in within if span.length > 0))

    def call(self, model: nn.Module) -> torch.Tensor:
        """Run the whole model without its language-model head; return the last hidden states."""
        full_model = whole_model(model)
        weight: Any = backbone(model).get_input_embeddings().weight
        device = torch.device("cpu") if weight.device.type == "meta" else weight.device
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        with torch.no_grad(), _attributes_restored(full_model):
            hidden: torch.Tensor = full_model(**inputs, use_cache=False)[0]
        return hidden


def whole_model(model: nn.Module) -> PreTrainedModel:
    """Return the smallest model that contains the text decoder and more: with the image encoder, without the head."""
    decoder = backbone(model)
    around = [m for m in plain_model(model).modules() if isinstance(m, PreTrainedModel) and m is not decoder]
    containing = [m for m in around if any(part is decoder for part in m.modules())]
    return containing[-1] if containing else decoder


def placeholders(model: nn.Module) -> list[int]:
    """Return the ids of placeholder tokens for images, video or sound, from the model's config."""
    entries = vars(plain_model(model).config).items()
    return sorted({value for name, value in entries if _PLACEHOLDER.fullmatch(name) and isinstance(value, int)})


def inputs_text(inputs: Mapping[str, Any]) -> str:
    """Return a string that identifies a document: digests of all its inputs, pixels included."""
    return " ".join(f"{name} {_digest(value)}" for name, value in sorted(tensors(inputs).items()))


def has_images(inputs: Mapping[str, Any]) -> bool:
    """True if there are inputs other than those of a text."""
    return not {name for name, value in inputs.items() if value is not None} <= _OF_TEXT


def tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the inputs of one document as tensors; raise an error unless its token ids are one row."""
    by_name = {name: _tensor(name, value) for name, value in inputs.items() if value is not None}
    ids = by_name.get("input_ids")
    if ids is None or ids.ndim not in (1, 2) or ids.is_floating_point() or (ids.ndim == 2 and len(ids) != 1):
        got = "none" if ids is None else f"{str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}"
        raise ConfigError(f"expected input_ids as one row of integers, got {got}; give each document by itself")
    rows = {name: value[None] if name in _OF_TEXT and value.ndim == 1 else value for name, value in by_name.items()}
    if "attention_mask" in rows and not bool(rows["attention_mask"].all()):
        raise ConfigError("expected a document without padding, got an attention_mask with zeros")
    return rows | {"input_ids": rows["input_ids"].long()}


def image_inputs(model: nn.Module, inputs: Mapping[str, Any], name: str) -> ImageInputs:
    """Return a document with images; positions are read from a call of the model that stops before its first layer."""
    document = ImageInputs(tensors(inputs), (), 0)
    _check_names(whole_model(model), document.inputs, name)
    ids = document.inputs["input_ids"][0].cpu().numpy()
    is_text = ~np.isin(ids, placeholders(model))
    if is_text.all():
        raise CaptureError(f"{name} has images, but no token in its input_ids stands for one; use the processor's")
    positions = _positions(model, document, name)
    if positions.shape[1] != len(ids):
        raise CaptureError(f"{name} has {len(ids)} tokens, but the model reads {positions.shape[1]}")
    return replace(document, text_spans=_text_spans(is_text, positions, name), image_tokens=int((~is_text).sum()))


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected a tensor for {name}, got {type(value).__name__} ({error})") from None


def _digest(value: torch.Tensor) -> str:
    plain = value.cpu().contiguous()
    raw = plain.flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{plain.dtype}{tuple(plain.shape)}".encode() + raw).hexdigest()


def _check_names(full_model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], name: str) -> None:
    foreign = sorted(set(inputs) - set(inspect.signature(full_model.forward).parameters))
    if foreign:
        raise CaptureError(f"{name}: {type(full_model).__name__} takes no {', '.join(foreign)}; leave it out")


class _ReachedError(Exception):
    """Ends a call of the model at its rotary embedding."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions


def _positions(model: nn.Module, document: ImageInputs, name: str) -> np.ndarray:
    """The positions (axes, T) with which the text decoder calls its rotary embedding."""

    def stop(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        raise _ReachedError(inspect.signature(module.forward).bind(*args, **options).arguments["position_ids"])

    modules = {embedding.module for embedding in embeddings(model)}
    hooks = [module.register_forward_pre_hook(stop, with_kwargs=True) for module in modules]
    try:
        with torch.compiler.set_stance("force_eager"):
            document.call(model)
    except _ReachedError as reached:
        return reached.positions.reshape(-1, reached.positions.shape[-1]).cpu().numpy()
    except torch.OutOfMemoryError:
        raise CaptureError(f"{name}: its images do not fit into memory; use smaller ones") from None
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CaptureError(f"{name}: the model cannot read these inputs ({reason}); use its processor's") from None
    finally:
        for hook in hooks:
            hook.remove()
    raise CaptureError(f"{name}: the text decoder has no rotary embedding that tells the positions of its tokens")


def _text_spans(is_text: np.ndarray, positions: np.ndarray, name: str) -> tuple[TextSpan, ...]:
    """Spans of text tokens; an error if a token has several positions, or if positions do not increase."""
    columns = np.flatnonzero(is_text)
    by_axis = positions[:, columns]
    position = by_axis[0].astype(np.int64)
    if (by_axis != position).any():
        first = int(columns[(by_axis != position).any(0)][0])
        listed = ", ".join(map(str, positions[:, first].tolist()))
        raise CaptureError(f"{name}: expected one position for text token {first}, got {listed}; it cannot be measured")
    if (np.diff(position) <= 0).any() or (position < 0).any():
        raise CaptureError(f"{name}: expected text tokens at increasing positions from 0 on; it cannot be measured")
    parts = np.split(np.arange(len(position)), np.flatnonzero((np.diff(position) != 1) | (np.diff(columns) != 1)) + 1)
    return tuple(TextSpan(int(columns[part[0]]), int(position[part[0]]), len(part)) for part in parts if len(part))


@contextmanager
def _attributes_restored(module: nn.Module) -> Iterator[None]:
    """Restore a module's attributes after the block, such as the position offset that images caused."""
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)
