"""Run folders: a manifest, the moments of each layer, and a sample of vectors in the dataset layout.

    run.json                      what was measured, and how
    moments/layer-000.safetensors scatters as packed upper triangles
    sample/l00h00q/data.parquet   …

While a capture is in progress there is ``progress.json`` instead of ``run.json``; see inprogress.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope.core.layermoments import LayerMoments
from qkscope.errors import DatasetError
from qkscope.files.checksums import difference
from qkscope.files.layerfiles import layer_file, read_layer_of
from qkscope.files.manifest import problem
from qkscope.files.readers import read_text

FORMAT = 3
MANIFEST = "run.json"
PROGRESS = "progress.json"
MOMENTS = "moments"
SAMPLE = "sample"
LEFT_OUT, ONE_BY_ONE, LOSS = "left_out", "one_by_one", "loss"
"""Keys that only the manifest of a finished run may have: documents that were not measured, and shards whose batches
did not fit into memory."""
UNFINISHED = "capture unfinished in {}; rerun the same capture command to resume"


@dataclass(frozen=True)
class RunFolder:
    """A finished run on disk."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> RunFolder:
        """Open the folder of a finished run; a ``DatasetError`` says what is wrong with its manifest."""
        path = folder / MANIFEST
        try:
            manifest = json.loads(read_text(path))
        except FileNotFoundError:
            if (folder / PROGRESS).exists():
                raise DatasetError(UNFINISHED.format(folder)) from None
            raise DatasetError(
                f"{folder} is not a captured run: it has no {MANIFEST}; give the folder of a run"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise DatasetError(f"{path} cannot be read ({error}); capture the run again") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found_format = manifest.get("format") if isinstance(manifest, dict) else None
            raise DatasetError(f"{path}: expected format {FORMAT}, got {found_format}; capture the run again")
        error_text = problem(manifest)
        if error_text:
            raise DatasetError(f"{path} is not a valid manifest ({error_text}); capture the run again")
        return cls(folder, manifest)

    @property
    def encoder(self) -> bool:
        """Whether queries of any layer also see later keys."""
        return any(layer.get("both") for layer in self.manifest["layers"])

    def layer(self, layer: int, *, buckets: bool = True, undone: bool = False) -> LayerMoments:
        """The moments of one layer; by bucket only if ``buckets``, with the rotation undone only if ``undone``.

        A ``DatasetError`` if its file, or the manifest, is not what was captured.
        """
        moments = read_layer_of(self.manifest, self.folder / MOMENTS, layer, buckets=buckets, undone=undone)
        self.check(MANIFEST, f"{MOMENTS}/{layer_file(layer)}")
        return moments

    def check(self, *names: str) -> None:
        """Raise a ``DatasetError`` if one of its files has changed since the capture."""
        changed = difference(self.folder, names)
        if changed is not None:
            raise DatasetError(changed)
