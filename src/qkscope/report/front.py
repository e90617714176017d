"""The report's first screen: one sentence, four numbers, four findings; all of it computed."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from qkscope.figures.figure import NotApplicable
from qkscope.figures.select import before_and_after, models
from qkscope.report.frontfindings import FRONT_FINDINGS, FrontFinding, compared_labels, cost_of, heads_mean
from qkscope.report.sections import frames_of, rotated
from qkscope.report.values import mean_of, over_what, shown
from qkscope.report.windows import comparison
from qkscope.study.study import Study

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
