"""What every export says of its run: model, digest of the weights, rotary encoding, texts; and whose it is, read back.

Values that differ from layer to layer stand in a list, one for each layer, null where a layer is not rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkscope._version import __version__
from qkscope.errors import ConfigError, DatasetError
from qkscope.files.manifest import LayerEntry, RopeEntry
from qkscope.files.runfolder import RunFolder
from qkscope.runs.captured import CapturedSource
from qkscope.runs.run import Run

ABOUT_KEY = "qkscope"
"""Where a file that has entries of its own says it."""
OnLayers = Callable[[int, int], None]
"""Called with the number of layers done and the number of all layers."""
_SAME_BASE = 1e-4
"""Largest relative error at which frequencies are the powers of one base."""


@dataclass(frozen=True)
class ModelShape:
    """Layers, heads and their size, the same in every layer."""

    layers: int
    query_heads: int
    key_heads: int
    head_dim: int

    @classmethod
    def of(cls, run: RunFolder) -> ModelShape:
        """Of a run of the whole model; a ``ConfigError`` if a layer or a head is missing, or layers differ."""
        entries, in_all = run.manifest.layers, int(run.manifest.model.layers or 0)
        missing = sorted(set(range(in_all)) - {entry.layer for entry in entries})
        if missing or not in_all or run.manifest.options.heads is not None:
            lacks = f"layer {missing[0]}" if missing else "some heads"
            raise ConfigError(f"{run.folder} lacks {lacks}, and this format is of whole models; capture all heads")
        shapes = {(len(entry.query_heads), len(entry.key_heads), entry.d) for entry in entries}
        if len(shapes) > 1 or len(entries) > in_all:
            raise ConfigError(f"the layers of {run.folder} differ in shape, which this format cannot hold")
        n_q, n_k, _ = shapes.pop()
        return cls(in_all, n_q, n_k, run.layer(0, buckets=False).q.d)


def opened_run(run: Run | str | Path) -> Run:
    """A captured run, given as such or as its folder; a ``ConfigError`` if it has no sums of rotated vectors."""
    if not isinstance(run, Run):
        run = Run(CapturedSource(RunFolder.open(Path(run))), Path(run).absolute().name)
    folder_of(run)
    return run


def folder_of(run: Run) -> RunFolder:
    """The folder of a captured run."""
    if not isinstance(run.source, CapturedSource):
        raise ConfigError(f"{run.source} is a dataset of vectors; exports need a captured run (qkscope capture)")
    folder = run.source.run
    if not folder.manifest.rotated:
        raise ConfigError(f"{folder.folder} was captured before the rotation; capture it without --pre-rope")
    return folder


def about_run(run: RunFolder, to: str) -> dict[str, Any]:
    """What an export says of its run."""
    manifest = run.manifest
    model, measured = manifest.model, [manifest.documents[number] for number in manifest.measured]
    return {
        "to": to,
        "qkscope": __version__,
        "model": model.id,
        "revision": model.revision,
        "commit": model.commit,
        "weights": model.weights,
        "dtype": model.dtype,
        "head_dim": run.layer(manifest.layers[0].layer, buckets=False).q.d,
        **_rotary(manifest.layers),
        "skip_first": manifest.options.skip_first,
        "window": manifest.window,
        "documents": len(measured),
        "tokens": sum(document.tokens for document in measured),
        "corpus": manifest.corpus,
    }


def shaped(about: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The same with the shape of the whole model."""
    return about | asdict(shape)


def refuse_other(path: Path, about: Any, run: RunFolder) -> None:
    """Raise an error unless an export says that it is of the weights of this run."""
    said, model = about if isinstance(about, dict) else {}, run.manifest.model
    if "weights" not in said:
        raise DatasetError(f"{path} does not say of which weights it is; export it again with qkscope export")
    if said["weights"] != model.weights:
        theirs, ours = f"{said.get('model')}, weights {said['weights']}", f"{model.id}, weights {model.weights}"
        raise DatasetError(f"{path} is of another model ({theirs}; {run.folder} is of {ours}); export it from this run")


def refuse_shape(path: Path, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise an error unless an array of an export has the shape that the run's model asks for."""
    if got != expected:
        wanted, found = (" × ".join(map(str, shape)) or "one number" for shape in (expected, got))
        raise DatasetError(f"{path} is of another model: expected {wanted}, got {found}; export it from this run")


def base_of(frequencies: list[float]) -> float | None:
    """The base θ whose powers θ^(−m/planes) the frequencies are; None if they are not, as in scaled encodings.

    >>> base_of([1.0, 0.1, 0.01, 0.001]), base_of([1.0, 0.1, 0.01, 0.0])
    (10000.0, None)
    """
    planes, found = len(frequencies), np.asarray(frequencies, dtype=float)
    if planes < 2 or (found <= 0).any():
        return None
    base = float(found[-1] ** (-planes / (planes - 1)))
    powers = base ** (-np.arange(planes) / planes)
    return float(f"{base:.6g}") if np.allclose(found, powers, rtol=_SAME_BASE, atol=0) else None


def _rotary(layers: list[LayerEntry]) -> dict[str, Any]:
    """Layout, base and frequencies: of the whole model if they are the same in every layer, else layer by layer."""
    ropes = [layer.rope for layer in layers]

    def of_each(value: Callable[[RopeEntry], Any]) -> Any:
        values = [None if rope is None else value(rope) for rope in ropes]
        return values[0] if all(one == values[0] for one in values) else values

    d_rotated = of_each(lambda rope: 2 * len(rope.frequencies))
    return {
        "rope_style": of_each(lambda rope: rope.layout),
        "rope_theta": of_each(lambda rope: base_of(rope.frequencies)),
        "rotary_dim": d_rotated,
        "rotary_start": of_each(lambda rope: rope.start),
        "rope_sign": of_each(lambda rope: rope.sign),
        "attention_factor": of_each(lambda rope: rope.attention_factor),
        "frequencies": of_each(lambda rope: rope.frequencies),
    }
