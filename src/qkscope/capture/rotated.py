"""Which of the tensors that a model rotates attend: some models rotate queries and keys one by one, or others too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_COMPARED = 16
"""Tokens by which rotated tensors are told apart."""


@dataclass(frozen=True)
class Turned:
    """A tensor before and after a model's rotary function, and the angles."""

    before: torch.Tensor
    after: torch.Tensor
    angles: tuple[torch.Tensor, ...]
    """(cos, sin), or one complex tensor."""


@dataclass(frozen=True)
class Rotary:
    """How the queries of a call were rotated, and its keys if they were in the same pass."""

    q: Turned
    k: Turned | None
    """None: the keys come from an earlier layer."""

    @property
    def angles(self) -> tuple[torch.Tensor, ...]:
        """Those of the queries."""
        return self.q.angles


def rotary_of(query: torch.Tensor, key: torch.Tensor, turned: list[Turned]) -> Rotary | None:
    """Which of the rotated tensors attend here; None if the queries are not among them."""
    q = _own(query, turned)
    return None if q is None else Rotary(q, _own(key[..., -query.shape[-2] :, :], turned, shared=True))


def _own(x: torch.Tensor, turned: list[Turned], *, shared: bool = False) -> Turned | None:
    """The rotated tensor that x, (B, H, T, d), is or contains; one head for all of them if ``shared``."""
    heads, tokens, d = x.shape[1:]
    allowed = {heads, 1} if shared else {heads}
    fitting = [
        one
        for one in turned
        if one.after.ndim == 4
        and one.after.shape[-1] <= d
        and any(one.after.shape[a] in allowed and one.after.shape[b] == tokens for a, b in ((1, 2), (2, 1)))
    ]
    same = [one for one in fitting if one.after.data_ptr() == x.data_ptr()]
    if same:
        return same[-1]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    return max(fitting, key=lambda one: alike(x, one.after))


def alike(x: torch.Tensor, after: torch.Tensor) -> float:
    """Mean cosine of the first tokens of x, (B, H, T, d), with a rotated tensor, in its first or last coordinates."""
    size, few = after.shape[-1], slice(0, min(_COMPARED, x.shape[2]))
    parts = [after] if after.shape[2] == x.shape[2] else []
    parts += [after.transpose(1, 2)] if after.shape[1] == x.shape[2] else []
    places = [x[:1, :, few, :size]] + ([x[:1, :, few, -size:]] if size < x.shape[-1] else [])
    return max(
        float(nn.functional.cosine_similarity(place.float(), part[:1, :, few].float(), dim=-1).mean())
        for place in places
        for part in parts
    )


def is_real(value: object) -> bool:
    """Whether it is a tensor of real or complex numbers, not of indices."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
