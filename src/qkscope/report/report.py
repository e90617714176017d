"""report.html: an opening page, the findings, and a table of all heads, in one file."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, datetime

from qkscope._version import __version__
from qkscope.figures.write import SkippedFigure, Written
from qkscope.report.findings import FINDINGS
from qkscope.report.heads import LISTED, head_frame, metrics, numbers
from qkscope.report.opening import interval_note, opening
from qkscope.report.page import data_url, render
from qkscope.report.published import UNSURE_KEY_HEADS, is_published
from qkscope.study.study import Study


def report_html(
    study: Study,
    written: Sequence[Written],
    left_out: Sequence[SkippedFigure],
    *,
    command: str = "",
    explorer: str | None = None,
) -> str:
    """The whole page; ``explorer`` is the explorer's file name, if there is one."""
    pictures = {
        figure.name: {"title": figure.title, "shows": figure.shows, "says": figure.says, "png": data_url(figure.png)}
        | dict(zip(("width", "height"), _on_page(figure.png), strict=True))
        for figure in written
    }
    missing = {figure.name: {"title": figure.title, "reason": figure.reason} for figure in left_out}
    sections = [finding.fill(study) for finding in FINDINGS]
    sections = [s for s in sections if s.rows or s.lines or any(name in pictures for name in s.figures)]
    return render(
        "report.html.j2",
        study=study,
        title=study.title or (study.labels[0] if len(study.runs) == 1 else "Position and content in attention heads"),
        opening=opening(study),
        interval_note=interval_note(study),
        sections=sections,
        pictures=pictures,
        missing=missing,
        heads=head_list(study),
        command=command,
        explorer=explorer,
        version=__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        unsure=[run.label for run in study.runs if run.label.lower() in UNSURE_KEY_HEADS],
        any_published=any(is_published(run.label) for run in study.runs),
    )


def head_list(study: Study) -> dict[str, object]:
    """The table of heads as columns, for the page's script."""
    frame = head_frame(study)
    by_column = {metric.column: metric for metric in metrics(frame)}
    listed = [name for name in LISTED if name in by_column]
    return {
        "runs": study.labels,
        "run": [study.labels.index(label) for label in frame["model"]],
        "layer": frame["layer"].astype(int).tolist(),
        "head": frame["head"].astype(int).tolist(),
        "taxonomy": frame["taxonomy"].fillna("").astype(str).tolist(),
        "columns": [
            {"name": name, "meaning": by_column[name].meaning, "unit": by_column[name].unit} for name in listed
        ],
        "values": [numbers(frame, name) for name in listed],
    }


def _on_page(png: bytes) -> tuple[int, int]:
    """Width and height on the page, so that text in figures is about as large as the text around them."""
    width, height = png_size(png)
    return round(PIXELS * width), round(PIXELS * height)


PIXELS = 0.6
"""CSS pixels per pixel of a figure."""


def png_size(png: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header."""
    width, height = struct.unpack(">II", png[16:24])
    return int(width), int(height)
