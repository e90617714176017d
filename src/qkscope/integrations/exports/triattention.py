"""TriAttention's statistics: the centre of each head's queries before RoPE and their mean length, by plane.

A file of ``torch.save``: {metadata, stats: {"layer00_head00": {q_mean_real, q_mean_imag, q_abs_mean}}}, each with one
number per plane. Heads of layers without rotary encoding are omitted. TensorRT-LLM's own, flat form has the same
numbers of all layers and heads in one tensor each, with the frequencies: E_q, E_q_norm, omega and freq_scale_sq.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Complex, Float

from qkscope.errors import ConfigError, DatasetError
from qkscope.files.atomic import write_together
from qkscope.files.runfolder import RunFolder
from qkscope.integrations.exports.about import (
    ModelShape,
    OnLayers,
    about_run,
    check_shape,
    check_weights,
    json_path,
    read_about,
    with_shape,
)
from qkscope.integrations.exports.beforerope import layers_before_rope

FLAT_KEYS = {"E_q", "E_q_norm", "omega", "freq_scale_sq"}


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


def write_flat_triattention(run: RunFolder, path: Path, on_done: OnLayers | None = None) -> list[Path]:
    """Write the flat form, and a JSON file next to it that describes the run; returns both.

    E_q (layers, heads, planes) complex64, E_q_norm float32, omega (planes,) in radians per token, and freq_scale_sq,
    the square of the encoding's constant factor, which is not in E_q.
    """
    from qkscope.integrations.exports.torchfiles import torch_bytes

    shape = ModelShape.of(run)
    ropes = [entry.rope for entry in run.manifest.layers]
    rope = ropes[0]
    if rope is None or any(other != rope for other in ropes):
        raise ConfigError(f"the layers of {run.folder} rotate differently, and the flat form has one omega for all")
    if rope.layout != "half" or 2 * len(rope.frequencies) != shape.head_dim:
        raise ConfigError(f"{run.folder} does not rotate all coordinates in two halves, as the flat form requires")
    layers = [(layer.planes_q, layer.lengths("q")) for layer in layers_before_rope(run, on_done)]
    content = {
        "E_q": np.stack([means for means, _ in layers]).astype(np.complex64),
        "E_q_norm": np.stack([lengths for _, lengths in layers]).astype(np.float32),
        "omega": np.abs(rope.frequencies).astype(np.float32),
        "freq_scale_sq": np.full(len(rope.frequencies), rope.attention_factor**2, dtype=np.float32),
    }
    about = json.dumps(with_shape(about_run(run, "triattention-flat"), shape), indent=1) + "\n"
    write_together(path.parent, {path.name: torch_bytes(content), json_path(path).name: about.encode()})
    return [path, json_path(path)]


def read_flat_triattention(path: Path, run: RunFolder) -> dict[tuple[int, int], HeadCentre]:
    """Read the flat form as ``read_triattention`` does; an error if it is not of the model of this run."""
    from qkscope.integrations.exports.torchfiles import read_torch

    check_weights(path, read_about(path), run)
    content, shape = read_torch(path), ModelShape.of(run)
    if not isinstance(content, dict) or not set(content) >= FLAT_KEYS:
        raise DatasetError(f"{path} is not the flat form of TriAttention's statistics; export it again")
    for name in ("E_q", "E_q_norm"):
        check_shape(path, np.shape(content[name]), (shape.layers, shape.query_heads, len(content["omega"])))
    return flat_centres(content)


def flat_centres(content: dict[str, Any]) -> dict[tuple[int, int], HeadCentre]:
    """Return the centres and lengths of the flat form, by layer and query head."""
    means, lengths = np.asarray(content["E_q"]), np.asarray(content["E_q_norm"])
    return {
        (layer, head): HeadCentre(means[layer, head], lengths[layer, head])
        for layer, head in np.ndindex(*means.shape[:2])
    }


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
