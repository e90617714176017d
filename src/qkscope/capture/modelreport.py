"""Results of a replica of the model: a report on the model itself, and the sums of a shard of documents."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from qkscope.capture.vectors import KeptVectors
from qkscope.core.layermoments import LayerMoments
from qkscope.files.passage import Vectors


@dataclass(frozen=True)
class ModelReport:
    """Description of a replica's model; all replicas of a capture must have the same one."""

    model: dict[str, Any]
    layers: list[dict[str, Any]]
    q_per_kv: int
    longest: int
    """The model's max_position_embeddings."""
    vocabulary: int
    """Number of tokens in the model's vocabulary."""
    threads: int | None
    """Threads on a CPU, on which the last bits of a forward pass depend; None on a GPU."""
    device: str
    """The CPU, or the name of the GPU and how its sums are formed."""
    versions: dict[str, str]
    passage: dict[int, Vectors] = field(default_factory=dict)
    """Queries and keys of the passage by layer; only the first replica reads it."""

    placeholders: list[int] = field(default_factory=list)
    """Ids of the tokens that stand for images, video or sound."""

    @property
    def digest(self) -> str:
        """Identifies the model, wherever it runs."""
        said = {name: value for name, value in vars(self).items() if name != "passage"}
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class ShardSums:
    """The sums and kept vectors of one shard."""

    moments: dict[int, LayerMoments]
    """By layer; empty if no document could be measured."""
    kept: KeptVectors
    left_out: dict[int, str]
    """Documents that could not be measured, and why."""
    report_digest: str
    """Digest of the replica's ``ModelReport``."""
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Sum of the losses of some tokens of each document, and their number."""
    one_by_one: bool = False
    """Whether batches did not fit into memory and documents were measured alone, which changes the last bits."""
