"""The sentences of the report that are computed from the data."""

from __future__ import annotations

import pandas as pd

from qkscope.analyses.acrossheads import correlation
from qkscope.figures.bias import prepare_separation
from qkscope.figures.figure import NotApplicable, checkpoints, models
from qkscope.report.sections import frames_of, rotated, with_derived
from qkscope.report.values import figures, mean_of, pooled, published, shown
from qkscope.report.windows import at_which_windows, changes, in_percent
from qkscope.results.study import Study


def pooled_lines(study: Study, pairs: list[tuple[str, str]]) -> list[str]:
    """Published values over all models, if the study contains at least two of those models."""
    published_runs = [run for run in models(study) if run.label.lower() in figures()["models"]]
    if len(published_runs) < 2:
        return []
    values = [f"{text} {_range(value)}" for name, text in pairs if (value := pooled(name)) is not None]
    return [f"Published over 11 models and 3,239 heads: {', '.join(values)}."]


def _range(value: float | list[float]) -> str:
    """A published value, or the range over models that a pair of values means."""
    return " to ".join(shown(end) for end in value) + " by model" if isinstance(value, list) else shown(value)


def share_lines(study: Study) -> list[str]:
    """How far the published formula is from the exact share."""
    heads = study.tables.get("heads")
    lines = pooled_lines(study, [("posvar_q_published", "queries"), ("posvar_k_published", "keys")])
    if heads is None or not {"posvar_q", "posvar_q_published"} <= set(heads):
        return lines
    rows = heads[heads["model"].isin([run.label for run in models(study)])]
    rows = rows.dropna(subset=["posvar_q", "posvar_q_published"])
    rows = rows[rows["posvar_q"] > 0]
    if rows.empty:
        return lines
    ratio = (rows["posvar_q_published"] / rows["posvar_q"]).median()
    larger = (rows["posvar_q"] > rows["posvar_q_published"]).mean()
    return [
        f"For queries the published formula gives {ratio:.2g} times the exact linear share in the median head; the "
        f"exact one is the larger in {larger:.0%} of heads{_pooled_over(study)}.",
        *_first_component(rows),
        *lines,
    ]


def _first_component(rows: pd.DataFrame) -> list[str]:
    """PC0's part of what the published formula adds up over components."""
    names = ["posvar_q_pc0_share", "posvar_k_pc0_share"]
    if not set(names) <= set(rows):
        return []
    parts = [
        f"{rows[name].mean():.0%} of the {kind} (published {pooled(name):.0%})"
        for name, kind in zip(names, ("queries'", "keys'"), strict=True)
    ]
    return [f"Of the published sum over components, PC0 alone makes {' and '.join(parts)}."]


def separability_lines(study: Study) -> list[str]:
    """Published values of separability."""
    return pooled_lines(study, [("fisher_pc0", "Fisher ratio about"), ("separation_pc0", "separation about")])


def axes_lines(study: Study) -> list[str]:
    """Whether queries or keys follow position more closely, on PC0 and on axis a, where the intervals tell."""
    first, frame = with_derived(study), rotated(study)
    labels = [run.label for run in models(study)]
    if first is None or frame is None or not {"r_q_a", "r_k_a"} <= set(frame):
        return []
    q0, k0 = (mean_of(study, labels, first, name) for name in ("r_q", "abs_r_k"))
    qa, ka = (mean_of(study, labels, frame, name) for name in ("r_q_a", "r_k_a"))
    if q0 is None or k0 is None or qa is None or ka is None:
        return []
    orders = q0.beside(k0), qa.beside(ka)
    turn = (
        "The order on the two axes cannot be told from these intervals"
        if 0 in orders
        else "The order reverses"
        if orders[0] != orders[1]
        else "The order is the same on both axes"
    )
    numbers = f"on PC0 r_q {q0.text()} against |r_k| {k0.text()}, on axis a r_q_a {qa.text()} against r_k_a {ka.text()}"
    return [f"{turn}: {numbers}{_pooled_over(study)}."]


def axes_title(study: Study) -> str:
    """Who follows position more closely along the drift axis, where the intervals tell."""
    frame, labels = rotated(study), [run.label for run in models(study)]
    q, k = (mean_of(study, labels, frame, name) for name in ("r_q_a", "r_k_a"))
    order = 0 if q is None or k is None else k.beside(q)
    return {
        1: "Keys follow position more closely than queries",
        -1: "Queries follow position more closely than keys",
        0: "Queries and keys follow position about as closely",
    }[order]


def distance_title(study: Study) -> str:
    """How far the distance curve follows from means."""
    heads, labels = study.tables.get("heads"), [run.label for run in models(study)]
    worst = mean_of(study, labels, heads, "distance_worst")
    if worst is None:
        return "The distance curve and what means say of it"
    return f"Means predict the distance curve to within {worst.value:.2g} logits"


def decay_lines(study: Study) -> list[str]:
    """Which way the mean score goes with distance, and by how much."""
    heads, labels = frames_of(study)["heads"], [run.label for run in models(study)]
    decays, decay = (mean_of(study, labels, heads, name) for name in ("decays", "decay"))
    if decays is None or decay is None:
        return []
    if decay.low > 0:
        course = f"falls by {decay.text()} logits"
    elif decay.high < 0:
        course = f"rises by {decay.negative().text()} logits"
    else:
        course = f"falls by {decay.text()} logits, which may be none,"
    return [
        f"{decays.text(percent=True)} of heads favour near keys: with every doubling of the distance the mean score "
        f"{course} on average over heads{_pooled_over(study)}."
    ]


def bias_lines(study: Study) -> list[str]:
    """Which way heads lean, by the window-free decay and by the published line, beside the published shares."""
    frame, labels = rotated(study), [run.label for run in models(study)]
    lines = decay_lines(study)
    positive, mean_query = (mean_of(study, labels, frame, name) for name in ("positive", "mu_q_a_positive"))
    if positive is not None and mean_query is not None:
        lines.append(
            f"By the published line {positive.text(percent=True)} of heads favour later keys (published "
            f"{pooled('positive_bias_share'):.1%} over 11 models); mu_q_a is positive in "
            f"{mean_query.text(percent=True)} (published {pooled('mu_q_a_positive_share'):.1%})."
        )
    return lines


def complement_lines(study: Study) -> list[str]:
    """Significance beside size, and what drifts within a class; then published values."""
    heads, frame, labels = study.tables.get("heads"), rotated(study), [run.label for run in models(study)]
    lines = []
    if heads is not None and {"active_planes", "strong_planes", "turning_share"} <= set(heads):
        rows = heads[heads["model"].isin(labels)].dropna(subset=["active_planes", "strong_planes"])
        active, strong = rows["active_planes"].sum(), rows["strong_planes"].sum()
        if active > 0:
            lines.append(
                f"Of {int(active):,} active planes {1 - float(strong) / float(active):.0%} have |angle_r| below 0.3: "
                f"active says that a plane turns, not how much. {rows['turning_share'].mean():.0%} of the variance off "
                "a and b turns."
            )
    if frame is not None and {"residual_r_q", "residual_r_k"} <= set(frame):
        rows = frame[frame["model"].isin(labels)]
        lines.append(
            "Within a class some directions off a and b do drift: along the strongest, |r| with position is "
            f"{rows['residual_r_q'].median():.2f} for queries and {rows['residual_r_k'].median():.2f} for keys in the "
            "median head."
        )
    return [
        *lines,
        *pooled_lines(
            study,
            [
                ("active_planes_of_30", "active planes"),
                ("active_planes_complement_variance", "share of the complement"),
            ],
        ),
    ]


def _pooled_over(study: Study) -> str:
    """What a number pools, if it pools several runs."""
    runs = models(study)
    return "" if len(runs) == 1 else f" (over all heads of {len(runs)} models)"


def simpson_lines(study: Study) -> list[str]:
    """Bias and separation pooled, and family by family."""
    try:
        data = prepare_separation(study)
    except NotApplicable:
        return []
    pooled_r = correlation(data["separation_strength"], data["bias_strength"])
    lines = [f"Over all {len(data):,} heads: r = {pooled_r:+.2f}."]
    if data["family"].nunique() < 2:
        return lines
    published_r = pooled("bias_separation_r")
    for family, heads in data.groupby("family", sort=False):
        r = correlation(heads["separation_strength"], heads["bias_strength"])
        comparison = f" (published {published_r[family]:+.2f})" if family in published_r else ""
        lines.append(f"{str(family) or 'No family'}: r = {r:+.2f}{comparison}, {len(heads):,} heads.")
    return lines


FOLLOWED = [("decay", "heads"), ("position_share_q", "heads"), ("position_share_k", "heads"), ("r_q", "qk"),
            ("r_k", "qk"), ("abs_r_k", "qk"), ("explained_variance", "qk"), ("position-dominated", "qk"),
            ("r_k_a", "rotated"), ("mu_q_a", "rotated"), ("alpha_k_window", "rotated"), ("bias_window", "rotated"),
            ("plane_var_fraction", "rotated")]  # fmt: skip


def training_lines(study: Study) -> list[str]:
    """How means change: from the first checkpoint to the last, and from the end of the first window to the last."""
    try:
        runs = checkpoints(study)
    except NotApplicable:
        return []
    lines = _changes(study, runs[0].label, runs[-1].label)
    shorter = [run.label for run in runs if run.window == runs[0].window]
    if len(shorter) not in (1, len(runs)):
        lines += _changes(study, shorter[-1], runs[-1].label)
        lines += _own_windows(study, shorter[-1], runs[-1].label)
    return lines


def _changes(study: Study, before: str, after: str) -> list[str]:
    said = [_with_published(line, before, after) for line in changes(study, FOLLOWED, before, after)]
    at = at_which_windows(study, before, after)
    return [f"Means over heads from {before} to {after}{at}:", *said] if said else []


def _with_published(line: str, before: str, after: str) -> str:
    column = line.split(":", 1)[0]
    ends = [published(label, column, in_percent(column)) for label in (before, after)]
    return f"{line} (published {ends[0]} → {ends[1]})" if all(ends) else line


def _own_windows(study: Study, before: str, after: str) -> list[str]:
    """The same change by lines at each run's own window, as published: not a comparison of like with like."""
    frame, said = rotated(study), []
    for column, name in (("bias_strength", "per token"), ("bias_window", "per window")):
        ends = [mean_of(study, [label], frame, column) for label in (before, after)]
        if ends[0] is not None and ends[1] is not None:
            said.append(f"{name} the bias {ends[0].change(ends[1])} ({ends[0].text()} → {ends[1].text()})")
    windows = [study.run(label).window for label in (before, after)]
    if not said or None in windows or windows[0] == windows[1]:
        return []
    return [
        f"At their own windows ({windows[0]:,} and {windows[1]:,}), by a line fitted to a curve that is close to "
        f"logarithmic: {'; '.join(said)}. Neither says whether the head changed."
    ]
