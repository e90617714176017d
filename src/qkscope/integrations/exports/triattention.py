"""TriAttention's statistics: the centre of each head's queries before RoPE and their mean length, by plane.

A file of ``torch.save``: {metadata, stats: {"layer00_head00": {q_mean_real, q_mean_imag, q_abs_mean}}}, each with one
number per plane. Heads of layers without rotary encoding are omitted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Complex, Float

from qkscope.errors import ConfigError, DatasetError
from qkscope.files.atomic import write_together
from qkscope.files.runfolder import RunFolder
from qkscope.integrations.exports.about import OnLayers, about_run, check_shape, check_weights
from qkscope.integrations.exports.beforerope import layers_before_rope


class HeadCentre(NamedTuple):
    """Centre and mean length of one query head, by plane."""

    mean: Complex[np.ndarray, "planes"]
    """E[q] of each plane."""
    length: Float[np.ndarray, "planes"]
    """E|q| of each plane."""


def write_triattention(run: RunFolder, path: Path, on_done: OnLayers | None = None) -> list[Path]:
    """Write the file; returns it in a list."""
    from qkscope.integrations.exports.torchfiles import torch_bytes

    stats: dict[str, dict[str, Float[np.ndarray, "planes"]]] = {}
    heads: list[list[int]] = []
    for layer in layers_before_rope(run, on_done):
        if layer.rope is None:
            continue
        means, lengths = layer.planes_q, layer.lengths("q")
        for head, mean, length in zip(layer.entry.query_heads, means, lengths, strict=True):
            parts = {"q_mean_real": mean.real, "q_mean_imag": mean.imag, "q_abs_mean": length}
            stats[_name(layer.layer, head)] = {name: part.astype(np.float32) for name, part in parts.items()}
            heads.append([layer.layer, head])
    if not heads:
        raise ConfigError(f"no layer of {run.folder} has a rotary encoding, which TriAttention needs")
    metadata = _metadata(run) | {"sampled_heads": heads}
    write_together(path.parent, {path.name: torch_bytes({"metadata": metadata, "stats": stats})})
    return [path]


def read_triattention(path: Path, run: RunFolder) -> dict[tuple[int, int], HeadCentre]:
    """Read centres and lengths by layer and query head; an error if the file is not of the model of this run."""
    from qkscope.integrations.exports.torchfiles import read_torch

    content = read_torch(path)
    check_weights(path, content.get("metadata") if isinstance(content, dict) else None, run)
    planes = {
        (entry.layer, head): len(entry.rope.frequencies)
        for entry in run.manifest.layers
        if entry.rope is not None
        for head in entry.query_heads
    }
    try:
        entries = {key: content["stats"][_name(*key)] for key in planes}
        centres = {
            key: HeadCentre(entry["q_mean_real"] + 1j * entry["q_mean_imag"], entry["q_abs_mean"])
            for key, entry in entries.items()
        }
    except (LookupError, TypeError, ValueError) as error:
        raise DatasetError(f"{path} lacks statistics of a head ({error}); export it again") from None
    for key, centre in centres.items():
        for part in centre:
            check_shape(path, np.shape(part), (planes[key],))
    return centres


def _metadata(run: RunFolder) -> dict[str, Any]:
    """The description of the run, with TriAttention's own names where they exist."""
    about, model = about_run(run, "triattention"), run.manifest.model
    frequencies = about.pop("frequencies")
    is_shared = not isinstance(frequencies[0], list | None)
    native = {"num_traces": about["documents"], "attn_implementation": model.attention}
    return about | native | {"inv_freq" if is_shared else "inv_freq_by_layer": frequencies}


def _name(layer: int, head: int) -> str:
    return f"layer{layer:02d}_head{head:02d}"
