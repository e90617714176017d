"""What a replica of the model reports: what it sees of the model, and what comes of a shard of documents."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from qkscope.capture.vectors import KeptVectors
from qkscope.core.layermoments import LayerMoments


@dataclass(frozen=True)
class ModelReport:
    """What a replica sees of its model; replicas that see different things measure different things."""

    model: dict[str, Any]
    layers: list[dict[str, Any]]
    q_per_kv: int
    longest: int
    """Positions the model was made for."""
    vocabulary: int
    """Tokens the model knows."""
    threads: int | None
    """On a CPU: how many it computes with, on which the last bits of a forward pass depend."""
    device: str
    """The CPU, or the GPU by name and by how its sums are formed."""
    versions: dict[str, str]

    @property
    def digest(self) -> str:
        """Identifies all of it."""
        return hashlib.sha256(json.dumps(vars(self), sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class ShardSums:
    """What comes of one shard."""

    moments: dict[int, LayerMoments]
    """By layer; none if no document could be measured."""
    kept: KeptVectors
    left_out: dict[int, str]
    """Documents that could not be measured, and why."""
    seen: str
    """Digest of what the replica saw."""
    one_by_one: bool = False
    """Whether batches did not fit and its documents were measured alone, which changes the last bits."""
