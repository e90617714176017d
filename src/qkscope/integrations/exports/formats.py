"""The formats that a run can be exported to, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkscope.errors import ConfigError
from qkscope.files.atomic import check_writable
from qkscope.integrations.exports.about import OnLayers, folder_of, open_captured_run
from qkscope.integrations.exports.duoattention import read_duo_attention, write_duo_attention
from qkscope.integrations.exports.kvpressstats import read_kvpress_stats, write_kvpress_stats
from qkscope.integrations.exports.mha2mla import read_mha2mla, write_mha2mla
from qkscope.integrations.exports.triattention import (
    read_flat_triattention,
    read_triattention,
    write_flat_triattention,
    write_triattention,
)
from qkscope.options import check_path
from qkscope.runs.run import Run

DUO = "duo-attention"
_BY_LAYER = {
    "triattention": write_triattention,
    "triattention-flat": write_flat_triattention,
    "kvpress-stats": write_kvpress_stats,
    "mha2mla": write_mha2mla,
}
_READERS = {
    "triattention": read_triattention,
    "triattention-flat": read_flat_triattention,
    DUO: read_duo_attention,
    "kvpress-stats": read_kvpress_stats,
    "mha2mla": read_mha2mla,
}
EXPORT_FORMATS = tuple(_READERS)
_FOLDERS = (DUO, "kvpress-stats")
"""Formats that are folders; the others are files."""


def export_run(
    run: Run | str | Path,
    to: str,
    path: str | Path,
    *,
    by: str | None = None,
    recent: int | None = None,
    workers: int | None = 1,
    on_done: OnLayers | None = None,
) -> list[Path]:
    """Export a captured run in the format of another tool; returns the files.

    ``by`` (far or area) and ``recent`` (keys that a shortened head keeps) apply only to ``duo-attention``.
    """
    _check_format(to)
    check_path(path, "path", "folder" if to in _FOLDERS else "file")
    output = Path(path)
    _check_output(to, output)
    if to != DUO and (by is not None or recent is not None):
        raise ConfigError(f"a score and a window apply only to {DUO}; remove them for {to}")
    captured_run = open_captured_run(run)
    if to == DUO:
        on_heads = None if on_done is None else lambda done, total, _: on_done(done, total)
        return write_duo_attention(captured_run, output, by or "far", recent, workers, on_heads)
    return _BY_LAYER[to](folder_of(captured_run), output, on_done)


def read_export(run: Run | str | Path, to: str, path: str | Path) -> Any:
    """Read an export as arrays; an error if it is not of the model of this run."""
    _check_format(to)
    check_path(path, "path", "folder" if to in _FOLDERS else "file")
    return _READERS[to](Path(path), folder_of(open_captured_run(run)))


def _check_format(to: str) -> None:
    if to not in EXPORT_FORMATS:
        raise ConfigError(f"unknown format {to!r}; choose from {', '.join(EXPORT_FORMATS)}")


def _check_output(to: str, output: Path) -> None:
    """Raise an error before the work starts if the output cannot be written."""
    check_writable(output if to in _FOLDERS else output.parent)
    if to not in _FOLDERS and output.is_dir():
        raise ConfigError(f"{output} is a folder, and {to} is a file; choose another --output")
