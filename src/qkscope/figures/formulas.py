"""Published formulas compared with exact ones."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.figures.eachrun import of_each_run
from qkscope.figures.figure import Figure, models, rows
from qkscope.figures.style import canvas, family_look, grid, panels, shortened
from qkscope.progress import plural
from qkscope.results.study import Study


def prepare_audit(study: Study) -> pd.DataFrame:
    """Published and exact positional variance of every head of the models."""
    columns = ["posvar_q", "posvar_q_published", "posvar_k", "posvar_k_published"]
    return rows(study, models(study), "heads", *columns)[["model", "layer", "head", "family", *columns]]


def draw_audit(data: pd.DataFrame) -> Drawing:
    """Two clouds about the diagonal."""
    group = "family" if data["family"].nunique() > 1 else "model"
    look = family_look(data[group].tolist())
    figure = canvas(7.4, 3.3 if len(look) > 1 else 3.0)
    top = float(data.filter(like="posvar_").max().max()) * 1.05 or 1.0
    for cell, kind, name in zip(panels(figure, 1, 2)[0], "qk", ("queries", "keys"), strict=True):
        for label, (colour, marker) in look.items():
            heads = data[data[group] == label]
            cell.scatter(heads[f"posvar_{kind}"], heads[f"posvar_{kind}_published"], s=12, color=colour, marker=marker,
                         alpha=0.65, linewidths=0, rasterized=True, label=shortened(label) or "all")  # fmt: skip
        cell.plot([0, top], [0, top], color="#777777", linewidth=0.9, linestyle=(0, (4, 3)))
        cell.set(xlabel="exact share of variance", ylabel="published formula", xlim=(0, top), ylim=(0, top))
        cell.set_title(f"linear positional variance of {name}")
        grid(cell)
    if len(look) > 1:
        figure.legend(*cell.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(look)))
    return figure


def say_audit(data: pd.DataFrame) -> list[str]:
    """The difference of the two formulas in a run's heads."""
    sentences = []
    for kind, name in (("q", "queries"), ("k", "keys")):
        heads = data[data[f"posvar_{kind}"] > 0]
        if heads.empty:
            continue
        ratio = (heads[f"posvar_{kind}_published"] / heads[f"posvar_{kind}"]).median()
        larger = (heads[f"posvar_{kind}"] > heads[f"posvar_{kind}_published"]).sum()
        sentences.append(
            f"For {name} the published formula gives {ratio:.2g} times the exact linear share in the median head; the "
            f"exact one is the larger in {larger} of {plural(len(heads), 'head')}."
        )
    return sentences or ["No head has a linear positional variance above 0, so the formulas are not compared."]


AUDIT = Figure(
    "audit/01_published_vs_exact",
    "Published formulas beside exact ones",
    "Every head's linear positional variance by the published formula against the exact share of the variance, with "
    "the diagonal, where both would be the same.",
    prepare_audit,
    draw_audit,
    of_each_run(say_audit),
)
