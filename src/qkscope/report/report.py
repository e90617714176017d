"""report.html: an opening page, the findings, and a table of all heads, in one file."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from datetime import UTC, datetime

from PIL import Image

from qkscope._version import __version__
from qkscope.analyses.analysis import Column
from qkscope.figures.hero import HERO
from qkscope.figures.write import SkippedFigure, Written
from qkscope.report.findings import FINDINGS
from qkscope.report.front import front
from qkscope.report.heads import LISTED, head_frame, metrics, numbers
from qkscope.report.opening import interval_note, opening
from qkscope.report.page import data_url, render
from qkscope.report.published import UNSURE_KEY_HEADS, is_published
from qkscope.report.sections import Section
from qkscope.results.schema import TABLES
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
    hero = next((figure for figure in written if figure.name == HERO.name), None)
    first = front(study)
    pictures = {
        figure.name: {"title": figure.title, "shows": figure.shows, "says": figure.says, "png": data_url(figure.png)}
        | dict(zip(("width", "height"), _on_page(figure.png), strict=True))
        for figure in written
    }
    thumbnails = {figure.name: data_url(_small(figure.png)) for figure in written if figure.name in first.figures}
    missing = {figure.name: {"title": figure.title, "reason": figure.reason} for figure in left_out}
    sections = [finding.fill(study) for finding in FINDINGS]
    sections = [s for s in sections if s.rows or s.lines or any(name in pictures for name in s.figures)]
    return render(
        "report.html.j2",
        study=study,
        title=study.title or (study.labels[0] if len(study.runs) == 1 else "Position and content in attention heads"),
        front=first,
        hero=None if hero is None else pictures[hero.name],
        thumbnails=thumbnails,
        measured="effects_together" in study.tables,
        opening=opening(study),
        interval_note=interval_note(study),
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


def words(sections: Sequence[Section]) -> list[tuple[str, str]]:
    """What words and columns of the page mean."""
    columns = {column.name: column for table in TABLES.values() for column in table}
    used = dict.fromkeys([measure.column for section in sections for measure in section.measures] + list(LISTED))
    return [*WORDS, *((name, _meaning(columns[name])) for name in used if name in columns)]


def _meaning(column: Column) -> str:
    """What a column is, with its unit."""
    return f"{column.meaning} [{column.unit}]" if column.unit else column.meaning


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


def _small(png: bytes) -> bytes:
    """The picture at the size of a card."""
    picture = Image.open(io.BytesIO(png))
    picture.thumbnail(THUMBNAIL)
    small = io.BytesIO()
    picture.convert("RGB").save(small, "png", optimize=True)
    return small.getvalue()


def _on_page(png: bytes) -> tuple[int, int]:
    """Width and height on the page, so that text in figures is about as large as the text around them."""
    width, height = png_size(png)
    return round(PIXELS * width), round(PIXELS * height)


THUMBNAIL = (560, 320)
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
