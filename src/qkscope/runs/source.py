"""Where moments and vectors come from: what a dataset and the folder of a captured run both offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qkscope.core.headdata import HeadData
from qkscope.core.rows import Rows
from qkscope.errors import HeadError
from qkscope.heads import HeadId


@dataclass(frozen=True)
class Reading:
    """How the rows of a head are taken from its file."""

    max_samples: int | None = None
    """Keep at most this many rows of each head, chosen by a hash of (seed, document, position)."""
    seed: int = 0
    """Seed of that choice."""
    paired: bool = False
    """Also take moments of (q, k) at the same token."""
    sample: int = 0
    """Also keep this many vectors of each kind, or all there are."""
    buckets: int = 0
    """Also take moments of the queries in this many position buckets."""
    rotary: bool = False
    """Also take means with the rotation undone, where it is known."""


WHOLE = Reading()
"""Every row of every head."""


@dataclass(frozen=True)
class LayerNotes:
    """What sets a layer apart; None where it is not known."""

    nope: bool | None = None
    """Without rotary encoding."""
    sliding_window: int | None = None
    """Tokens that a query sees, where it does not see them all."""


@dataclass(frozen=True)
class Extent:
    """How much text a run was measured on."""

    n_documents: int | None
    n_tokens: int | None


class Source(Protocol):
    """Where a run's moments and vectors come from."""

    @property
    def query_heads(self) -> list[HeadId]:
        """All query heads, by (layer, head)."""

    @property
    def q_per_kv(self) -> int:
        """Query heads per key head."""

    @property
    def window(self) -> int | None:
        """Context length, where it is known for all heads."""

    @property
    def buckets(self) -> int | None:
        """Position buckets that queries were reduced in; None where that is yet to be chosen."""

    def key_head(self, head: HeadId) -> HeadId:
        """The key head that a query head reads; a ``HeadError`` if there is none."""

    def file(self, head: HeadId) -> str | None:
        """The file that a message about this head should name."""

    def layer_notes(self, head: HeadId) -> LayerNotes:
        """What sets the layer of a query head apart from full attention with rotary encoding."""

    def load(self, heads: Sequence[HeadId], reading: Reading) -> tuple[list[HeadData], list[HeadError]]:
        """Moments of query heads that read one key head, and the heads that failed."""

    def rows(self, head: HeadId, reading: Reading) -> Rows:
        """Vectors of a query or key head: all there are, or the run's sample of them."""

    def extent(self, heads: Sequence[HeadId]) -> Extent:
        """How much was measured, by the first of these heads that can be read."""

    def identity(self) -> dict[str, str]:
        """What exactly was read, for the record."""
