"""Effects of terms on the prediction, head by head, and their correlation with descriptions of heads (cause 02, 03)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import rank_correlation
from qkscope.figures.figure import Figure, NotApplicable, needed
from qkscope.figures.scoreterms import TERM_COLOURS
from qkscope.figures.style import INK, canvas, grid, panels, shortened
from qkscope.headids import TERMS, head_name
from qkscope.progress import plural
from qkscope.results.effects import interval_text, known_effect
from qkscope.results.study import Study

DESCRIPTIONS = {
    "curve_range": "range of the distance curve",
    "decay": "fall per doubling of distance",
    "position_share": "position's share of vectors",
    "lock_q": "phase lock of queries",
    "positional_overhead": "linear drift's share of vectors",
    "r_q": "r_q on PC0",
    "r_k": "r_k on PC0",
    "score_content": "content's share of scores",
}
"""Columns that describe heads, and their names in plain words."""
LEAST_HEADS = 10
"""With fewer heads a rank correlation has no interval that means anything."""


_CHOICES = ("random", "strongest", "named")
"""Why heads were measured: estimates hold for most heads, and less for the strongest."""


def prepare_effects(study: Study) -> pd.DataFrame:
    """Estimated and, if available, measured divergence of every head and term of the last run that has them."""
    effects = needed(study.tables.get("effects"), "effects; qkscope effects writes it")
    last = [label for label in study.labels if label in set(effects["model"])][-1]
    columns = [
        "model",
        "layer",
        "head",
        "k_head",
        "term",
        "chosen",
        "window",
        "gamma",
        "kl_predicted",
        "kl",
        "kl_low",
        "kl_high",
    ]
    data = effects[effects["model"] == last].reset_index(drop=True)
    data = data.reindex(columns=columns)  # the window is that of the texts on which it was measured
    if not (data[["kl_predicted", "kl"]] > 0).any().any():
        raise NotApplicable("no head's effect was estimated or measured (qkscope effects --passes and --measure)")
    return data


def draw_effects(data: pd.DataFrame) -> Drawing:
    """One panel per term, layers from left to right; the strongest head is named."""
    figure = canvas(7.6, 2.6)
    cells = panels(figure, 1, len(TERMS), sharey=True)[0]
    layers = sorted(data["layer"].unique())
    place = {layer: i for i, layer in enumerate(layers)}
    for cell, term in zip(cells, TERMS, strict=True):
        of_term = data[data["term"] == term]
        centre, last_head = of_term["head"].mean(), max(float(of_term["head"].max()), 1.0)
        x = of_term["layer"].map(place) + (of_term["head"] - centre) / last_head * 0.6
        estimated, measured = of_term["kl_predicted"] > 0, of_term["kl"] > 0
        cell.scatter(x[estimated], of_term.loc[estimated, "kl_predicted"], s=9, color=TERM_COLOURS[term], linewidths=0)
        cell.scatter(x[measured], of_term.loc[measured, "kl"], s=20, facecolors="none", edgecolors=INK, linewidths=0.7)
        strongest = of_term["kl"].fillna(of_term["kl_predicted"])
        if strongest.notna().any():
            top = strongest.idxmax()
            name = head_name(of_term.at[top, "layer"], of_term.at[top, "head"])
            side = "right" if x[top] > len(layers) / 2 else "left"
            cell.annotate(name, (x[top], strongest[top]), (-4 if side == "right" else 4, 3),
                          textcoords="offset points", fontsize=6.5, ha=side)  # fmt: skip
        cell.set(yscale="log", xlabel="layer", title=term)
        cell.margins(y=0.12)
        shown = range(0, len(layers), -(-len(layers) // 6))
        cell.set_xticks(shown, [str(layers[i]) for i in shown])
        grid(cell)
    cells[0].set_ylabel("divergence without the term\n(nats per token)")
    figure.suptitle(shortened(str(data["model"].iloc[0]), 48), fontsize=9, x=0.01, ha="left")
    return figure


def say_effects(data: pd.DataFrame) -> list[str]:
    """The term of largest effect, its concentration in few heads, and the agreement of estimate and measurement."""
    known = data.assign(effect=known_effect(data)).dropna(subset=["effect"])
    medians = known.groupby("term", sort=False)["effect"].median()
    sentences = [
        f"{data['model'].iloc[0]}: of the four terms of one head, {medians.idxmax()} matters most to the prediction in "
        f"the median head ({medians.max():.2g} nats per token), {medians.idxmin()} least ({medians.min():.2g})."
    ]
    for term in TERMS:
        of_term = known[known["term"] == term].sort_values("effect", ascending=False)
        if of_term.empty:
            continue
        share = of_term["effect"].head(max(1, len(of_term) // 10)).sum() / max(of_term["effect"].sum(), 1e-300)
        top_is_measured = pd.notna(of_term["kl"].iloc[0])
        estimated = "" if top_is_measured else ", whose effect is estimated; such estimates are often too large"
        text = (
            f"{_without(data, term)}, the strongest tenth of heads carries {share:.0%} of the divergence of all; the "
            f"first is {head_name(*of_term[['layer', 'head']].iloc[0])}{estimated}."
        )
        sentences.append(text + "".join(_agreement(of_term, choice) for choice in _CHOICES))
    return sentences


def _agreement(of_term: pd.DataFrame, choice: str) -> str:
    """The agreement of estimate and measurement over the heads of one choice, in a sentence; empty if they are few."""
    measured = of_term[(of_term["chosen"] == choice) & (of_term["kl"] > 0)].dropna(subset=["kl_predicted"])
    if len(measured) < 3:
        return ""
    rho, ratio = rank_correlation(measured, "kl_predicted", "kl"), (measured["kl_predicted"] / measured["kl"]).median()
    return (
        f" On {plural(len(measured), f'{choice} head')} that were measured the ranks agree at "
        f"{rho_text(rho, len(measured))}, and the median estimate is {ratio:.2g} times the measurement."
    )


def rho_text(rank: dict[str, float], n: int) -> str:
    """A rank correlation with its interval; of too few heads without one, and with their number.

    >>> rho_text({"rho": 1.0, "rho_low": 1.0, "rho_high": 1.0}, 4)
    'ρ = +1.00 (4 heads only)'
    """
    if n < LEAST_HEADS:
        return f"ρ = {rank['rho']:+.2f} ({n} heads only)"
    return f"ρ = {rank['rho']:+.2f}{interval_text(rank['rho_low'], rank['rho_high'], '+.2f')}"


def _shows_effects(data: pd.DataFrame) -> str:
    """The description of estimates, measurements or both, as far as they are drawn."""
    estimated, measured = (data["kl_predicted"] > 0).any(), (data["kl"] > 0).any()
    kinds = ["dots are estimated from backward passes (half of the Fisher information)"] * bool(estimated)
    kinds += ["rings are measured by doing it"] * bool(measured)
    return (
        "Divergence of the prediction when one term of one head's scores is taken away, head by head within each "
        f"layer: {', '.join(kinds)}. The strongest head of each term is named."
    )


def _without(data: pd.DataFrame, term: str) -> str:
    """The removed part of a term, in words."""
    gamma = float(data["gamma"].iloc[0])
    return f"Without {term}" if gamma == 1 else f"With {gamma:.0%} of {term} taken away"


def prepare_descriptions(study: Study) -> pd.DataFrame:
    """Rank correlation over heads of each description with the estimated effect of each term, and its interval."""
    data = prepare_effects(study)
    heads = needed(study.tables.get("heads"), "heads")
    heads = heads[heads["model"] == data["model"].iloc[0]]
    ranks = description_ranks(heads, data, list(DESCRIPTIONS))
    if ranks.empty:
        raise NotApplicable("there are no descriptions of the heads whose effects are known")
    return ranks.assign(model=data["model"].iloc[0], window=data["window"].iloc[0])


def description_ranks(heads: pd.DataFrame, effects: pd.DataFrame, descriptions: Sequence[str]) -> pd.DataFrame:
    """Spearman's ρ over heads of each description with the estimated effect of each term, and its interval."""
    rows = []
    for column in descriptions:
        for term in TERMS if column in heads else ():
            of_term = effects[effects["term"] == term][["layer", "head", "kl_predicted"]]
            joined = heads.merge(of_term, on=["layer", "head"]).dropna(subset=[column, "kl_predicted"])
            if len(joined) > 2:
                rank = rank_correlation(joined, column, "kl_predicted")
                if len(joined) < LEAST_HEADS:
                    rank |= {"rho_low": np.nan, "rho_high": np.nan}
                rows.append({"description": column, "term": term, "n_heads": len(joined)} | rank)
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
        cell.set(xlim=(-1, 1), xticks=(-0.5, 0, 0.5), xlabel="rank correlation", title=term)
        cell.set_yticks(y, [DESCRIPTIONS[name] for name in names])
        grid(cell, "x")
    return figure


def say_descriptions(data: pd.DataFrame) -> list[str]:
    """For each term the description that ranks heads most as their effects do, if any does beyond its interval."""
    foretold, sentences = [], []
    for term in TERMS:
        of_term = data[data["term"] == term]
        if of_term.empty:
            continue
        clear = of_term[(of_term["rho_low"] > 0) | (of_term["rho_high"] < 0)]
        if clear.empty:
            sentences.append(f"The effect of {term} goes with no description beyond its interval.")
            continue
        foretold.append(term)
        best = clear.loc[clear["rho"].abs().idxmax()]
        direction = "larger" if best["rho"] > 0 else "smaller"
        sentences.append(
            f"The {direction} the {DESCRIPTIONS[best['description']]}, the larger the effect of {term}: "
            f"{rho_text(best.to_dict(), int(best['n_heads']))}."
        )
    n = plural(int(data["n_heads"].max()), "head")
    claim = f"{data['model'].iloc[0]}: over {n}, some description goes with the estimated effect of "
    claim += f"{' and '.join(foretold)} beyond its interval"
    if not foretold:
        claim = f"{data['model'].iloc[0]}: over {n}, no description goes with the estimated effect of any term"
    return [f"{claim}.", *sentences]


EFFECTS_FIGURE = Figure(
    "cause/02_effects",
    "What the prediction loses without a term",
    _shows_effects,
    prepare_effects,
    draw_effects,
    say_effects,
)
DESCRIPTIONS_FIGURE = Figure(
    "cause/03_descriptions",
    "Do the descriptions foretell the cause?",
    "Spearman's rank correlation, over heads, of each description with the estimated effect of taking each term away; "
    "lines are intervals by bootstrap over key heads.",
    prepare_descriptions,
    draw_descriptions,
    say_descriptions,
)
