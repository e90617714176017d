"""A section of the report: a table of means next to published values, sentences, a caveat, figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from qkscope.figures.figure import is_checkpoint
from qkscope.report.claims import Claims
from qkscope.report.values import Value, frames_of, in_text, mean_of, over_what, published
from qkscope.results.study import Study, StudyRun


@dataclass(frozen=True)
class Measure:
    """A column of a section's table."""

    column: str
    label: str
    table: str
    """qk, heads or rotated; ``qk`` means component 0."""
    percent: bool = False
    key: str = ""
    """Name in summary.json, if different."""


@dataclass(frozen=True)
class Cell:
    """One number of the table, and the published number next to it."""

    number: str
    interval: str
    over: str
    published: str | None


@dataclass(frozen=True)
class Row:
    """A run of the table with its window, or the same weights at the window of comparison."""

    label: str
    cells: list[Cell | None]
    folded: bool
    """True if it is shown on demand only: a checkpoint that is neither the first nor the last of its phase."""


@dataclass(frozen=True)
class Track:
    """A measure over checkpoints as a small multiple; coordinates are shares of its width and height."""

    label: str
    column: str
    points: list[tuple[float, float]]
    bars: list[tuple[float, float, float]]
    """Where a value has an interval: its place, and the ends."""
    first: str
    last: str


@dataclass(frozen=True)
class Section:
    """A section of the report, filled in."""

    id: str
    title: str
    menu: str
    """The title in the navigation."""
    about: str
    measures: list[Measure]
    rows: list[Row]
    lines: list[str]
    caveat: str
    figures: list[str]
    tracks: list[Track]

    @property
    def n_folded(self) -> int:
        """Rows that are shown on demand only."""
        return sum(row.folded for row in self.rows)

    @property
    def intervals(self) -> str:
        """A sentence that says what the intervals of the table are over, by column where columns differ."""
        kinds: dict[str, list[str]] = {}
        for number, measure in enumerate(self.measures):
            cells = [row.cells[number] for row in self.rows]
            for over in dict.fromkeys(cell.over for cell in cells if cell is not None and cell.interval):
                kinds.setdefault(over, []).append(measure.label)
        if not kinds:
            return ""
        first, *other_kinds = sorted(kinds, key=lambda over: -len(kinds[over]))
        further = [f"of {', '.join(kinds[over])} {over_what(over)}" for over in other_kinds]
        return f"In brackets: 95% intervals {over_what(first)}{''.join(f'; {phrase}' for phrase in further)}."


@dataclass(frozen=True)
class Finding:
    """A finding of the study: the texts of a section that do not depend on the data."""

    id: str
    title: str | Callable[[Claims], str]
    """A title that compares is the headline of a claim."""
    about: str
    caveat: str
    figures: tuple[str, ...]
    measures: tuple[Measure, ...] = ()
    lines: Callable[[Claims], list[str]] = lambda _claims: []
    menu: str = ""
    """The title in the navigation, for one that depends on the data."""

    def fill(self, claims: Claims) -> Section:
        """Return the section for a study."""
        study, frames = claims.study, claims.frames
        measures = [m for m in self.measures if (frame := frames[m.table]) is not None and m.column in frame]
        rows = [row for run in study.runs for row in _rows(study, run, measures)]
        title = self.title if isinstance(self.title, str) else self.title(claims)
        return Section(
            self.id, title, self.menu or title, self.about, measures, rows if measures else [], self.lines(claims),
            self.caveat, list(self.figures), _tracks(study, frames, measures),
        )  # fmt: skip


def _rows(study: Study, run: StudyRun, measures: list[Measure]) -> list[Row]:
    """A run at its own window and, if that is another one, at the window of comparison."""
    label, folded = f"{run.label}, window {run.window:,}" if run.window else run.label, _is_between(study, run)
    rows = [Row(label, _cells(study, run.label, measures), folded)]
    compared = study.compared
    if compared is not study and run.window != study.compare_at and run.label in compared.labels:
        label_compared = f"{run.label}, same weights at {study.compare_at:,}"
        rows.append(Row(label_compared, _cells(compared, run.label, measures), folded))
    return rows


def _tracks(study: Study, frames: Mapping[str, pd.DataFrame | None], measures: Sequence[Measure]) -> list[Track]:
    """Each measure over the checkpoints of a study, if there are at least three and all have it."""
    labels = [run.label for run in study.runs if is_checkpoint(run)]
    tracks = []
    for measure in measures if len(labels) > 2 else []:
        means = [mean_of(study, label, frames[measure.table], measure.column, measure.key) for label in labels]
        values = [value for value in means if value is not None]
        if len(values) == len(labels):
            tracks.append(_track(measure, values))
    return tracks


def _track(measure: Measure, values: list[Value]) -> Track:
    numbers = [end for v in values for end in (v.value, v.low, v.high) if math.isfinite(end)]
    least, size = min(numbers, default=0.0), (max(numbers, default=0.0) - min(numbers, default=0.0)) or 1.0
    place = [number / (len(values) - 1) for number in range(len(values))]
    points = [(x, (v.value - least) / size) for x, v in zip(place, values, strict=True) if math.isfinite(v.value)]
    bars = [
        (x, (v.low - least) / size, (v.high - least) / size)
        for x, v in zip(place, values, strict=True)
        if math.isfinite(v.low) and math.isfinite(v.high)
    ]
    ends = [in_text(values[n].value, measure.percent) for n in (0, -1)]
    return Track(measure.label, measure.column, points, bars, *ends)


def _is_between(study: Study, run: StudyRun) -> bool:
    """Return True for a checkpoint that is neither the first nor the last of its phase."""
    of_phase = [other.label for other in study.runs if is_checkpoint(other) and other.phase == run.phase]
    return is_checkpoint(run) and run.label not in (of_phase[0], of_phase[-1])


def _cells(study: Study, label: str, measures: list[Measure]) -> list[Cell | None]:
    frames = frames_of(study)
    return [_cell(study, label, frames[m.table], m) for m in measures]


def _cell(study: Study, label: str, frame: pd.DataFrame | None, measure: Measure) -> Cell | None:
    if frame is None or measure.column not in frame:
        return None
    value = mean_of(study, label, frame, measure.column, measure.key)
    if value is None:
        return None
    number, interval = in_text(value.value, measure.percent, 3), value.interval(measure.percent, 3)
    return Cell(number, interval, value.over, published(label, measure.column, measure.percent))
