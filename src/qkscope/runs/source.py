"""A source of moments and vectors: the interface of a dataset and of the folder of a captured run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pandas as pd

from qkscope.core.headdata import HeadData
from qkscope.core.rows import Rows
from qkscope.errors import ConfigError, HeadError
from qkscope.headids import HeadId


@dataclass(frozen=True)
class LoadSpec:
    """Options for loading a head: rows, sample, buckets and further data."""

    max_samples: int | None = None
    """Use at most this many rows of each head, chosen by a hash of (seed, document, position)."""
    seed: int = 0
    """Seed of that choice."""
    paired: bool = False
    """Also compute moments of (q, k) at the same token."""
    sample: int = 0
    """Also load a sample of this many queries and keys, or all if there are fewer."""
    buckets: int = 0
    """Also compute moments of the queries in this many position buckets."""
    rotary: bool = False
    """Also compute means with the rotation undone, if the rotary encoding is known."""
    passage: bool = False
    """Also load the vectors of the run's passage, if it has one."""
    skip_first: int = 0
    """Leave out the rows at positions below this one, such as attention sinks."""

    def __post_init__(self) -> None:
        if not 0 <= self.skip_first < 2**31:
            raise ConfigError(f"expected skip_first to be 0 or a positive 32-bit integer, got {self.skip_first}")


WHOLE = LoadSpec()
"""Load all rows of every head."""


@dataclass(frozen=True)
class LayerNotes:
    """Properties of a layer; None if unknown."""

    nope: bool | None = None
    """True if the layer has no rotary encoding."""
    sliding_window: int | None = None
    """A query sees keys less than this far away; None: all."""
    both: bool = False
    """True if queries also see later keys, as in encoders."""


@dataclass(frozen=True)
class Extent:
    """The amount of text that a run was measured on."""

    n_documents: int | None
    n_tokens: int | None
    loss: float | None = None
    """Mean loss of the documents in nats per token, if a capture recorded it."""


class Source(Protocol):
    """The interface of a source of moments and vectors."""

    @property
    def query_heads(self) -> list[HeadId]:
        """All query heads, by (layer, head)."""

    @property
    def q_per_kv(self) -> int:
        """Query heads per key head."""

    @property
    def window(self) -> int | None:
        """Context length, if it is known for all heads."""

    @property
    def buckets(self) -> int | None:
        """Number of position buckets of the queries' moments; None if the analysis chooses it."""

    def key_head(self, head: HeadId) -> HeadId:
        """The key head that a query head reads; a ``HeadError`` if there is none."""

    def file(self, head: HeadId) -> str | None:
        """The file to name in messages about this head."""

    def layer_notes(self, head: HeadId) -> LayerNotes:
        """Properties of the layer of a query head."""

    def load(self, heads: Sequence[HeadId], spec: LoadSpec) -> tuple[list[HeadData], list[HeadError]]:
        """Moments of query heads that read one key head, and the heads that failed."""

    def rows(self, head: HeadId, spec: LoadSpec) -> Rows:
        """Vectors of a query or key head: all of them, or the run's sample."""

    def token_texts(self) -> pd.DataFrame:
        """Tokens as text: ``example_id``, ``position`` and ``token`` of those that the first head has as text."""

    def extent(self, heads: Sequence[HeadId]) -> Extent:
        """Documents and tokens, from the first of these heads that can be read."""

    def identity(self) -> dict[str, str]:
        """A description of the exact source, to record in results."""
