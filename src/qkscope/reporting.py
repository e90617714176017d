"""From runs, datasets, results folders or a study file to a report: missing tables, figures, two pages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from qkscope.analyses.vectortables import PointOptions
from qkscope.config import StudyRunConfig, load_study_config
from qkscope.engine import Place
from qkscope.errors import ConfigError, TableError
from qkscope.figures.collages import choose
from qkscope.figures.figure import NotApplicable
from qkscope.figures.follow import followed
from qkscope.figures.select import checkpoints
from qkscope.figures.write import LeftOut, write_figures
from qkscope.jobs import Job
from qkscope.pipeline import OnDone, analyze
from qkscope.report.explorer import explorer_html
from qkscope.report.points import COMPLEMENT_AXES, MOST_ROWS
from qkscope.report.report import report_html
from qkscope.results import write_results
from qkscope.run import Run, open_run
from qkscope.runrow import run_row
from qkscope.store.atomic import write_together
from qkscope.store.columns import SUMMED_UP, column_names
from qkscope.study import Entry, Study, build
from qkscope.tablefolder import is_results

REPORT, EXPLORER, FIGURES, TABLES = "report.html", "explorer.html", "figures", "tables"
RUNS, TRACKS = "runs.csv", "tracks.csv"
OnFigures = Callable[[int, int], None]


@dataclass(frozen=True)
class Sources:
    """What a study is made of, in order."""

    items: tuple[StudyRunConfig, ...]
    title: str = ""


def sources(arguments: Sequence[str]) -> Sources:
    """A study file, or the runs themselves."""
    files = [argument for argument in arguments if argument.lower().endswith((".yaml", ".yml"))]
    if files and len(arguments) > 1:
        raise ConfigError(f"give one study file or several runs, not both ({', '.join(arguments)})")
    if not files:
        return Sources(tuple(StudyRunConfig(path=argument) for argument in arguments))
    path = Path(files[0])
    config = load_study_config(path)
    return Sources(tuple(_located(item, path.parent) for item in config.runs), config.title)


def _located(item: StudyRunConfig, folder: Path) -> StudyRunConfig:
    """Paths in a study file are relative to it; what is not there and could be a Hub id is taken as it stands."""
    near = folder / item.path
    elsewhere = not near.exists() and (item.path.count("/") == 1 or item.path.startswith("hf://"))
    return item if elsewhere else item.model_copy(update={"path": str(near)})


def gather(
    given: Sources,
    folder: Path,
    *,
    points: bool = True,
    workers: int | None = None,
    on_done: OnDone | None = None,
) -> Study:
    """Read every results folder; analyse every run or dataset into a folder of its own below ``folder``.

    With ``points``, vectors of four heads are kept for the collages, and fewer of every other head for the explorer.
    """
    folders = [Path(item.path) for item in given.items]
    known = [is_results(path) for path in folders]
    runs = {i: _open(item) for i, item in enumerate(given.items) if not known[i]}
    places = {i: folder / _safe(f"{i:02d}-{run.model}") for i, run in runs.items()}
    jobs = {
        i: Job(run, points=run_points(run) if points else None, config={"command": "report"}) for i, run in runs.items()
    }
    started = time.monotonic()
    outcomes = analyze(list(jobs.values()), place=Place(workers), on_done=on_done) if jobs else []
    seconds = time.monotonic() - started
    for i, outcome in zip(jobs, outcomes, strict=True):
        write_results(places[i], [outcome], wall_seconds=seconds)
    entries = [
        _entry(item, folders[i]) if known[i] else replace(_entry(item, places[i]), model=runs[i].model)
        for i, item in enumerate(given.items)
    ]
    return build(entries, given.title)


def write_report(
    study: Study,
    folder: Path,
    *,
    command: str = "",
    workers: int | None = None,
    on_figures: OnFigures | None = None,
) -> list[LeftOut]:
    """Figures, report.html, explorer.html, runs.csv and, of checkpoints, tracks.csv; returns what does not apply."""
    try:
        written, left_out = write_figures(study, folder / FIGURES, command=command, workers=workers, on_done=on_figures)
        page = report_html(study, written, left_out, command=command, explorer=EXPLORER)
        pages = {REPORT: page.encode(), EXPLORER: explorer_html(study, report=REPORT).encode()} | _beside(study)
        write_together(folder, pages)
    except OSError as error:
        raise TableError(f"cannot write to {folder} ({error.strerror}); choose another folder") from None
    return left_out


def _beside(study: Study) -> dict[str, bytes]:
    """One row per run; and, of checkpoints, components followed from one to the next."""
    files = {RUNS: runs_table(study).to_csv(index=False).encode()}
    try:
        tracks = followed(study, checkpoints(study))
    except NotApplicable:
        tracks = None
    return files if tracks is None else files | {TRACKS: tracks.to_csv(index=False, float_format="%.6g").encode()}


def runs_table(study: Study) -> pd.DataFrame:
    """The table ``runs`` of a study, with phase and step as it has them."""
    rows = []
    for run in study.runs:
        mine = {name: frame[frame["model"] == run.label] for name, frame in study.tables.items()}
        n_heads = [len(mine[name].drop_duplicates(["layer", "head"])) for name in SUMMED_UP if name in mine]
        counts = {"n_heads": max(n_heads, default=0), "n_documents": run.n_documents, "n_tokens": run.n_tokens}
        about: dict[str, object] = {
            "model": run.label,
            "family": run.family,
            "phase": run.phase or "",
            "step": run.step,
        }
        rows.append(about | {"window": run.window} | counts | run_row(mine, run.headline, run.window))
    whole = dict.fromkeys(("window", "n_documents", "n_tokens"), "Int64")
    return pd.DataFrame(rows)[column_names("runs")].astype(whole)


def write_explorer(study: Study, path: Path) -> None:
    """The explorer alone."""
    try:
        write_together(path.parent, {path.name: explorer_html(study).encode()})
    except OSError as error:
        raise TableError(f"cannot write {path} ({error.strerror}); choose another --output") from None


def _open(item: StudyRunConfig) -> Run:
    return open_run(item.path, item.revision, model=item.label or item.model, family=item.family or "")


def run_points(run: Run) -> PointOptions:
    """Vectors of four heads for the collages, and fewer of every other head for the explorer."""
    shown = frozenset(choose([(head.layer, head.head) for head in run.heads]))
    return PointOptions(shown, rows=2000, brief_rows=MOST_ROWS, brief_axes=COMPLEMENT_AXES)


def _entry(item: StudyRunConfig, folder: Path) -> Entry:
    nope = None if item.nope_layers is None else frozenset(item.nope_layers)
    return Entry(folder, item.model, item.label, item.family, item.phase, item.step, item.window, nope)


def _safe(name: str) -> str:
    """A folder name from a label, which may be anything."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80].strip(".") or "run"
