"""Tables of interventions: what a term of a head does to the prediction, and what shorter windows cost.

``effects`` has one row per head and term, ``effects_together`` one per change of all heads and octave of position. They
are written by ``qkscope effects``, into a results folder or on their own; numbers come with intervals over documents.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import stdtrit

from qkscope.errors import TableError
from qkscope.files.atomic import finish, locked
from qkscope.results.frames import read_table, write_tables
from qkscope.results.schema import column_names

LEAST_DOCUMENTS = 4
"""With fewer documents there is no interval."""


def mean_with_interval(
    sums: Float[np.ndarray, "documents"], counts: Float[np.ndarray, "documents"], *, positive: bool = False
) -> tuple[float, float, float]:
    """Σ sums / Σ counts and its 95% interval over documents: jackknife with Student's t, on the root if positive."""
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


def effects_frame(
    model: str,
    family: str,
    q_per_kv: int,
    heads: list[tuple[int, int]],
    terms: list[str],
    fisher: Float[np.ndarray, "documents heads terms"],
    single: dict[tuple[tuple[int, int], str], Float[np.ndarray, "documents octaves measures"]],
    strongest: set[tuple[int, int]],
    gamma: float,
    lengths: Float[np.ndarray, "documents"],
) -> pd.DataFrame:
    """``effects``; ``single`` has kl, delta_nll, nll and tokens of each change that was measured."""
    rows = []
    for i, (layer, head) in enumerate(heads):
        for t, term in enumerate(terms):
            information = fisher[:, i, t]
            counted = np.isfinite(information) * lengths
            estimate = mean_with_interval(np.nan_to_num(information) * lengths, counted, positive=True)
            measured = single.get(((layer, head), term))
            nothing = dict.fromkeys(("kl", "kl_low", "kl_high", "delta_nll", "delta_nll_low", "delta_nll_high"), np.nan)
            choice = "" if measured is None else "strongest" if (layer, head) in strongest else "random"
            rows.append(
                {"model": model, "family": family, "layer": layer, "head": head, "k_head": head // q_per_kv}
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
    model: str,
    family: str,
    changes: dict[str, Float[np.ndarray, "documents octaves measures"]],
    n_heads: int,
    gamma: float,
) -> pd.DataFrame:
    """``effects_together``: each change over all tokens, and by octave of their position."""
    rows = []
    for change, sums in changes.items():
        selections = [("all", np.nan, sums.sum(1))]
        selections += [("octave", float(2**octave), sums[:, octave]) for octave in range(sums.shape[1])]
        for over, start, selected in selections:
            if selected[:, 3].sum() > 0:
                labels = {"model": model, "family": family, "change": change, "over": over, "position": start}
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


def write_measured(folder: Path, frames: dict[str, pd.DataFrame]) -> list[Path]:
    """Write such tables into a folder that keeps its rows of other models; returns the csv files."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        finish(folder)
        merged = {}
        for name, frame in frames.items():
            old = read_table(folder, name)
            other_models = [] if old is None else [old[~old["model"].isin(frame["model"])]]
            nonempty = [rows for rows in (*other_models, frame) if len(rows)]
            if not nonempty:
                raise TableError(f"{name} would have no rows; {folder} is unchanged")
            merged[name] = pd.concat(nonempty, ignore_index=True)
        return write_tables(folder, merged, {})
