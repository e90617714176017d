"""A layer's queries and keys before the rotary encoding: means, lengths in planes, covariances.

A run stores sums with the rotation undone, but with the encoding's constant factor (yarn, longrope); here the factor is
removed too. Coordinates are in the order of the rotated vectors, also if a model's rotary function reorders them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Complex, Float

from qkscope.core.layermoments import UNDONE_COV, LayerMoments
from qkscope.core.rope import Rope
from qkscope.errors import ConfigError
from qkscope.files.manifest import LayerEntry
from qkscope.files.runfolder import RunFolder
from qkscope.integrations.exports.about import OnLayers
from qkscope.runs.captured import layer_rope


@dataclass(frozen=True)
class BeforeRope:
    """One layer of a run."""

    run: RunFolder
    entry: LayerEntry
    moments: LayerMoments

    @property
    def layer(self) -> int:
        """The layer's number."""
        return self.entry.layer

    @property
    def rope(self) -> Rope | None:
        """The layer's rotary encoding; None if it has none."""
        return layer_rope(self.entry)

    @property
    def factor(self) -> float:
        """The encoding's constant factor on rotated vectors."""
        return 1.0 if self.entry.rope is None else self.entry.rope.attention_factor

    @property
    def planes_q(self) -> Complex[np.ndarray, "hq planes"]:
        """E[q] of every plane, as (first, second coordinate) = (real, imaginary)."""
        total = self.moments.unrotated_q.sum(1)
        return (total[..., 0] + 1j * total[..., 1]) / self._n("q") / self.factor

    def lengths(self, kind: Literal["q", "k"]) -> Float[np.ndarray, "h planes"]:
        """E|z| of every plane, of the queries or of the keys; a ``ConfigError`` if the run did not sum them."""
        sizes = self.moments.sizes_q if kind == "q" else self.moments.sizes_k
        if sizes is None:
            raise ConfigError(
                f"{self.run.folder} has no lengths in planes, since an earlier version captured it; capture it again"
            )
        return sizes.sum(1) / self._n(kind) / self.factor

    @property
    def mean_q(self) -> Float[np.ndarray, "hq d"]:
        """E[q], including the coordinates that are not rotated."""
        groups = self.moments.q
        mean: Float[np.ndarray, "hq d"] = (groups.mean_x * groups.n[..., None]).sum(1) / self._n("q")
        if self.rope is not None:
            first, second = self.rope.pairs.T
            mean[:, first], mean[:, second] = self.planes_q.real, self.planes_q.imag
        return mean

    @property
    def cov_q(self) -> Float[np.ndarray, "hq d d"]:
        """Cov(q), divided by n − 1; a ``ConfigError`` if the capture did not store it."""
        moments = self.moments.q.total if self.rope is None else self.moments.undone
        if moments is None:
            raise ConfigError(
                f"{self.run.folder} has no covariance of queries before the rotation; capture it with "
                f"--keep {UNDONE_COV}"
            )
        cov = moments.scatter[:, :-1, :-1] / np.maximum(moments.n - 1, 1.0)[:, None, None]
        scale = np.ones(cov.shape[-1])
        if self.rope is not None:
            scale[self.rope.pairs] /= self.factor
        return cov * scale[:, None] * scale

    def _n(self, kind: Literal["q", "k"]) -> Float[np.ndarray, "h 1"]:
        n = (self.moments.q if kind == "q" else self.moments.k).n
        return np.maximum(n.sum(-1, keepdims=True), 1.0)


def layers_before_rope(
    run: RunFolder, on_done: OnLayers | None = None, *, undone: bool = False
) -> Iterator[BeforeRope]:
    """Yield the layers of a run in order, each read when requested; with covariances only if ``undone``."""
    entries = sorted(run.manifest.layers, key=lambda entry: entry.layer)
    for number, entry in enumerate(entries, start=1):
        yield BeforeRope(run, entry, run.layer(entry.layer, buckets=False, undone=undone))
        if on_done is not None:
            on_done(number, len(entries))
