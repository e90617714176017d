"""Options that choose the query heads of a run, and options for reading the rows of a dataset."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qkscope.errors import ConfigError
from qkscope.options import Indices, is_whole, option, parse_indices

if TYPE_CHECKING:
    from qkscope.headids import HeadId
    from qkscope.runs.run import Run


def _some(help_: str) -> Any:
    """An option that chooses layers or heads by number."""
    return option(
        None, help_, typed=str | None, written=Indices, parse=lambda text: frozenset(parse_indices(text)), always=True
    )


@dataclass(frozen=True)
class DatasetOptions:
    """Options for reading a dataset of vectors; for a captured run, all of them are fixed."""

    q_per_kv: int | None = option(
        None, "Query heads per key head, if they cannot be derived from the heads in the dataset.", least=1, always=True
    )
    window: int | None = option(None, "Context length of the capture, in tokens.", least=1, always=True)
    rope_theta: float | None = option(
        None,
        "Base of the rotary encoding, for datasets whose dataset.json does not state it.",
        least=1,
        in_config=False,
    )
    max_samples: int | None = option(None, "At most this many rows of each head.", least=2, always=True)
    skip_first: int = option(
        0, "Leave out this many positions at the start of every document: attention sinks.", least=0
    )

    def keywords(self) -> dict[str, Any]:
        """Return the same options as keywords of ``open_run``."""
        rope = None if self.rope_theta is None else {"theta": self.rope_theta}
        keywords = {name: value for name, value in vars(self).items() if name != "rope_theta"}
        return keywords | {"rope": rope}


@dataclass(frozen=True)
class Selection:
    """The query heads of a run to analyse."""

    layers: frozenset[int] | None = _some("Only these layers, such as 0,4-7.")
    heads: frozenset[int] | None = _some("Only these query heads of each layer, such as 0,4-7.")
    sample: int | None = option(
        None, "Only this many query heads, drawn with --seed.", name="sample_heads", least=1, always=True
    )
    seed: int = option(0, "Seed of random choices.", always=True)
    exactly: frozenset[tuple[int, int]] | None = None
    """(layer, head) of the only heads to analyse."""

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
            missing_layers = ", ".join(map(str, missing[:5]))
            raise ConfigError(f"{run.model} has no layer {missing_layers}; its layers are {_ranges(run)}")
        if not chosen:
            raise ConfigError(
                f"{run.model}: none of its {len(run.heads)} query heads is in the chosen layers and heads"
            )
        if self.sample is not None and (not is_whole(self.sample) or self.sample < 1):
            raise ConfigError(f"expected sample_heads of 1 or more, got {self.sample!r}")
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
