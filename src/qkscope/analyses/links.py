"""Does plasticity go with what the PCA and the rotation model say? By class of heads, and by rank."""

from __future__ import annotations

import pandas as pd

from qkscope.analyses.overheads import mean_over_heads, rank_correlation
from qkscope.analyses.pca import TAXONOMY

KEY = ["model", "layer", "head"]
RANKED = {
    "bias_full_window": "bias_full_window",
    "abs_bias_full_window": "bias_full_window",
    "posvar_q": "posvar_q",
    "posvar_k": "posvar_k",
    "amplification_window": "amplification_window",
    "abs_amplification_window": "amplification_window",
}
"""What plasticity is ranked against, and the column it comes from; ``abs_`` leaves out the sign."""
COLUMNS = ["model", "family", "link", "name", "n_heads", "value", "value_low", "value_high"]


def plasticity_links(heads: pd.DataFrame, rotated: pd.DataFrame | None) -> pd.DataFrame:
    """``plasticity_links``: mean ap_overall of each class, and its rank correlation with other columns, by model."""
    known = heads.dropna(subset=["ap_overall"])
    if rotated is not None:
        known = known.merge(rotated[[*KEY, "bias_full_window"]], on=KEY, how="left")
    rows: list[dict[str, object]] = []
    for (model, family), part in known.groupby(["model", "family"], sort=False):
        named = {"model": model, "family": family}
        rows += [named | row for row in [*_by_class(part), *_by_rank(part)]]
    return pd.DataFrame(rows, columns=COLUMNS)


def _by_class(heads: pd.DataFrame) -> list[dict[str, object]]:
    rows = []
    for kind in TAXONOMY:
        part = heads[heads["taxonomy"] == kind]
        if len(part):
            found = mean_over_heads(part, ["ap_overall"])
            value, low, high = (found[f"ap_overall{end}"] for end in ("", "_low", "_high"))
            rows.append(_row("class", kind, len(part), value, low, high))
    return rows


def _by_rank(heads: pd.DataFrame) -> list[dict[str, object]]:
    rows = []
    for name, column in RANKED.items():
        if column not in heads:
            continue
        part = heads.dropna(subset=[column])
        part = part.assign(other=part[column].abs() if name.startswith("abs_") else part[column])
        if len(part) > 2:
            found = rank_correlation(part, "ap_overall", "other")
            rows.append(_row("rank", name, len(part), found["rho"], found["rho_low"], found["rho_high"]))
    return rows


def _row(link: str, name: str, n: int, value: float, low: float, high: float) -> dict[str, object]:
    return {"link": link, "name": name, "n_heads": n, "value": value, "value_low": low, "value_high": high}
