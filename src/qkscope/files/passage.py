"""passage.safetensors of a run: every query and key of its passage, (tokens, heads, dimensions) for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from qkscope.core.headdata import PassageVectors
from qkscope.errors import DatasetError
from qkscope.files.atomic import write_together
from qkscope.files.readers import check_regular

PASSAGE_FILE, PASSAGE_ENTRY = "passage.safetensors", "passage"
"""The file, and the key of run.json under which its tokens stand."""

Vectors = tuple[Shaped[np.ndarray, "tokens heads d"], Shaped[np.ndarray, "tokens key_heads d"]]


def write_passage(folder: Path, layers: Mapping[int, Vectors]) -> None:
    """Write queries and keys of the passage: in half precision, unless a value is too large for it."""
    named = {f"{layer}.{kind}": _short(x) for layer, both in layers.items() for kind, x in zip("qk", both, strict=True)}
    write_together(folder, {PASSAGE_FILE: save(named)})


def read_passage(folder: Path, manifest: dict[str, Any], layer: int, query: int, key: int) -> PassageVectors | None:
    """The passage in one head, given by its numbers among the captured ones; None if the run has no passage."""
    entry = manifest.get(PASSAGE_ENTRY)
    if entry is None:
        return None
    q, k = _layer(folder / PASSAGE_FILE, layer)
    tokens = tuple(entry["tokens"])
    if not len(q) == len(k) == len(tokens) or query >= q.shape[1] or key >= k.shape[1] or q.shape[2] != k.shape[2]:
        raise DatasetError(f"{folder / PASSAGE_FILE} does not fit run.json in layer {layer}; copy the run again")
    return PassageVectors(tokens, q[:, query].astype(float), k[:, key].astype(float))


@lru_cache(maxsize=2)
def _layer(path: Path, layer: int) -> Vectors:
    try:
        check_regular(path)
        with safe_open(path, framework="numpy") as file:
            q, k = (file.get_tensor(f"{layer}.{kind}") for kind in "qk")
    except (OSError, LookupError, ValueError, TypeError, SafetensorError) as error:
        raise DatasetError(f"{path} cannot be read ({error}); copy the run again") from None
    if not (q.ndim == k.ndim == 3 and np.isfinite(q).all() and np.isfinite(k).all()):
        raise DatasetError(f"{path}: layer {layer} contains no finite vectors of tokens and heads; copy the run again")
    return q, k


def _short(x: Shaped[np.ndarray, "tokens heads d"]) -> Shaped[np.ndarray, "tokens heads d"]:
    half = np.float16(6e4)
    return np.ascontiguousarray(x, dtype=np.float16 if np.abs(x).max(initial=0) < half else np.float32)
