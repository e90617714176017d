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
"""Columns that have another name in the published data."""
UNSURE_KEY_HEADS = ("llama3.2-3b", "qwen3-14b")
"""Models whose published values may have been computed with the wrong key heads."""


@cache
def figures() -> dict[str, Any]:
    """The content of published.json."""
    return json.loads((files("qkscope.report") / "assets" / "published.json").read_text(encoding="utf-8"))


def published(label: str, column: str, percent: bool = False) -> str | None:
    """The published mean of a column for the run with this label, as text; None if there is none."""
    entry = _entry(label)
    name = COLUMNS.get(column, column)
    if entry is None or name not in entry:
        return None
    prefix = "≈ " if name in entry.get("approx", []) else ""
    return prefix + shown(float(entry[name]), percent)


def is_published(label: str) -> bool:
    """Whether a run was part of the study."""
    return _entry(label) is not None


def pooled(column: str) -> Any:
    """A published value over all models of the study; None if there is none."""
    return figures()["pooled"].get(column)


def _entry(label: str) -> dict[str, Any] | None:
    name = label.strip().lower()
    if name in figures()["models"]:
        return figures()["models"][name]
    for checkpoint, entry in figures()["smollm3_checkpoints"]["values"].items():
        if name == checkpoint or name.endswith(f"smollm3-3b-{checkpoint}"):
            return entry
    return None
