"""One layer's moments on disk: a safetensors file, scatters as packed upper triangles.

During a capture all arrays are float64, so that merging parts loses no precision. A finished run stores scatters in
single precision, since their products were computed in it, and of queries by bucket only what plasticity needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qkscope.core.bucketspread import StoredSpread
from qkscope.core.headmoments import N_GROUPS, BucketMeans
from qkscope.core.keypairs import TokenPairs
from qkscope.core.layermoments import LARGEST, SUMMED, UNDONE_COV, LayerMoments
from qkscope.core.moments import Moments
from qkscope.core.reach import REACH_COUNTS, REPEAT_COUNTS, bin_starts
from qkscope.errors import DatasetError
from qkscope.files.atomic import atomic_path
from qkscope.files.readers import check_regular

_SINGLE = (
    "q.scatter", "k.scatter", "undone.scatter", "q_cells.mean_x", "k_cells.mean_x", "spread.along_pairs",
    "spread.along_axes",
)  # fmt: skip
"""Arrays that a finished run stores in single precision, as their products were; all others are float64."""
_PAIRS = "spread.pairs"
"""Document, earlier and later position of each pair of keys (buckets, pairs, 3), int32."""


def layer_file(layer: int) -> str:
    """File name of a layer's moments."""
    return f"layer-{layer:03d}.safetensors"


def write_part_layer(path: Path, moments: LayerMoments) -> None:
    """Write one layer's moments during a capture, in full, atomically."""
    assert (moments.q_buckets is None) != (moments.spread is None)
    write_tensors(path, _packed_arrays(moments) | _pair_numbers(moments))


def write_layer(path: Path, moments: LayerMoments) -> None:
    """Write one layer's moments as in a finished run; an ``OverflowError`` if they exceed single precision.

    Means of cells are stored as differences from the mean of their document group, which preserves precision if that
    mean is far from zero.
    """
    assert moments.q_buckets is None
    tensors = _packed_arrays(moments)
    for name in ("q", "k"):
        cells: BucketMeans = getattr(moments, f"{name}_cells")
        tensors[f"{name}_cells.mean_x"] = np.where(cells.n[..., None] > 0, cells.mean_x - _centre(moments, name), 0.0)
    with np.errstate(over="ignore"):
        tensors |= {name: tensors[name].astype(np.float32) for name in _SINGLE if name in tensors}
    for name in set(_SINGLE) & set(tensors):
        if not np.isfinite(tensors[name]).all():
            raise OverflowError(name)
    write_new_tensors(path, tensors | _pair_numbers(moments))


def read_layer(path: Path, *, finished: bool = True, buckets: bool = True, undone: bool = True) -> LayerMoments:
    """Read one layer's moments, of a finished run or of a part of a capture.

    Moments by bucket are read only if ``buckets``, moments with the rotation undone only if ``undone``.
    """
    skipped = (*(() if buckets else ("q_buckets.", "spread.")), *(() if undone else ("undone.",)))
    try:
        check_regular(path)
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if not name.startswith(skipped)}  # noqa: SIM118
        _check_types(tensors, finished)
        q, k = (Moments(*_matching(tensors, name, ("n", "mean", "scatter"))) for name in ("q", "k"))
        has_spread = finished or _PAIRS in tensors  # in place of the moments by bucket
        q_buckets = None if has_spread else Moments(*_matching(tensors, "q_buckets", ("n", "mean", "scatter")))
        q_cells, k_cells = (
            BucketMeans(*_matching(tensors, kind, ("n", "mean_x", "mean_t"))) for kind in ("q_cells", "k_cells")
        )
        rotary = tensors["unrotated_q"], tensors["unrotated_k"], tensors["temperature"]
        optional: dict[str, Any] = {name: tensors.get(name) for name in (*SUMMED, *LARGEST)}
        spread = _spread(tensors) if has_spread and buckets else None
        moments = LayerMoments(q, k, q_buckets, q_cells, k_cells, *rotary, **optional)
        unrotated = Moments(*_matching(tensors, "undone", ("n", "mean", "scatter"))) if "undone.n" in tensors else None
        moments = replace(moments, spread=spread, undone=unrotated)
        return _with_centres(moments) if finished else moments
    except (OSError, LookupError, ValueError, TypeError, SafetensorError) as error:
        raise DatasetError(f"{path} cannot be read as a layer's moments ({error}); capture the run again") from None
    except MemoryError:
        raise DatasetError(f"{path} does not fit into memory; use fewer --workers, or another machine") from None


def _check_types(tensors: dict[str, Any], finished: bool) -> None:
    """Raise a ``ValueError`` for an array that does not have the precision of the format."""
    for name, array in tensors.items():
        expected = np.int32 if name == _PAIRS else np.float32 if finished and name in _SINGLE else np.float64
        if array.dtype != expected:
            raise ValueError(f"{name}: expected {np.dtype(expected)}, got {array.dtype}")


def _spread(tensors: dict[str, Any]) -> StoredSpread:
    pairs = tensors[_PAIRS]
    if pairs.ndim != 3 or pairs.shape[-1] != 3:
        raise ValueError(f"{_PAIRS}: expected documents and two positions, got shape {pairs.shape}")
    variances = (tensors[f"spread.{name}"].astype(np.float64) for name in ("along_pairs", "along_axes"))
    return StoredSpread(TokenPairs(*np.moveaxis(pairs.astype(np.int64), -1, 0)), *variances)


def _with_centres(moments: LayerMoments) -> LayerMoments:
    """Restore means of cells from their differences to the mean of their document group."""
    q_cells, k_cells = (
        replace(cells, mean_x=np.where(cells.n[..., None] > 0, cells.mean_x + _centre(moments, name), 0.0))
        for name, cells in (("q", moments.q_cells), ("k", moments.k_cells))
    )
    return replace(moments, q_cells=q_cells, k_cells=k_cells)


def _centre(moments: LayerMoments, name: str) -> Float[np.ndarray, "h 8 1 d"]:
    groups: Moments = getattr(moments, name)
    return groups.mean_x[..., None, :]


def _matching(
    tensors: dict[str, Float[np.ndarray, "..."]], name: str, fields: tuple[str, ...]
) -> list[Float[np.ndarray, "..."]]:
    """The arrays of one set of moments, scatters unpacked; a ``ValueError`` if their shapes do not match."""
    arrays = [
        _unpacked(tensors[f"{name}.{field}"]) if field == "scatter" else tensors[f"{name}.{field}"] for field in fields
    ]
    arrays = [array.astype(np.float64, copy=False) for array in arrays]
    batch, *(mean, third) = (array.shape for array in arrays)
    if mean[:-1] != batch or third not in (batch, (*mean, mean[-1])):
        shapes = ", ".join(f"{field} {array.shape}" for field, array in zip(fields, arrays, strict=True))
        raise ValueError(f"the shapes of {name} do not match: {shapes}")
    return arrays


def read_layer_of(
    manifest: dict[str, Any],
    folder: Path,
    layer: int,
    *,
    finished: bool = True,
    buckets: bool = True,
    undone: bool = True,
) -> LayerMoments:
    """Read one layer's moments from a folder; a ``DatasetError`` if they do not match the manifest."""
    path = folder / layer_file(layer)
    moments = read_layer(path, finished=finished, buckets=buckets, undone=undone)
    entry = next((entry for entry in manifest["layers"] if entry["layer"] == layer), None)
    if entry is None:
        raise DatasetError(f"{path} is not valid (its manifest has no layer {layer}); capture the run again")
    # A pre-rope run has no sums with the rotation undone.
    expected = entry if manifest["stage"] == "post-rope" else entry | {"rope": None}
    error_text = misfit(moments, expected, manifest["options"]["buckets"], manifest["window"])
    has_undone = manifest["options"].get("keep") == UNDONE_COV and expected["rope"] is not None
    if undone and has_undone and moments.undone is None:
        error_text = error_text or "it has no moments of queries with their rotation undone"
    if error_text:
        raise DatasetError(f"{path} is not valid ({error_text}); capture the run again")
    return moments


def misfit(moments: LayerMoments, entry: dict[str, Any], buckets: int, window: int) -> str | None:
    """Return the first difference between a layer's moments and its manifest; None if they match."""
    n_q, n_k, d = len(entry["query_heads"]), len(entry["key_heads"]), moments.q.mean.shape[-1] - 1
    planes = 0 if entry["rope"] is None else len(entry["rope"]["frequencies"])
    expected = {
        "unrotated_q": (n_q, N_GROUPS, planes, 2),
        "unrotated_k": (n_k, N_GROUPS, planes, 2),
        "sizes_q": (n_q, N_GROUPS, planes),
        "sizes_k": (n_k, N_GROUPS, planes),
        "reach": (n_q, N_GROUPS, len(REACH_COUNTS) + len(bin_starts(window))),
        "entropy": (n_q, N_GROUPS),
        "max_logit": (n_q,),
        "repeats": (n_q, N_GROUPS, len(REPEAT_COUNTS)),
        **_moments_shapes("q", (n_q, N_GROUPS), d),
        **_moments_shapes("k", (n_k, N_GROUPS), d),
        **_moments_shapes("q_buckets", (n_q, buckets), d),
        **_moments_shapes("undone", (n_q,), d),
        **_cells_shapes("q_cells", (n_q, N_GROUPS, buckets), d),
        **_cells_shapes("k_cells", (n_k, N_GROUPS, buckets), d),
    }
    if moments.spread is not None:
        pairs = moments.spread.pairs
        expected |= {
            "spread.along_pairs": (n_q, buckets, pairs.example.shape[-1]),
            "spread.along_axes": (n_q, buckets, d),
        }
        positions = np.stack([pairs.earlier, pairs.later])[:, pairs.real]
        if len(pairs.example) != buckets or ((positions < 0) | (positions >= window)).any():
            return f"{_PAIRS}: expected pairs of positions below {window} for {buckets} buckets"
    if entry["rope"] is not None and entry["rope"].get("start", 0) + 2 * planes > d:
        return f"its manifest rotates coordinates beyond the vector length of {d}"
    by_name = arrays(moments)
    if by_name["temperature"].shape not in ((2, 0), (2, window)):
        return f"temperature: expected shape {(2, 0)} or {(2, window)}, got {by_name['temperature'].shape}"
    for name, array in by_name.items():
        if array.shape != expected.get(name, array.shape):
            return f"{name}: expected shape {expected[name]}, got {array.shape}"
        if not np.isfinite(array).all():
            return f"{name} contains non-finite values"
    return None


def arrays(moments: LayerMoments) -> dict[str, Float[np.ndarray, "..."]]:
    """The arrays of a layer's moments, by their names in the file."""
    by_name = {name: getattr(moments, name) for name in ("unrotated_q", "unrotated_k", "temperature")}
    by_name |= {name: array for name in (*SUMMED, *LARGEST) if (array := getattr(moments, name)) is not None}
    for name in ("q", "k", "q_buckets", "undone"):
        sums: Moments | None = getattr(moments, name)
        if sums is not None:
            by_name |= {f"{name}.n": sums.n, f"{name}.mean": sums.mean, f"{name}.scatter": sums.scatter}
    for name in ("q_cells", "k_cells"):
        cells: BucketMeans = getattr(moments, name)
        by_name |= {f"{name}.n": cells.n, f"{name}.mean_x": cells.mean_x, f"{name}.mean_t": cells.mean_t}
    if moments.spread is not None:
        by_name |= {f"spread.{name}": getattr(moments.spread, name) for name in ("along_pairs", "along_axes")}
    return by_name


def _pair_numbers(moments: LayerMoments) -> dict[str, Any]:
    if moments.spread is None:
        return {}
    pairs = moments.spread.pairs
    return {_PAIRS: np.stack([pairs.example, pairs.earlier, pairs.later], -1).astype(np.int32)}


def _packed_arrays(moments: LayerMoments) -> dict[str, Any]:
    return {name: _packed(array) if name.endswith(".scatter") else array for name, array in arrays(moments).items()}


def _moments_shapes(name: str, batch: tuple[int, ...], d: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.n": batch, f"{name}.mean": (*batch, d + 1), f"{name}.scatter": (*batch, d + 1, d + 1)}


def _cells_shapes(name: str, batch: tuple[int, ...], d: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.n": batch, f"{name}.mean_x": (*batch, d), f"{name}.mean_t": batch}


def _packed(scatter: Float[np.ndarray, "*batch z z"]) -> Float[np.ndarray, "*batch p"]:
    rows, columns = np.triu_indices(scatter.shape[-1])
    return scatter[..., rows, columns]


def _unpacked(packed: Float[np.ndarray, "*batch p"]) -> Float[np.ndarray, "*batch z z"]:
    # An empty array takes no bytes, so its other axes may have any length.
    size = int((np.sqrt(8 * packed.shape[-1] + 1) - 1) / 2)
    if not packed.size:
        raise ValueError(f"an array of shape {packed.shape} holds no triangles")
    return np.take(packed, _packed_index(size), axis=-1).reshape(*packed.shape[:-1], size, size)


@lru_cache(maxsize=8)
def _packed_index(size: int) -> Int[np.ndarray, "zz"]:
    """Index of each entry of a symmetric matrix in its packed triangle."""
    rows, columns = np.triu_indices(size)
    index = np.empty((size, size), dtype=np.intp)
    index[rows, columns] = index[columns, rows] = np.arange(len(rows))
    return index.reshape(-1)


def write_tensors(path: Path, tensors: Mapping[str, Shaped[np.ndarray, "..."]]) -> None:
    """Write arrays, atomically."""
    with atomic_path(path) as temporary:
        write_new_tensors(temporary, tensors)


def write_new_tensors(path: Path, tensors: Mapping[str, Shaped[np.ndarray, "..."]]) -> None:
    """Write arrays, not atomically: for folders that are only read once they are complete and on disk."""
    try:
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)
    except SafetensorError as error:
        # safetensors reports a full disk only in the text of its error.
        os_error = re.search(r"os error (\d+)", str(error))
        if os_error is None:
            raise
        code = int(os_error[1])
        raise OSError(code, os.strerror(code), str(path)) from None
