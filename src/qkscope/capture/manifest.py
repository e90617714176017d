"""The manifest run.json: model, documents, options, versions; nothing in it depends on the time or speed of the run."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

from qkscope.capture.documenttokens import DocumentTokens
from qkscope.capture.modelreport import ModelReport
from qkscope.capture.options import CaptureOptions
from qkscope.capture.texts import Document
from qkscope.files.runfolder import FORMAT


def manifest(
    report: ModelReport,
    documents: list[Document],
    tokens: list[DocumentTokens],
    options: CaptureOptions,
    about: dict[str, Any],
) -> dict[str, Any]:
    """The manifest of a capture; ``about`` states where the model comes from."""
    listed = [
        {"name": document.name, "digest": document.digest} | of_document.as_dict()
        for document, of_document in zip(documents, tokens, strict=True)
    ]
    digests = "".join(f"{entry['digest']}{entry['tokens']};" for entry in listed)
    corpus = hashlib.sha256(digests.encode()).hexdigest()
    return {
        "format": FORMAT,
        "model": about | report.model,
        "stage": "pre-rope" if options.pre_rope else "post-rope",
        "window": options.window,
        "q_per_kv": report.q_per_kv,
        "options": _recorded(options),
        "threads": report.threads,
        "corpus": corpus,
        "tokens": hashlib.sha256(b"".join(of_document.ids.tobytes() for of_document in tokens)).hexdigest(),
        "documents": listed,
        "layers": report.layers,
        "versions": report.versions,
    }


def _recorded(options: CaptureOptions) -> dict[str, Any]:
    """What is measured; what else is kept only if something is, so that other runs stay as they were."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(options).items()
        if key != "keep" or value is not None
    }
