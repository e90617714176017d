"""The sentences of the report that are computed from the data."""

from __future__ import annotations

from qkscope.analyses.acrossheads import correlation
from qkscope.figures.bias import prepare_separation
from qkscope.figures.figure import NotApplicable
from qkscope.figures.select import checkpoints, models
from qkscope.report.published import figures, pooled, published
from qkscope.report.sections import rotated, with_derived
from qkscope.report.values import mean_of, shown
from qkscope.study.study import Study


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
        f"For queries the published formula gives {ratio:.2g} times the exact share in the median head; the exact "
        f"share is the larger one in {larger:.0%} of heads.",
        *lines,
    ]


def separability_lines(study: Study) -> list[str]:
    """Published values of separability."""
    return pooled_lines(study, [("fisher_pc0", "Fisher ratio about"), ("separation_pc0", "separation about")])


def axes_lines(study: Study) -> list[str]:
    """Whether queries or keys follow position more closely, on PC0 and on axis a."""
    first, frame = with_derived(study), rotated(study)
    labels = [run.label for run in models(study)]
    if first is None or frame is None or not {"r_q_a", "r_k_a"} <= set(frame):
        return []
    pc = [mean_of(study, labels, first, name) for name in ("r_q", "abs_r_k")]
    axis = [mean_of(study, labels, frame, name) for name in ("r_q_a", "r_k_a")]
    if any(value is None for value in (*pc, *axis)):
        return []
    (q0, k0), (qa, ka) = ([v.value for v in pair if v is not None] for pair in (pc, axis))
    turn = "The order reverses" if (q0 > k0) != (qa > ka) else "The order is the same on both axes"
    return [f"{turn}: on PC0 r_q {q0:.2f} against |r_k| {k0:.2f}, on axis a r_q_a {qa:.2f} against r_k_a {ka:.2f}."]


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


def training_lines(study: Study) -> list[str]:
    """Means at the first and the last checkpoint."""
    try:
        runs = checkpoints(study)
    except NotApplicable:
        return []
    first, frame = with_derived(study), rotated(study)
    wanted = [("r_q", first), ("r_k", first), ("abs_r_k", first), ("explained_variance", first),
              ("position-dominated", first), ("r_k_a", frame), ("mu_q_a", frame), ("alpha_k", frame),
              ("bias_strength", frame), ("bias_window", frame), ("plane_var_fraction", frame)]  # fmt: skip
    lines = []
    for column, table in wanted:
        ends = [mean_of(study, [run.label], table, column) for run in (runs[0], runs[-1])]
        if ends[0] is not None and ends[1] is not None:
            percent = column in ("explained_variance", "position-dominated", "plane_var_fraction")
            published_ends = [published(run.label, column, percent) for run in (runs[0], runs[-1])]
            comparison = f" (published {published_ends[0]} → {published_ends[1]})" if all(published_ends) else ""
            lines.append(f"{column}: {ends[0].marked(percent)} → {ends[1].marked(percent)}{comparison}")
    return [f"Means over heads from {runs[0].label} to {runs[-1].label}:", *lines] if lines else []
