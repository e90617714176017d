"""Published formulas compared with exact ones."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.figures.figure import Figure, NotApplicable, models, rows, with_window
from qkscope.figures.style import canvas, family_look, grid, panels, shortened
from qkscope.results.study import Study


def prepare_audit(study: Study) -> pd.DataFrame:
    """Published and exact positional variance of every head, and its bias per token and per window."""
    variance = rows(
        study, list(study.runs), "heads", "posvar_q", "posvar_q_published", "posvar_k", "posvar_k_published"
    )
    bias = with_window(study, rows(study, list(study.runs), "rotated", "bias_strength"))
    key = ["model", "layer", "head"]
    columns = ["posvar_q", "posvar_q_published", "posvar_k", "posvar_k_published"]
    heads = variance[[*key, "family", *columns]].merge(bias[[*key, "bias_strength", "bias_window"]], on=key, sort=False)
    if heads.empty:
        raise NotApplicable("heads.csv and rotated.csv have no head in common")
    compared = heads["model"].isin([run.label for run in models(study)])
    windows = heads["model"].map({run.label: run.window for run in study.runs}).astype(float)
    return heads.assign(window=windows, compared=compared)


def draw_audit(data: pd.DataFrame) -> Drawing:
    """Two clouds about the diagonal, and the bias of each run in both units."""
    figure = canvas(7.4, 5.4)
    axes = panels(figure, 2, 2)
    look = family_look(data["family"].tolist())
    for cell, kind, name in ((axes[0, 0], "q", "queries"), (axes[0, 1], "k", "keys")):
        for family, (colour, marker) in look.items():
            heads = data[data["family"] == family]
            cell.scatter(heads[f"posvar_{kind}"], heads[f"posvar_{kind}_published"], s=8, color=colour, marker=marker,
                         alpha=0.6, linewidths=0, rasterized=True, label=shortened(family) or "all")  # fmt: skip
        top = float(data[[f"posvar_{kind}", f"posvar_{kind}_published"]].max().max()) * 1.05
        cell.plot([0, top], [0, top], color="#777777", linewidth=0.9, linestyle=(0, (4, 3)))
        cell.set(xlabel="exact", ylabel="published formula", xlim=(0, top), ylim=(0, top))
        cell.set_title(f"positional variance of {name}")
        grid(cell)
    labels = list(dict.fromkeys(data["model"]))
    for cell, column, name in ((axes[1, 0], "bias_strength", "per token"), (axes[1, 1], "bias_window", "per window")):
        values = [data.loc[data["model"] == label, column].dropna().to_numpy(float) for label in labels]
        middle = [
            np.quantile(values_of_run, [0.25, 0.5, 0.75]) if len(values_of_run) else np.full(3, np.nan)
            for values_of_run in values
        ]
        low, mid, high = np.array(middle).T
        cell.vlines(range(len(labels)), low, high, color="#8a6d3b", linewidth=1.6)
        cell.plot(range(len(labels)), mid, linestyle="none", marker="o", markersize=4, color="#8a6d3b")
        cell.set_xticks(range(len(labels)), [shortened(label, 20) for label in labels], rotation=40, ha="right",
                        rotation_mode="anchor", fontsize=6)  # fmt: skip
        cell.set_title(f"recency bias {name}: median and middle half")
        cell.axhline(0, color="#777777", linewidth=0.7)
        grid(cell)
    return figure


def say_audit(data: pd.DataFrame) -> list[str]:
    """The difference of the two formulas, in the models that are compared or the last checkpoint."""
    sentences = []
    for kind, name in (("q", "queries"), ("k", "keys")):
        heads = data[(data[f"posvar_{kind}"] > 0) & data["compared"]]
        ratio = (heads[f"posvar_{kind}_published"] / heads[f"posvar_{kind}"]).median()
        if heads.empty:
            continue
        sentences.append(
            f"For {name} the published formula gives {ratio:.2g} times the exact linear share in the median head of "
            f"{', '.join(heads['model'].unique()[:2])}{' and others' if heads['model'].nunique() > 2 else ''}; the "
            f"exact one is the larger in {(heads[f'posvar_{kind}'] > heads[f'posvar_{kind}_published']).mean():.0%} of "
            "heads."
        )
    return sentences


AUDIT = Figure(
    "audit/01_published_vs_exact",
    "Published formulas beside exact ones",
    "Every head's positional variance by the published formula against the exact share, with the diagonal; below, the "
    "recency bias of each run per token and per window.",
    prepare_audit,
    draw_audit,
    say_audit,
)
