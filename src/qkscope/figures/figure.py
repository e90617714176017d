"""The parts of a figure: a name, a description, functions that prepare and draw its data, and sentences about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.core.linalg import SIGN_ANCHOR
from qkscope.errors import QkscopeError
from qkscope.results.study import Study, StudyRun


class NotApplicable(QkscopeError):
    """A figure that does not apply to this study; the text gives the reason."""


@dataclass(frozen=True)
class Folded:
    """A second version of a figure, drawn and described like the first from other data; pages show it on demand."""

    suffix: str
    """Ends the names of its files, such as ``figure-own-windows.png``."""
    title: str
    prepare: Callable[[Study], pd.DataFrame]
    """Raises ``NotApplicable`` if there is no such version."""


@dataclass(frozen=True)
class Figure:
    """One figure of the catalogue."""

    name: str
    """Folder below ``figures/``, such as ``qk-pca/01_pc_roles``."""
    title: str
    shows: str | Callable[[pd.DataFrame], str]
    """A description of the drawing in a sentence or two; of this data's drawing, if not all of it is always there."""
    prepare: Callable[[Study], pd.DataFrame]
    """Returns exactly the numbers that are drawn; raises ``NotApplicable`` if there are none."""
    draw: Callable[[pd.DataFrame], Drawing]
    says: Callable[[pd.DataFrame], list[str]]
    """Returns sentences about this data, whose numbers come from the prepared data; the first is the key takeaway."""
    folded: Folded | None = None

    def caption(self, data: pd.DataFrame) -> str:
        """The description of the drawing of this data."""
        return self.shows if isinstance(self.shows, str) else self.shows(data)

    def prepared(self, study: Study) -> pd.DataFrame:
        """The data of the figure, with the window of each run."""
        return with_run_windows(study, self.prepare(study))


def with_run_windows(study: Study, data: pd.DataFrame) -> pd.DataFrame:
    """The data with the window of each run in the column ``window``, unless it has that column."""
    if "window" in data or "model" not in data:
        return data
    return data.assign(window=data["model"].map({run.label: run.window for run in study.runs}).astype(float))


def at_own_windows(prepare: Callable[[Study], pd.DataFrame]) -> Folded:
    """The version of a figure with each run at its own window, for studies whose runs are shown at one."""

    def prepare_own(study: Study) -> pd.DataFrame:
        own = study.own
        if own is None:
            raise NotApplicable("every run is shown at its own window")
        return with_run_windows(own, prepare(own))

    return Folded("own-windows", "each run at its own window", prepare_own)


def window_of(data: pd.DataFrame) -> str:
    """The window or windows of the data of a figure, in words; empty if they are not known.

    >>> window_of(pd.DataFrame({"window": [1024, 1024]})), window_of(pd.DataFrame({"window": [1024, 8192]}))
    ('window of 1,024 tokens', 'windows of 1,024 to 8,192 tokens')
    """
    windows = np.unique(data["window"].dropna().to_numpy(float)) if "window" in data else np.zeros(0)
    if not len(windows):
        return ""
    if len(windows) == 1:
        return f"window of {windows[0]:,.0f} tokens"
    return f"windows of {windows[0]:,.0f} to {windows[-1]:,.0f} tokens"


def needed(frame: pd.DataFrame | None, content: str) -> pd.DataFrame:
    """The table, or the reason why there is no figure."""
    if frame is None or frame.empty:
        raise NotApplicable(f"there is no table with {content}")
    return frame


def models(study: Study) -> list[StudyRun]:
    """The runs that are compared as models; for a study with only checkpoints, the last one."""
    compared = [run for run in study.runs if not is_checkpoint(run)]
    return compared or list(study.runs[-1:])


def side_by_side(study: Study) -> tuple[list[StudyRun], str]:
    """The models, or the checkpoints of a single model if there are several; and the word for them."""
    compared = models(study)
    ordered = [run for run in study.runs if is_checkpoint(run)]
    return (ordered, "checkpoints") if len(compared) == 1 and len(ordered) > 1 else (compared, "models")


def at_least_two_runs(study: Study) -> tuple[list[StudyRun], str]:
    """The runs of ``side_by_side``; ``NotApplicable`` for a single run, whose numbers are in the tables."""
    runs, kind = side_by_side(study)
    if len(runs) < 2:
        raise NotApplicable("there is one run, so there is nothing to put beside it; its numbers are in the table")
    return runs, kind


def models_alone(study: Study) -> list[StudyRun]:
    """The models; ``NotApplicable`` for a single model with checkpoints, which other figures show."""
    if side_by_side(study)[1] == "checkpoints":
        raise NotApplicable("there is one model; the figures of training show its checkpoints")
    return models(study)


def checkpoints(study: Study) -> list[StudyRun]:
    """The runs that are training checkpoints; ``NotApplicable`` if there are fewer than two."""
    ordered = [run for run in study.runs if is_checkpoint(run)]
    if len(ordered) < 2:
        raise NotApplicable("the study has no ordered checkpoints (runs with a phase or a step)")
    return ordered


def before_and_after(study: Study) -> tuple[str, str]:
    """The two checkpoints to compare: the first and the last; if own windows differ, the last of the first window.

    ``NotApplicable`` if there are fewer than two.
    """
    runs = checkpoints(study.as_captured)
    shorter = [run.label for run in runs if run.window == runs[0].window]
    return (runs[0].label if len(shorter) == len(runs) else shorter[-1]), runs[-1].label


def is_checkpoint(run: StudyRun) -> bool:
    """Return True if the study gives a phase or step of training for a run."""
    return run.phase is not None or run.step is not None


def rows(study: Study, runs: list[StudyRun], table: str, *columns: str) -> pd.DataFrame:
    """The rows of these runs, in their order; ``pc0`` means component 0 of ``qk``."""
    frame = study.pc0 if table == "pc0" else study.table(table, *columns)
    if frame is not None and not set(columns) <= set(frame.columns):
        frame = None
    available = needed(frame, f"{', '.join(columns)} ({'qk' if table == 'pc0' else table}.csv)")
    labels = [run.label for run in runs]
    selected = available[available["model"].isin(labels)]
    order = {label: i for i, label in enumerate(labels)}
    selected = selected.sort_values("model", key=lambda column: column.map(order), kind="stable", ignore_index=True)
    return needed(selected.dropna(subset=list(columns)), f"{', '.join(columns)} of {', '.join(labels[:3])}")


def timeline(runs: list[StudyRun]) -> pd.DataFrame:
    """One row per checkpoint: order, label, phase, step, window."""
    return pd.DataFrame(
        {
            "order": range(len(runs)),
            "model": [run.label for run in runs],
            "phase": [run.phase or "training" for run in runs],
            "step": [run.step if run.step is not None else float("nan") for run in runs],
            "window": [run.window if run.window is not None else float("nan") for run in runs],
        }
    )


def with_sliding(study: Study, frame: pd.DataFrame) -> pd.DataFrame:
    """The table with the column ``sliding``: true in layers with a sliding window."""
    sliding = {(run.label, layer) for run in study.runs for layer in run.sliding_layers}
    return frame.assign(sliding=[key in sliding for key in zip(frame["model"], frame["layer"], strict=True)])


def over_window(data: pd.DataFrame) -> str:
    """The distances of a slope over the window: in layers with a sliding window, their reach."""
    return "over the window or, in layers where it slides, their reach" if data["sliding"].any() else "over the window"


def discordant(frame: pd.DataFrame) -> pd.Series:
    """1 where keys drift against queries along PC0, 0 where in the same direction; empty where r_q is too weak."""
    sign_defined = (frame["r_q"].abs() >= SIGN_ANCHOR) & frame["r_k"].notna()
    return (frame["r_k"] < 0).astype(float).where(sign_defined)


def with_window(study: Study, frame: pd.DataFrame) -> pd.DataFrame:
    """``bias_window`` of every head: as the table has it, or from its window, or from the window of its run."""
    if "bias_window" in frame:
        return frame
    windows = frame["model"].map({run.label: run.window for run in study.runs}).astype(float)
    if "window" in frame:
        windows = frame["window"].fillna(windows)
    return frame.assign(bias_window=frame["bias_strength"] * windows)
