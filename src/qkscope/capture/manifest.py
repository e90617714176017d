"""run.json: what was measured, on what, and how; nothing in it depends on when or how fast."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qkscope._version import __version__
from qkscope.capture import models
from qkscope.capture.texts import Document
from qkscope.store.runs import FORMAT

if TYPE_CHECKING:
    from qkscope.capture.run import CaptureRun


def manifest(run: CaptureRun, documents: list[Document], about: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a capture; ``about`` says where the model comes from."""
    listed = [
        {"name": d.name, "digest": d.digest, "tokens": len(one)} for d, one in zip(documents, run.ids, strict=True)
    ]
    corpus = hashlib.sha256("".join(f"{d['digest']}{d['tokens']};" for d in listed).encode()).hexdigest()
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "format": FORMAT,
        "model": about | models.describe(run.model),
        "stage": "pre-rope" if run.options.pre_rope else "post-rope",
        "window": run.plan.window,
        "q_per_kv": _q_per_kv(run),
        "options": _plain(asdict(run.options)),
        "corpus": corpus,
        "documents": listed,
        "layers": [_plain(layer.as_dict()) for layer in run.layers.values()],
        "versions": {"qkscope": __version__} | packages,
    }


def _q_per_kv(run: CaptureRun) -> int:
    config = run.decoder.config
    n_q = int(config.num_attention_heads)
    return n_q // int(getattr(config, "num_key_value_heads", None) or n_q)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value
