"""Means over heads with their intervals, as the report states them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.acrossheads import clusters, mean_over_heads
from qkscope.analyses.components import TAXONOMY
from qkscope.analyses.scores import HEAD_CLASSES
from qkscope.analyses.uncertainty import wilson
from qkscope.figures.figure import discordant, with_window
from qkscope.results.study import Study

DOCUMENTS, KEY_HEADS, COUNTED = "documents", "key heads", "counted heads"
CLASS_COLUMNS = {f"class_{kind}": kind for kind in HEAD_CLASSES}
"""Columns of the classes by the parts of scores, as TAXONOMY has those of the published ones."""
SHARES_OF_HEADS = frozenset({*TAXONOMY, *CLASS_COLUMNS, "positive", "discordant", "decays", "mu_q_a_positive"})
"""Columns with 1 (yes) or 0 (no) for each head; their mean is a share of heads."""


@dataclass(frozen=True)
class Value:
    """A number, its 95% interval, and the units that the interval is over."""

    value: float
    low: float = math.nan
    high: float = math.nan
    over: str = ""
    n_heads: int = 0
    """Heads that a share was counted over; 0 if it is no share of heads."""

    def counted(self) -> str:
        """A share of heads as a count.

        >>> Value(0.75, 0.3, 0.95, "counted heads", 4).counted(), Value(0.5).counted()
        ('3 of 4', '')
        """
        return f"{round(self.value * self.n_heads):,} of {self.n_heads:,}" if self.n_heads else ""

    def text(self, percent: bool = False) -> str:
        """The number with its interval; a share that cannot be told from zero is told by the end of its interval.

        >>> Value(0.25, 0.2, 0.3, "documents").text(percent=True), Value(-0.04, -0.04, 0.1).text(percent=True)
        ('25% [20%, 30%]', 'no more than 10%')
        >>> Value(0.99996, 0.99995, 0.99997, "documents").text(percent=True)
        '100%'
        >>> Value(0.7374, 0.7351, 0.7398).text()
        '0.737 [0.735, 0.740]'
        """
        if percent and not self.above_zero:
            return self.share()
        digits = 3 if self.interval() and in_text(self.low, percent) == in_text(self.high, percent) else 2
        number, ends = in_text(self.value, percent, digits), self.interval(percent, digits)
        return number if ends == f"[{number}, {number}]" else f"{number} {ends}".rstrip()

    @property
    def above_zero(self) -> bool:
        """False for a share, fitted on other documents or a covariance, that cannot be told from zero."""
        return self.over == COUNTED or not (self.value < 0 or self.low <= 0)

    def share(self) -> str:
        """The number as a share in words: never negative, and no more than it can be told to be.

        >>> Value(0.254).share(), Value(0.03, -0.01, 0.07).share(), Value(-0.02).share(), Value(0, -1, 0.001).share()
        ('25%', 'no more than 7.0%', 'not more than chance', 'under 1%')
        """
        if self.above_zero or not math.isfinite(self.value):
            return in_text(self.value, percent=True)
        if math.isnan(self.high):
            return "not more than chance"
        return f"no more than {in_text(self.high, percent=True)}" if self.high >= 0.01 else "under 1%"

    def interval(self, percent: bool = False, digits: int = 2) -> str:
        """The interval in brackets; empty if there is none."""
        if math.isnan(self.low) or (self.low == self.high and self.over != COUNTED):
            return ""  # if all heads have the same value, a bootstrap over heads has no width
        return f"[{in_text(self.low, percent, digits)}, {in_text(self.high, percent, digits)}]"

    def negative(self) -> Value:
        """The number with the opposite sign."""
        return Value(-self.value, -self.high, -self.low, self.over)

    def compare(self, other: Value) -> int:
        """1 if it is larger than another value, −1 if smaller, 0 if the intervals overlap or one is missing.

        >>> Value(0.8, 0.78, 0.82).compare(Value(0.7, 0.65, 0.76)), Value(0.8, 0.7, 0.9).compare(Value(0.7, 0.6, 0.8))
        (1, 0)
        """
        return 1 if self.low > other.high else -1 if self.high < other.low else 0

    def change(self, later: Value) -> str:
        """The change to a later value in words: larger, smaller, or neither beyond the intervals of both.

        >>> Value(2.0, 1.9, 2.1).change(Value(3.0, 2.9, 3.1)), Value(2.0, 1.0, 3.0).change(Value(2.5, 1.5, 3.5))
        ('rises by 50%', 'does not change beyond its intervals')
        """
        order = later.compare(self)
        if order == 0:
            return "does not change beyond its intervals"
        ratio = later.value / self.value if self.value * later.value > 0 else math.nan
        size = f" by {abs(ratio - 1):.0%}" if ratio < 3 else f" to {ratio:,.0f} times" if math.isfinite(ratio) else ""
        return f"{'rises' if order > 0 else 'falls'}{size}"


def over_what(over: str) -> str:
    """The units that an interval is over, in words."""
    return {
        DOCUMENTS: "over documents (jackknife)",
        KEY_HEADS: "over key heads (bootstrap)",
        COUNTED: "of shares of heads, counted by key head (Wilson)",
    }[over]


def rounded(number: float, percent: bool = False) -> str:
    """Three significant digits, or a percentage with one decimal.

    >>> rounded(0.0123456), rounded(0.5, percent=True), rounded(float("nan")), rounded(1234.5), rounded(3.4e-5)
    ('0.0123', '50.0%', '–', '1,234', '3.4e-05')
    """
    if not math.isfinite(number):
        return "–"
    if percent:
        return f"{number:.1%}"
    if number != 0 and abs(number) < 1e-3:
        return f"{number:.1e}"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def in_text(number: float, percent: bool = False, digits: int = 2) -> str:
    """A number in running text: two significant digits, or as many as say where an interval ends.

    >>> in_text(0.737), in_text(0.0641, percent=True), in_text(0.999, percent=True), in_text(1234.5), in_text(0.0)
    ('0.74', '6.4%', '100%', '1,200', '0')
    """
    if not math.isfinite(number):
        return "–"
    if number == 0:
        return "0%" if percent else "0"
    shown = 100 * number if percent else number
    decimals = max(digits - 1 - math.floor(math.log10(abs(float(f"{shown:.{digits - 1}e}")))), 0)
    if abs(shown) < 1e-3:
        return f"{shown:.{digits - 1}e}" + "%" * percent
    return f"{float(f'{shown:.{digits - 1}e}'):,.{decimals}f}" + "%" * percent


def mean_of(study: Study, label: str, frame: pd.DataFrame | None, column: str, key: str = "") -> Value | None:
    """Mean of a column over the heads of a run; None if the table does not have it.

    The interval is over documents if the run's summary has one (under ``key`` or the column's name), and a bootstrap
    over key heads otherwise. A share of heads has Wilson's interval, also at 0 and 100%.
    """
    if frame is None or column not in frame:
        return None
    rows = frame[frame["model"] == label].dropna(subset=[column])
    if rows.empty:
        return None
    if column in SHARES_OF_HEADS:
        return _share(rows, column)
    mean = float(rows[column].astype(float).mean())
    summary = study.run(label).headline.get(key or column, {})
    if "low" in summary and np.isclose(summary["mean"], mean, rtol=1e-6, atol=1e-12):
        return Value(mean, summary["low"], summary["high"], DOCUMENTS)
    mean_and_ends = mean_over_heads(rows.assign(**{column: rows[column].astype(float)}), [column])
    return Value(mean_and_ends[column], mean_and_ends[f"{column}_low"], mean_and_ends[f"{column}_high"], KEY_HEADS)


def _share(rows: pd.DataFrame, column: str) -> Value:
    """A share of heads with Wilson's interval; heads that read the same key head count as one observation."""
    share, n = float(rows[column].astype(float).mean()), int(clusters(rows).max()) + 1
    low, high = wilson(np.array(share), np.array(n))
    return Value(share, float(low), float(high), COUNTED, len(rows))


def frames_of(study: Study) -> dict[str, pd.DataFrame | None]:
    """The tables that measures refer to, with columns that follow from them."""
    return {"qk": with_derived(study), "heads": heads(study), "rotated": rotated(study)}


def heads(study: Study) -> pd.DataFrame | None:
    """The table of heads with ``decays``, 1 if the mean score falls with distance, and one column per class."""
    frame = study.tables.get("heads")
    if frame is not None and "decay" in frame:
        frame = frame.assign(decays=(frame["decay"] > 0).astype(float).where(frame["decay"].notna()))
    if frame is not None and "head_class" in frame:
        known = frame["head_class"].notna()
        kinds = {c: (frame["head_class"] == kind).astype(float).where(known) for c, kind in CLASS_COLUMNS.items()}
        frame = frame.assign(**kinds)
    return frame


def with_derived(study: Study) -> pd.DataFrame | None:
    """Component 0 with |r_k|, whether it is discordant, and one column per published class."""
    first = study.pc0
    if first is None:
        return None
    classes = {kind: (first["taxonomy_published"] == kind).astype(float) for kind in TAXONOMY}
    return first.assign(abs_r_k=first["r_k"].abs(), discordant=discordant(first), **classes)


def rotated(study: Study) -> pd.DataFrame | None:
    """The rotation model's table with columns for a positive bias and a positive mean query on a."""
    frame = study.tables.get("rotated")
    if frame is None:
        return None
    if "bias_strength" in frame:
        frame = frame if "bias_window" in frame else with_window(study, frame)
        frame = frame.assign(positive=(frame["bias_strength"] > 0).astype(float).where(frame["bias_strength"].notna()))
    if "mu_q_a" in frame:
        frame = frame.assign(mu_q_a_positive=(frame["mu_q_a"] > 0).astype(float).where(frame["mu_q_a"].notna()))
    return frame


COLUMNS = {
    "r_q": "pc0_r_q",
    "r_k": "pc0_r_k",
    "explained_variance": "pc0_ev",
    "position-dominated": "position_dominated",
    "content-focused": "content_focused",
}
"""Columns that have another name in the published data."""
UNSURE_KEY_HEADS = ("llama3.2-3b", "qwen3-14b")
"""Models whose published values may have been computed with the wrong key heads."""


@cache
def figures() -> dict[str, Any]:
    """The content of published.json."""
    return json.loads((files("qkscope.report") / "assets" / "published.json").read_text(encoding="utf-8"))


def published(label: str, column: str, percent: bool = False) -> str | None:
    """The published mean of a column for the run with this label, as text; None if there is none."""
    entry = _entry(label)
    name = COLUMNS.get(column, column)
    if entry is None or name not in entry:
        return None
    prefix = "≈ " if name in entry.get("approx", []) else ""
    return prefix + rounded(float(entry[name]), percent)


def is_published(label: str) -> bool:
    """Return True if a run was part of the published study."""
    return _entry(label) is not None


def pooled(column: str) -> Any:
    """A value over all models of the published study; None if there is none."""
    return figures()["pooled"].get(column)


def _entry(label: str) -> dict[str, Any] | None:
    name = label.strip().lower()
    if name in figures()["models"]:
        return figures()["models"][name]
    for checkpoint, entry in figures()["smollm3_checkpoints"]["values"].items():
        if name == checkpoint or name.endswith(f"smollm3-3b-{checkpoint}"):
            return entry
    return None
