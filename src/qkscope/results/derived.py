"""Tables derived from others: one row per run, plasticity ranked against other columns, the heads at the top of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.acrossheads import mean_over_heads, rank_correlation
from qkscope.analyses.analysis import HEAD_KEY, one_per_head
from qkscope.analyses.catalogue import DECLARED_TABLES, SCALARS
from qkscope.analyses.components import TAXONOMY
from qkscope.analyses.tabulate import heads_from
from qkscope.errors import TableError
from qkscope.headids import TERMS
from qkscope.options import is_whole
from qkscope.results.schema import STATISTICS, SUMMED_UP, TEXTS, column_names
from qkscope.results.summary import merged_headline


def derived_tables(
    tables: Mapping[str, pd.DataFrame], models: Mapping[str, Mapping[str, Any]]
) -> dict[str, pd.DataFrame]:
    """The tables derived from those of all models in a folder; ``models`` comes from the summary."""
    available = {name: frame for name in SUMMED_UP if (frame := tables.get(name)) is not None}
    if "heads" not in available:
        scalar_tables = {name: frame for name in SCALARS if (frame := tables.get(name)) is not None}
        heads = heads_from(scalar_tables)
        available |= {} if heads is None else {"heads": heads}
    rows = [row for model, entry in models.items() if (row := _run(available, model, entry)) is not None]
    derived = {"runs": pd.DataFrame(rows)} if rows else {}
    heads = available.get("heads")
    if heads is not None and "taxonomy_published" in heads and heads["ap_overall"].notna().any():
        derived["plasticity_links"] = plasticity_links(heads, available.get("rotated"))
    return derived


def _run(tables: Mapping[str, pd.DataFrame], model: str, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row of one model; None if no table has its heads."""
    own_tables = {name: frame[frame["model"] == model] for name, frame in tables.items()}
    if not any(len(frame) for frame in own_tables.values()):
        return None
    rotated = own_tables.get("rotated")
    window = int(rotated["window"].max()) if rotated is not None and len(rotated) else None
    labels = {"model": model, "family": entry.get("family") or "", "phase": "", "step": np.nan, "window": window}
    counts: dict[str, Any] = {"n_heads": max(len(one_per_head(frame)) for frame in own_tables.values())}
    counts |= {name: entry.get(name) for name in ("n_documents", "n_tokens", "loss")}
    return labels | counts | run_row(own_tables, merged_headline(entry))


def run_row(frames: Mapping[str, pd.DataFrame], headline: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """``X_mean``, ``X_median`` over heads and ``X_low``, ``X_high`` of the mean by document; NaN where unknown.

    ``headline`` holds the means with intervals from a summary.
    """
    row: dict[str, float] = {}
    for table, columns in SUMMED_UP.items():
        frame = frames.get(table)
        for column in columns:
            row |= {f"{column}_{name}": value for name, value in _numbers(frame, table, column, headline).items()}
    return row


def _numbers(
    frame: pd.DataFrame | None,
    table: str,
    column: str,
    headline: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    missing = dict.fromkeys(STATISTICS, float("nan"))
    if frame is None or frame.empty or column not in frame:
        return missing
    rows = DECLARED_TABLES[table].whole_heads(frame)
    values = rows[column].to_numpy(float, na_value=np.nan)
    values = values[np.isfinite(values)]
    if not len(values):
        return missing
    summary = headline.get(column, {})
    same = np.isclose(summary.get("mean", np.nan), values.mean(), rtol=1e-6, atol=1e-12)
    ends = {name: summary[name] for name in ("low", "high") if name in summary and same}
    return missing | {"mean": float(values.mean()), "median": float(np.median(values))} | ends


# ---- plasticity and other columns ---------------------------------------------------------------

RANKED_AGAINST = {
    "bias_full_window": "bias_full_window",
    "abs_bias_full_window": "bias_full_window",
    "posvar_q": "posvar_q",
    "posvar_k": "posvar_k",
    "amplification_window": "amplification_window",
    "abs_amplification_window": "amplification_window",
}
"""Numbers that plasticity is ranked against, and their columns; ``abs_``: the absolute value."""


def plasticity_links(heads: pd.DataFrame, rotated: pd.DataFrame | None) -> pd.DataFrame:
    """``plasticity_links``: mean ap_overall of each class and its rank correlation with other columns, by model."""
    needed = {*HEAD_KEY, "family", "k_head", "taxonomy_published", "ap_overall", *RANKED_AGAINST.values()}
    with_ap = heads[[name for name in heads if name in needed]].dropna(subset=["ap_overall"])
    if rotated is not None:
        with_ap = with_ap.merge(rotated[[*HEAD_KEY, "bias_full_window"]], on=HEAD_KEY, how="left")
    rows: list[dict[str, object]] = []
    for (model, family), own_heads in with_ap.groupby(["model", "family"], sort=False):
        labels = {"model": model, "family": family}
        rows += [labels | row for row in [*_by_class(own_heads), *_by_rank(own_heads)]]
    return pd.DataFrame(rows, columns=column_names("plasticity_links"))


def _by_class(heads: pd.DataFrame) -> list[dict[str, object]]:
    rows = []
    for kind in TAXONOMY:
        members = heads[heads["taxonomy_published"] == kind]
        if len(members):
            mean = mean_over_heads(members, ["ap_overall"])
            value, low, high = (mean[f"ap_overall{end}"] for end in ("", "_low", "_high"))
            rows.append(_row("class", kind, len(members), value, low, high))
    return rows


def _by_rank(heads: pd.DataFrame) -> list[dict[str, object]]:
    rows = []
    for name, column in RANKED_AGAINST.items():
        if column not in heads:
            continue
        selected = heads.dropna(subset=[column])
        selected = selected.assign(other=selected[column].abs() if name.startswith("abs_") else selected[column])
        if len(selected) > 2:
            correlation = rank_correlation(selected, "ap_overall", "other")
            rows.append(
                _row("rank", name, len(selected), correlation["rho"], correlation["rho_low"], correlation["rho_high"])
            )
    return rows


def _row(link: str, name: str, n: int, value: float, low: float, high: float) -> dict[str, object]:
    return {"link": link, "name": name, "n_heads": n, "value": value, "value_low": low, "value_high": high}


# ---- the heads that a column ranks highest -----------------------------------------------------


PARTS = tuple(f"part_{term}" for term in TERMS)
"""The columns that say what the scores of a head are made of."""


def suggested(name: str, names: Sequence[str]) -> str:
    """The end of a message about a column that does not exist: the names close to it, or where all are listed."""
    near = [known for known in names if name.lower() in known] or get_close_matches(name, names, 3)
    return f"; did you mean {' or '.join(near[:3])}?" if near else "; qkscope analyze --columns lists all"


def top_heads(heads: pd.DataFrame, by: str, n: int = 10, *, lowest: bool = False) -> pd.DataFrame:
    """The heads with the highest (or lowest) values of a column, with its interval, class, parts and their window."""
    _check_number(heads, by)
    if not is_whole(n) or n < 1:
        raise TableError(f"expected n, how many heads, to be 1 or more, got {n!r}")
    shown = [by, f"{by}_low", f"{by}_high", "head_class", "role", *PARTS, "decay", "window", "flags"]
    rows = heads.dropna(subset=[by]).sort_values(by, ascending=lowest, kind="stable").head(n)
    return rows[
        ["model", "layer", "head", "k_head", *dict.fromkeys(name for name in shown if name in rows)]
    ].reset_index(drop=True)


def number_of_heads(tables: Mapping[str, pd.DataFrame], column: str) -> pd.DataFrame:
    """All tables about whole heads joined; an error with the nearest names if this column is not a number of them."""
    heads = one_row_per_head(tables)
    _check_number(heads, column)
    return heads


def _check_number(heads: pd.DataFrame, column: str) -> None:
    if not isinstance(column, str):
        raise TableError(f"expected the name of a column, such as 'part_position', got {column!r}")
    if column in heads and column in TEXTS:
        raise TableError(f"{column} is text, not a number; give a number such as {', '.join(PARTS)}")
    numbers = [name for name in heads.columns if pd.api.types.is_numeric_dtype(heads[name])]
    if column not in numbers:
        raise TableError(f"heads have no number {column!r}{suggested(column, numbers)}")


def one_row_per_head(tables: Mapping[str, pd.DataFrame], model: str | None = None) -> pd.DataFrame:
    """All tables about whole heads joined: ``heads``, ``rotated`` and component 0 of ``qk``, side by side."""
    frames = [DECLARED_TABLES[name].whole_heads(tables[name]) for name in ("heads", "rotated", "qk") if name in tables]
    if not frames:
        raise TableError("there is no table about heads; run qkscope analyze with all analyses")
    heads = frames[0]
    for frame in frames[1:]:
        new = [name for name in frame if name not in heads and name != "pc"]
        heads = heads.merge(frame[[*HEAD_KEY, *new]], on=HEAD_KEY, how="left")
    if model is None:
        return heads
    if model not in set(heads["model"]):
        raise TableError(f"there is no model {model!r}; there are {', '.join(heads['model'].unique())}")
    return heads[heads["model"] == model]
