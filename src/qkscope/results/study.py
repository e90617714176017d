"""A Study: an ordered list of runs with labels, and their tables. Figures and reports are made from it.

Tables come from results folders. They may also be a ``qk.csv`` or ``rotated.csv`` of another program: only the columns
that a figure needs must exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.components import TAXONOMY, taxonomy
from qkscope.config import StudyRunConfig
from qkscope.errors import TableError
from qkscope.results.reader import Folder, read_folder
from qkscope.results.schema import MEASURED
from qkscope.results.side import SIDE_TABLES
from qkscope.results.summary import merged_headline


@dataclass(frozen=True)
class StudyRun:
    """One model or checkpoint of a study."""

    label: str
    """The name shown; the column ``model`` of the study's tables."""
    family: str = ""
    phase: str | None = None
    """Part of training, for checkpoints."""
    step: float | None = None
    """Training step, for checkpoints."""
    window: int | None = None
    """Context length of the capture, in tokens."""
    nope_layers: frozenset[int] = frozenset()
    """Layers without rotary encoding."""
    sliding_layers: frozenset[int] = frozenset()
    """Layers with a sliding window."""
    source: str = ""
    """The results folder of its tables."""
    headline: dict[str, dict[str, float]] = field(default_factory=dict)
    """Means over heads with intervals by document, if a summary has them."""
    n_documents: int | None = None
    """Number of documents measured, if a summary has it."""
    n_tokens: int | None = None
    """Number of tokens measured, if a summary has it."""
    loss: float | None = None
    """Mean loss of the documents in nats per token, if a summary has it."""


@dataclass(frozen=True)
class Study:
    """Runs in order, and their tables with the label of each run in the column ``model``."""

    runs: tuple[StudyRun, ...]
    tables: dict[str, pd.DataFrame]
    title: str = ""
    compare_at: int | None = None
    """Window at which runs are compared, if not all were captured at it; None: they have one, or it is not known."""
    at: Mapping[int, Study] = field(default_factory=dict)
    """The same runs at every window, by window, as far as they were captured at it."""
    own: Study | None = None
    """The runs each at its own window, if these differ and this study has all of them at one."""

    @property
    def as_captured(self) -> Study:
        """The runs each at its own window."""
        return self.own or self

    @property
    def compared(self) -> Study:
        """The runs for comparison: at one window, as far as they were captured at it."""
        return self if self.compare_at is None else self.at.get(self.compare_at, self)

    @property
    def uncompared(self) -> list[str]:
        """Runs with a window other than that of comparison, and not captured at that one."""
        if self.compare_at is None:
            return []
        captured = self.at[self.compare_at].labels if self.compare_at in self.at else []
        return [run.label for run in self.runs if run.label not in captured]

    @property
    def windows(self) -> list[int]:
        """The windows of the runs, in order."""
        return sorted({run.window for run in self.runs if run.window})

    @property
    def labels(self) -> list[str]:
        """The runs' labels, in order."""
        return [run.label for run in self.runs]

    @property
    def families(self) -> list[str]:
        """The runs' families, in order of first appearance."""
        return list(dict.fromkeys(run.family for run in self.runs))

    def table(self, name: str, *columns: str) -> pd.DataFrame | None:
        """A table with at least these columns, in the order of the runs; None if there is none."""
        frame = self.tables.get(name)
        if frame is None or frame.empty or not set(columns) <= set(frame.columns):
            return None
        return frame

    @cached_property
    def pc0(self) -> pd.DataFrame | None:
        """Component 0 of every head, with its class."""
        qk = self.table("qk", "pc", "r_q", "r_k")
        if qk is None:
            return None
        first = qk[qk["pc"] == 0].reset_index(drop=True)
        if "taxonomy_published" not in first:
            kinds = taxonomy(first["r_q"].to_numpy(float), first["r_k"].to_numpy(float))
            first = first.assign(taxonomy_published=np.array(TAXONOMY)[kinds])
        return first

    def run(self, label: str) -> StudyRun:
        """The run with this label."""
        return next(run for run in self.runs if run.label == label)

    @cached_property
    def last_layer(self) -> dict[str, int]:
        """The deepest layer of each run in any table, so that a depth means the same in all of them."""
        parts = [
            frame.groupby("model")["layer"].max()
            for name, frame in self.tables.items()
            if name not in [side.name for side in SIDE_TABLES] and "layer" in frame
        ]
        return {str(label): int(layer) for label, layer in pd.concat(parts).groupby(level=0).max().items()}

    @cached_property
    def nope(self) -> dict[str, frozenset[int]]:
        """Layers without rotary encoding of each run."""
        return {run.label: run.nope_layers for run in self.runs}


def build(
    entries: Sequence[StudyRunConfig],
    title: str = "",
    compare_at: int | None = None,
    other_windows: Sequence[Study] = (),
) -> Study:
    """Read the results folder of every entry; an entry without a model means all models of its folder.

    Each of ``other_windows`` is one of the runs at another window. Runs are shown at ``compare_at``, by default the
    smallest window among them, if all of them were captured at it, else each at its own.
    """
    folders = {entry.path: read_folder(Path(entry.path)) for entry in entries}
    runs: list[StudyRun] = []
    frames_of_table: dict[str, list[pd.DataFrame]] = {}
    for entry in entries:
        folder = folders[entry.path]
        for model in folder.models if entry.model is None else [entry.model]:
            run, tables = _take(entry, folder, model)
            if run.label in {earlier.label for earlier in runs}:
                raise TableError(f"two runs of the study have the label {run.label!r}; give each run its own label")
            runs.append(run)
            for name, frame in tables.items():
                frames_of_table.setdefault(name, []).append(frame)
    tables = {name: pd.concat(frames, ignore_index=True) for name, frames in frames_of_table.items()}
    return _with_windows(Study(tuple(runs), tables, title), other_windows, compare_at)


def _with_windows(study: Study, other_windows: Sequence[Study], compare_at: int | None) -> Study:
    """Add the runs at other windows to a study; each of ``other_windows`` is one of its runs."""
    windows = study.windows
    if compare_at is None and len(windows) > 1:
        compare_at = windows[0]
    if compare_at is None and not other_windows:
        return study
    by_window = {
        window: _at_window(study, other_windows, window)
        for window in {*windows, *(w for o in other_windows for w in o.windows)}
    }
    at = {w: by_window[w] for w in sorted(by_window) if by_window[w].runs}
    if len(windows) < 2 and (compare_at is None or windows == [compare_at]):
        return replace(study, at=at)
    study = replace(study, compare_at=compare_at, at=at)
    return study if study.uncompared else _at_one_window(study)


def _at_one_window(study: Study) -> Study:
    """The runs of a study at the window of comparison; what was measured of their models, at its own, stays."""
    one = study.compared
    measured = {name: study.tables[name] for name in MEASURED if name in study.tables}
    own = replace(study, compare_at=None)
    return replace(one, tables=one.tables | measured, title=study.title, at=study.at, own=own)


def _at_window(study: Study, other_windows: Sequence[Study], window: int) -> Study:
    """The runs of a study that were captured at this window, in its order."""
    by_label = {run.label: select_runs(study, [run.label]) for run in study.runs if run.window == window}
    by_label |= {
        other.labels[0]: other
        for other in other_windows
        if other.windows == [window] and other.labels[0] not in by_label
    }
    in_order = [by_label[label] for label in study.labels if label in by_label]
    return replace(all_runs(in_order), title=study.title)


def select_runs(study: Study, labels: Sequence[str]) -> Study:
    """A study of some of the runs."""
    runs = tuple(run for run in study.runs if run.label in labels)
    tables = {name: frame[frame["model"].isin(list(labels))] for name, frame in study.tables.items()}
    return Study(runs, {name: frame for name, frame in tables.items() if len(frame)}, study.title)


def with_most_windows(study: Study) -> tuple[str, list[int]]:
    """The run captured at the largest number of windows (the last one of several), and these windows."""
    windows_of = {
        label: [w for w, at_window in study.at.items() if label in at_window.labels] for label in study.labels
    }
    label = max(reversed(study.labels), key=lambda name: len(windows_of[name]))
    return label, sorted(windows_of[label])


def all_runs(studies: Sequence[Study]) -> Study:
    """A study of all runs of these."""
    names = dict.fromkeys(name for study in studies for name in study.tables)
    tables = {
        name: pd.concat([study.tables[name] for study in studies if name in study.tables], ignore_index=True)
        for name in names
    }
    return Study(tuple(run for study in studies for run in study.runs), tables)


def _take(entry: StudyRunConfig, folder: Folder, model: str) -> tuple[StudyRun, dict[str, pd.DataFrame]]:
    """One model of a folder as a run of the study, and its rows under the study's label and family."""
    tables = {name: rows for name, frame in folder.tables.items() if len(rows := frame[frame["model"] == model])}
    if not tables:
        raise TableError(f"{folder.path} has no model {model!r}; it has {', '.join(folder.models)}")
    label = entry.label or model
    family = entry.family if entry.family is not None else _first_value(tables, "family", "")
    layers = _marked_layers(tables)
    run = StudyRun(
        label=label,
        family=str(family),
        phase=entry.phase,
        step=entry.step,
        window=entry.window or window_of(tables),
        nope_layers=layers["nope"] if entry.nope_layers is None else frozenset(entry.nope_layers),
        sliding_layers=layers["sliding_window"],
        source=str(folder.path),
        headline=merged_headline(folder.summary.get(model)),
        n_documents=_count(folder.summary.get(model), "n_documents"),
        n_tokens=_count(folder.summary.get(model), "n_tokens"),
        loss=_loss(folder.summary.get(model)),
    )
    labelled = {name: rows.assign(model=label, family=str(family)) for name, rows in tables.items()}
    return run, labelled


def _first_value(tables: dict[str, pd.DataFrame], column: str, default: Any) -> Any:
    for frame in tables.values():
        values = frame[column].dropna() if column in frame else frame.iloc[:0, 0]
        if len(values):
            return values.iloc[0]
    return default


def _count(summary: Any, name: str) -> int | None:
    value = summary.get(name) if isinstance(summary, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _loss(summary: Any) -> float | None:
    value = summary.get("loss") if isinstance(summary, dict) else None
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def window_of(tables: Mapping[str, pd.DataFrame]) -> int | None:
    """The window of a run, from its tables; None if they do not say."""
    rotated = tables.get("rotated")
    if rotated is None or "window" not in rotated or rotated["window"].isna().all():
        return None
    return int(rotated["window"].max())


def _marked_layers(tables: dict[str, pd.DataFrame]) -> dict[str, frozenset[int]]:
    marked: dict[str, set[int]] = {"nope": set(), "sliding_window": set()}
    for frame in tables.values():
        for column, layers in marked.items():
            if column in frame:
                filled = frame[column].fillna(0.0) > 0
                layers |= set(frame.loc[filled, "layer"].astype(int))
    return {column: frozenset(layers) for column, layers in marked.items()}
