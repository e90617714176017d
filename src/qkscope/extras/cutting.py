"""From Python: choose key heads to cut to a window, as ``qkscope reach --cut``, and measure what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qkscope.engine import Place
from qkscope.errors import ConfigError
from qkscope.extras.reach import Cut, check_order, choose, every_cut, longer_than, query_head_table, write_cut
from qkscope.files.runfolder import RunFolder
from qkscope.pipeline.analyze import OnDone, analyze
from qkscope.pipeline.job import Job
from qkscope.runs.captured import CapturedSource
from qkscope.runs.run import Run


@dataclass(frozen=True)
class CutLimits:
    """What a run says about which key heads a cut can change."""

    sinks: int
    """Tokens at the start of a document that every head keeps."""
    sliding: dict[int, int | None]
    """The sliding window of each layer."""
    shape: tuple[int, int]
    """How many layers and key heads the model has."""

    @classmethod
    def of(cls, run: RunFolder) -> CutLimits:
        """From the manifest of a run; an error for encoders, which keep no keys."""
        if run.encoder:
            raise ConfigError(f"{run.folder} is a run of an encoder, which keeps no keys: there is nothing to cut")
        manifest = run.manifest
        sliding = {int(layer["layer"]): layer["sliding_window"] for layer in manifest["layers"]}
        n_layers = max(int(manifest["model"].get("layers") or 0), max(sliding) + 1)
        n_key_heads = 1 + max(head for layer in manifest["layers"] for head in layer["key_heads"])
        return cls(int(manifest["options"]["skip_first"]), sliding, (n_layers, n_key_heads))


def cut_heads(
    run: Run,
    window: int,
    *,
    keep: float = 0.5,
    by: str = "far",
    folder: str | Path | None = None,
    workers: int = 1,
) -> Cut:
    """The key heads of a captured run that need least to see beyond a window: all but a share ``keep``.

    ``by`` orders them: far, area, lock or measured, as ``qkscope reach --by``. ``cut.windows`` is what
    ``qkscope.intervene.windowed`` takes. With a ``folder``, cut.json is written there.
    """
    heads, limits = _heads(run, window, by, workers)
    chosen = choose(heads, by, keep, window, limits.sinks)
    if folder is not None:
        write_cut(Path(folder), chosen, run.model, keep, limits.shape)
    return chosen


def cut_costs(
    model: Any,
    run: Run,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    window: int,
    keep: Sequence[float] = (0.5, 0.75, 0.25),
    by: str = "far",
    draws: int = 16,
    seed: int = 0,
    length: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """What cutting key heads to a window does to the loss of a loaded model: the table ``cuts``.

    Texts are strings, with a tokenizer, or token ids, each cut to ``length`` tokens, by default the run's window; they
    must be longer than twice the ``window``, and not those of the run. Besides the order ``by`` there are all others
    that are known, the same reversed and ``draws`` random choices.
    """
    from qkscope.capture.effects import cut_documents
    from qkscope.capture.lockedmodel import LockedModel
    from qkscope.extras.cutcost import cut_table
    from qkscope.extras.inmemory import text_ids

    heads, limits = _heads(run, window, by, 1)
    cuts = every_cut(heads, by, list(dict.fromkeys(keep)), window, limits.sinks, draws, seed)
    locked = LockedModel.of(model, run)
    ids = [text_ids(text, tokenizer) for text in texts]
    documents = cut_documents(ids, length or int(locked.run.manifest["window"]))
    return cut_table(locked, documents, cuts, run.model, on_progress or (lambda *_: None))


def _heads(run: Run, window: int, by: str, workers: int) -> tuple[pd.DataFrame, CutLimits]:
    """What is known of each query head that a cut can change."""
    check_order(by)
    if not isinstance(run.source, CapturedSource):
        raise ConfigError(f"{run.model} is a dataset of vectors; key heads are cut by what a captured run says of them")
    limits = CutLimits.of(run.source.run)
    return longer_than(query_head_table(reach_tables(run, workers), window), limits.sliding, window), limits


def reach_tables(run: Run, workers: int | None = 1, on_done: OnDone | None = None) -> dict[str, pd.DataFrame]:
    """The tables ``position`` and ``reach``, without intervals; a head that cannot be analysed raises."""
    (outcome,) = analyze(
        [Job(run)], ["position", "reach"], place=Place(workers), intervals=False, strict=True, on_done=on_done
    )
    frames = outcome.tables.frames
    if frames["reach"].empty:
        raise ConfigError(f"nothing is known about the reach of {run.source}: no layer has a rotary encoding")
    return {name: frames[name] for name in ("position", "reach")}
