"""DuoAttention's gates: one number per key head; 1 keeps its whole cache, 0 only the first and the latest keys.

A folder with ``full_attention_heads.tsv`` (layers × key heads) and ``config.json`` (sink_size, recent_size). Gates are
ranks of the scores of cause/choice.py, spread evenly over 0 … 1: a threshold of s, and a sparsity of s, shorten a share
s of the key heads. Layers whose sliding window is not longer than recent_size keep a gate of 1, since they are short.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from qkscope.cause import choice as choosing
from qkscope.cause.choice import CutLimits, reach_tables
from qkscope.errors import ConfigError, DatasetError
from qkscope.files.atomic import write_together
from qkscope.files.readers import read_json
from qkscope.files.runfolder import RunFolder
from qkscope.integrations.exports.about import (
    ABOUT_KEY,
    ModelShape,
    about_run,
    check_shape,
    check_weights,
    folder_of,
    with_shape,
)
from qkscope.results.analyze import OnDone
from qkscope.runs.run import Run

BY = ("far", "area")
"""Scores of key heads that are computed from means alone."""


class AttentionPattern(NamedTuple):
    """The gates of all key heads, and the sizes of a shortened cache."""

    gates: Float[np.ndarray, "layers hkv"]
    sink_size: int
    recent_size: int


def write_duo_attention(
    run: Run,
    folder: Path,
    by: str = "far",
    recent: int | None = None,
    workers: int | None = 1,
    on_done: OnDone | None = None,
) -> list[Path]:
    """Write the gates by a score, for a window of ``recent`` keys; None: the middle window of the table."""
    if by not in BY:
        raise ConfigError(f"unknown score {by!r}; choose from {', '.join(BY)}")
    captured = folder_of(run)
    shape, limits = ModelShape.of(captured), CutLimits.of(captured)
    tables = reach_tables(run, workers, on_done)
    middle = choosing.middle_window(tables)
    window = recent or middle
    heads = choosing.query_head_table(tables, window if by == "far" else middle)
    scores = choosing.key_head_scores(choosing.longer_than(heads, limits.sliding, window), by)
    gates = choosing.rank_gates(scores, (shape.layers, shape.key_heads))
    about = with_shape(about_run(captured, "duo-attention"), shape) | {"by": by, "scaled": "ranks"}
    config = {"sink_size": limits.sinks, "recent_size": window, ABOUT_KEY: about}
    files = {
        choosing.GATES: choosing.gates_text(gates) + "\n",
        choosing.GATES_CONFIG: json.dumps(config, indent=1) + "\n",
    }
    write_together(folder, {name: text.encode() for name, text in files.items()})
    return [folder / name for name in files]


def read_duo_attention(folder: Path, run: RunFolder) -> AttentionPattern:
    """Read the gates of a folder, written by qkscope or another tool; an error if the model is not that of the run.

    Gates are clipped to 0 … 1, as DuoAttention does. Other tools do not record weights: then only shapes are compared.
    """
    try:
        config = read_json(folder / choosing.GATES_CONFIG)
        sizes = int(config["sink_size"]), int(config["recent_size"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DatasetError(
            f"{folder / choosing.GATES_CONFIG} is not DuoAttention's ({error}); export it again"
        ) from None
    if ABOUT_KEY in config:
        check_weights(folder, config[ABOUT_KEY], run)
    scores, level = choosing.read_list(folder / choosing.GATES)
    shape = ModelShape.of(run)
    table = scores.unstack() if level == "k_head" else pd.DataFrame()
    check_shape(folder / choosing.GATES, table.shape, (shape.layers, shape.key_heads))
    if not np.isfinite(table.to_numpy()).all():
        raise DatasetError(f"{folder / choosing.GATES} contains non-finite values; export it again")
    return AttentionPattern(np.clip(table.to_numpy(float), 0.0, 1.0), *sizes)
