"""Where the queries and keys of an attention call are in their text, with and without a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from qkscope.capture.attention import Attention
from qkscope.capture.rope import LayerRope
from qkscope.errors import CaptureError
from qkscope.options import MOST_TOKENS

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cos and sin (T, planes)."""
_SAME_ANGLES = 1e-3
"""Mean squared difference of angles up to which two positions are one; half precision needs that much."""


@dataclass(frozen=True)
class Placed:
    """Where a call is, and the angles there."""

    at_queries: Angles | None
    """None without rotary."""
    at_keys: Angles | None
    first: int | None
    """Position of the first query; None if it is not known, without rotary."""
    offset: int
    """Position of the first key."""

    def key_positions(self, keys: int, device: torch.device) -> torch.Tensor:
        """Positions of the keys."""
        return torch.arange(self.offset, self.offset + keys, device=device)

    def query_positions(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """Positions of the queries; the last keys' where they are not known."""
        first = keys - queries if self.first is None else self.first
        return torch.arange(first, first + queries, device=device)


@dataclass
class Placement:
    """Places the calls of a layer.

    A call tells the angles of its queries alone; where these lie in the embedding's table is their position. Keys end
    with the queries, unless the cache has room for more; they begin later than 0 if it forgets, as those of sliding
    windows do.
    """

    rope: LayerRope | None
    _tables: dict[int, Angles] = field(default_factory=dict, repr=False)

    def place(self, attention: Attention) -> Placed:
        """Place a call; an error if its tokens are not at consecutive positions."""
        _, query, key = attention.call[0][:3]
        queries, keys, device = query.shape[2], key.shape[2], query.device
        if self.rope is None or attention.rotary is None:
            return Placed(None, None, None, 0)
        if self.rope.depends_on_length and queries < keys:
            raise CaptureError("the rotary encoding of this model depends on the length of a text; use no cache")
        size = keys
        while (first := _first_position(attention, self._angles(size, device), queries)) is None:
            size *= 2
            if size > MOST_TOKENS:
                raise CaptureError(
                    "an intervention needs tokens at consecutive positions; pad on the right, or use one text at a time"
                )
        offset = max(first + queries - keys, 0)
        cos, sin = self._angles(max(size, first + queries), device)
        at_queries, at_keys = slice(first, first + queries), slice(offset, offset + keys)
        return Placed((cos[at_queries], sin[at_queries]), (cos[at_keys], sin[at_keys]), first, offset)

    def _angles(self, size: int, device: torch.device) -> Angles:
        """Cos and sin at the first positions."""
        assert self.rope is not None
        if size not in self._tables:
            self._tables.clear()  # they may depend on the length
            cos, sin = self.rope.embedding.angles(torch.arange(size, device=self.rope.embedding.device))
            self._tables[size] = cos.to(device), sin.to(device)
        return self._tables[size]


def _first_position(attention: Attention, table: Angles, queries: int) -> int | None:
    """Position of the first query of a call, by its own angles; None if the table does not have them all."""
    assert attention.rotary is not None
    angles = attention.rotary.angles
    cos, sin = (angles[0].real, angles[0].imag) if angles[0].is_complex() else angles[:2]
    cos, sin = (part.float().reshape(-1, queries, part.shape[-1]) for part in (cos, sin))
    planes = table[0].shape[-1]
    if cos.shape[-1] != planes:  # every plane twice, as two halves or interleaved
        half = torch.equal(cos[..., :planes], cos[..., planes:])
        cos, sin = (part[..., :planes] if half else part[..., 0::2] for part in (cos, sin))
    first = int(_away(table, (cos[:1, :1], sin[:1, :1])).argmin(-1))
    rows = slice(first, first + queries)
    if len(table[0][rows]) < queries:
        return None
    return first if float(_away((table[0][rows], table[1][rows]), (cos, sin)).max()) < _SAME_ANGLES * planes else None


def _away(a: Angles, b: Angles) -> torch.Tensor:
    return ((a[0] - b[0]).square() + (a[1] - b[1]).square()).sum(-1)
