"""run.json: what was measured, on what, and how; nothing in it depends on when, where or how fast."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

import numpy as np

from qkscope.capture.modelreport import ModelReport
from qkscope.capture.options import CaptureOptions
from qkscope.capture.texts import Document
from qkscope.files.runfolder import FORMAT


def manifest(
    seen: ModelReport, documents: list[Document], ids: list[np.ndarray], options: CaptureOptions, about: dict[str, Any]
) -> dict[str, Any]:
    """The manifest of a capture; ``about`` says where the model comes from."""
    listed = [{"name": d.name, "digest": d.digest, "tokens": len(one)} for d, one in zip(documents, ids, strict=True)]
    corpus = hashlib.sha256("".join(f"{d['digest']}{d['tokens']};" for d in listed).encode()).hexdigest()
    return {
        "format": FORMAT,
        "model": about | seen.model,
        "stage": "pre-rope" if options.pre_rope else "post-rope",
        "window": options.window,
        "q_per_kv": seen.q_per_kv,
        "options": {key: list(one) if isinstance(one, tuple) else one for key, one in asdict(options).items()},
        "threads": seen.threads,
        "corpus": corpus,
        "tokens": hashlib.sha256(b"".join(one.tobytes() for one in ids)).hexdigest(),
        "documents": listed,
        "layers": seen.layers,
        "versions": seen.versions,
    }
