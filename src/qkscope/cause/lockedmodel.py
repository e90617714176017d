"""A loaded model together with a run of it: the position-locked means of its heads, at any position.

Before anything is changed, the model is described as for a capture, through the same parity gate, and compared with the
run: means of another model, or of another rotary encoding, do not apply to this one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from qkscope.capture import gate as parity
from qkscope.capture import model as models
from qkscope.capture.layers import Layer, describe_layer
from qkscope.capture.options import CaptureOptions
from qkscope.capture.rope import LayerRope, embeddings
from qkscope.capture.watch import backbone, plain_model
from qkscope.core.layermoments import LayerMoments
from qkscope.core.linalg import ratio
from qkscope.errors import CaptureError
from qkscope.files.manifest import LayerEntry
from qkscope.files.runfolder import RunFolder
from qkscope.headids import head_name

_log = logging.getLogger("qkscope")
DESCRIBED_TOKENS = 64
_ALIKE = 1e-3
"""Largest relative difference of frequencies, factors and scalings between a run and a model."""


def describe(model: PreTrainedModel, window: int = DESCRIBED_TOKENS) -> dict[int, Layer]:
    """Describe the layers of a model on a few tokens, after the parity gate."""
    decoder = backbone(model)
    embedding: Any = decoder.get_input_embeddings()
    ids = torch.arange(3, 3 + DESCRIBED_TOKENS)[None] * 7919 % int(embedding.weight.shape[0])
    restores = [rotary.state_restorer() for rotary in embeddings(model)]

    def forward() -> torch.Tensor:
        for restore in restores:
            restore()
        with torch.no_grad():
            hidden: torch.Tensor = decoder(input_ids=ids.to(embedding.weight.device), use_cache=False).last_hidden_state
        return hidden

    attentions = parity.check(model, forward)
    options, candidates = CaptureOptions(window=max(window, 16)), embeddings(model)
    return {a.layer: describe_layer(a, decoder, candidates, options) for a in attentions}


@dataclass(frozen=True)
class LockedModel:
    """A model and a run of it."""

    model: PreTrainedModel
    run: RunFolder
    _means: dict[int, LockedMeans] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, model: PreTrainedModel, run: Any) -> LockedModel:
        """Match a model with a captured run, given as its folder or opened; an error if it is not of this model."""
        model = plain_model(model)
        locked = cls(model, _run_folder(run))
        manifest = locked.run.manifest
        if not manifest.rotated:
            raise CaptureError(f"{locked.run.folder} was captured before the rotation; capture it without --pre-rope")
        if manifest.encoder:
            raise CaptureError(
                f"{locked.run.folder} is a run of an encoder; the cost of terms and windows is measured on models that "
                "predict the next token"
            )
        recorded, loaded = manifest.model, models.describe_model(model)
        other = other_model(dict(recorded), loaded)
        if other:
            raise CaptureError(f"{locked.run.folder} is a run of another model ({other}); capture this model")
        for number, entry in locked.entries.items():
            difference = _difference(entry, locked.layers.get(number))
            if difference:
                raise CaptureError(f"{locked.run.folder} does not fit this model: layer {number}: {difference}")
        if other_weights(locked.run.folder, dict(recorded), loaded):
            raise CaptureError(
                f"{locked.run.folder} is a run of other weights of this model (another revision or checkpoint); "
                "capture these"
            )
        return locked

    @property
    def skip_first(self) -> int:
        """Number of a document's first keys, the sinks, whose scores are not changed."""
        return self.run.manifest.options.skip_first

    @cached_property
    def layers(self) -> dict[int, Layer]:
        """The layers of the model."""
        return describe(self.model, self.run.manifest.window)

    @cached_property
    def entries(self) -> dict[int, LayerEntry]:
        """The layers of the run."""
        return {entry.layer: entry for entry in self.run.manifest.layers}

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Layer and number of every query head of the run."""
        return [(number, head) for number, entry in self.entries.items() for head in entry.query_heads]

    def key_head(self, head: int) -> int:
        """Return the key head that a query head reads."""
        return head // self.run.manifest.q_per_kv

    def check_heads(self, heads: Any) -> None:
        """Raise an error that names the first head the run does not have."""
        missing = sorted(set(heads) - set(self.heads))
        if missing:
            layer, head = missing[0]
            raise CaptureError(f"{self.run.folder} has no head {head_name(layer, head)}; see run.heads")

    def means(self, layer: int) -> LockedMeans:
        """Return the position-locked means of a layer's heads; they are read once."""
        if layer not in self._means:
            moments, entry = self.run.layer(layer, buckets=False), self.entries[layer]
            self._means[layer] = LockedMeans(self.layers[layer].rope, moments, entry.query_heads, entry.key_heads)
        return self._means[layer]


@dataclass(frozen=True)
class LockedMeans:
    """μ̃ of the heads of a layer: planes with their rotation undone, plain means of the other coordinates."""

    rope: LayerRope | None
    moments: LayerMoments
    query_heads: list[int]
    key_heads: list[int]

    def queries(self, heads: list[int]) -> torch.Tensor:
        """Return μ̃_q of these query heads (n, d), float32."""
        return self._locked("q")[[self.query_heads.index(head) for head in heads]]

    def keys(self, heads: list[int]) -> torch.Tensor:
        """Return μ̃_k of these key heads (n, d), float32."""
        return self._locked("k")[[self.key_heads.index(head) for head in heads]]

    def drift(self, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return β_K = Cov(k, t)/Var t of these key heads (n, d), and the mean position of each (n,)."""
        rows = [self.moments.k[self.key_heads.index(head)].merged() for head in heads]
        beta = np.stack([ratio(row.cov_xt, row.var_t) for row in rows])
        return torch.from_numpy(beta).float(), torch.tensor([float(row.mean[-1]) for row in rows])

    def _locked(self, kind: str) -> torch.Tensor:
        moments = self.moments.q if kind == "q" else self.moments.k
        n = moments.n.sum(-1)
        mean = np.einsum("hg,hgd->hd", moments.n, moments.mean_x) / np.maximum(n, 1.0)[:, None]
        if self.rope is not None:
            undone = (self.moments.unrotated_q if kind == "q" else self.moments.unrotated_k).sum(1)
            undone = undone / np.maximum(n, 1.0)[:, None, None]
            first, second = self.rope.coordinates
            mean[:, first], mean[:, second] = undone[..., 0], undone[..., 1]
        return torch.from_numpy(mean).float()


def other_model(recorded: dict[str, Any], loaded: dict[str, Any]) -> str:
    """Return the difference of a recorded model from a loaded one, both described as in manifests; empty if none."""
    recorded_class = recorded.get("class", recorded.get("type"))
    if recorded.get("parameters") == loaded["parameters"] and recorded_class == loaded["class"]:
        return ""
    description = f"{recorded_class} with {recorded.get('parameters')} parameters"
    return f"{description}; this is {loaded['class']} with {loaded['parameters']}"


def other_weights(source: Path, recorded: dict[str, Any], loaded: dict[str, Any]) -> bool:
    """Return True if the weights differ; with another dtype they cannot be compared, which is logged."""
    if recorded.get("dtype") == loaded["dtype"]:
        return bool(recorded.get("weights") != loaded["weights"])
    _log.warning(
        "%s is of %s and the model is loaded in %s, so their weights were not compared",
        source, recorded.get("dtype"), loaded["dtype"],
    )  # fmt: skip
    return False


def rotated(
    mean: torch.Tensor, rope: LayerRope | None, angles: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """Return R_t μ̃ (n, T, d) for means (n, d) and the angles (T, planes) of the embedding at T positions."""
    if rope is None or angles is None:
        return mean[:, None]
    cos, sin = angles[0] / rope.attention_factor, rope.sign * angles[1] / rope.attention_factor
    first, second = rope.coordinates
    u, v = mean[:, None, first], mean[:, None, second]
    vectors = mean[:, None].expand(-1, len(cos), -1).clone()
    vectors[..., first], vectors[..., second] = cos * u - sin * v, sin * u + cos * v
    return vectors


def _run_folder(run: Any) -> RunFolder:
    if isinstance(run, str | Path):
        return RunFolder.open(Path(run))
    folder = getattr(getattr(run, "source", run), "run", run)
    if not isinstance(folder, RunFolder):
        raise CaptureError("expected a captured run: its folder, or qkscope.open(FOLDER)")
    return folder


def _difference(entry: LayerEntry, layer: Layer | None) -> str | None:
    """Return the difference between a layer of a run and of the model, in words; None if there is none."""
    if layer is None:
        return "the model has no such layer"
    if entry.d != layer.d or not set(entry.query_heads) <= set(layer.query_heads):
        return f"the run has heads of length {entry.d}, the model of {layer.d}"
    if not _alike(entry.scaling, layer.scaling):
        return f"the run has a scaling of {entry.scaling:.4g}, the model of {layer.scaling:.4g}"
    rope, model_rope = entry.rope, layer.rope
    if (rope is None) != (model_rope is None):
        return "only one of the two has a rotary encoding"
    if rope is None or model_rope is None:
        return None
    for name in ("layout", "start", "sign"):
        if getattr(rope, name) != getattr(model_rope, name):
            return f"rotary {name}: {getattr(rope, name)} in the run, {getattr(model_rope, name)} in the model"
    if len(rope.frequencies) != model_rope.planes or not _alike(rope.frequencies, model_rope.frequencies):
        return "the run has other rotary frequencies"
    return None if _alike(rope.attention_factor, model_rope.attention_factor) else "the run has another rotary factor"


def _alike(a: Any, b: Any) -> bool:
    return bool(np.allclose(np.asarray(a, dtype=float), np.asarray(b, dtype=float), rtol=_ALIKE, atol=1e-9))
