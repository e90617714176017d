"""One layer's moments on disk: a safetensors file, float64, scatters as packed upper triangles."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open

from qkscope.core.headmoments import N_GROUPS, BucketMeans
from qkscope.core.layermoments import LayerMoments
from qkscope.core.moments import Moments
from qkscope.errors import DatasetError
from qkscope.files.arrays import write_tensors
from qkscope.files.readers import check_regular


def layer_file(layer: int) -> str:
    """File name of a layer's moments."""
    return f"layer-{layer:03d}.safetensors"


def write_layer(path: Path, moments: LayerMoments) -> None:
    """Write one layer's moments, atomically."""
    assert moments.q_buckets is not None
    found = {name: _packed(one) if name.endswith(".scatter") else one for name, one in arrays(moments).items()}
    write_tensors(path, found)


def read_layer(path: Path, *, buckets: bool = True) -> LayerMoments:
    """Read one layer's moments, those of queries by bucket only if wanted."""
    wanted = ("q", "k", "q_buckets") if buckets else ("q", "k")
    try:
        check_regular(path)
        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_tensor(name) for name in file.keys() if buckets or "q_buckets" not in name}  # noqa: SIM118
        parts = {name: Moments(*_together(found, name, ("n", "mean", "scatter"))) for name in wanted}
        q_cells, k_cells = (
            BucketMeans(*_together(found, kind, ("n", "mean_x", "mean_t"))) for kind in ("q_cells", "k_cells")
        )
        rest = found["unrotated_q"], found["unrotated_k"], found["temperature"]
    except (OSError, LookupError, ValueError, TypeError, SafetensorError) as error:
        raise DatasetError(f"{path} cannot be read as a layer's moments ({error}); capture the run again") from None
    return LayerMoments(parts["q"], parts["k"], parts.get("q_buckets"), q_cells, k_cells, *rest)


def _together(
    found: dict[str, Float[np.ndarray, "..."]], name: str, parts: tuple[str, ...]
) -> list[Float[np.ndarray, "..."]]:
    """Arrays that belong together, scatters unpacked; a ``ValueError`` if they are of different heads or lengths."""
    arrays = [_unpacked(found[f"{name}.{part}"]) if part == "scatter" else found[f"{name}.{part}"] for part in parts]
    batch, *(mean, last) = (array.shape for array in arrays)
    if mean[:-1] != batch or last not in (batch, (*mean, mean[-1])):
        shapes = ", ".join(f"{part} {array.shape}" for part, array in zip(parts, arrays, strict=True))
        raise ValueError(f"the shapes of {name} do not fit together: {shapes}")
    return arrays


def read_layer_of(manifest: dict[str, Any], folder: Path, layer: int, *, buckets: bool = True) -> LayerMoments:
    """Read one layer's moments from a folder of them; a ``DatasetError`` where they are not as the manifest says."""
    path = folder / layer_file(layer)
    moments = read_layer(path, buckets=buckets)
    said = next((one for one in manifest["layers"] if one["layer"] == layer), None)
    if said is None:
        raise DatasetError(f"{path} does not fit (its manifest has no such layer); capture the run again")
    # Vectors before the rotation have no means with it undone.
    plain = said if manifest["stage"] == "post-rope" else said | {"rope": None}
    wrong = misfit(moments, plain, manifest["options"]["buckets"], manifest["window"])
    if wrong:
        raise DatasetError(f"{path} does not fit ({wrong}); capture the run again")
    return moments


def misfit(moments: LayerMoments, said: dict[str, Any], buckets: int, window: int) -> str | None:
    """What of a layer's moments is not as its manifest says; None if all is."""
    n_q, n_k, d = len(said["query_heads"]), len(said["key_heads"]), moments.q.mean.shape[-1] - 1
    planes = 0 if said["rope"] is None else len(said["rope"]["frequencies"])
    expected = {
        "unrotated_q": (n_q, N_GROUPS, planes, 2),
        "unrotated_k": (n_k, N_GROUPS, planes, 2),
        **_moments_shapes("q", (n_q, N_GROUPS), d),
        **_moments_shapes("k", (n_k, N_GROUPS), d),
        **_moments_shapes("q_buckets", (n_q, buckets), d),
        **_cells_shapes("q_cells", (n_q, N_GROUPS, buckets), d),
        **_cells_shapes("k_cells", (n_k, N_GROUPS, buckets), d),
    }
    if said["rope"] is not None and said["rope"].get("start", 0) + 2 * planes > d:
        return f"its manifest turns coordinates beyond the {d} there are"
    found = arrays(moments)
    if found["temperature"].shape not in ((2, 0), (2, window)):
        return f"temperature has shape {found['temperature'].shape}, its manifest says {(2, 0)} or {(2, window)}"
    for name, array in found.items():
        if array.dtype != np.float64:
            return f"{name} is {array.dtype}, moments are float64"
        if array.shape != expected.get(name, array.shape):
            return f"{name} has shape {array.shape}, its manifest says {expected[name]}"
        if not np.isfinite(array).all():
            return f"{name} is not finite"
    return None


def arrays(moments: LayerMoments) -> dict[str, Float[np.ndarray, "..."]]:
    """Every array of a layer's moments, by its name in the file."""
    found = {name: getattr(moments, name) for name in ("unrotated_q", "unrotated_k", "temperature")}
    for name in ("q", "k", "q_buckets"):
        part: Moments | None = getattr(moments, name)
        if part is not None:
            found |= {f"{name}.n": part.n, f"{name}.mean": part.mean, f"{name}.scatter": part.scatter}
    for name in ("q_cells", "k_cells"):
        cells: BucketMeans = getattr(moments, name)
        found |= {f"{name}.n": cells.n, f"{name}.mean_x": cells.mean_x, f"{name}.mean_t": cells.mean_t}
    return found


def _moments_shapes(name: str, batch: tuple[int, ...], d: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.n": batch, f"{name}.mean": (*batch, d + 1), f"{name}.scatter": (*batch, d + 1, d + 1)}


def _cells_shapes(name: str, batch: tuple[int, ...], d: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.n": batch, f"{name}.mean_x": (*batch, d), f"{name}.mean_t": batch}


def _packed(scatter: Float[np.ndarray, "*batch z z"]) -> Float[np.ndarray, "*batch p"]:
    rows, columns = np.triu_indices(scatter.shape[-1])
    return scatter[..., rows, columns]


def _unpacked(packed: Float[np.ndarray, "*batch p"]) -> Float[np.ndarray, "*batch z z"]:
    size = int((np.sqrt(8 * packed.shape[-1] + 1) - 1) / 2)
    return np.take(packed, _places(size), axis=-1).reshape(*packed.shape[:-1], size, size)


@lru_cache(maxsize=8)
def _places(size: int) -> Int[np.ndarray, "zz"]:
    """Where each entry of a symmetric matrix stands in its packed triangle."""
    rows, columns = np.triu_indices(size)
    places = np.empty((size, size), dtype=np.intp)
    places[rows, columns] = places[columns, rows] = np.arange(len(rows))
    return places.reshape(-1)
