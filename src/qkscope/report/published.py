"""Published figures of the study that qkscope implements, for the runs that were part of it."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from qkscope.report.values import shown

COLUMNS = {
    "r_q": "pc0_r_q",
    "r_k": "pc0_r_k",
    "explained_variance": "pc0_ev",
    "position-dominated": "position_dominated",
    "content-focused": "content_focused",
}
"""Columns under another name there."""
UNSURE_KEY_HEADS = ("llama3.2-3b", "qwen3-14b")
"""Models whose published values may rest on other key heads than their own."""


@cache
def figures() -> dict[str, Any]:
    """The whole file."""
    return json.loads((files("qkscope.report") / "assets" / "published.json").read_text(encoding="utf-8"))


def published(label: str, column: str, percent: bool = False) -> str | None:
    """The published mean of a column for the run of this label, as text; None where none is known."""
    entry = _entry(label)
    name = COLUMNS.get(column, column)
    if entry is None or name not in entry:
        return None
    about = "≈ " if name in entry.get("approx", []) else ""
    return about + shown(float(entry[name]), percent)


def is_published(label: str) -> bool:
    """Whether a run was part of the study."""
    return _entry(label) is not None


def pooled(column: str) -> Any:
    """A figure over all models of the study; None where none is known."""
    return figures()["pooled"].get(column)


def _entry(label: str) -> dict[str, Any] | None:
    name = label.strip().lower()
    if name in figures()["models"]:
        return figures()["models"][name]
    for checkpoint, entry in figures()["smollm3_checkpoints"]["values"].items():
        if name == checkpoint or name.endswith(f"smollm3-3b-{checkpoint}"):
            return entry
    return None
