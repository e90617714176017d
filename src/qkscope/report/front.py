"""The first screen of the report and the answers below it: the choice and order of claims."""

from __future__ import annotations

from dataclasses import dataclass

from qkscope.figures.figure import models
from qkscope.report.claims import Claim, Claims, details
from qkscope.report.values import DOCUMENTS, Value, over_what, rounded
from qkscope.report.windows import window_note

FINDINGS_SHOWN = 4


@dataclass(frozen=True)
class FrontFinding:
    """A sentence, its certainty, the figure that shows it and the section that has the rest."""

    sentence: str
    sure: str
    figure: str
    section: str


@dataclass(frozen=True)
class Tile:
    """A number that stands for an answer."""

    number: str
    interval: str
    label: str
    about: str
    """A definition of the number, on hover."""
    section: str


@dataclass(frozen=True)
class Front:
    """The first screen."""

    sentence: str
    lead: str
    """The numbers behind the sentence."""
    tiles: list[Tile]
    of: str
    """The runs that the tiles are about, with their window."""
    findings: list[FrontFinding]

    @property
    def figures(self) -> set[str]:
        """The figures that findings show."""
        return {finding.figure for finding in self.findings}


def front(claims: Claims) -> Front:
    """Return the first screen of a study; parts without data are left out."""
    return Front(
        claims.first.headline, claims.first.detail, tiles(claims), _runs_in_words(claims), front_findings(claims)
    )


def front_findings(claims: Claims) -> list[FrontFinding]:
    """Return the first claims of this list that can be made."""
    axes = None
    if claims.axes.values:
        q, k = claims.axes.values["r_q_a"], claims.axes.values["r_k_a"]
        axes = f"{claims.axes.headline}: along the axis of drift they correlate with it at "
        axes += f"{rounded(k.value)} (keys) and {rounded(q.value)} (queries)."
    loss = claims.loss if claims.loss is not None and len(claims.loss.values) > 1 else None
    placed: list[tuple[Claim | None, str | None, str, str]] = [
        (claims.recency, None, "distance/01_distance_curves", "bias"),
        (claims.terms, None, "cause/01_score_terms", "score"),
        (loss, None, "cause/02_effects", "cause"),
        (claims.windows, None, "audit/02_same_weights", "windows"),
        (claims.axes if axes else None, axes, "qk-rotation/01_ab_plane_collage", "axes"),
        (claims.formula, None, "audit/01_published_vs_exact", "share"),
    ]
    findings = [
        FrontFinding(sentence or claim.headline, "; ".join(filter(None, (claim.sure, claim.window))), figure, section)
        for claim, sentence, figure, section in placed
        if claim is not None
    ]
    return findings[:FINDINGS_SHOWN]


def tiles(claims: Claims) -> list[Tile]:
    """Return the four numbers: near keys, variance, scores, loss."""
    recency, share, scores = (
        {} if claim is None else claim.values for claim in (claims.recency, claims.share, claims.score_share)
    )
    candidates = [
        _tile(recency.get("decays"), "of heads favour near keys", "bias",
              "Share of heads whose mean score falls with the distance to the key"),
        _tile(share.get("position_share") or share.get("posvar_q"), "of queries and keys is position", "share",
              "Share of the variance of queries and keys that position alone determines, on documents it was not "
              "fitted to"),
        _tile(next(iter(scores.values()), None), "of the scores is position", "distance",
              "Share of the variance of scores over single pairs that the distance between them determines"),
        _loss_tile(None if claims.loss is None else claims.loss.values.get("position")),
    ]  # fmt: skip
    return [tile for tile in candidates if tile is not None]


def _tile(value: Value | None, label: str, section: str, about: str) -> Tile | None:
    if value is None:
        return None
    ends = f"[{value.low:.0%}, {value.high:.0%}]" if value.interval() else ""
    return Tile(
        f"{value.value:.0%}", ends, label, f"{about}. In brackets its 95% interval {over_what(value.over)}.", section
    )


def _loss_tile(value: Value | None) -> Tile | None:
    if value is None:
        return None
    ends = f"[{value.low:+.2f}, {value.high:+.2f}]" if value.interval() else ""
    about = "Rise of the loss in nats per token when the position term of all heads' scores is taken away while the "
    about += "model runs; 95% interval over documents."
    return Tile(f"{value.value:+.2f}", ends, "nats of loss without position", about, "cause")


def _runs_in_words(claims: Claims) -> str:
    if len(claims.labels) > 1:
        return f"over all heads of {len(claims.labels)} models"
    return ", ".join(filter(None, (claims.labels[0], claims.window)))


def answers(claims: Claims) -> list[tuple[str, str]]:
    """Return (question, answer) pairs; a question without data is left out."""
    pairs = [
        ("What was measured?", [_measured(claims)]),
        ("How positional are these heads?", details(claims.first_component)),
        ("How much of queries and keys is position?", details(claims.share)),
        ("What kinds of heads are there?", details(claims.classes)),
        ("Who follows position more closely?", details(claims.axes)),
        ("Which way is the bias?", details(claims.recency, claims.published_line)),
        ("Are queries and keys apart?", details(claims.separation)),
        ("What is in the rest?", details(claims.rings)),
        ("Which heads stand out?", details(claims.outstanding)),
        ("What changed over training?", details(claims.changed)),
        ("What may be compared?", [*filter(None, [window_note(claims.study)]), *details(claims.not_compared)]),
    ]
    return [(question, " ".join(sentences)) for question, sentences in pairs if sentences]


def _measured(claims: Claims) -> str:
    study, labels = claims.study, claims.labels
    tables = (study.pc0, study.tables.get("rotated"), study.tables.get("heads"))
    table = next((frame for frame in tables if frame is not None), None)
    n_heads = 0 if table is None else int(table["model"].isin(labels).sum())
    subject = labels[0] if len(labels) == 1 else f"{len(labels)} models"
    window = claims.window.replace("window ", " at a window of ") + " tokens" if claims.window else ""
    n_checkpoints = len(study.runs) - len(models(study))
    and_checkpoints = f", and {n_checkpoints} checkpoints" if n_checkpoints else ""
    return f"{n_heads:,} query heads of {subject}{window}{and_checkpoints}."


def interval_note(claims: Claims) -> str:
    """Return a sentence that says what the intervals are over."""
    heads = "a bootstrap over key heads (how much a mean depends on which heads there are)"
    counted = "Wilson's for shares of heads, counted by key head"
    first = claims.mean("qk", "r_q") or claims.mean("rotated", "r_k_a")
    if first is not None and first.over == DOCUMENTS:
        return (
            "Intervals are 95%: over documents (jackknife) for correlations, variance, bias and plasticity; "
            f"{counted}; {heads} for the rest."
        )
    return f"Intervals are 95%: {counted}; {heads} for means."
