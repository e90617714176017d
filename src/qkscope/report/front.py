"""The first screen of the report and the answers below it: the choice and order of claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qkscope.figures.eachrun import NAMED, by_run, named, together
from qkscope.figures.figure import models
from qkscope.report.claims import Claim, Claims, details
from qkscope.report.panels import HeadMap, TextPanel, head_maps, text_panels
from qkscope.report.values import COUNTED, DOCUMENTS, Value, in_text, over_what
from qkscope.report.windows import window_note

FINDINGS_SHOWN = 5


@dataclass(frozen=True)
class FrontFinding:
    """A sentence, its certainty and its caveat, the figure that shows it and the section that has the rest."""

    sentence: str
    sure: str
    caveat: str
    figure: str
    section: str


@dataclass(frozen=True)
class Tile:
    """A number that stands for an answer."""

    number: str
    interval: str
    label: str
    """The object and unit of the number."""
    about: str
    """A definition of the number, on hover."""
    section: str


@dataclass(frozen=True)
class Front:
    """The first screen."""

    sentence: str
    lead: str
    """The numbers behind the sentence."""
    why: Claim | None
    """Why the published number says otherwise."""
    tiles: list[Tile]
    of: str
    """The runs that the tiles are about, with their window."""
    maps: list[HeadMap]
    texts: list[TextPanel]
    findings: list[FrontFinding]

    @property
    def small_maps(self) -> bool:
        """True if the maps fit beside the curve, below the texts."""
        return bool(self.maps) and not self.maps[0].across

    @property
    def figures(self) -> set[str]:
        """The figures that findings show."""
        return {finding.figure for finding in self.findings}


def front(claims: Claims) -> Front:
    """Return the first screen of a study; parts without data are left out."""
    return Front(
        sentence=claims.first.headline,
        lead=claims.first.detail or " ".join(details(claims.not_compared)),
        why=claims.published_slope,
        tiles=tiles(claims),
        of=_runs_in_words(claims),
        maps=head_maps(claims.study),
        texts=text_panels(claims.study),
        findings=front_findings(claims),
    )


def front_findings(claims: Claims) -> list[FrontFinding]:
    """Return the first claims of this list that can be made."""
    axes = together({name: sentence for name, one in claims.each.items() if (sentence := _axes(one.axes))}, brief=True)
    placed: list[tuple[Claim | None, str | None, str, str, str]] = [
        (claims.recency, None, "distance/01_distance_curves", "bias",
         "A mean over heads and documents; single scores also follow content."),
        (claims.terms, None, "cause/01_score_terms", "score",
         "Parts depend on the window through the pairs of tokens. A part that varies little can still matter to the "
         "prediction."),
        (claims.loss, None, "cause/02_effects", "cause",
         "Taking a whole term away is a large change; what it costs depends on the texts."),
        (claims.windows, None, "audit/02_same_weights", "windows",
         "No slope of a line compares across windows; the fall per doubling of the distance does."),
        (claims.share, None, "qk-pca/01_pc_roles", "share",
         "It depends on the window: planes that hardly turn within it count as position only in a longer one."),
        (claims.axes if axes else None, axes, "qk-rotation/01_ab_plane_collage", "axes",
         "The axis is fitted to the drift, so correlations along it are high by construction."),
        (claims.formula, None, "audit/01_published_vs_exact", "share",
         "The published formula multiplies shares of two different variances."),
    ]  # fmt: skip
    findings = [
        FrontFinding(sentence or claim.headline, "; ".join(filter(None, (claim.sure, claim.window))),
                     caveat, figure, section)
        for claim, sentence, figure, section, caveat in placed
        if claim is not None and (sentence or claim.headline)
    ]  # fmt: skip
    return findings[:FINDINGS_SHOWN]


def _axes(claim: Claim) -> str:
    """The order of queries and keys along the axis of drift, with its numbers; empty if there are none."""
    if not claim.values:
        return ""
    q, k = claim.values["r_q_a"], claim.values["r_k_a"]
    return (
        f"{claim.headline}: along the axis of drift the correlation with position is {in_text(k.value)} for keys, "
        f"{in_text(q.value)} for queries."
    )


def tiles(claims: Claims) -> list[Tile]:
    """Return the four numbers: near keys, variance, scores, loss."""
    candidates = [
        _tile(_values(claims, "recency", "decays"), "of heads score near keys higher than far ones", "bias",
              "Share of heads whose mean score falls with the distance to the key"),
        _tile(_values(claims, "share", "position_share", "posvar_q"),
              "of what varies in queries and keys is position", "share",
              "Share of the variance of queries and keys that position alone determines, on documents it was not "
              "fitted to"),
        _tile(_values(claims, "score_share", "part_position"),
              "of what varies in scores, which attention sees, is position", "score",
              "Part of the term of position in the variance of scores over single pairs; the four parts sum to 1"),
        _loss_tile(_values(claims, "loss", "position"), claims.loss),
    ]  # fmt: skip
    return [tile for tile in candidates if tile is not None]


def _values(claims: Claims, name: str, *columns: str) -> dict[str, Value]:
    """The number of a claim in each run that has it: the first of these columns."""
    found = {}
    for run, one in claims.each.items():
        values = getattr(getattr(one, name), "values", {})
        value = next((values[column] for column in columns if column in values), None)
        if value is not None:
            found[run] = value
    return found


def _tile(values: Mapping[str, Value], label: str, section: str, about: str) -> Tile | None:
    if not values:
        return None
    numbers = {run: value.share().replace("no more than ", "≤ ") for run, value in values.items()}
    ends = {run: v.counted() or v.interval(percent=True) for run, v in values.items() if v.interval() and v.above_zero}
    over = next(iter(values.values())).over
    over = f" In brackets: 95% interval {over_what(over)}." if ends and over != COUNTED else ""
    return Tile(*_number_and_interval(numbers, ends), label, f"{about}.{over}", section)


def _loss_tile(values: Mapping[str, Value], claim: Claim | None) -> Tile | None:
    if not values or claim is None:
        return None
    numbers = {run: f"{value.value:+.2f}" for run, value in values.items()}
    ends = {run: f"[{value.low:+.2f}, {value.high:+.2f}]" for run, value in values.items() if value.interval()}
    about = "Rise of the loss in nats per token when the position term of all heads' scores is taken away while the "
    about += "model runs; 95% interval over documents."
    label = "nats per token more loss without position" + (f", {claim.window}" if claim.window else "")
    return Tile(*_number_and_interval(numbers, ends), label, about, "cause")


def _number_and_interval(numbers: Mapping[str, str], ends: Mapping[str, str]) -> tuple[str, str]:
    """The large and the small text of a tile: a number and its interval, or those of several runs, by run."""
    if len(numbers) == 1:
        return next(iter(numbers.values())), "".join(ends.values())
    if len(numbers) <= NAMED:
        return " · ".join(numbers.values()), " · ".join(f"{run} {ends.get(run, '')}".strip() for run in numbers)
    small = by_run({run: f"{number} {ends.get(run, '')}".strip() for run, number in numbers.items()})
    return f"{len(numbers)} runs", f"{small}{' each' if len(set(numbers.values())) == 1 and '(' not in small else ''}"


def _runs_in_words(claims: Claims) -> str:
    return ", ".join(filter(None, (named(claims.labels), claims.window)))


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
        (
            "What may be compared?",
            [*filter(None, [window_note(claims.study)]), *details(claims.not_compared), *_copies(claims)],
        ),
    ]
    return [(question, " ".join(sentences)) for question, sentences in pairs if sentences]


def _measured(claims: Claims) -> str:
    study, labels = claims.study, claims.labels
    tables = (study.pc0, study.tables.get("rotated"), study.tables.get("heads"))
    table = next((frame for frame in tables if frame is not None), None)
    n_heads = {label: f"{0 if table is None else int((table['model'] == label).sum()):,}" for label in labels}
    subject = labels[0] if len(labels) == 1 else f"each of {len(labels)} models"
    window = claims.window.replace("window ", " at a window of ") + " tokens" if claims.window else ""
    n_checkpoints = len(study.runs) - len(models(study))
    and_checkpoints = f", and {n_checkpoints} checkpoints" if n_checkpoints else ""
    heads = f"{by_run(n_heads)} query heads of {subject}"
    if len(set(n_heads.values())) > 1:
        heads = f"The query heads of {subject}: {by_run(n_heads)},"
    return f"{heads}{window}{and_checkpoints}."


def _copies(claims: Claims) -> list[str]:
    """Sentences on runs that are an earlier one again."""
    return [f"{copy} is {first} again, the same run, and counts once." for copy, first in claims.copies.items()]


def interval_note(claims: Claims) -> str:
    """Return a sentence that says what the intervals are over."""
    heads = "a bootstrap over key heads (how much a mean depends on which heads there are)"
    counted = "Wilson's for shares of heads, counted by key head"
    one = next(iter(claims.each.values()))
    first = one.mean("qk", "r_q") or one.mean("rotated", "r_k_a")
    if first is not None and first.over == DOCUMENTS:
        return (
            "Intervals are 95%: over documents (jackknife) for correlations, variance, bias and plasticity; "
            f"{counted}; {heads} for the rest."
        )
    return f"Intervals are 95%: {counted}; {heads} for means."
