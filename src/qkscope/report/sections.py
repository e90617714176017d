"""A section of the report: a table of means next to published values, sentences, a caveat, figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from qkscope.analyses.components import TAXONOMY
from qkscope.figures.select import discordant, with_window
from qkscope.report.published import published
from qkscope.report.values import mean_of
from qkscope.study.study import Study


@dataclass(frozen=True)
class Measure:
    """A column of a section's table."""

    column: str
    label: str
    table: str
    """qk, heads or rotated; ``qk`` means component 0."""
    percent: bool = False
    key: str = ""
    """Its name in summary.json, if different."""


@dataclass(frozen=True)
class Cell:
    """One number of the table, and the published number next to it."""

    text: str
    over: str
    published: str | None


@dataclass(frozen=True)
class Section:
    """A section of the report, filled in."""

    id: str
    title: str
    about: str
    measures: list[Measure]
    rows: list[tuple[str, list[Cell | None]]]
    lines: list[str]
    caveat: str
    figures: list[str]


@dataclass(frozen=True)
class Finding:
    """A finding of the study: the texts of a section that do not depend on the data."""

    id: str
    title: str
    about: str
    caveat: str
    figures: tuple[str, ...]
    measures: tuple[Measure, ...] = ()
    lines: Callable[[Study], list[str]] = lambda _study: []

    def fill(self, study: Study) -> Section:
        """The section for this study."""
        frames = {"qk": with_derived(study), "heads": study.tables.get("heads"), "rotated": rotated(study)}
        measures = [m for m in self.measures if (frame := frames[m.table]) is not None and m.column in frame]
        rows = [(run.label, [_cell(study, run.label, frames[m.table], m) for m in measures]) for run in study.runs]
        return Section(
            self.id, self.title, self.about, measures, rows if measures else [], self.lines(study), self.caveat,
            list(self.figures),
        )  # fmt: skip


def _cell(study: Study, label: str, frame: pd.DataFrame | None, measure: Measure) -> Cell | None:
    value = mean_of(study, [label], frame, measure.column, measure.key)
    if value is None:
        return None
    return Cell(value.text(measure.percent), value.over, published(label, measure.column, measure.percent))


def with_derived(study: Study) -> pd.DataFrame | None:
    """Component 0 with |r_k|, whether it is discordant, and one column per class."""
    first = study.pc0
    if first is None:
        return None
    classes = {kind: (first["taxonomy"] == kind).astype(float) for kind in TAXONOMY}
    return first.assign(abs_r_k=first["r_k"].abs(), discordant=discordant(first), **classes)


def rotated(study: Study) -> pd.DataFrame | None:
    """The rotation model's table with |r_k_a|, |r_q_a| and whether the bias is positive."""
    frame = study.tables.get("rotated")
    if frame is None:
        return None
    if "bias_strength" in frame:
        frame = frame if "bias_window" in frame else with_window(study, frame)
        frame = frame.assign(positive=(frame["bias_strength"] > 0).astype(float).where(frame["bias_strength"].notna()))
    return frame
