"""The first screen of the report: a sentence, four numbers, four findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from qkscope.figures.figure import NotApplicable, before_and_after, models
from qkscope.heads import TERMS
from qkscope.report.sections import frames_of, rotated
from qkscope.report.sentences import axes_title
from qkscope.report.values import Value, mean_of, over_what, shown
from qkscope.report.windows import comparison, same_weights
from qkscope.results.study import Study


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


SAME = 0.1
"""A curve that moved by less than this share is said to be where it was."""


@dataclass(frozen=True)
class Tile:
    """A number that stands for an answer."""

    number: str
    interval: str
    label: str
    about: str
    """What exactly it is, on hover."""
    section: str


@dataclass(frozen=True)
class Front:
    """The first screen."""

    sentence: str
    lead: str
    """Its numbers."""
    tiles: list[Tile]
    of: str
    """What the tiles are about."""
    findings: list[FrontFinding]

    @property
    def figures(self) -> set[str]:
        """The figures that findings show."""
        return {finding.figure for finding in self.findings}


def front(study: Study) -> Front:
    """The first screen of a study; parts without data are left out."""
    findings = [finding for make in FRONT_FINDINGS if (finding := make(study)) is not None]
    return Front(*opening_sentence(study), tiles(study), _of(study), findings[:4])


# ---- the sentence ---------------------------------------------------------------------------------


def opening_sentence(study: Study) -> tuple[str, str]:
    """The strongest true thing, and its numbers: what an extension or training did, or else how far position goes."""
    return _extended(study) or _trained(study) or (_standing(study), "")


def _extended(study: Study) -> tuple[str, str] | None:
    """What happened to the curve from one window to the next."""
    try:
        before, after = before_and_after(study)
    except NotApplicable:
        return None
    windows = [study.run(label).window for label in (before, after)]
    ends = comparison(study, "decay", "heads", before, after)
    if ends is None or windows[0] == windows[1] or None in windows or ends[0].value <= 0:
        return None
    change = ends[1].value / ends[0].value - 1
    if abs(change) < SAME:
        course = "left the recency curve where it was"
    else:
        course = f"made the recency curve {abs(change):.0%} {'steeper' if change > 0 else 'flatter'}"
    line, lines = _line_said(study, before, after)
    numbers = (
        f"The mean score falls by {shown(ends[0].value)} logits with every doubling of the distance before and "
        f"{shown(ends[1].value)} after ({change:+.0%}){lines}."
    )
    return f"Extending the context from {windows[0]:,} to {windows[1]:,} tokens {course}{line}.", numbers


def _line_said(study: Study, before: str, after: str) -> tuple[str, str]:
    """What the published number, the slope of a line per token, would have said, if that is another thing."""
    frame = rotated(study)
    ends = [mean_of(study, [label], frame, "bias_strength") for label in (before, after)]
    if ends[0] is None or ends[1] is None or ends[0].value <= 0:
        return "", ""
    change = ends[1].value / ends[0].value - 1
    if abs(change) < 0.5:
        return "", ""
    said = f", though the published slope per token {'rose' if change > 0 else 'fell'} by {abs(change):.0%}"
    return said, f"; the slope of a line through it went from {shown(ends[0].value)} to {shown(ends[1].value)}"


def _trained(study: Study) -> tuple[str, str] | None:
    """What training did to how far position goes."""
    try:
        before, after = before_and_after(study)
    except NotApplicable:
        return None
    ends = comparison(study, "position_share", "heads", before, after)
    if ends is None:
        return None
    course = {1: "grew", -1: "shrank", 0: "did not change beyond its intervals"}[ends[1].beside(ends[0])]
    return (
        f"Through training the part of queries and keys that position alone determines {course}.",
        f"{before}: {shown(ends[0].value, True)} of the variance; {after}: {shown(ends[1].value, True)}.",
    )


def _standing(study: Study) -> str:
    """How many heads favour near keys, and how much of the vectors is position."""
    decays, share = (heads_mean(study, column) for column in ("decays", "position_share"))
    parts = []
    if decays is not None:
        parts.append(f"{decays.value:.0%} of heads score near keys higher than far ones")
    if share is not None:
        parts.append(f"position alone determines {share.value:.0%} of the variance of queries and keys")
    if not parts:
        r_q = mean_of(study, compared_labels(study), frames_of(study)["qk"], "r_q")
        if r_q is None:
            return ""
        parts.append(f"along their first component queries follow position with a correlation of {shown(r_q.value)}")
    sentence = ", and ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


# ---- the tiles ------------------------------------------------------------------------------------


def tiles(study: Study) -> list[Tile]:
    """Near keys, variance, scores, loss: of the models that are compared, or of the last checkpoint."""
    made = [
        _tile(study, ("decays",), "of heads favour near keys", "bias",
              "Share of heads whose mean score falls with the distance to the key"),
        _tile(study, ("position_share", "posvar_q"), "of queries and keys is position", "share",
              "Share of the variance of queries and keys that position alone determines, on documents it was not "
              "fitted to"),
        _tile(study, ("position_share_of_score", "score_position"), "of the scores is position", "distance",
              "Share of the variance of scores over single pairs that the distance between them determines"),
        _loss_tile(study),
    ]  # fmt: skip
    return [tile for tile in made if tile is not None]


def _tile(study: Study, columns: tuple[str, ...], label: str, section: str, about: str) -> Tile | None:
    value = next((value for column in columns if (value := heads_mean(study, column)) is not None), None)
    if value is None:
        return None
    ends = f"[{value.low:.0%}, {value.high:.0%}]" if value.interval() else ""
    about = f"{about}. In brackets its 95% interval {over_what(value.over)}."
    return Tile(f"{value.value:.0%}", ends, label, about, section)


def _loss_tile(study: Study) -> Tile | None:
    row = cost_of(study, "position")
    if row is None:
        return None
    low, high = row["delta_nll_low"], row["delta_nll_high"]
    ends = "" if pd.isna(low) else f"[{low:+.2f}, {high:+.2f}]"
    about = "Rise of the loss in nats per token when the position term of all heads' scores is taken away while the "
    about += "model runs; 95% interval over documents."
    return Tile(f"{row['delta_nll']:+.2f}", ends, "nats of loss without position", about, "cause")


def _of(study: Study) -> str:
    """What the tiles are about, in words."""
    runs = models(study)
    if len(runs) > 1:
        return f"over all heads of {len(runs)} models"
    window = f", window {runs[0].window:,}" if runs[0].window else ""
    return f"{runs[0].label}{window}"
