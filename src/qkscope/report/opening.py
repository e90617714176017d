"""The report's first page, in about ten lines: how positional the heads are, which way the bias goes, what changed."""

from __future__ import annotations

import pandas as pd

from qkscope.analyses.components import TAXONOMY
from qkscope.figures.figure import NotApplicable, before_and_after, models
from qkscope.report.sections import frames_of, rotated
from qkscope.report.sentences import decay_lines
from qkscope.report.values import DOCUMENTS, Value, mean_of
from qkscope.report.windows import at_which_windows, changes, window_note
from qkscope.results.study import Study

STAND_OUT = 3
"""Heads named for each extreme."""
CHANGES = [
    ("decay", "heads"),
    ("position_share_q", "heads"),
    ("r_q", "qk"),
    ("position-dominated", "qk"),
    ("bias_window", "rotated"),
]
"""What the first page follows over training."""


def opening(study: Study) -> list[tuple[str, str]]:
    """(question, answer) pairs; every number is computed from the tables, and a question without data is left out."""
    questions = (_measured, _positional, _variance, _classes, _axes, _direction, _apart, _rings, _outstanding, _changed)
    answers = [(question, answer) for ask in questions for question, answer in [ask(study)] if answer]
    note = window_note(study)
    return [*answers, ("What may be compared?", note)] if note else answers


def interval_note(study: Study) -> str:
    """What the intervals are over."""
    heads = "a bootstrap over key heads (how much a mean depends on which heads there are)"
    counted = "Wilson's for shares of heads, counted by key head"
    first = _mean(study, "qk", "r_q") or _mean(study, "rotated", "r_k_a")
    if first is not None and first.over == DOCUMENTS:
        return (
            "Intervals are 95%: over documents (jackknife) for correlations, variance, bias and plasticity; "
            f"{counted}; {heads} for the rest."
        )
    return f"Intervals are 95%: {counted}; {heads} for means."


def _mean(study: Study, table: str, column: str, key: str = "") -> Value | None:
    return mean_of(study, [run.label for run in models(study)], frames_of(study)[table], column, key)


def _measured(study: Study) -> tuple[str, str]:
    runs = models(study)
    table = next(
        (f for f in (study.pc0, study.tables.get("rotated"), study.tables.get("heads")) if f is not None), None
    )
    heads = 0 if table is None else int(table["model"].isin([run.label for run in runs]).sum())
    windows = sorted({run.window for run in runs if run.window})
    named = runs[0].label if len(runs) == 1 else f"{len(runs)} models"
    total = f", and {len(study.runs) - len(runs)} checkpoints" if len(study.runs) > len(runs) else ""
    window = (
        f" at a window of {' to '.join(f'{w:,}' for w in dict.fromkeys([windows[0], windows[-1]]))} tokens"
        if windows
        else ""
    )
    return "What was measured?", f"{heads:,} query heads of {named}{window}{total}."


def _positional(study: Study) -> tuple[str, str]:
    r_q, r_k, share = (_mean(study, "qk", c, c) for c in ("r_q", "abs_r_k", "explained_variance"))
    if r_q is None or r_k is None:
        return "", ""
    more = f" PC0 holds {share.text(percent=True)} of the variance." if share else ""
    return (
        "How positional are these heads?",
        f"On PC0 queries correlate with position at {r_q.text()}, keys at {r_k.text()} (absolute).{more}",
    )


def _variance(study: Study) -> tuple[str, str]:
    whole = [_mean(study, "heads", f"position_share_{kind}") for kind in "qk"]
    linear = [_mean(study, "heads", f"posvar_{kind}") for kind in "qk"]
    sentences = []
    if whole[0] is not None and whole[1] is not None:
        sentences.append(
            f"Position alone determines {whole[0].text(percent=True)} of the queries' variance and "
            f"{whole[1].text(percent=True)} of the keys'."
        )
    if linear[0] is not None and linear[1] is not None:
        part = "Its linear part, the drift, is" if sentences else "Linear in position are"
        sentences.append(f"{part} {linear[0].text(percent=True)} and {linear[1].text(percent=True)}.")
    return "How much of queries and keys is position?", " ".join(sentences)


def _classes(study: Study) -> tuple[str, str]:
    shares = [(kind, value) for kind in TAXONOMY if (value := _mean(study, "qk", kind)) is not None and value.value > 0]
    shares.sort(key=lambda pair: -pair[1].value)
    classes = ", ".join(f"{v.text(percent=True)} {kind}" for kind, v in shares)
    return "What kinds of heads are there?", f"{classes}." if classes else ""


def _axes(study: Study) -> tuple[str, str]:
    q, k = (_mean(study, "rotated", column) for column in ("r_q_a", "r_k_a"))
    if q is None or k is None:
        return "", ""
    who = {1: "Keys", -1: "Queries", 0: "Neither, beyond the intervals"}[k.beside(q)]
    answer = f"{who}: correlations along the drift axis are r_q_a {q.text()}, r_k_a {k.text()}."
    return "Who follows position more closely?", answer


def _direction(study: Study) -> tuple[str, str]:
    positive, bias = (_mean(study, "rotated", column) for column in ("positive", "bias_window"))
    sentences = decay_lines(study)
    if positive is not None:
        size = f", by {bias.text()} in q·k over the window on average" if bias else ""
        sentences.append(f"By the published line {positive.text(percent=True)} of heads favour later keys{size}.")
    return "Which way is the bias?", " ".join(sentences)


def _apart(study: Study) -> tuple[str, str]:
    accuracy, plane = _mean(study, "heads", "lda_accuracy_gaussian"), _mean(study, "rotated", "plane_var_fraction")
    if accuracy is None:
        return "", ""
    more = f" The plane of drift and separation holds {plane.text(percent=True)} of the variance." if plane else ""
    line = f"Were both clouds Gaussian, a line on PC0 and PC1 would tell {accuracy.text(percent=True)} of them apart."
    return "Are queries and keys apart?", line + more


def _rings(study: Study) -> tuple[str, str]:
    planes, strong, share = (
        _mean(study, "heads", column) for column in ("active_planes", "strong_planes", "turning_share")
    )
    if planes is None:
        return "", ""
    closely = f", {strong.text()} of them closely (|r| of 0.3 or more)" if strong else ""
    size = f" What turns is {share.text(percent=True)} of the variance off a and b." if share else ""
    return (
        "What is in the rest?",
        f"Rotation: {planes.text()} of at most 30 planes turn with position beyond chance, a count that "
        f"grows with the number of documents{closely}.{size}",
    )


def _outstanding(study: Study) -> tuple[str, str]:
    labels = [run.label for run in models(study)]
    sentences = []
    frame, heads = rotated(study), study.tables.get("heads")
    if frame is not None and "bias_window" in frame:
        rows = frame[frame["model"].isin(labels)].dropna(subset=["bias_window"])
        sentences.append("strongest bias: " + _names(rows.nlargest(STAND_OUT, "bias_window"), "bias_window", labels))
        if (rows["bias_window"] < 0).any():
            sentences.append(
                "most against it: " + _names(rows.nsmallest(STAND_OUT, "bias_window"), "bias_window", labels)
            )
    if heads is not None and "positional_overhead" in heads:
        rows = heads[heads["model"].isin(labels)].dropna(subset=["positional_overhead"])
        least = rows.nsmallest(STAND_OUT, "positional_overhead")
        sentences.append("least positional variance: " + _names(least, "positional_overhead", labels))
    return "Which heads stand out?", "; ".join(sentences) + ("." if sentences else "")


def _names(rows: pd.DataFrame, column: str, labels: list[str]) -> str:
    named = []
    for _, row in rows.iterrows():
        place = f"l{row['layer']:02d}h{row['head']:02d}" + (f" of {row['model']}" if len(labels) > 1 else "")
        named.append(f"{place} ({row[column]:.3g})")
    return ", ".join(named)


def _changed(study: Study) -> tuple[str, str]:
    try:
        first, last = before_and_after(study)
    except NotApplicable:
        return "", ""
    said = changes(study, CHANGES, first, last)
    at = at_which_windows(study, first, last)
    return "What changed over training?", f"From {first} to {last}{at}: " + " ".join(said) if said else ""
