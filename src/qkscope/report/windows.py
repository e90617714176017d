"""Comparison of runs at different windows: at one window for all, or by numbers that do not depend on the window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qkscope.report.values import SHARES_OF_HEADS, Value, frames_of, mean_of
from qkscope.results.schema import TABLES
from qkscope.results.study import Study, with_most_windows

SAME_WEIGHTS = (
    ("bias_strength", "rotated", "bias per token"),
    ("bias_window", "rotated", "bias per window"),
    ("r_q", "qk", "r_q on PC0"),
    ("class_position", "heads", "heads of the class position"),
    ("position-dominated", "qk", "position-dominated heads (published class)"),
    ("position_share_q", "heads", "position's share of queries"),
    ("decay", "heads", "decay: logits per doubling of distance"),
)
"""Columns, their tables, and their names in the table of one model at several windows."""


NAMES = {column: name for column, _, name in SAME_WEIGHTS if column in SHARES_OF_HEADS}
"""Columns that are no columns of tables, in words."""
_SHARES = frozenset(column.name for columns in TABLES.values() for column in columns if column.unit == "share")


def in_percent(column: str) -> bool:
    """Return True if a mean is shown in percent: shares of variance, and shares of heads."""
    return column in _SHARES or column in SHARES_OF_HEADS


@dataclass(frozen=True)
class OneModel:
    """One run at several windows: its numbers, by window."""

    label: str
    windows: list[int]
    rows: list[tuple[str, str, list[Value]]]
    """Name, column, and values in the order of the windows."""


def same_weights(study: Study) -> OneModel | None:
    """The run captured at the largest number of windows (the last of several); None if none was captured at two."""
    label, windows = with_most_windows(study)
    if len(windows) < 2:
        return None
    rows = []
    for column, table, name in SAME_WEIGHTS:
        means = [mean_of(study.at[w], label, frames_of(study.at[w])[table], column) for w in windows]
        values = [value for value in means if value is not None]
        if len(values) == len(windows):
            rows.append((name, column, values))
    return OneModel(label, windows, rows) if rows else None


def same_weights_lines(model: OneModel | None) -> list[str]:
    """Return a line for each number of one model that says whether it changes with the window."""
    if model is None:
        return []
    lines = [
        f"{model.label} at windows of {', '.join(f'{w:,}' for w in model.windows)} tokens, the same weights each time:"
    ]
    for name, column, values in model.rows:
        course = " → ".join(value.text(in_percent(column)) for value in values)
        lines.append(f"{name}: {course}; it {values[0].change(values[-1])}.")
    return lines


def _study_for_comparison(study: Study, before: str, after: str) -> Study:
    """The study with two runs at one window if both were captured at it, else each at its own."""
    return study.compared if {before, after} <= set(study.compared.labels) else study


def at_which_windows(study: Study, before: str, after: str) -> str:
    """The windows at which two runs are compared, in words; empty if they were captured at one."""
    if study.compare_at is None and study.own is None:
        return ""
    compared = _study_for_comparison(study, before, after)
    windows = [compared.run(label).window for label in (before, after)]
    if windows[0] == windows[1]:
        return f", both at a window of {windows[0]:,} tokens"
    return f", at their own windows ({windows[0] or 0:,} and {windows[1] or 0:,} tokens), which do not compare"


def comparison(study: Study, column: str, table: str, before: str, after: str) -> tuple[Value, Value] | None:
    """A mean of two runs, at one window if possible; None if either has no such number."""
    compared = _study_for_comparison(study, before, after)
    frame = frames_of(compared)[table]
    first, second = (mean_of(compared, label, frame, column) for label in (before, after))
    return None if first is None or second is None else (first, second)


def window_note(study: Study) -> str:
    """The window of all runs if they were captured at several, or a warning; empty if they have one."""
    if study.own is not None:
        windows = f"{study.own.windows[0]:,} to {study.own.windows[-1]:,}"
        return (
            f"Runs were captured at windows of {windows} tokens. All numbers here are at {study.windows[0]:,}, where "
            "all were captured, unless another window is named: a line, a correlation or a class at another window "
            "is another question."
        )
    if study.compare_at is None:
        return ""
    windows = f"{study.windows[0]:,} to {study.windows[-1]:,}"
    missing = ", ".join(study.uncompared[:3]) + (" and more" if len(study.uncompared) > 3 else "")
    return (
        f"Runs have windows of {windows} tokens, and {missing} {'was' if len(study.uncompared) == 1 else 'were'} not "
        f"captured at {study.compare_at:,}: slopes, correlations, classes and shares of different windows do not "
        f"compare. Decay does, over the same distances{_ranges(study)}. qkscope study capture measures what is missing."
    )


def _ranges(study: Study) -> str:
    """A warning if decay was computed over different distances."""
    heads = study.tables.get("heads")
    ends = [] if heads is None or "decay_range" not in heads else sorted(heads["decay_range"].dropna().unique())
    return "" if len(ends) < 2 else f" (here it is over distances up to {int(ends[0]):,} to {int(ends[-1]):,}, by run)"


def changes(study: Study, columns: Sequence[tuple[str, str]], before: str, after: str) -> list[tuple[str, str]]:
    """Return each column with a sentence about the change of its mean between two runs, by the intervals."""
    lines = []
    for column, table in columns:
        ends = comparison(study, column, table, before, after)
        if ends is not None:
            percent = in_percent(column)
            course = f"{ends[0].text(percent)} → {ends[1].text(percent)}"
            lines.append((column, f"{NAMES.get(column, column)}: {course}; it {ends[0].change(ends[1])}."))
    return lines
