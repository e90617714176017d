"""The findings that a report may open with: a sentence, how sure it is, and where to see it; all of it computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from qkscope.figures.select import models
from qkscope.heads import TERMS
from qkscope.report.sections import frames_of, rotated
from qkscope.report.sentences import axes_title
from qkscope.report.values import Value, mean_of, shown
from qkscope.report.windows import same_weights
from qkscope.study.study import Study


@dataclass(frozen=True)
class FrontFinding:
    """A sentence, how sure it is, the figure that shows it and the section that has the rest."""

    sentence: str
    sure: str
    figure: str
    section: str


def compared_labels(study: Study) -> list[str]:
    """The models that are compared, or the last checkpoint."""
    return [run.label for run in models(study)]


def heads_mean(study: Study, column: str) -> Value | None:
    """The mean of a column of ``heads`` over the heads of these."""
    return mean_of(study, compared_labels(study), frames_of(study)["heads"], column)


def cost_of(study: Study, change: str) -> pd.Series | None:
    """What a change of all heads costs the last of the models that were measured."""
    table = study.tables.get("effects_together")
    if table is None:
        return None
    rows = table[(table["change"] == change) & (table["over"] == "all") & table["model"].isin(compared_labels(study))]
    return None if rows.empty else rows.iloc[-1]


def _recency(study: Study) -> FrontFinding | None:
    decay = heads_mean(study, "decay")
    if decay is None:
        return None
    if decay.low > 0 or decay.high < 0:
        way, sure = ("falls" if decay.value > 0 else "rises"), f"the interval is {decay.interval()}, over {decay.over}"
    else:
        way, sure = "may fall or rise", f"the interval {decay.interval()} holds 0"
    return FrontFinding(
        f"The mean score {way} by {shown(abs(decay.value))} logits with every doubling of the distance.",
        sure, "distance/01_distance_curves", "bias",
    )  # fmt: skip


def _made_of(study: Study) -> FrontFinding | None:
    parts = {term: value for term in TERMS if (value := heads_mean(study, f"score_{term}")) is not None}
    if len(parts) < len(TERMS):
        return None
    order = sorted(parts, key=lambda term: -parts[term].value)
    apart = parts[order[0]].beside(parts[order[1]])
    listed = ", ".join(f"{term} {shown(parts[term].value, True)}" for term in order)
    first = (
        f"The largest part of what varies in scores is {order[0]}"
        if apart
        else (f"What varies in scores is {order[0]} and {order[1]} about alike")
    )
    sure = "the first is larger than the second beyond the intervals" if apart else "their intervals overlap"
    return FrontFinding(f"{first}: {listed}.", sure, "cause/01_score_terms", "score")


def _caused(study: Study) -> FrontFinding | None:
    rows = {term: row for term in TERMS if (row := cost_of(study, term)) is not None}
    if len(rows) < 2:
        return None
    order = sorted(rows, key=lambda term: -rows[term]["delta_nll"])
    listed = ", ".join(f"without {term} {rows[term]['delta_nll']:+.2f}" for term in order)
    return FrontFinding(
        f"The loss depends most on {order[0]}, in nats per token: {listed}.",
        "measured by taking the term away in all heads, on texts that the means were not made from",
        "cause/02_effects", "cause",
    )  # fmt: skip


def _windows(study: Study) -> FrontFinding | None:
    one = same_weights(study)
    if one is None:
        return None
    ends = {column: (name.split(":")[0], values[0], values[-1]) for name, column, values in one.rows}
    chosen = [ends[column] for column in ("bias_strength", "bias_window", "decay") if column in ends]
    said = [
        f"{name} {last.value / first.value - 1:+.0%}" for name, first, last in chosen if first.value * last.value > 0
    ]
    if not said:
        return None
    windows = f"{one.windows[-1]:,} instead of {one.windows[0]:,} tokens"
    moved = [name for name, first, last in chosen if last.beside(first)]
    return FrontFinding(
        f"The same weights, looked at over {windows}, have: {', '.join(said)}.",
        f"{one.label}; beyond the intervals: {', '.join(moved) or 'none'}",
        "audit/02_same_weights", "windows",
    )  # fmt: skip


def _followed(study: Study) -> FrontFinding | None:
    frame = rotated(study)
    q, k = (mean_of(study, compared_labels(study), frame, column) for column in ("r_q_a", "r_k_a"))
    if q is None or k is None:
        return None
    sure = "beyond their intervals" if k.beside(q) else "their intervals overlap"
    return FrontFinding(
        f"{axes_title(study)}: along the axis of drift they correlate with it at {shown(k.value)} (keys) and "
        f"{shown(q.value)} (queries).",
        sure, "qk-rotation/01_ab_plane_collage", "axes",
    )  # fmt: skip


def _formula(study: Study) -> FrontFinding | None:
    exact, published = (heads_mean(study, column) for column in ("posvar_q", "posvar_q_published"))
    if exact is None or published is None:
        return None
    order = published.beside(exact)
    word = {1: "more", -1: "less", 0: "about as much"}[order]
    return FrontFinding(
        f"The published formula gives {word} positional variance than there is: {shown(published.value, True)} of "
        f"queries where {shown(exact.value, True)} is linear in position."
        if order
        else f"The published formula and the exact one agree: {shown(published.value, True)} of queries.",
        "beyond their intervals" if order else "their intervals overlap",
        "audit/01_published_vs_exact", "share",
    )  # fmt: skip


FRONT_FINDINGS: tuple[Callable[[Study], FrontFinding | None], ...] = (
    _recency,
    _made_of,
    _caused,
    _windows,
    _followed,
    _formula,
)
