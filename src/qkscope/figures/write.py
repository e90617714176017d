"""A figure on disk: figure.png, also for dark pages, figure.svg, data.csv and a README about it and this data."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure as Drawing
from matplotlib.transforms import Bbox

from qkscope._version import __version__
from qkscope.engine import ExecutionTarget, for_each
from qkscope.errors import TableError
from qkscope.figures.catalogue import CATALOGUE, FIGURES_BY_NAME
from qkscope.figures.dark import darkened
from qkscope.figures.figure import Figure, NotApplicable, window_of, with_run_windows
from qkscope.figures.style import FAINT, house_style
from qkscope.files.atomic import atomic_path, write_together
from qkscope.results.frames import csv_bytes
from qkscope.results.study import Study


@dataclass(frozen=True)
class WrittenFigure:
    """A figure that was drawn."""

    name: str
    title: str
    """With the window, if it is known."""
    shows: str
    says: list[str]
    png: bytes
    dark: bytes
    """The same png for a dark page."""
    window: str
    """The window or windows of what is drawn, in words; empty if they are not known."""
    suffix: str = ""
    """Ends the names of the files of a folded version: ``figure-own-windows.png``; else empty."""
    folded: WrittenFigure | None = None
    """A second version, which pages show on demand, such as each run at its own window."""


@dataclass(frozen=True)
class SkippedFigure:
    """A figure that does not apply to this study, and why."""

    name: str
    title: str
    reason: str


@dataclass(frozen=True)
class _Task:
    name: str
    folder: Path
    data: pd.DataFrame
    folded: pd.DataFrame | None
    command: str
    families: dict[str, str]
    """Family and phase of each run, for the README."""


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
    about = {run.label: ", ".join(filter(None, (run.family, run.phase))) for run in study.runs}
    for path in (
        folder,
        *(folder / figure.name for figure in CATALOGUE),
        *(folder / f.name.split("/")[0] for f in CATALOGUE),
    ):
        if path.is_symlink():
            raise TableError(f"{path} is a symbolic link, and figures would be written to its target; remove it")
    for figure in CATALOGUE:
        try:
            data = figure.prepared(study)
            tasks.append(_Task(figure.name, folder / figure.name, data, _folded(figure, study), command, about))
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


def _folded(figure: Figure, study: Study) -> pd.DataFrame | None:
    try:
        return None if figure.folded is None else with_run_windows(study, figure.folded.prepare(study))
    except NotApplicable:
        return None


def _write(task: _Task) -> WrittenFigure:
    figure = FIGURES_BY_NAME[task.name]
    written, files = _drawn(figure, task.data, "")
    if task.folded is not None and figure.folded is not None:
        folded, more = _drawn(figure, task.folded, figure.folded.suffix)
        written, files = replace(written, folded=folded), files | more
    write_together(task.folder, files | {"README.md": _readme(written, task).encode()})
    return written


def _drawn(figure: Figure, data: pd.DataFrame, suffix: str) -> tuple[WrittenFigure, dict[str, bytes]]:
    """One version of a figure, and its files."""
    with house_style():
        png, svg, in_the_dark = pictures(figure.draw(data), window_of(data))
    end = f"-{suffix}" if suffix else ""
    version = f", {figure.folded.title}" if suffix and figure.folded is not None else ""
    window = window_of(data)
    title = f"{figure.title}{version} ({window})" if window else f"{figure.title}{version}"
    written = WrittenFigure(
        figure.name, title, _shows(figure, data), figure.says(data), png, in_the_dark, window, suffix
    )
    files = {f"figure{end}.png": png, f"figure{end}.svg": svg, f"figure{end}-dark.png": in_the_dark}
    return written, files | {f"data{end}.csv": csv_bytes(data, "%.7g")}


FORMATS = ("png", "svg", "pdf")


def _shows(figure: Figure, data: pd.DataFrame) -> str:
    """The caption, with the window."""
    window, caption = window_of(data), figure.caption(data)
    if not window:
        return caption
    return f"{caption} Drawn at {window}." if window.startswith("windows") else f"{caption} Drawn at a {window}."


def pictures(drawing: Drawing, note: str = "") -> tuple[bytes, bytes, bytes]:
    """The figure as png, svg and dark png, with a note below, laid out once, since that takes longer than drawing."""
    drawing.set_dpi(rcParams["savefig.dpi"])  # sizes of texts depend on it
    drawing.draw_without_rendering()
    drawing.set_layout_engine(None)  # keep the layout
    width, height = drawing.get_size_inches()
    strip = 0.2 if note else 0.0
    if note:
        drawing.text(
            1 - 0.06 / width, (0.04 - strip) / height, note, ha="right", va="bottom", fontsize=6.5, color=FAINT
        )
    box = Bbox([[0, -strip], [width, height]])
    light = [rendered(drawing, form, box) for form in ("png", "svg")]
    return light[0], light[1], rendered(darkened(drawing), "png", box)


def rendered(drawing: Drawing, form: str, box: Bbox | None = None) -> bytes:
    """The figure, or what is within a box in inches, as the bytes of a file, without a date."""
    buffer = io.BytesIO()
    no_date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    drawing.savefig(buffer, format=form, metadata=no_date, bbox_inches=box)
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


def _produced(task: _Task) -> list[str]:
    """The command, and the runs that are drawn."""
    data, start = task.data, f"With `{task.command}`, " if task.command else "With "
    lines = [f"{start}qkscope {__version__}, from the tables of:", ""]
    for label in data["model"].unique():
        about = task.families.get(label, "")
        window = window_of(data[data["model"] == label])
        lines.append(f"- {label}" + (f" ({about})" if about else "") + (f", {window}" if window else ""))
    return [*lines, "", f"`data.csv` holds what is drawn: {len(data):,} rows."]


def _plain(text: str) -> str:
    """Text for Markdown, escaped so that labels of runs are not read as tags."""
    return text.replace("<", "&lt;")


def _readme(written: WrittenFigure, task: _Task) -> str:
    """The description, the sentences about this data, how it was produced and, at the end, the key takeaway."""
    lines = [f"# {written.title}", "", "![](figure.png)", "", "## What it shows", "", written.shows, ""]
    lines += ["## In this data", "", *_bullets(written), "", "## How it was produced", "", *_produced(task), ""]
    if written.folded is not None:
        lines += [f"## {written.folded.title}", "", f"![](figure-{written.folded.suffix}.png)", ""]
        lines += [*_bullets(written.folded), ""]
    lines += ["## Key takeaway", "", written.says[0], ""] if written.says else []
    return "\n".join(_plain(line) for line in lines)


def _bullets(written: WrittenFigure) -> list[str]:
    return [f"- {sentence}" for sentence in written.says]
