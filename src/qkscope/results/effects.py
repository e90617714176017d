"""Tables of interventions: what a term of a head does to the prediction, and what shorter windows cost.

``effects`` has one row per head and term, ``effects_together`` one per change of all heads and octave of position. They
are written by ``qkscope effects``, into a results folder or on their own; numbers come with intervals over documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import stdtrit

from qkscope.errors import TableError
from qkscope.files.atomic import finish, locked
from qkscope.headids import head_name
from qkscope.results.frames import arranged, read_table, write_tables
from qkscope.results.schema import column_names
from qkscope.results.summary import SUMMARY, is_other, read_summary, record_rows, summary_bytes

LEAST_DOCUMENTS = 4
"""With fewer documents there is no interval."""


def mean_with_interval(
    sums: Float[np.ndarray, "documents"], counts: Float[np.ndarray, "documents"], *, positive: bool = False
) -> tuple[float, float, float]:
    """Σ sums / Σ counts and its 95% interval over documents: jackknife with Student's t, on the root if positive.

    It is centred at the estimate, which for documents of one length is the bias-corrected value unless on the root.
    """
    nonempty = counts > 0
    sums, counts = sums[nonempty], counts[nonempty]
    n = len(sums)
    if not n:
        return float("nan"), float("nan"), float("nan")
    mean = float(sums.sum() / counts.sum())
    if n < LEAST_DOCUMENTS:
        return mean, float("nan"), float("nan")
    replicates = (sums.sum() - sums) / (counts.sum() - counts)
    if positive:
        replicates, centre = np.sqrt(np.maximum(replicates, 0.0)), np.sqrt(max(mean, 0.0))
    else:
        centre = mean
    spread = float(np.sqrt((n - 1) / n * ((replicates - replicates.mean()) ** 2).sum()))
    low, high = centre - stdtrit(n - 1, 0.975) * spread, centre + stdtrit(n - 1, 0.975) * spread
    return (mean, max(low, 0.0) ** 2, high**2) if positive else (mean, low, high)


def interval_text(low: Any, high: Any, form: str) -> str:
    """Return an interval in brackets after a space; empty if there is none.

    >>> interval_text(0.123, 0.456, "+.1f"), interval_text(float("nan"), float("nan"), ".2f")
    (' [+0.1, +0.5]', '')
    """
    return "" if np.isnan(low) or np.isnan(high) else f" [{low:{form}}, {high:{form}}]"


def known_effect(effects: pd.DataFrame) -> pd.Series:
    """Return the divergence of each row: measured where it was, otherwise estimated."""
    estimated: pd.Series = effects["kl_predicted"]
    return effects["kl"].fillna(estimated) if "kl" in effects else estimated


def strongest_heads(effects: pd.DataFrame, n: int = 3) -> list[str]:
    """Return a line for each term: the heads whose effect on the prediction is largest, measured if it was."""
    lines = []
    for term, rows in effects.groupby("term", sort=False):
        largest = known_effect(rows).dropna().sort_values(ascending=False).head(n)
        heads = [
            f"{head_name(layer, head)} ({value:.2g}, {'estimated' if np.isnan(kl) else 'measured'})"
            for value, layer, head, kl in zip(
                largest, *(rows.loc[largest.index, c] for c in ("layer", "head", "kl")), strict=True
            )
        ]
        if heads:
            lines.append(f"{term} matters most in {', '.join(heads)}: divergence without it, in nats per token")
    return lines


def effects_frame(
    about: dict[str, object],
    q_per_kv: int,
    heads: list[tuple[int, int]],
    terms: list[str],
    fisher: Float[np.ndarray, "documents heads terms"],
    single: dict[tuple[tuple[int, int], str], Float[np.ndarray, "documents octaves measures"]],
    chosen: dict[tuple[int, int], str],
    gamma: float,
    lengths: Float[np.ndarray, "documents"],
) -> pd.DataFrame:
    """``effects``; ``single`` has kl, delta_nll, nll and tokens of each change that was measured, ``chosen`` why."""
    rows = []
    for i, (layer, head) in enumerate(heads):
        for t, term in enumerate(terms):
            information = fisher[:, i, t]
            counted = np.isfinite(information) * lengths
            estimate = mean_with_interval(np.nan_to_num(information) * lengths, counted, positive=True)
            measured = single.get(((layer, head), term))
            nothing = dict.fromkeys(("kl", "kl_low", "kl_high", "delta_nll", "delta_nll_low", "delta_nll_high"), np.nan)
            choice = "" if measured is None else chosen[layer, head]
            rows.append(
                about
                | {"layer": layer, "head": head, "k_head": head // q_per_kv}
                | {"term": term, "chosen": choice, "gamma": gamma}
                | dict(
                    zip(
                        ("fisher_information", "fisher_information_low", "fisher_information_high"),
                        estimate,
                        strict=True,
                    )
                )
                | {"kl_predicted": gamma**2 * estimate[0] / 2}
                | (nothing if measured is None else cost_columns(measured.sum(1)))
            )
    return pd.DataFrame(rows, columns=column_names("effects"))


def together_frame(
    about: dict[str, object],
    changes: dict[tuple[str, str], tuple[int, Float[np.ndarray, "documents octaves measures"]]],
    gamma: float,
) -> pd.DataFrame:
    """``effects_together``: each change of some heads over all tokens, and by octave of their position."""
    rows = []
    for (change, heads), (n_heads, sums) in changes.items():
        selections = [("all", np.nan, sums.sum(1))]
        selections += [("octave", float(2**octave), sums[:, octave]) for octave in range(sums.shape[1])]
        for over, start, selected in selections:
            if selected[:, 3].sum() > 0:
                labels = about | {"change": change, "heads": heads, "over": over, "position": start}
                labels |= {"n_heads": n_heads, "gamma": 1.0 if change in ("drift", "control") else gamma}
                rows.append(labels | cost_columns(selected) | {"nll": selected[:, 2].sum() / selected[:, 3].sum()})
    return pd.DataFrame(rows, columns=column_names("effects_together"))


def cost_columns(sums: Float[np.ndarray, "documents measures"]) -> dict[str, float]:
    """Means per token and their intervals, from sums of kl, delta_nll, nll and tokens of each document."""
    tokens = sums[:, 3]
    kl = mean_with_interval(sums[:, 0], tokens, positive=True)
    nll = mean_with_interval(sums[:, 1], tokens)
    names = ("kl", "kl_low", "kl_high", "delta_nll", "delta_nll_low", "delta_nll_high")
    return dict(zip(names, (*kl, *nll), strict=True))


def check_measured(folder: Path, label: str, source: Mapping[str, object]) -> None:
    """Raise an error if a folder has tables of other weights than those of a run (``source``) under this label."""
    if is_other(read_summary(folder)["models"].get(label, {}), source, "weights"):
        raise TableError(
            f"{folder} has tables of {label} from a run of other weights; write elsewhere, or give one of them another "
            "label"
        )


def write_measured(folder: Path, frames: dict[str, pd.DataFrame], source: Mapping[str, object]) -> list[Path]:
    """Write such tables into a folder that keeps its rows of other models; returns the csv files.

    ``source`` identifies the run; the summary records it, so that tables of another run never stand beside these.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        finish(folder)
        merged, summary = {}, read_summary(folder)
        for name, frame in frames.items():
            old = read_table(folder, name)
            other_models = [] if old is None else [old[~old["model"].isin(frame["model"])]]
            nonempty = [rows for rows in (*other_models, frame) if len(rows)]
            if not nonempty:
                raise TableError(f"{name} would have no rows; {folder} is unchanged")
            merged[name] = pd.concat(nonempty, ignore_index=True)
            for label, rows in arranged(name, frame).groupby("model", sort=False):
                check_measured(folder, str(label), source)
                record_rows(summary["models"].setdefault(str(label), {}), name, rows, source)
        return write_tables(folder, merged, {SUMMARY: summary_bytes(summary)})
