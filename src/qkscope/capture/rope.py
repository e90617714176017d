"""The rotary encoding of each layer, read from the loaded model: frequencies, scaling, layout, temperature.

No model is treated by name. The rotary embedding of the model is evaluated in float32 at chosen positions; the inputs
and outputs of the layer's own rotary function show which coordinates form its planes and in which direction they turn.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Literal

import torch
from torch import nn

from qkscope.capture.watch import Attention, alike, backbone
from qkscope.core.rope import base_of
from qkscope.errors import CaptureError

_Layout = Literal["half", "interleaved"]
_SAME = 0.5
"""Smallest mean cosine of attending with rotated queries; below 1 if they are normalised in between."""
_TOLERANCE = 2e-2
"""Largest relative error at which a hypothesis about the rotation is accepted, large enough for bf16."""


@dataclass(frozen=True)
class Embedding:
    """A rotary embedding of the model, with the layer type to call it with if it has several."""

    module: nn.Module
    layer_type: str | None = None

    @property
    def device(self) -> torch.device:
        """Device of its frequencies."""
        return next((buffer.device for buffer in self.module.buffers()), torch.device("cpu"))

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin (T, planes) in float32 at these positions (T,), times the embedding's attention factor."""
        cos, sin = self._cos_sin(positions)
        return cos[..., self._columns], sin[..., self._columns]

    @cached_property
    def _columns(self) -> slice:
        """One column per plane of its output, found once: comparing columns waits for all work queued on a GPU."""
        return _distinct_columns(self._cos_sin(torch.arange(1, 9, device=self.device))[1])

    def _cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probe = torch.zeros(1, 1, 1, dtype=torch.float32, device=positions.device)
        options = {} if self.layer_type is None else {"layer_type": self.layer_type}
        try:
            with torch.no_grad():
                output = self._copy()(probe, positions[None], **options)
        except (IndexError, ValueError) as error:
            raise CaptureError(
                f"{type(self.module).__name__} cannot be asked for its angles at a text's positions ({error}); try a "
                "newer transformers"
            ) from None
        if isinstance(output, torch.Tensor):
            return output.real[0].float(), output.imag[0].float()
        cos, sin = (part[0].float() for part in output)
        return cos, sin

    def _copy(self) -> nn.Module:
        """Return a copy to evaluate, since some embeddings change when called with a longer sequence than before."""
        copied = copy.copy(self.module)
        copied._buffers = dict(self.module._buffers)
        return copied

    def state_restorer(self) -> Callable[[], None]:
        """Return a function that restores the embedding to its present state."""
        attributes, buffers = dict(vars(self.module)), dict(self.module._buffers)

        def restore() -> None:
            vars(self.module).update(attributes)
            self.module._buffers = dict(buffers)

        return restore

    def depends_on_length(self, window: int) -> bool:
        """True if the angle at a position depends on the length of the sequence."""
        short = torch.tensor([0, 1], device=self.device)
        long = torch.tensor([0, 1, window - 1], device=self.device)
        return not torch.equal(self.angles(short)[1], self.angles(long)[1][:2])


@dataclass(frozen=True)
class LayerRope:
    """The rotary encoding of one layer; planes m = 0 … of coordinates start + (m, m + planes) or (2m, 2m + 1)."""

    frequencies: list[float]
    """Radians per token, one per plane, at the run's window."""
    attention_factor: float
    """Factor by which the encoding scales every rotated vector."""
    layout: _Layout
    start: int
    """First rotated coordinate."""
    sign: int
    """+1 if planes turn counter-clockwise with position."""
    temperature: bool
    """True if queries are scaled by a position-dependent factor after the rotation."""
    depends_on_length: bool
    """True if the frequencies change with the length of the document (dynamic, longrope)."""
    embedding: Embedding = field(repr=False, compare=False)

    @property
    def planes(self) -> int:
        """Number of rotated planes."""
        return len(self.frequencies)

    @property
    def coordinates(self) -> tuple[slice, slice]:
        """First and second coordinate of every plane."""
        start, planes = self.start, self.planes
        if self.layout == "half":
            return slice(start, start + planes), slice(start + planes, start + 2 * planes)
        return slice(start, start + 2 * planes, 2), slice(start + 1, start + 2 * planes, 2)

    @property
    def planar(self) -> tuple[object, ...]:
        """Coordinates and direction of its planes."""
        return self.layout, self.start, self.planes, self.sign

    def as_dict(self) -> dict[str, Any]:
        """Return the entry in the manifest."""
        entries = {key: value for key, value in vars(self).items() if key != "embedding"}
        return entries | {"theta": base_of(self.frequencies)}


def planes_of(x: torch.Tensor, planes: int, layout: _Layout, start: int = 0) -> torch.Tensor:
    """The rotated coordinates as complex numbers (…, planes)."""
    part = x[..., start : start + 2 * planes].float()
    if layout == "half":
        return torch.complex(part[..., :planes], part[..., planes:])
    return torch.complex(part[..., 0::2], part[..., 1::2])


def describe_rope(
    attention: Attention, positions: torch.Tensor, candidates: list[Embedding], window: int
) -> LayerRope | None:
    """Return the rotary encoding of a layer from one call of its attention; None if it has none."""
    if attention.rotary is None:
        return None
    if alike(attention.q, attention.rotary.q.after) < _SAME:
        return None  # the rotated tensor is not the one that attends
    before, after = (by_heads(part, attention.q) for part in (attention.rotary.q.before, attention.rotary.q.after))
    embedding = _used(attention, positions, candidates)
    cos, sin = embedding.angles(positions)
    layout, sign = _layout(before, after, cos, sin, f"layer {attention.layer}")
    ends = embedding.angles(torch.tensor([0, 1, window - 1], device=positions.device))
    factor = float(torch.hypot(ends[0][0], ends[1][0]).mean())
    frequencies = torch.atan2(ends[1][1].double(), ends[0][1].double()).tolist()
    return LayerRope(
        frequencies=frequencies,
        attention_factor=factor,
        layout=layout,
        start=_start(attention.q, after),
        sign=sign,
        temperature=_has_temperature(attention.q, after),
        depends_on_length=embedding.depends_on_length(window),
        embedding=embedding,
    )


def embeddings(model: nn.Module) -> list[Embedding]:
    """Every rotary embedding of the text decoder, once for each layer type it distinguishes."""
    decoder = backbone(model)
    types = sorted(set(getattr(decoder.config, "layer_types", None) or []))
    return list(_embeddings(decoder, types))


def check_angles(attention: Attention, rope: LayerRope, columns: torch.Tensor, positions: torch.Tensor) -> None:
    """Raise an error unless these columns of a call were rotated by the angles of these positions."""
    expected = torch.complex(*rope.embedding.angles(positions.to(rope.embedding.device)))
    angles = _call_angles(attention, attention.q.shape[2]).to(expected.device)[columns.to(expected.device)]
    if not _close(angles, expected):
        raise CaptureError(
            f"layer {attention.layer}: text between images is not rotated by the angles of its positions"
        )


def temperature(attention: Attention, rope: LayerRope) -> torch.Tensor | None:
    """Factor (B, T) on the queries of each position after the rotation; None if the layer applies none."""
    if not rope.temperature or attention.rotary is None:
        return None
    after = by_heads(attention.rotary.q.after, attention.q)[:, 0].float()
    q = attention.q[:, 0, :, rope.start : rope.start + after.shape[-1]].float()
    return _factor(q, after)


def _embeddings(decoder: nn.Module, types: list[str]) -> Iterator[Embedding]:
    for module in decoder.modules():
        if not type(module).__name__.endswith("RotaryEmbedding"):
            continue
        if "layer_type" in inspect.signature(type(module).forward).parameters:
            types_of_module = getattr(module, "rope_type", None)
            yield from (
                Embedding(module, kind)
                for kind in (sorted(types_of_module) if isinstance(types_of_module, dict) else types)
            )
        else:
            yield Embedding(module)


def _used(attention: Attention, positions: torch.Tensor, candidates: list[Embedding]) -> Embedding:
    """Return the embedding that produced the angles of this layer."""
    angles = _call_angles(attention, positions.shape[0])
    for candidate in candidates:
        expected = torch.complex(*candidate.angles(positions))
        if expected.shape == angles.shape and _close(expected, angles):
            return candidate
    raise CaptureError(f"layer {attention.layer}: its rotary angles match none of the model's rotary embeddings")


def _call_angles(attention: Attention, length: int) -> torch.Tensor:
    """The angles of a call as complex numbers (T, planes)."""
    assert attention.rotary is not None
    angles = attention.rotary.angles
    if angles[0].is_complex():
        cos, sin = angles[0].real, angles[0].imag
    else:
        cos, sin = angles[0], angles[1]
    cos, sin = (part.float().reshape(-1, length, part.shape[-1])[0] for part in (cos, sin))
    return torch.complex(*(part[..., _distinct_columns(part)] for part in (cos, sin)))


def _distinct_columns(part: torch.Tensor) -> slice:
    """One column per plane, where cos or sin contains every plane twice (as two halves, or interleaved)."""
    n = part.shape[-1]
    if n % 2 == 0 and torch.equal(part[..., : n // 2], part[..., n // 2 :]):
        return slice(0, n // 2)
    if n % 2 == 0 and torch.equal(part[..., 0::2], part[..., 1::2]):
        return slice(0, n, 2)
    return slice(None)


def _layout(
    before: torch.Tensor, after: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, where: str
) -> tuple[_Layout, int]:
    """Return the layout of planes after the rotation, and its direction: the hypothesis with the smallest error."""
    planes = cos.shape[-1]
    layouts: tuple[_Layout, _Layout] = ("half", "interleaved")
    errors = {}
    for source, target, sign in product(layouts, layouts, (1, -1)):
        rotated = planes_of(before, planes, source) * torch.complex(cos, sign * sin)
        errors[target, sign, source] = _error(planes_of(after, planes, target), rotated)
    best = min(errors, key=lambda key: errors[key])
    if errors[best] > _TOLERANCE:
        raise CaptureError(f"{where}: its rotary function is not a known rotation of planes")
    return best[0], best[1]


def by_heads(part: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the rotary function as (B, H, T, …): some models call it with (B, T, H, …)."""
    if part.shape[1:3] == q.shape[1:3] and not (part.shape[1] == part.shape[2] and _is_transposed(part, q)):
        return part
    return part.transpose(1, 2)


def _is_transposed(part: torch.Tensor, q: torch.Tensor) -> bool:
    norms = [x.float().norm(dim=-1) for x in (part, q)]
    return _error(norms[0].transpose(1, 2), norms[1]) < _error(norms[0], norms[1])


def _start(q: torch.Tensor, after: torch.Tensor) -> int:
    """First rotated coordinate of the head: all coordinates are rotated, or only the first or the last ones."""
    size = after.shape[-1]
    if size == q.shape[-1]:
        return 0
    front, end = q[..., :size].float(), q[..., -size:].float()
    return 0 if _error(front, after.float()) < _error(end, after.float()) else q.shape[-1] - size


def _has_temperature(q: torch.Tensor, after: torch.Tensor) -> bool:
    """True if q is the rotated query times a factor that depends on the position alone."""
    if q.data_ptr() == after.data_ptr() or after.shape[-1] != q.shape[-1] or q.shape[1] < 2:
        return False
    factors = _factor(q.float(), after.float())
    return _close(factors, factors[:, :1].expand_as(factors))


def _factor(scaled: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Factor by which vectors were scaled; 1 for a zero vector."""
    power = (plain * plain).sum(-1)
    return torch.where(power > 0, (scaled * plain).sum(-1) / power.clamp_min(1e-30), 1.0)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.abs().square().mean().sqrt()
    return float((got - expected).abs().square().mean().sqrt() / scale.clamp_min(1e-30))


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return _error(got, expected) < _TOLERANCE
