"""Run folders: a manifest, the moments of each layer, and a sample of vectors in the dataset layout.

    run.json                      what was measured, and how
    moments/layer-000.safetensors float64; scatters as packed upper triangles
    sample/l00h00q/data.parquet   …

While a capture is under way there is ``progress.json`` instead of ``run.json``; it names the folder that holds the
moments of the documents done so far.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qkscope.core.headmoments import N_GROUPS, BucketMeans
from qkscope.core.layermoments import LayerMoments
from qkscope.core.moments import Moments
from qkscope.errors import DatasetError
from qkscope.store.atomic import atomic_path, write_together
from qkscope.store.manifests import problem

FORMAT = 2
MANIFEST = "run.json"
PROGRESS = "progress.json"
MOMENTS = "moments"
SAMPLE = "sample"
UNFINISHED = "the capture in {} is not finished; the same command again goes on with it"


@dataclass(frozen=True)
class RunFolder:
    """A finished run on disk."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> RunFolder:
        """Read the manifest; a ``DatasetError`` says what is wrong with it."""
        path = folder / MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if (folder / PROGRESS).exists():
                raise DatasetError(UNFINISHED.format(folder)) from None
            raise DatasetError(f"{folder} is no captured run: it holds no {MANIFEST}; give the folder of one") from None
        except (OSError, ValueError, RecursionError) as error:
            raise DatasetError(f"{path} cannot be read ({error}); capture the run again") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else None
            raise DatasetError(f"{path} has format {found}, this version reads {FORMAT}; capture the run again")
        wrong = problem(manifest)
        if wrong:
            raise DatasetError(f"{path} is no manifest of a capture ({wrong}); capture the run again")
        return cls(folder, manifest)

    def layer(self, layer: int, *, buckets: bool = True) -> LayerMoments:
        """The moments of one layer; those of queries by bucket, two thirds of its file, only if wanted."""
        path = self.folder / MOMENTS / layer_file(layer)
        moments = read_layer(path, buckets=buckets)
        said = next((one for one in self.manifest["layers"] if one["layer"] == layer), None)
        wrong = "its manifest has no such layer" if said is None else self._misfit(moments, said)
        if wrong:
            raise DatasetError(f"{path} does not fit ({wrong}); capture the run again")
        return moments

    def _misfit(self, moments: LayerMoments, said: dict[str, Any]) -> str | None:
        # Vectors before the rotation have no means with it undone.
        plain = said if self.manifest["stage"] == "post-rope" else said | {"rope": None}
        return misfit(moments, plain, self.manifest["options"]["buckets"])


def layer_file(layer: int) -> str:
    """File name of a layer's moments."""
    return f"layer-{layer:03d}.safetensors"


def write_layer(path: Path, moments: LayerMoments) -> None:
    """Write one layer's moments, atomically."""
    tensors = {
        "unrotated_q": moments.unrotated_q,
        "unrotated_k": moments.unrotated_k,
        "temperature": moments.temperature,
    }
    assert moments.q_buckets is not None
    for name, part in (("q", moments.q), ("k", moments.k), ("q_buckets", moments.q_buckets)):
        tensors |= {f"{name}.n": part.n, f"{name}.mean": part.mean, f"{name}.scatter": _packed(part.scatter)}
    for name in ("q_cells", "k_cells"):
        cells: BucketMeans = getattr(moments, name)
        tensors |= {f"{name}.n": cells.n, f"{name}.mean_x": cells.mean_x, f"{name}.mean_t": cells.mean_t}
    with atomic_path(path) as temporary:
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, temporary)


def read_layer(path: Path, *, buckets: bool = True) -> LayerMoments:
    """Read one layer's moments, those of queries by bucket only if wanted."""
    wanted = ("q", "k", "q_buckets") if buckets else ("q", "k")
    try:
        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_tensor(name) for name in file.keys() if buckets or "q_buckets" not in name}  # noqa: SIM118
        parts = {
            name: Moments(found[f"{name}.n"], found[f"{name}.mean"], _unpacked(found[f"{name}.scatter"]))
            for name in wanted
        }
        q_cells, k_cells = (
            BucketMeans(*(found[f"{kind}.{name}"] for name in ("n", "mean_x", "mean_t")))
            for kind in ("q_cells", "k_cells")
        )
        rest = found["unrotated_q"], found["unrotated_k"], found["temperature"]
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise DatasetError(f"{path} cannot be read as a layer's moments ({error}); capture the run again") from None
    return LayerMoments(parts["q"], parts["k"], parts.get("q_buckets"), q_cells, k_cells, *rest)


def misfit(moments: LayerMoments, said: dict[str, Any], buckets: int) -> str | None:
    """What of a layer's moments is not as its manifest says; None if all is."""
    n_q, n_k, d = len(said["query_heads"]), len(said["key_heads"]), moments.q.d
    planes = 0 if said["rope"] is None else len(said["rope"]["frequencies"])
    shapes = {
        "q": (moments.q.scatter.shape, (n_q, N_GROUPS, d + 1, d + 1)),
        "k": (moments.k.scatter.shape, (n_k, N_GROUPS, d + 1, d + 1)),
        "q_cells": (moments.q_cells.mean_x.shape, (n_q, N_GROUPS, buckets, d)),
        "k_cells": (moments.k_cells.mean_x.shape, (n_k, N_GROUPS, buckets, d)),
        "unrotated_q": (moments.unrotated_q.shape, (n_q, N_GROUPS, planes, 2)),
        "unrotated_k": (moments.unrotated_k.shape, (n_k, N_GROUPS, planes, 2)),
    }
    if moments.q_buckets is not None:
        shapes["q_buckets"] = (moments.q_buckets.scatter.shape, (n_q, buckets, d + 1, d + 1))
    for name, (found, expected) in shapes.items():
        if found != expected:
            return f"{name} has shape {found}, its manifest says {expected}"
    finite = all(np.isfinite(part.scatter).all() and np.isfinite(part.mean).all() for part in (moments.q, moments.k))
    return None if finite else "some of its moments are not finite"


class Checkpoints:
    """The state of a capture under way: manifest, moments so far, and how many shards they hold."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.shards_done = 0
        self.moments: dict[int, LayerMoments] = {}

    @property
    def _progress(self) -> Path:
        return self.folder / PROGRESS

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return (self.folder / MANIFEST).exists()

    def resume(self) -> None:
        """Take up what an earlier attempt left; a manifest that differs is an error that shows the difference."""
        source = self.folder / MANIFEST if self.finished else self._progress
        if not source.exists():
            return
        try:
            state = json.loads(source.read_text(encoding="utf-8"))
            before = dict(state if self.finished else state["manifest"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{source} cannot be read ({error!r}); choose another folder") from None
        different = [key for key in sorted({*before, *self.manifest}) if before.get(key) != self.manifest.get(key)]
        if different:
            shown = "; ".join(_difference(key, before.get(key), self.manifest.get(key)) for key in different)
            raise DatasetError(f"{self.folder} holds a run of other settings ({shown}); choose another folder")
        if not self.finished:
            self.shards_done = state["shards_done"]
            # A kill between the two steps of finish() leaves the moments under their final name.
            named = self.folder / state["moments"]
            files = sorted((named if named.exists() else self.folder / MOMENTS).glob("layer-*.safetensors"))
            self.moments = {int(file.stem.removeprefix("layer-")): read_layer(file) for file in files}

    def save(self, moments: dict[int, LayerMoments]) -> None:
        """Record one more shard: moments first, then the progress that names them, then the old ones go."""
        self.shards_done += 1
        self.moments = moments
        name = f"moments-{self.shards_done:05d}"
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        for layer, part in moments.items():
            write_layer(self.folder / name / layer_file(layer), part)
        state = {"manifest": self.manifest, "shards_done": self.shards_done, "moments": name}
        write_together(self.folder, {PROGRESS: _json(state)})
        self._remove_but(name)

    def finish(self) -> None:
        """Turn the last checkpoint into a finished run."""
        name = f"moments-{self.shards_done:05d}"
        if (self.folder / name).exists():
            shutil.rmtree(self.folder / MOMENTS, ignore_errors=True)
            os.replace(self.folder / name, self.folder / MOMENTS)  # noqa: PTH105
        write_together(self.folder, {MANIFEST: _json(self.manifest)})
        self._progress.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "shards", ignore_errors=True)

    def _remove_but(self, name: str) -> None:
        for old in self.folder.glob("moments-*"):
            if old.name != name:
                shutil.rmtree(old)


def _difference(key: str, before: object, now: object) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        inner = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k)]
        return ", ".join(_difference(f"{key}.{k}", before.get(k), now.get(k)) for k in inner[:5])
    shown = [text if len(text := json.dumps(value)) < 80 else text[:77] + "..." for value in (before, now)]
    return f"{key}: {shown[0]} there, {shown[1]} now"


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


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
