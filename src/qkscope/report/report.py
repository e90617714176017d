"""report.html: an opening page, the findings, and a table of all heads, in one file."""

from __future__ import annotations

import io
import logging
import re
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from PIL import Image

from qkscope._version import __version__
from qkscope.errors import TableError
from qkscope.figures.componenttracks import component_tracks
from qkscope.figures.figure import NotApplicable, checkpoints
from qkscope.figures.hero import HERO
from qkscope.figures.write import SkippedFigure, WrittenFigure, write_figures
from qkscope.files.atomic import write_together
from qkscope.report.claims import Claims
from qkscope.report.explorer import explorer_html
from qkscope.report.explorerdata import HEAD_TABLE_COLUMNS, head_frame, metrics, numbers
from qkscope.report.findings import FINDINGS
from qkscope.report.front import answers, front, interval_note
from qkscope.report.page import data_url, render
from qkscope.report.sections import Section
from qkscope.report.values import UNSURE_KEY_HEADS, is_published
from qkscope.results.derived import run_row
from qkscope.results.frames import csv_bytes
from qkscope.results.schema import SUMMED_UP, TABLES, column_names
from qkscope.results.study import Study


def report_html(
    study: Study,
    written: Sequence[WrittenFigure],
    skipped: Sequence[SkippedFigure],
    *,
    command: str = "",
    explorer: str | None = None,
) -> str:
    """The whole page; ``explorer`` is the explorer's file name, if there is one."""
    hero = next((figure for figure in written if figure.name == HERO.name), None)
    claims = Claims(study)
    first = front(claims)
    with ThreadPoolExecutor() as threads:  # compressing leaves the interpreter free
        pictures = dict(zip((figure.name for figure in written), threads.map(_picture, written), strict=True))
    missing = {figure.name: {"title": figure.title, "reason": figure.reason} for figure in skipped}
    sections = [finding.fill(claims) for finding in FINDINGS]
    sections = [s for s in sections if s.rows or s.lines or any(name in pictures for name in s.figures)]
    return render(
        "report.html.j2",
        study=study,
        title=study.title or (study.labels[0] if len(study.runs) == 1 else "Position and content in attention heads"),
        front=first,
        hero=None if hero is None else pictures[hero.name],
        measured="effects_together" in study.tables,
        opening=answers(claims),
        interval_note=interval_note(claims),
        sections=sections,
        pictures=pictures,
        missing=missing,
        heads=head_list(study) | {"explorer": explorer},
        words=words(sections),
        command=command,
        explorer=explorer,
        version=__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        unsure=[run.label for run in study.runs if run.label.lower() in UNSURE_KEY_HEADS],
        any_published=any(is_published(run.label) for run in study.runs),
    )


def _picture(figure: WrittenFigure) -> dict[str, object]:
    """A figure as the page shows it: its words, its pictures for both themes, and the version that is folded."""
    width, height = _on_page(figure.png)
    return {
        "title": figure.title, "shows": figure.shows, "says": figure.says, "width": width, "height": height,
        "light": _compressed(figure.png), "dark": _compressed(figure.dark),
        "suffix": f"-{figure.suffix}" if figure.suffix else "",
        "folded": None if figure.folded is None else _picture(figure.folded),
    }  # fmt: skip


def _compressed(png: bytes) -> str:
    """A picture as a data URL of a third of its size, without loss."""
    compressed = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(compressed, "webp", lossless=True, method=1, quality=20)
    return data_url(compressed.getvalue(), "webp")


def words(sections: Sequence[Section]) -> list[tuple[str, str]]:
    """The meanings of words and columns of the page."""
    columns = {column.name: column for table in TABLES.values() for column in table}
    names = dict.fromkeys(
        [measure.column for section in sections for measure in section.measures] + list(HEAD_TABLE_COLUMNS)
    )
    shown = [columns[name] for name in names if name in columns]
    return [*WORDS, *((c.name, f"{c.meaning} [{c.unit}]" if c.unit else c.meaning) for c in shown)]


def head_list(study: Study) -> dict[str, object]:
    """The table of heads as columns, for the page's script."""
    frame = head_frame(study)
    by_column = {metric.column: metric for metric in metrics(frame)}
    names = [name for name in HEAD_TABLE_COLUMNS if name in by_column]
    return {
        "runs": study.labels,
        "run": [study.labels.index(label) for label in frame["model"]],
        "layer": frame["layer"].astype(int).tolist(),
        "head": frame["head"].astype(int).tolist(),
        "kind": frame["kind"].tolist(),
        "columns": [{"name": name, "meaning": by_column[name].meaning, "unit": by_column[name].unit} for name in names],
        "values": [numbers(frame, name) for name in names],
    }


def _on_page(png: bytes) -> tuple[int, int]:
    """Width and height on the page, so that text in figures is about as large as the text around them."""
    width, height = png_size(png)
    return round(PIXELS * width), round(PIXELS * height)


WORDS = [
    ("query, key", "Vectors of a head; a key scores by the product of the query with it."),
    ("position", "Where a token stands in its text; the window is the number of positions looked at."),
    ("logit", "Unit of a score as the softmax sees it: one more multiplies the attention by 2.7."),
    ("nat", "Unit of the loss: −log of the probability of the next token."),
    ("PC0", "The direction in which queries and keys together vary most."),
    ("axis a", "The direction in which queries and keys drift with position."),
    ("axis b", "The direction, at a right angle to a, in which queries and keys are apart."),
    ("drift", "How the mean vector moves, linearly, with position."),
    ("recency", "That keys nearby score higher than keys far away."),
    ("sink", "One of the first tokens of a text, which heads attend to when nothing else asks for it."),
]
PIXELS = 0.6
"""CSS pixels per pixel of a figure."""


def png_size(png: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header."""
    width, height = struct.unpack(">II", png[16:24])
    return int(width), int(height)


_log = logging.getLogger("qkscope")
REPORT, EXPLORER, PDF, FIGURES = "report.html", "explorer.html", "report.pdf", "figures"
RUNS, TRACKS = "runs.csv", "tracks.csv"
GENERATOR = b'<meta name="generator" content="qkscope">'
"""In the head of every page that qkscope writes."""
TITLE_END = re.compile("· qkscope( explorer)?</title>".encode())
OnFigures = Callable[[int, int], None]


def check_pages(*pages: Path) -> None:
    """Raise early if a page would replace a file that was not written by qkscope."""
    for page in pages:
        if page.exists() and not page.is_file():
            kind = "a folder" if page.is_dir() else "not a regular file"
            raise TableError(f"{page} is {kind}; move it away or choose another --output")
        if page.exists() and not _is_ours(page):
            raise TableError(f"{page} was not written by qkscope; move it away or choose another --output")


def _is_ours(page: Path) -> bool:
    """Return True if the head of a page names qkscope; pages of version 0.1.0 name it in their title."""
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
    """Write figures, report.html, explorer.html, runs.csv and, for checkpoints, tracks.csv; returns skipped figures."""
    try:
        drawn = _without_copies(study)
        written, skipped = write_figures(drawn, folder / FIGURES, command=command, workers=workers, on_done=on_figures)
        if len(study.runs) > 2:  # a second for each
            _log.info("writing the pages of %d runs", len(study.runs))
        page = report_html(study, written, skipped, command=command, explorer=EXPLORER)
        pages = {REPORT: page.encode(), EXPLORER: explorer_html(study, report=REPORT).encode()} | _csv_files(study)
        write_together(folder, pages)
    except OSError as error:
        raise TableError(f"cannot write to {folder} ({error.strerror}); choose another folder") from None
    return skipped


def _without_copies(study: Study) -> Study:
    """The study for figures: a run that is an earlier one again is not drawn as another model."""
    copies = Claims(study).copies
    return replace(study, runs=tuple(run for run in study.runs if run.label not in copies)) if copies else study


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
