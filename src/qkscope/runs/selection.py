"""Which query heads of a run are analysed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from qkscope.errors import ConfigError
from qkscope.heads import HeadId
from qkscope.runs.run import Run


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
        missing = sorted((self.layers or set()) - {head.layer for head in run.heads})
        if missing:
            listed = ", ".join(map(str, missing[:5]))
            raise ConfigError(f"{run.model} has no layer {listed}; its layers are {_ranges(run)}")
        if not chosen:
            raise ConfigError(
                f"{run.model}: none of its {len(run.heads)} query heads is in the chosen layers and heads"
            )
        if self.sample is not None and self.sample < len(chosen):
            chosen = sorted(random.Random(self.seed).sample(chosen, self.sample))
        return chosen


def _ranges(run: Run) -> str:
    """The layers of a run, such as 0–3, 7."""
    layers, parts = sorted({head.layer for head in run.heads}), list[list[int]]()
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ", ".join("–".join(map(str, part)) for part in parts)
