"""A figure on disk: figure.png, figure.svg, data.csv and a README that describes it and this data."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope._version import __version__
from qkscope.engine import ExecutionTarget, for_each
from qkscope.errors import TableError
from qkscope.figures.catalogue import CATALOGUE, FIGURES_BY_NAME
from qkscope.figures.figure import NotApplicable
from qkscope.figures.style import house_style
from qkscope.files.atomic import atomic_path, write_together
from qkscope.results.frames import csv_bytes
from qkscope.results.study import Study


@dataclass(frozen=True)
class WrittenFigure:
    """A figure that was drawn."""

    name: str
    title: str
    shows: str
    says: list[str]
    png: bytes


@dataclass(frozen=True)
class SkippedFigure:
    """A figure that does not apply to this study, and why."""

    name: str
    title: str
    reason: str


@dataclass(frozen=True)
class _Task:
    name: str
    data: pd.DataFrame
    folder: Path
    about: str


def write_figures(
    study: Study,
    folder: Path,
    *,
    command: str = "",
    workers: int | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> tuple[list[WrittenFigure], list[SkippedFigure]]:
    """Draw every figure of the catalogue that applies, each into its own folder."""
    tasks, skipped = [], []
    for path in (
        folder,
        *(folder / figure.name for figure in CATALOGUE),
        *(folder / f.name.split("/")[0] for f in CATALOGUE),
    ):
        if path.is_symlink():
            raise TableError(f"{path} is a symbolic link, and figures would be written to its target; remove it")
    for figure in CATALOGUE:
        try:
            tasks.append(_Task(figure.name, figure.prepare(study), folder / figure.name, _produced(study, command)))
        except NotApplicable as error:
            skipped.append(SkippedFigure(figure.name, figure.title, str(error)))
    drawn: dict[int, WrittenFigure] = {}
    if on_done is not None:
        on_done(0, len(tasks))
    for index, written in for_each(_write, tasks, ExecutionTarget(workers)):
        drawn[index] = written
        if on_done is not None:
            on_done(len(drawn), len(tasks))
    return [drawn[index] for index in range(len(tasks))], skipped


def _write(task: _Task) -> WrittenFigure:
    figure = FIGURES_BY_NAME[task.name]
    with house_style():
        png, svg = png_and_svg(figure.draw(task.data))
    says = figure.says(task.data)
    readme = _readme(figure.title, figure.shows, says, task.about, task.data)
    csv = csv_bytes(task.data, "%.7g")
    write_together(
        task.folder,
        {"figure.png": png, "figure.svg": svg, "data.csv": csv, "README.md": readme.encode()},
    )
    return WrittenFigure(task.name, figure.title, figure.shows, says, png)


FORMATS = ("png", "svg", "pdf")


def png_and_svg(drawing: Drawing) -> tuple[bytes, bytes]:
    """The figure as png and svg, laid out once, since layout takes longer than drawing."""
    png = rendered(drawing, "png")
    drawing.set_layout_engine(None)  # keep the layout
    return png, rendered(drawing, "svg")


def rendered(drawing: Drawing, form: str) -> bytes:
    """The figure as the bytes of a file, without a date."""
    buffer = io.BytesIO()
    no_date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    drawing.savefig(buffer, format=form, metadata=no_date)
    return buffer.getvalue()


def save(drawing: Drawing, path: Path) -> None:
    """Write one figure as png, svg or pdf, by the extension."""
    form = path.suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise TableError(f"{path}: expected a name that ends in .png, .svg or .pdf")
    content = rendered(drawing, form)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise TableError(f"cannot write {path} ({error.strerror}); choose another --output") from None


def _produced(study: Study, command: str) -> str:
    runs = [
        f"- {run.label}"
        + (f" ({run.family})" if run.family else "")
        + (f", {run.phase}" if run.phase else "")
        + (f", window {run.window:,}" if run.window else "")
        for run in study.runs
    ]
    produced = f"With `{command}`, " if command else "With "
    return "\n".join([f"{produced}qkscope {__version__}, from the tables of:", "", *runs])


def _plain(text: str) -> str:
    """Text for Markdown, escaped so that labels of runs are not read as tags."""
    return text.replace("<", "&lt;")


def _readme(title: str, shows: str, says: list[str], about: str, data: pd.DataFrame) -> str:
    says, about = [_plain(sentence) for sentence in says], _plain(about)
    lines = [f"# {title}", "", "![](figure.png)", "", "## What it shows", "", shows, "", "## In this data", ""]
    lines += [f"- {sentence}" for sentence in says]
    lines += ["", "## How it was produced", "", about, "", f"`data.csv` holds what is drawn: {len(data):,} rows.", ""]
    lines += ["## Key takeaway", "", says[0], ""] if says else []
    return "\n".join(lines)
