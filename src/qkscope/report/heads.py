"""One row per head with everything the tables say about it: what the report lists and the explorer maps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from qkscope.store.columns import TABLES
from qkscope.study import Study

KEY = ["model", "layer", "head"]
LISTED = (
    "explained_variance", "r_q", "r_k", "posvar_q", "posvar_k", "posvar_q_published", "r_q_a", "r_k_a", "bias_window",
    "bias_full_window", "bias_causal_window", "bias_strength", "separation_strength", "plane_var_fraction",
    "active_planes", "position_share_of_score", "ap_overall", "ap_drop",
)  # fmt: skip
"""Numbers in the report's table of heads."""
SIGNED = frozenset(
    {
        "r_q", "r_k", "r_q_a", "r_k_a", "alpha_q", "alpha_k", "mu_q_a", "mu_k_a", "mu_q_b", "mu_k_b", "bias_strength",
        "bias_full", "bias_window", "bias_full_window", "logit_bias_window", "amplification", "amplification_window",
        "query_term", "interaction", "constant", "mu_q", "mu_k", "slope_q", "slope_k", "a_qk_cos", "b_centroid_cos",
        "omega", "distance_corr", "bias_causal", "bias_causal_window", "ap_drop", "r_q_heldout", "r_k_heldout",
    }
)  # fmt: skip
"""Numbers whose zero means something: they are coloured about it."""


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
        whole = whole.merge(frame[[*KEY, *new]], on=KEY, how="outer", sort=False)
    if whole is None:
        return pd.DataFrame(columns=[*KEY, "family", "taxonomy"])
    order = {label: i for i, label in enumerate(study.labels)}
    whole = whole.assign(family=whole["model"].map({run.label: run.family for run in study.runs}))
    if "taxonomy" not in whole:
        whole["taxonomy"] = ""
    ordered = whole.assign(_run=whole["model"].map(order)).sort_values(["_run", "layer", "head"], ignore_index=True)
    return ordered.drop(columns="_run")


def metrics(frame: pd.DataFrame) -> list[Metric]:
    """The numbers there are, as columns.py describes them; interval ends and counts of rows are not among them."""
    described = {column.name: column for table in ("qk", "heads", "rotated") for column in TABLES[table]}
    skipped = {*KEY, "k_head", "pc", "window", "sliding_window", "n_q", "n_k"}
    found = []
    for name, column in described.items():
        ends = name.endswith(("_se", "_low", "_high"))
        if name in skipped or ends or name not in frame or not pd.api.types.is_numeric_dtype(frame[name]):
            continue
        if column.unit == "true/false" or frame[name].isna().all():
            continue
        on = " (on component 0)" if column in TABLES["qk"] and "omponent" not in column.meaning else ""
        found.append(Metric(name, column.unit, column.meaning + on, name in SIGNED))
    return found


def numbers(frame: pd.DataFrame, column: str) -> list[float | None]:
    """A column for JSON: five significant digits, null where there is none."""
    values = frame[column].to_numpy(float, na_value=np.nan)
    return [None if not np.isfinite(value) else float(f"{value:.5g}") for value in values]
