"""Effects of terms on the prediction, head by head, and their correlation with descriptions of heads (cause 02, 03)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import rank_correlation
from qkscope.figures.figure import Figure, NotApplicable, needed
from qkscope.figures.scoreterms import TERM_COLOURS
from qkscope.figures.style import INK, canvas, grid, panels
from qkscope.heads import TERMS
from qkscope.results.study import Study

DESCRIPTIONS = (
    "curve_range",
    "decay",
    "position_share",
    "lock_q",
    "positional_overhead",
    "r_q",
    "r_k",
    "score_content",
)


def prepare_effects(study: Study) -> pd.DataFrame:
    """Estimated and, if available, measured divergence of every head and term of the last run that has them."""
    effects = needed(study.tables.get("effects"), "effects; qkscope effects writes it")
    last = [label for label in study.labels if label in set(effects["model"])][-1]
    columns = ["model", "layer", "head", "k_head", "term", "gamma", "kl_predicted", "kl", "kl_low", "kl_high"]
    data = effects[effects["model"] == last][columns].reset_index(drop=True)
    if not (data[["kl_predicted", "kl"]] > 0).any().any():
        raise NotApplicable("no head's effect was estimated or measured (qkscope effects --passes and --measure)")
    return data


def draw_effects(data: pd.DataFrame) -> Drawing:
    """One panel per term: small dots are estimates, by layer; rings are measured."""
    figure = canvas(7.6, 2.5)
    cells = panels(figure, 1, len(TERMS), sharey=True)[0]
    for cell, term in zip(cells, TERMS, strict=True):
        of_term = data[data["term"] == term]
        estimated = of_term[of_term["kl_predicted"] > 0]
        centre, last_head = of_term["head"].mean(), max(float(of_term["head"].max()), 1.0)
        shift = (estimated["head"] - centre) / last_head * 0.6
        cell.scatter(estimated["layer"] + shift, estimated["kl_predicted"], s=7, color=TERM_COLOURS[term], linewidths=0)
        measured = of_term[of_term["kl"] > 0]
        measured_shift = (measured["head"] - centre) / last_head * 0.6
        cell.scatter(
            measured["layer"] + measured_shift, measured["kl"], s=18, facecolors="none", edgecolors=INK, linewidths=0.7
        )
        cell.set(yscale="log", xlabel="layer", title=term)
        grid(cell)
    cells[0].set_ylabel("divergence without the term\n(nats per token)")
    return figure


def say_effects(data: pd.DataFrame) -> list[str]:
    """The concentration of the effect in few heads, and the agreement of estimate and measurement."""
    sentences = []
    for term in TERMS:
        of_term = data[(data["term"] == term) & data["kl_predicted"].notna()]
        if of_term.empty:
            continue
        ordered = of_term.sort_values("kl_predicted", ascending=False)
        tenth = ordered.head(max(1, len(of_term) // 10))
        share = tenth["kl_predicted"].sum() / max(of_term["kl_predicted"].sum(), 1e-300)
        top = ordered.iloc[0]
        text = (
            f"{_without(data, term)}, the strongest tenth of heads carries {share:.0%} of the estimated divergence; "
            f"first is layer {int(top['layer'])}, head {int(top['head'])}."
        )
        measured = of_term.dropna(subset=["kl"])
        if len(measured) > 2:
            rho = rank_correlation(measured, "kl_predicted", "kl")
            text += (
                f" On {len(measured)} heads where it was measured the ranks agree at ρ = {rho['rho']:.2f} "
                f"[{rho['rho_low']:.2f}, {rho['rho_high']:.2f}]."
            )
        sentences.append(text)
    return sentences


def _without(data: pd.DataFrame, term: str) -> str:
    """The removed part of a term, in words."""
    gamma = float(data["gamma"].iloc[0])
    return f"Without {term}" if gamma == 1 else f"With {gamma:.0%} of {term} taken away"


def prepare_descriptions(study: Study) -> pd.DataFrame:
    """Rank correlation over heads of each description with the estimated effect of each term, and its interval."""
    data = prepare_effects(study)
    heads = needed(study.tables.get("heads"), "heads")
    heads = heads[heads["model"] == data["model"].iloc[0]]
    ranks = description_ranks(heads, data, DESCRIPTIONS)
    if ranks.empty:
        raise NotApplicable("there are no descriptions of the heads whose effects are known")
    return ranks.assign(model=data["model"].iloc[0])


def description_ranks(heads: pd.DataFrame, effects: pd.DataFrame, descriptions: Sequence[str]) -> pd.DataFrame:
    """Spearman's ρ over heads of each description with the estimated effect of each term, and its interval."""
    rows = []
    for column in descriptions:
        for term in TERMS if column in heads else ():
            of_term = effects[effects["term"] == term][["layer", "head", "kl_predicted"]]
            joined = heads.merge(of_term, on=["layer", "head"]).dropna(subset=[column, "kl_predicted"])
            if len(joined) > 2:
                rows.append({"description": column, "term": term} | rank_correlation(joined, column, "kl_predicted"))
    return pd.DataFrame(rows)


def draw_descriptions(data: pd.DataFrame) -> Drawing:
    """One panel per term, descriptions as rows, intervals over key heads."""
    names = list(data["description"].unique())
    figure = canvas(7.6, 0.26 * len(names) + 0.9)
    cells = panels(figure, 1, len(TERMS), sharey=True)[0]
    for cell, term in zip(cells, TERMS, strict=True):
        of_term = data[data["term"] == term].set_index("description").reindex(names)
        y = np.arange(len(names))[::-1]
        cell.axvline(0, color="#777777", linewidth=0.7)
        cell.hlines(y, of_term["rho_low"], of_term["rho_high"], color=TERM_COLOURS[term], linewidth=1.6)
        cell.plot(of_term["rho"], y, "o", color=TERM_COLOURS[term], markersize=3.5)
        cell.set(xlim=(-1, 1), xlabel="rank correlation", title=term)
        cell.set_yticks(y, names)
        grid(cell, "x")
    return figure


def say_descriptions(data: pd.DataFrame) -> list[str]:
    """The description that correlates most with each term, and those whose interval includes 0."""
    sentences = []
    for term in TERMS:
        of_term = data[data["term"] == term]
        if of_term.empty:
            continue
        best = of_term.loc[of_term["rho"].abs().idxmax()]
        silent = of_term.loc[(of_term["rho_low"] <= 0) & (of_term["rho_high"] >= 0), "description"].tolist()
        sentences.append(
            f"The effect of {term} goes most with {best['description']} (ρ = {best['rho']:+.2f} "
            f"[{best['rho_low']:+.2f}, {best['rho_high']:+.2f}])"
            + (f"; {', '.join(silent)} may say nothing about it." if silent else ".")
        )
    return sentences


EFFECTS_FIGURE = Figure(
    "cause/02_effects",
    "What the prediction loses without a term",
    "Divergence of the prediction when one term of one head's scores is taken away: dots are estimated for every head "
    "from backward passes (half of the Fisher information), rings are measured by doing it.",
    prepare_effects,
    draw_effects,
    say_effects,
)
DESCRIPTIONS_FIGURE = Figure(
    "cause/03_descriptions",
    "Do the descriptions foretell the cause?",
    "Spearman's rank correlation, over heads, of each description with the estimated effect of taking each term away; "
    "intervals by bootstrap over key heads.",
    prepare_descriptions,
    draw_descriptions,
    say_descriptions,
)
