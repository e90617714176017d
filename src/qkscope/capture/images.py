"""Documents with images or video, as a processor returns them: what the model is called with, and where its text is.

The model itself places images among the text. Its rotary embedding is asked with these positions, several for each
token (M-RoPE); on text tokens they are equal, and those are the tokens that are measured. No model is treated by name.
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
from qkscope.capture.sampling import Stretches
from qkscope.capture.watch import backbone, plain_model
from qkscope.errors import CaptureError, ConfigError

_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")
_OF_TEXT = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
"""Inputs that a document without images has, too."""


@dataclass(frozen=True)
class TextStretch:
    """Text tokens that follow each other, in columns of the call and in positions."""

    column: int
    position: int
    length: int

    @property
    def positions(self) -> tuple[int, int]:
        """First position and the one after the last."""
        return self.position, self.position + self.length


@dataclass(frozen=True)
class ImageInputs:
    """What the model is called with for one document, and where its text tokens are."""

    inputs: dict[str, torch.Tensor]
    stretches: tuple[TextStretch, ...]
    image_tokens: int
    """Tokens that stand for images or video; they have several positions, and are not measured."""

    @property
    def ids(self) -> np.ndarray:
        """Ids of the text tokens in the stretches."""
        row = self.inputs["input_ids"][0].cpu().numpy()
        return np.concatenate(
            [row[:0], *(row[stretch.column : stretch.column + stretch.length] for stretch in self.stretches)]
        )

    @property
    def positions(self) -> Stretches:
        """Positions of the text tokens in the stretches."""
        return tuple(stretch.positions for stretch in self.stretches)

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the text tokens in the call, and their positions."""
        beginnings = [(stretch.column, stretch.length) for stretch in self.stretches]
        columns = torch.cat([torch.arange(first, first + length) for first, length in beginnings])
        return columns, torch.cat([torch.arange(*stretch.positions) for stretch in self.stretches])

    @property
    def shifted(self) -> bool:
        """Whether a text token's position is not its number in the document."""
        return any(stretch.column != stretch.position for stretch in self.stretches)

    def cut(self, window: int) -> ImageInputs:
        """The same call, of which only text tokens at positions within the window are measured."""
        within = [replace(stretch, length=min(stretch.length, window - stretch.position)) for stretch in self.stretches]
        return replace(self, stretches=tuple(stretch for stretch in within if stretch.length > 0))

    def call(self, model: nn.Module) -> torch.Tensor:
        """Last hidden states of the whole model without its language-model head."""
        whole = whole_model(model)
        weight: Any = backbone(model).get_input_embeddings().weight
        device = torch.device("cpu") if weight.device.type == "meta" else weight.device
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        with torch.no_grad(), _unchanged(whole):
            hidden: torch.Tensor = whole(**inputs, use_cache=False)[0]
        return hidden


def whole_model(model: nn.Module) -> PreTrainedModel:
    """The smallest model that contains the text decoder and more: with what reads images, without the head."""
    decoder = backbone(model)
    around = [m for m in plain_model(model).modules() if isinstance(m, PreTrainedModel) and m is not decoder]
    containing = [m for m in around if any(part is decoder for part in m.modules())]
    return containing[-1] if containing else decoder


def placeholders(model: nn.Module) -> list[int]:
    """Ids of the tokens that stand for images, video or sound, as the model's config says."""
    entries = vars(plain_model(model).config).items()
    return sorted({value for name, value in entries if _PLACEHOLDER.fullmatch(name) and isinstance(value, int)})


def inputs_text(inputs: Mapping[str, Any]) -> str:
    """What identifies a document: all its inputs, pixels included."""
    return " ".join(f"{name} {_digest(value)}" for name, value in sorted(tensors(inputs).items()))


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Whether there are inputs other than those of a text."""
    return not set(tensors(inputs)) <= _OF_TEXT


def tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs of one document, with token ids of one row, as tensors; an error if they are not."""
    given = {name: _tensor(name, value) for name, value in inputs.items() if value is not None}
    ids = given.get("input_ids")
    if ids is None or ids.ndim not in (1, 2) or ids.is_floating_point() or (ids.ndim == 2 and len(ids) != 1):
        got = "none" if ids is None else f"{str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}"
        raise ConfigError(f"expected input_ids as one row of integers, got {got}; give each document by itself")
    rows = {name: value[None] if name in _OF_TEXT and value.ndim == 1 else value for name, value in given.items()}
    if "attention_mask" in rows and not bool(rows["attention_mask"].all()):
        raise ConfigError("expected a document without padding, got an attention_mask with zeros")
    return rows | {"input_ids": rows["input_ids"].long()}


def image_inputs(model: nn.Module, inputs: Mapping[str, Any], name: str) -> ImageInputs:
    """A document with images, its positions read from a call of the model that ends before the first layer."""
    given = ImageInputs(tensors(inputs), (), 0)
    _check_names(whole_model(model), given.inputs, name)
    ids = given.inputs["input_ids"][0].cpu().numpy()
    is_text = ~np.isin(ids, placeholders(model))
    if is_text.all():
        raise CaptureError(f"{name} has images, but no token in its input_ids stands for one; use the processor's")
    positions = _positions(model, given, name)
    if positions.shape[1] != len(ids):
        raise CaptureError(f"{name} has {len(ids)} tokens, but the model reads {positions.shape[1]}")
    return replace(given, stretches=_stretches(is_text, positions, name), image_tokens=int((~is_text).sum()))


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected a tensor for {name}, got {type(value).__name__} ({error})") from None


def _digest(value: torch.Tensor) -> str:
    plain = value.cpu().contiguous()
    raw = plain.flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{plain.dtype}{tuple(plain.shape)}".encode() + raw).hexdigest()


def _check_names(whole: PreTrainedModel, inputs: Mapping[str, torch.Tensor], name: str) -> None:
    foreign = sorted(set(inputs) - set(inspect.signature(whole.forward).parameters))
    if foreign:
        raise CaptureError(f"{name}: {type(whole).__name__} takes no {', '.join(foreign)}; leave it out")


class _ReachedError(Exception):
    """Ends a call of the model at its rotary embedding."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions


def _positions(model: nn.Module, document: ImageInputs, name: str) -> np.ndarray:
    """The positions (kinds of them, T) with which the text decoder asks its rotary embedding."""

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


def _stretches(is_text: np.ndarray, positions: np.ndarray, name: str) -> tuple[TextStretch, ...]:
    """Runs of text tokens; an error if one of them has several positions, or is not after those before it."""
    columns = np.flatnonzero(is_text)
    several = positions[:, columns]
    at = several[0].astype(np.int64)
    if (several != at).any():
        first = int(columns[(several != at).any(0)][0])
        listed = ", ".join(map(str, positions[:, first].tolist()))
        raise CaptureError(f"{name}: expected one position for text token {first}, got {listed}; it cannot be measured")
    if (np.diff(at) <= 0).any() or (at < 0).any():
        raise CaptureError(f"{name}: expected text tokens at increasing positions from 0 on; it cannot be measured")
    parts = np.split(np.arange(len(at)), np.flatnonzero((np.diff(at) != 1) | (np.diff(columns) != 1)) + 1)
    return tuple(TextStretch(int(columns[part[0]]), int(at[part[0]]), len(part)) for part in parts if len(part))


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore what a model remembers of a call, such as how far images moved the positions."""
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)
