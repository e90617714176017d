"""All formats that a run can be exported to, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkscope.errors import ConfigError
from qkscope.files.atomic import check_writable
from qkscope.integrations.exports.about import OnLayers, folder_of, opened_run
from qkscope.integrations.exports.duoattention import read_duo_attention, write_duo_attention
from qkscope.integrations.exports.kvpressstats import read_kvpress_stats, write_kvpress_stats
from qkscope.integrations.exports.mha2mla import read_mha2mla, write_mha2mla
from qkscope.integrations.exports.triattention import read_triattention, write_triattention
from qkscope.runs.run import Run

DUO = "duo-attention"
_BY_LAYER = {"triattention": write_triattention, "kvpress-stats": write_kvpress_stats, "mha2mla": write_mha2mla}
_READERS = {
    "triattention": read_triattention,
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
    """Write what a captured run says in the format of another tool; returns the files.

    ``by`` (far or area) and ``recent`` (keys that a shortened head keeps) are choices of ``duo-attention``.
    """
    place = Path(path)
    _check_format(to)
    _check_place(to, place)
    if to != DUO and (by is not None or recent is not None):
        raise ConfigError(f"a score and a window are choices of {DUO}; leave them out with {to}")
    opened = opened_run(run)
    if to == DUO:
        told = None if on_done is None else lambda done, in_all, _: on_done(done, in_all)
        return write_duo_attention(opened, place, by or "far", recent, workers, told)
    return _BY_LAYER[to](folder_of(opened), place, on_done)


def read_export(run: Run | str | Path, to: str, path: str | Path) -> Any:
    """What an export holds, as arrays; an error if it is not of the model of this run."""
    _check_format(to)
    return _READERS[to](Path(path), folder_of(opened_run(run)))


def _check_format(to: str) -> None:
    if to not in EXPORT_FORMATS:
        raise ConfigError(f"unknown format {to!r}; choose from {', '.join(EXPORT_FORMATS)}")


def _check_place(to: str, place: Path) -> None:
    """Raise before the work what would fail after it."""
    check_writable(place if to in _FOLDERS else place.parent)
    if to not in _FOLDERS and place.is_dir():
        raise ConfigError(f"{place} is a folder, and {to} is a file; choose another --output")
