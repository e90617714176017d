"""One row per head with everything the tables say about it: what the report lists and the explorer maps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import ENDS, HEAD_KEY
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


def head_frame(study: Study) -> pd.DataFrame:
    """All heads of all runs, in order; columns of component 0, ``heads`` and ``rotated`` side by side."""
    frames = [study.pc0, study.tables.get("heads"), study.tables.get("rotated")]
    whole: pd.DataFrame | None = None
    for frame in frames:
        if frame is None or frame.empty:
            continue
        if whole is None:
            whole = frame.drop(columns=["pc"], errors="ignore")
            continue
        new = [column for column in frame if column not in whole and column != "pc"]
        whole = whole.merge(frame[[*HEAD_KEY, *new]], on=HEAD_KEY, how="outer", sort=False)
    if whole is None:
        return pd.DataFrame(columns=[*HEAD_KEY, "family", "taxonomy"])
    order = {label: i for i, label in enumerate(study.labels)}
    whole = whole.assign(family=whole["model"].map({run.label: run.family for run in study.runs}))
    if "taxonomy" not in whole:
        whole["taxonomy"] = ""
    ordered = whole.assign(_run=whole["model"].map(order)).sort_values(["_run", "layer", "head"], ignore_index=True)
    return ordered.drop(columns="_run")


def metrics(frame: pd.DataFrame) -> list[Metric]:
    """The numbers there are, as their analyses describe them; interval ends and counts of rows are not among them."""
    described = {column.name: column for table in ("qk", "heads", "rotated") for column in TABLES[table]}
    found = []
    for name, column in described.items():
        if not column.is_metric or name.endswith(ENDS) or name not in frame:
            continue
        if not pd.api.types.is_numeric_dtype(frame[name]) or frame[name].isna().all():
            continue
        on = " (on component 0)" if column in TABLES["qk"] and "omponent" not in column.meaning else ""
        found.append(Metric(name, column.unit, column.meaning + on, column.signed))
    return found


def numbers(frame: pd.DataFrame, column: str) -> list[float | None]:
    """A column for JSON: five significant digits, null where there is none."""
    values = frame[column].to_numpy(float, na_value=np.nan)
    return [None if not np.isfinite(value) else float(f"{value:.5g}") for value in values]
