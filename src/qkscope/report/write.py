"""Writes figures, report.html, explorer.html and csv tables into one folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from qkscope.errors import TableError
from qkscope.figures.componenttracks import component_tracks
from qkscope.figures.figure import NotApplicable
from qkscope.figures.select import checkpoints
from qkscope.figures.write import SkippedFigure, write_figures
from qkscope.files.atomic import write_together
from qkscope.files.csvtext import csv_bytes
from qkscope.report.explorer import explorer_html
from qkscope.report.report import report_html
from qkscope.results.derived import run_row
from qkscope.results.schema import SUMMED_UP, column_names
from qkscope.study.study import Study

_log = logging.getLogger("qkscope")
REPORT, EXPLORER, PDF, FIGURES, TABLES_FOLDER = "report.html", "explorer.html", "report.pdf", "figures", "tables"
RUNS, TRACKS = "runs.csv", "tracks.csv"
GENERATOR = b'<meta name="generator" content="qkscope">'
"""In the head of every page that qkscope writes."""
TITLE_END = re.compile("· qkscope( explorer)?</title>".encode())
OnFigures = Callable[[int, int], None]


def check_pages(*pages: Path) -> None:
    """Raise early if a page would replace a file that was not written by qkscope."""
    for page in pages:
        if page.exists() and not page.is_file():
            what = "a folder" if page.is_dir() else "not a regular file"
            raise TableError(f"{page} is {what}; move it away or choose another --output")
        if page.exists() and not _is_ours(page):
            raise TableError(f"{page} was not written by qkscope; move it away or choose another --output")


def _is_ours(page: Path) -> bool:
    """Whether the head of a page says that qkscope wrote it; pages of version 0.1.0 say it in their title."""
    with page.open("rb") as file:
        head = file.read(4096)
    return GENERATOR in head or TITLE_END.search(head) is not None


def write_pages(
    study: Study,
    folder: Path,
    *,
    command: str = "",
    workers: int | None = None,
    on_figures: OnFigures | None = None,
) -> list[SkippedFigure]:
    """Figures, report.html, explorer.html, runs.csv and, for checkpoints, tracks.csv; returns the skipped figures."""
    try:
        written, skipped = write_figures(study, folder / FIGURES, command=command, workers=workers, on_done=on_figures)
        if len(study.runs) > 2:  # a second for each
            _log.info("writing the pages of %d runs", len(study.runs))
        page = report_html(study, written, skipped, command=command, explorer=EXPLORER)
        pages = {REPORT: page.encode(), EXPLORER: explorer_html(study, report=REPORT).encode()} | _csv_files(study)
        write_together(folder, pages)
    except OSError as error:
        raise TableError(f"cannot write to {folder} ({error.strerror}); choose another folder") from None
    return skipped


def _csv_files(study: Study) -> dict[str, bytes]:
    """runs.csv with one row per run and, for checkpoints, tracks.csv with components followed from one to the next."""
    files = {RUNS: csv_bytes(runs_table(study))}
    try:
        tracks = component_tracks(study, checkpoints(study))
    except NotApplicable:
        tracks = None
    return files if tracks is None else files | {TRACKS: csv_bytes(tracks, "%.6g")}


def runs_table(study: Study) -> pd.DataFrame:
    """The table ``runs`` of a study, with the phase and step of each run."""
    rows = []
    for run in study.runs:
        own_tables = {name: frame[frame["model"] == run.label] for name, frame in study.tables.items()}
        n_heads = [len(own_tables[name].drop_duplicates(["layer", "head"])) for name in SUMMED_UP if name in own_tables]
        counts: dict[str, object] = {
            "n_heads": max(n_heads, default=0),
            "n_documents": run.n_documents,
            "n_tokens": run.n_tokens,
        }
        counts |= {"loss": run.loss}
        labels: dict[str, object] = {
            "model": run.label,
            "family": run.family,
            "phase": run.phase or "",
            "step": run.step,
        }
        rows.append(labels | {"window": run.window} | counts | run_row(own_tables, run.headline))
    integers = dict.fromkeys(("window", "n_documents", "n_tokens"), "Int64")
    return pd.DataFrame(rows)[column_names("runs")].astype(integers)


def write_explorer(study: Study, path: Path) -> None:
    """Write only the explorer."""
    try:
        write_together(path.parent, {path.name: explorer_html(study).encode()})
    except OSError as error:
        raise TableError(f"cannot write {path} ({error.strerror}); choose another --output") from None
