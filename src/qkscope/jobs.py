"""What is to be done, and what came of it: jobs, the tasks they fall into, outcomes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from qkscope.analyses.columns import Tables
from qkscope.analyses.tabulate import PcaOptions, RotationOptions
from qkscope.analyses.vectortables import PointOptions
from qkscope.errors import ConfigError, HeadError
from qkscope.heads import HeadId
from qkscope.run import Run

Analysis = Literal["pca", "rotation", "planes", "distance", "plasticity"]
ANALYSES: dict[Analysis, tuple[str, ...]] = {
    "pca": ("qk", "heads"),
    "rotation": ("rotated",),
    "planes": ("planes",),
    "distance": ("distance",),
    "plasticity": ("plasticity", "plasticity_pairs"),
}
"""Each analysis and the tables it writes."""


@dataclass(frozen=True)
class Selection:
    """Which query heads of a run are analysed."""

    layers: frozenset[int] | None = None
    heads: frozenset[int] | None = None
    sample: int | None = None
    seed: int = 0
    exactly: frozenset[tuple[int, int]] | None = None
    """(layer, head) of the heads wanted."""

    def of(self, run: Run) -> list[HeadId]:
        """The chosen heads by (layer, head); a sample is ``random.Random(seed).sample`` over that order."""
        chosen = [
            head
            for head in run.heads
            if (self.layers is None or head.layer in self.layers)
            and (self.heads is None or head.head in self.heads)
            and (self.exactly is None or (head.layer, head.head) in self.exactly)
        ]
        if not chosen:
            raise ConfigError(
                f"{run.model}: none of its {len(run.heads)} query heads is in the chosen layers and heads"
            )
        if self.sample is not None and self.sample < len(chosen):
            chosen = sorted(random.Random(self.seed).sample(chosen, self.sample))
        return chosen


@dataclass(frozen=True)
class Job:
    """One run and everything that is to be done with it."""

    run: Run
    selection: Selection = field(default_factory=Selection)
    pca: PcaOptions = field(default_factory=PcaOptions)
    rotation: RotationOptions = field(default_factory=RotationOptions)
    points: PointOptions | None = None
    """Which vectors are written out for pictures, if any."""
    buckets: int | None = None
    """Position buckets of plasticity, for a dataset; a captured run has its own."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The configuration it came from, for the record."""


@dataclass(frozen=True)
class Failure:
    """A head that could not be analysed, and why."""

    model: str
    error: HeadError

    def __str__(self) -> str:
        return f"{self.model} {self.error}"


@dataclass(frozen=True)
class Outcome:
    """The tables of one job, and the heads that are missing from them."""

    job: Job
    analyses: tuple[Analysis, ...]
    n_heads: int
    tables: Tables
    failures: list[Failure]

    @property
    def n_failed(self) -> int:
        """Heads that are missing from a table."""
        return len({failure.error.head for failure in self.failures})


@dataclass(frozen=True)
class Task:
    """The query heads of one or several key heads: what one worker does at a time."""

    job: Job
    groups: tuple[tuple[HeadId, ...], ...]
    """The query heads of each key head, which is read once."""
    analyses: tuple[Analysis, ...]
    intervals: bool
    chance: float | None
    """What the coherence of structureless planes stays below, from the tokens of the first head."""

    @property
    def n_heads(self) -> int:
        """How many query heads it does."""
        return sum(map(len, self.groups))
