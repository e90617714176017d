"""kvpress' statistics of ExpectedAttention: mean and covariance of each head's queries before RoPE.

A folder as ``ExpectedAttentionStats.from_pretrained`` reads it: ``model.safetensors`` with query_mean (layers × heads ×
d) and query_cov (layers × heads × d × d, divided by n − 1), float32; ``config.json`` has what its constructor takes.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from qkscope.errors import DatasetError
from qkscope.files.atomic import write_together
from qkscope.files.readers import check_regular, read_json
from qkscope.files.runfolder import RunFolder
from qkscope.integrations.exports.about import (
    ABOUT_KEY,
    ModelShape,
    OnLayers,
    about_run,
    check_shape,
    check_weights,
    with_shape,
)
from qkscope.integrations.exports.beforerope import layers_before_rope

_log = logging.getLogger("qkscope")
STATS, STATS_CONFIG = "model.safetensors", "config.json"


class QueryStatistics(NamedTuple):
    """Mean and covariance of queries before the rotation."""

    mean: Float[np.ndarray, "layers hq d"]
    cov: Float[np.ndarray, "layers hq d d"]


def write_kvpress_stats(run: RunFolder, folder: Path, on_done: OnLayers | None = None) -> list[Path]:
    """Write the folder; returns its files. Warn if kvpress rotates queries in other planes than the model."""
    shape = ModelShape.of(run)
    layers = layers_before_rope(run, on_done, undone=True)
    means, covs = zip(*((layer.mean_q, layer.cov_q) for layer in layers), strict=True)
    tensors = {"query_mean": np.stack(means), "query_cov": np.stack(covs)}
    about = with_shape(about_run(run, "kvpress-stats"), shape)
    if about["rope_style"] != "half" or about["rotary_dim"] != shape.head_dim:
        _log.warning(
            "kvpress rotates all coordinates of a head, in two halves, but this model does not: its results from these "
            "statistics will be wrong"
        )
    config = _constructor_arguments(about) | {ABOUT_KEY: about}
    files = {
        STATS: save({name: tensor.astype(np.float32) for name, tensor in tensors.items()}),
        STATS_CONFIG: (json.dumps(config, indent=1) + "\n").encode(),
    }
    write_together(folder, files)
    return [folder / name for name in files]


def read_kvpress_stats(folder: Path, run: RunFolder) -> QueryStatistics:
    """Read the statistics of a folder; an error if they are not of the model of this run."""
    try:
        about = read_json(folder / STATS_CONFIG).get(ABOUT_KEY)
        check_regular(folder / STATS)
        tensors = load_file(folder / STATS)
        statistics = QueryStatistics(tensors["query_mean"], tensors["query_cov"])
    except (OSError, ValueError, LookupError, AttributeError, RecursionError, SafetensorError) as error:
        raise DatasetError(f"{folder} cannot be read as statistics of kvpress ({error}); export it again") from None
    check_weights(folder, about, run)
    shape = ModelShape.of(run)
    heads = (shape.layers, shape.query_heads, shape.head_dim)
    check_shape(folder / STATS, statistics.mean.shape, heads)
    check_shape(folder / STATS, statistics.cov.shape, (*heads, shape.head_dim))
    return statistics


def _constructor_arguments(about: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the constructor of ``ExpectedAttentionStats``."""
    return {
        "num_layers": about["layers"],
        "num_heads": about["query_heads"],
        "head_dim": about["head_dim"],
        "dataset_name": f"corpus-{about['corpus'][:16]}",
        "model_name": str(about["model"]),
        "num_samples": about["documents"],
        "sample_seq_len": about["window"],
        "n_sink": about["skip_first"],
    }
