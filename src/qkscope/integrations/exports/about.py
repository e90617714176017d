"""The description of the run in every export: model, digest of the weights, rotary encoding, texts; and its check.

Values that differ between layers are a list with one entry per layer, null where a layer is not rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qkscope._version import __version__
from qkscope.core.rope import base_of
from qkscope.errors import ConfigError, DatasetError
from qkscope.files.manifest import LayerEntry, RopeEntry
from qkscope.files.readers import read_json
from qkscope.files.runfolder import RunFolder
from qkscope.results.runtables import check_run
from qkscope.runs.captured import CapturedSource
from qkscope.runs.run import Run

ABOUT_KEY = "qkscope"
"""Key of the description in files that have other entries too."""
OnLayers = Callable[[int, int], None]
"""A callback that takes the number of layers done and the number of all layers."""


@dataclass(frozen=True)
class ModelShape:
    """Number of layers, heads per layer and head dimension, which are the same in all layers."""

    layers: int
    query_heads: int
    key_heads: int
    head_dim: int

    @classmethod
    def of(cls, run: RunFolder) -> ModelShape:
        """The shape of a whole model's run; a ``ConfigError`` if a layer or a head is missing, or layers differ."""
        entries, n_layers = run.manifest.layers, int(run.manifest.model.layers or 0)
        missing = sorted(set(range(n_layers)) - {entry.layer for entry in entries})
        if missing or not n_layers or run.manifest.options.heads is not None:
            absent = f"layer {missing[0]}" if missing else "some heads"
            raise ConfigError(f"{run.folder} lacks {absent}, and this format needs the whole model; capture all heads")
        shapes = {(len(entry.query_heads), len(entry.key_heads), entry.d) for entry in entries}
        if len(shapes) > 1 or len(entries) > n_layers:
            raise ConfigError(f"the layers of {run.folder} differ in shape, which this format does not support")
        n_q, n_k, _ = shapes.pop()
        return cls(n_layers, n_q, n_k, run.layer(0, buckets=False).q.d)


def open_captured_run(run: Run | str | Path) -> Run:
    """Open a captured run, unless it is open already; a ``ConfigError`` if it has no sums of rotated vectors."""
    check_run(run)
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
    """The description of a run for an export."""
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


def with_shape(about: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The description with the shape of the whole model."""
    return about | asdict(shape)


def json_path(path: Path) -> Path:
    """The JSON file that describes an export that is tensors alone, next to it."""
    return path.with_name(f"{path.name}.json")


def read_about(path: Path) -> Any:
    """Read that description; an error names its file."""
    try:
        return read_json(json_path(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{json_path(path)}, the description of {path.name}, cannot be read ({error})") from None


def check_weights(path: Path, about: Any, run: RunFolder) -> None:
    """Raise an error unless an export was made from a run of the same weights."""
    recorded, model = about if isinstance(about, dict) else {}, run.manifest.model
    if "weights" not in recorded:
        raise DatasetError(f"{path} does not record its model's weights; export it again with qkscope export")
    if recorded["weights"] != model.weights:
        got, expected = (
            f"{recorded.get('model')}, weights {recorded['weights']}",
            f"{model.id}, weights {model.weights}",
        )
        raise DatasetError(
            f"{path} is of another model ({got}; {run.folder} is of {expected}); export it from this run"
        )


def check_shape(path: Path, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise an error unless an array of an export has the shape that the run's model requires."""
    if got != expected:
        expected_text, got_text = (" × ".join(map(str, shape)) or "one number" for shape in (expected, got))
        raise DatasetError(
            f"{path} is of another model: expected {expected_text}, got {got_text}; export it from this run"
        )


def _rotary(layers: list[LayerEntry]) -> dict[str, Any]:
    """Layout, base and frequencies: one value if they are the same in all layers, otherwise one per layer."""
    ropes = [layer.rope for layer in layers]

    def by_layer(get: Callable[[RopeEntry], Any]) -> Any:
        values = [None if rope is None else get(rope) for rope in ropes]
        return values[0] if all(value == values[0] for value in values) else values

    return {
        "rope_style": by_layer(lambda rope: rope.layout),
        "rope_theta": by_layer(lambda rope: base_of(rope.frequencies)),
        "rotary_dim": by_layer(lambda rope: 2 * len(rope.frequencies)),
        "rotary_start": by_layer(lambda rope: rope.start),
        "rope_sign": by_layer(lambda rope: rope.sign),
        "attention_factor": by_layer(lambda rope: rope.attention_factor),
        "frequencies": by_layer(lambda rope: rope.frequencies),
    }
