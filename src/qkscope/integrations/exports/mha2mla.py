"""MHA2MLA's 2-norm ranks: how much each plane of a key head adds to scores, E|q_m| · E|k_m| over its query heads.

A file of ``torch.save`` with one tensor, layers × key heads × d, uint8: at each coordinate the rank of its plane, 0 is
the largest; 255, which is never selected, at coordinates that are not rotated. A JSON file next to it describes the
run.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from qkscope.errors import ConfigError
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
from qkscope.integrations.exports.beforerope import BeforeRope, layers_before_rope

NOT_ROTATED = 255
"""Rank of a coordinate that is not rotated."""


def write_mha2mla(run: RunFolder, path: Path, on_done: OnLayers | None = None) -> list[Path]:
    """Write the ranks and the JSON file next to them; returns both."""
    from qkscope.integrations.exports.torchfiles import torch_bytes

    shape = ModelShape.of(run)
    ranks = np.stack([_ranks(layer, shape) for layer in layers_before_rope(run, on_done)])
    about = json.dumps(with_shape(about_run(run, "mha2mla"), shape), indent=1) + "\n"
    write_together(path.parent, {path.name: torch_bytes(ranks), json_path(path).name: about.encode()})
    return [path, json_path(path)]


def read_mha2mla(path: Path, run: RunFolder) -> UInt8[np.ndarray, "layers hkv d"]:
    """Read the ranks; an error if they are not of the model of this run."""
    from qkscope.integrations.exports.torchfiles import read_torch

    check_weights(path, read_about(path), run)
    ranks = read_torch(path)
    shape = ModelShape.of(run)
    check_shape(path, np.shape(ranks), (shape.layers, shape.key_heads, shape.head_dim))
    return np.asarray(ranks)


def plane_weights(layer: BeforeRope) -> Float[np.ndarray, "hkv planes"]:
    """Σ E|q_m| · E|k_m| over the query heads that read a key head."""
    q, k = layer.lengths("q"), layer.lengths("k")
    return q.reshape(len(k), -1, q.shape[-1]).sum(1) * k


def _ranks(layer: BeforeRope, shape: ModelShape) -> UInt8[np.ndarray, "hkv d"]:
    rope = layer.rope
    if rope is None or rope.planes >= NOT_ROTATED:
        problem = (
            "has no rotary encoding" if rope is None else f"has {rope.planes} planes, more than fit into uint8 ranks"
        )
        raise ConfigError(f"layer {layer.layer} of {layer.run.folder} {problem}; MHA2MLA ranks rotated planes")
    order = np.argsort(-plane_weights(layer), axis=-1, kind="stable")
    plane_ranks = np.argsort(order, axis=-1)
    ranks = np.full((shape.key_heads, shape.head_dim), NOT_ROTATED, dtype=np.uint8)
    ranks[:, rope.pairs] = plane_ranks[..., None]
    return ranks
