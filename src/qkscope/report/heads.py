"""One row per head with all its columns: the table of heads in the report and the map in the explorer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import ENDS, HEAD_KEY
from qkscope.heads import TERMS
from qkscope.results.schema import TABLES
from qkscope.study.study import Study

LISTED = (
    "explained_variance", "r_q", "r_k", "posvar_q", "posvar_k", "posvar_q_published", "r_q_a", "r_k_a", "bias_window",
    "bias_full_window", "bias_causal_window", "bias_strength", "separation_strength", "plane_var_fraction",
    "active_planes", "position_share_of_score", "ap_overall", "ap_drop",
)  # fmt: skip
"""Numbers in the report's table of heads."""


@dataclass(frozen=True)
class Metric:
    """A number per head: its column, unit and meaning."""

    column: str
    unit: str
    meaning: str
    signed: bool
    group: str
    """The question that it belongs to."""


_GROUPS = {
    "Cause": ("effect_", "score_", "position_share_of_score", "positional", "symbolic", "interaction_share"),
    "Reach": ("mass_", "reach", "sink_gap", "curve_area"),
    "Plasticity": ("ap_",),
    "Bias": ("decay", "curve_range", "bias", "alpha", "mu_", "amplification", "slope", "distance", "content_offset",
             "query_term", "interaction", "constant"),
    "Class": ("fisher", "separation", "lda", "plane_var", "r_squared"),
    "Rotation": ("active", "strong", "turning", "omega", "residual", "angle"),
}  # fmt: skip
"""Questions, and how the names of their columns begin; all others are about position."""
_ORDER = ("Position", "Bias", "Cause", "Reach", "Plasticity", "Class", "Rotation")


def question(column: str) -> str:
    """The question that a column belongs to.

    >>> question("decay"), question("r_q"), question("positional_overhead"), question("effect_position")
    ('Bias', 'Position', 'Position', 'Cause')
    """
    if column == "positional_overhead":
        return "Position"
    return next((name for name, starts in _GROUPS.items() if column.startswith(starts)), "Position")


def head_frame(study: Study) -> pd.DataFrame:
    """All heads of all runs, in order; columns of component 0, ``heads`` and ``rotated`` side by side."""
    frames = [study.pc0, study.tables.get("heads"), study.tables.get("rotated"), _effects(study)]
    heads: pd.DataFrame | None = None
    for frame in frames:
        if frame is None or frame.empty:
            continue
        if heads is None:
            heads = frame.drop(columns=["pc"], errors="ignore")
            continue
        new = [column for column in frame if column not in heads and column != "pc"]
        heads = heads.merge(frame[[*HEAD_KEY, *new]], on=HEAD_KEY, how="outer", sort=False)
    if heads is None:
        return pd.DataFrame(columns=[*HEAD_KEY, "family", "taxonomy"])
    order = {label: i for i, label in enumerate(study.labels)}
    heads = heads.assign(family=heads["model"].map({run.label: run.family for run in study.runs}))
    if "taxonomy" not in heads:
        heads["taxonomy"] = ""
    ordered = heads.assign(_run=heads["model"].map(order)).sort_values(["_run", "layer", "head"], ignore_index=True)
    return ordered.drop(columns="_run")


def _effects(study: Study) -> pd.DataFrame | None:
    """One row per head: the estimated effect of each term."""
    effects = study.tables.get("effects")
    if effects is None or effects["kl_predicted"].isna().all():
        return None
    wide = effects.pivot_table(index=list(HEAD_KEY), columns="term", values="kl_predicted")
    return wide.add_prefix("effect_").rename_axis(columns=None).reset_index()


def metrics(frame: pd.DataFrame) -> list[Metric]:
    """The metrics that exist in the frame, as analyses describe them; without interval ends and row counts."""
    described = {column.name: column for table in ("qk", "heads", "rotated") for column in TABLES[table]}
    available = []
    for name, column in described.items():
        if not column.is_metric or name.endswith(ENDS) or name not in frame:
            continue
        if not pd.api.types.is_numeric_dtype(frame[name]) or frame[name].isna().all():
            continue
        on = " (on component 0)" if column in TABLES["qk"] and "omponent" not in column.meaning else ""
        available.append(Metric(name, column.unit, column.meaning + on, column.signed, question(name)))
    for term in TERMS:
        if f"effect_{term}" in frame:
            meaning = f"what the prediction changes by without the {term} term of its scores, estimated"
            available.append(Metric(f"effect_{term}", "nats per token", meaning, False, "Cause"))
    return sorted(available, key=lambda metric: _ORDER.index(metric.group))


def numbers(frame: pd.DataFrame, column: str) -> list[float | None]:
    """A column for JSON: five significant digits, None for missing values."""
    values = frame[column].to_numpy(float, na_value=np.nan)
    return [None if not np.isfinite(value) else float(f"{value:.5g}") for value in values]
