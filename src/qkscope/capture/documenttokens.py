"""The tokens of a document that are measured: all of a text, and the text tokens of a document with images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from qkscope.capture.imageinputs import ImageInputs
from qkscope.capture.modelreport import ModelReport
from qkscope.capture.tokensampling import Stretches
from qkscope.errors import CaptureError


@dataclass(frozen=True)
class DocumentTokens:
    """Token ids of a document, and where they are."""

    ids: np.ndarray
    images: ImageInputs | None = None
    """What the model is called with, if the document has images."""

    @classmethod
    def of(cls, given: np.ndarray | ImageInputs) -> DocumentTokens:
        """From token ids of a text, or from a document with images."""
        return cls(given.ids, given) if isinstance(given, ImageInputs) else cls(given)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def positions(self) -> Stretches:
        """Positions of the tokens: from 0 on, unless images lie between them."""
        return ((0, len(self.ids)),) if self.images is None else self.images.positions

    @property
    def extent(self) -> int:
        """The position after the last token."""
        return self.positions[-1][1] if self.positions else 0

    def cut(self, window: int | None) -> DocumentTokens:
        """The tokens at positions within a window; None: all."""
        if window is None:
            return self
        return DocumentTokens.of(self.ids[:window] if self.images is None else self.images.cut(window))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The ids at some of its positions."""
        if self.images is None:
            return self.ids[positions]
        known = np.concatenate([np.arange(*stretch) for stretch in self.positions])
        return self.ids[np.searchsorted(known, positions)]

    def n_after(self, skip_first: int) -> int:
        """Tokens after the first positions."""
        return sum(max(0, end - max(first, skip_first)) for first, end in self.positions)

    def as_dict(self) -> dict[str, Any]:
        """What the manifest records."""
        if self.images is None:
            return {"tokens": len(self)}
        positions = [list(stretch) for stretch in self.positions]
        return {"tokens": len(self), "image_tokens": self.images.image_tokens, "positions": positions}


def check_documents(names: list[str], documents: list[DocumentTokens], report: ModelReport) -> None:
    """Raise an error for a text with tokens of images, and for images whose positions a layer counts otherwise."""
    for name, document in zip(names, documents, strict=True):
        foreign = document.ids[np.isin(document.ids, report.placeholders)] if report.placeholders else document.ids[:0]
        if document.images is None and len(foreign):
            raise CaptureError(
                f"{name} contains token {foreign[0]}, which stands for an image, video or sound, without any; give "
                "qkscope.capture_model what the model's processor returns, or leave the document out"
            )
        if document.images is not None:
            _check_layers(name, document.images, report)


def _check_layers(name: str, images: ImageInputs, report: ModelReport) -> None:
    for layer in report.layers:
        rope, number = layer["rope"], layer["layer"]
        if rope is not None and rope["depends_on_length"]:
            raise CaptureError(
                f"{name} has images, but the frequencies of layer {number} depend on the length of the document "
                "(dynamic or longrope); leave it out"
            )
        if layer["sliding_window"] is not None and images.shifted:
            raise CaptureError(
                f"{name} has images, and layer {number} a sliding window that counts their tokens, not positions; "
                "capture with full_attention_only, or choose other layers"
            )
