"""What a capture measures: everything here is part of a run's identity."""

from __future__ import annotations

from dataclasses import dataclass

from qkscope.capture.tokensampling import VectorSampling
from qkscope.core.headmoments import N_BUCKETS
from qkscope.errors import CaptureError


@dataclass(frozen=True)
class CaptureOptions:
    """What is measured; everything here is part of the run's identity."""

    window: int | None = None
    """Tokens per document; by default the longest document, up to what the model was made for."""
    buckets: int = N_BUCKETS
    """Position buckets over the window."""
    skip_first: int = 4
    """Positions at the start of a document that enter no statistic: attention sinks."""
    batch: int = 1
    """Documents per forward pass."""
    sample: int = 2048
    """Tokens whose vectors are kept, the same ones in every head."""
    seed: int = 0
    """Seed of that sample."""
    layers: tuple[int, ...] | None = None
    """Only these layers."""
    heads: tuple[int, ...] | None = None
    """Only these query heads, and the key heads they read."""
    full_attention_only: bool = False
    """Leave out layers with a sliding window."""
    pre_rope: bool = False
    """Measure queries and keys before the rotation instead of after."""
    prefill: int | None = None
    """Tokens per step through a cache, in whole buckets; 0: one pass; by default only where a mask would be large."""
    vectors: VectorSampling | None = None
    """Also write a dataset of vectors."""
    documents_per_shard: int | None = None
    """Documents that are measured, saved and, after a kill, done again together; by default 8, more on a GPU."""

    def __post_init__(self) -> None:
        least = {
            "buckets": 1,
            "skip_first": 0,
            "batch": 1,
            "sample": 1,
            "prefill": 0,
            "window": 1,
            "documents_per_shard": 1,
        }
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise CaptureError(f"expected {name} of {lowest} or more, got {value}")
