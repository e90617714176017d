"""Run folders: a manifest, the moments of each layer, and a sample of vectors in the dataset layout.

    run.json                      what was measured, and how
    moments/layer-000.safetensors scatters as packed upper triangles
    sample/l00h00q/data.parquet   …

While a capture is in progress there is ``progress.json`` instead of ``run.json``; see inprogress.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from qkscope.core.headdata import PassageVectors
from qkscope.core.layermoments import LayerMoments
from qkscope.errors import DatasetError
from qkscope.files.atomic import write_together
from qkscope.files.checksums import difference, file_state
from qkscope.files.layerfiles import layer_file, read_layer_of
from qkscope.files.manifest import RunManifest, problem
from qkscope.files.readers import check_regular, read_text

FORMAT = 3
MANIFEST = "run.json"
PROGRESS = "progress.json"
MOMENTS = "moments"
SAMPLE = "sample"
LEFT_OUT, ONE_BY_ONE, LOSS = "left_out", "one_by_one", "loss"
"""Keys that only the manifest of a finished run may have: documents that were not measured, shards whose batches did
not fit into memory, and the loss."""
PUSHED = "pushed"
"""Key of run.json: items that were removed when the run was pushed, and the SHA-256 of the original file."""
UNFINISHED = "capture unfinished in {}; rerun the same capture command to resume"


def at_window(folder: str, window: int) -> str:
    """Return the folder of the same capture at another window.

    >>> at_window("runs/long/", 1024)
    'runs/long-at-1024'
    """
    return f"{folder.rstrip('/')}-at-{window}"


@dataclass(frozen=True)
class RunFolder:
    """A finished run on disk."""

    folder: Path
    raw: dict[str, Any]
    """The content of run.json on disk."""

    @cached_property
    def manifest(self) -> RunManifest:
        """The checked content of run.json."""
        return RunManifest.model_validate(self.raw)

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

    def layer(self, layer: int, *, buckets: bool = True, undone: bool = False) -> LayerMoments:
        """The moments of one layer; by bucket only if ``buckets``, with the rotation undone only if ``undone``.

        Raises a ``DatasetError`` if its file or the manifest has changed since the capture.
        """
        moments = read_layer_of(self.raw, self.folder / MOMENTS, layer, buckets=buckets, undone=undone)
        self.check(MANIFEST, f"{MOMENTS}/{layer_file(layer)}")
        return moments

    def check_same_weights(self, other: RunFolder) -> None:
        """Raise a ``DatasetError`` if another run, meant to be this one at another window, is of other weights."""
        a, b = self.manifest.model, other.manifest.model
        if a.dtype == b.dtype and None not in (a.weights, b.weights) and a.weights != b.weights:
            raise DatasetError(
                f"{other.folder} is a run of other weights than {self.folder}, not the same at another window; "
                "rename it, or leave it out"
            )

    def check(self, *names: str) -> None:
        """Raise a ``DatasetError`` if one of these files has changed since the capture."""
        error_text = difference(self.folder, names)
        if error_text is not None:
            raise DatasetError(error_text)


PASSAGE_FILE, PASSAGE_ENTRY = "passage.safetensors", "passage"
"""The file of the passage, and the key of run.json with its tokens."""
PASSAGE = (
    "In the lighthouse Ann Keller wrote: on Monday three ships, on Tuesday a storm. Years later Ann Keller read it "
    "again: on Monday three ships, on Tuesday a storm. The sea was quiet now, and no ship came to the old lighthouse."
)
"""The passage of runs that were given no other."""


def is_bundled(tokens: Sequence[str]) -> bool:
    """Return True if these tokens are of the bundled passage: their letters follow each other in it.

    >>> is_bundled(["<s>", "In", " the", " light", "##house"]), is_bundled(["In", " a", " submarine"])
    (True, False)
    """
    letters, at = _letters(PASSAGE), 0
    for token in tokens:
        part = _letters(token)
        at = letters.find(part, at) + len(part)
        if at < len(part):
            return False
    return True


def _letters(text: str) -> str:
    """Return letters and digits in lower case, without special tokens."""
    return re.sub(r"<[^>]*>|\[[^\]]*\]|[\W_]", "", text).lower()


Vectors = tuple[Shaped[np.ndarray, "tokens heads d"], Shaped[np.ndarray, "tokens key_heads d"]]


def write_passage(folder: Path, layers: Mapping[int, Vectors]) -> None:
    """Write queries and keys of the passage: in half precision, unless a value is too large for it."""
    tensors = {f"{layer}.{kind}": _short(x) for layer, qk in layers.items() for kind, x in zip("qk", qk, strict=True)}
    write_together(folder, {PASSAGE_FILE: save(tensors)})


def read_passage(folder: Path, manifest: RunManifest, layer: int, query: int, key: int) -> PassageVectors | None:
    """The passage in one head; ``query`` and ``key`` index the captured heads. None if the run has no passage."""
    if manifest.passage is None:
        return None
    q, k = _layer(folder / PASSAGE_FILE, layer, file_state(folder / PASSAGE_FILE))
    tokens = tuple(manifest.passage.tokens)
    if not len(q) == len(k) == len(tokens) or query >= q.shape[1] or key >= k.shape[1] or q.shape[2] != k.shape[2]:
        raise DatasetError(f"{folder / PASSAGE_FILE} does not fit run.json in layer {layer}; copy the run again")
    return PassageVectors(tokens, q[:, query].astype(float), k[:, key].astype(float))


@lru_cache(maxsize=2)
def _layer(path: Path, layer: int, _: object) -> Vectors:
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
