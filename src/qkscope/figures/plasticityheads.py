"""Plasticity head by head: by class, and by depth."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import mean_over_heads, rank_correlation
from qkscope.analyses.scores import HEAD_CLASSES
from qkscope.figures.depth import NOPE, bin_name, by_depth, two_maps
from qkscope.figures.eachrun import together
from qkscope.figures.effects import LEAST_HEADS
from qkscope.figures.figure import Figure, NotApplicable, models, rows
from qkscope.figures.style import INK, canvas, error_bars, grid, panels, shortened
from qkscope.results.study import Study

# ---- by class of heads --------------------------------------------------------------------------

MOST_MODELS = 4
"""Number of models that sentences are written about, at most."""
AP = "ap_fixed_overall"
"""Plasticity with queries turned to one place; the published number counts RoPE's turning as freedom."""
RANKED = ("bias_full_window", "posvar_q", "posvar_k", "amplification_window")


def prepare_plasticity_classes(study: Study) -> pd.DataFrame:
    """Each head's plasticity, its class, and the columns that plasticity is ranked against."""
    frame = rows(study, models(study), "heads", AP, "head_class")
    rotated = study.table("rotated", "bias_full_window")
    if rotated is not None:
        frame = frame.merge(rotated[["model", "layer", "head", "bias_full_window"]], on=["model", "layer", "head"],
                            how="left")  # fmt: skip
    key = ["k_head"] if "k_head" in frame else []
    columns = [name for name in RANKED if name in frame]
    return frame[["model", "layer", "head", *key, "head_class", AP, *columns]].reset_index(drop=True)


def draw_plasticity_classes(data: pd.DataFrame) -> Drawing:
    """A panel per model: every head as a point, next to the mean and interval of its class."""
    kinds = [kind for kind in HEAD_CLASSES if (data["head_class"] == kind).any()]
    of_models = list(data.groupby("model", sort=False))[:MOST_MODELS]
    figure = canvas(6.6, 0.5 + 2.7 * len(of_models))
    cells = panels(figure, len(of_models), 1)[:, 0]
    for axes, (model, heads_of_model) in zip(cells, of_models, strict=True):
        for x, kind in enumerate(kinds):
            _draw_class(axes, x, kind, heads_of_model[heads_of_model["head_class"] == kind])
        counts = heads_of_model["head_class"].value_counts()
        axes.set_xticks(range(len(kinds)), [f"{kind}\n{counts.get(kind, 0)} heads" for kind in kinds])
        axes.set(ylim=(0, 1), ylabel="attention plasticity of the head", xlim=(-0.6, len(kinds) - 0.4))
        axes.set_title(shortened(str(model)))
        grid(axes)
    return figure


def _draw_class(axes: Axes, x: int, kind: str, heads: pd.DataFrame) -> None:
    """The heads of one class of a model; there may be none."""
    if heads.empty:
        return
    # From the lowest to the highest: the place of a point within its column is its rank, and nothing is random.
    across = np.linspace(-0.28, 0.28, len(heads)) if len(heads) > 1 else np.zeros(1)
    size = 16 if len(heads) < 100 else 7
    axes.scatter(x + across, heads[AP].sort_values(), s=size, color=HEAD_CLASSES[kind], edgecolors=INK, alpha=0.75,
                 linewidths=0.2, rasterized=True)  # fmt: skip
    mean = _mean_of_class(heads)
    error_bars(axes, [x + 0.38], [mean[AP]], [mean[f"{AP}_low"]], [mean[f"{AP}_high"]])


def _mean_of_class(heads: pd.DataFrame) -> dict[str, float]:
    """Mean plasticity of the heads of a class; the interval of a few heads would only be their range."""
    mean = mean_over_heads(heads, [AP])
    return mean if len(heads) >= _FEW else mean | {f"{AP}_low": np.nan, f"{AP}_high": np.nan}


_FEW = 4


def say_plasticity_classes(data: pd.DataFrame) -> list[str]:
    """Means by class, and rank correlations, model by model: pooled over models they could have the opposite sign."""
    models = list(dict.fromkeys(data["model"]))
    several_models = len(models) > 1
    return [
        f"{model}: {line}" if several_models else f"{line[0].upper()}{line[1:]}"
        for model in models[:MOST_MODELS]
        for line in _say_model(data[data["model"] == model], brief=several_models)
    ]


def _say_model(data: pd.DataFrame, *, brief: bool) -> list[str]:
    means = {}
    for kind in HEAD_CLASSES:
        heads = data[data["head_class"] == kind]
        if len(heads):
            means[kind] = _mean_of_class(heads)
    listed = ", ".join(f"{kind} {mean[AP]:.2f}{_range(mean, AP)}" for kind, mean in means.items())
    sure = {kind: mean for kind, mean in means.items() if not np.isnan(mean[f"{AP}_low"])} or means
    top, low = max(sure, key=lambda kind: sure[kind][AP]), min(sure, key=lambda kind: sure[kind][AP])
    claim = f"all heads are of the class {top}, with a mean plasticity of {means[top][AP]:.2f}."
    if len(means) > 1:
        claim = "classes of heads do not differ in plasticity beyond their intervals."
        if means[top][f"{AP}_low"] > means[low][f"{AP}_high"]:
            claim = (
                f"of the classes with at least {_FEW} heads, {top} has the most plastic ones (mean "
                f"{means[top][AP]:.2f}), {low} the least plastic (mean {means[low][AP]:.2f})."
            )
    lines = [claim] if brief else [claim, f"mean plasticity by class: {listed}."]
    ranks = []
    for name in RANKED:
        heads = data.dropna(subset=[name]) if name in data else data.iloc[:0]
        if len(heads) > 2:
            rank = rank_correlation(heads, AP, name)
            interval = f" of {len(heads)} heads only" if len(heads) < LEAST_HEADS else _range(rank, "rho")
            ranks.append(f"{name} {rank['rho']:+.2f}{interval}")
    return lines + ([f"rank correlation with plasticity: {', '.join(ranks)}."] if ranks else [])


def _range(values: dict[str, float], name: str) -> str:
    low, high = values[f"{name}_low"], values[f"{name}_high"]
    return "" if np.isnan(low) else f" ({low:.2f} to {high:.2f})"


# ---- by depth -----------------------------------------------------------------------------------


def prepare_drop(study: Study) -> pd.DataFrame:
    """Plasticity and its drop along the window, by depth; where the rotation is not known, the published plasticity."""
    heads = study.table("heads", AP)
    column = AP if heads is not None and heads[AP].notna().any() else "ap_overall"
    frame = rows(study, models(study), "heads", column)
    if "ap_drop" not in frame or frame["ap_drop"].isna().all():
        raise NotApplicable("no head has plasticity at both ends of the window; take more buckets")
    return by_depth(frame, study, [column, "ap_drop"])


def draw_drop(data: pd.DataFrame) -> Drawing:
    """Two maps, one above the other."""
    return two_maps(
        data,
        (AP, "BuGn", "mean plasticity over the window")
        if AP in data
        else ("ap_overall", "BuGn", "as published: mean plasticity over the window"),
        ("ap_drop", "{:+.2f}", "as published: drop from the first fifth of the window to the last"),
    )


def say_drop(data: pd.DataFrame) -> list[str]:
    """The layers where plasticity is lowest, and its course along the window."""
    column, name = (AP, "Plasticity") if AP in data else ("ap_overall", "Plasticity as published")
    deep = data[(data["bin"] != NOPE) & (data["n_heads"] > 0)].dropna(subset=[column])
    if deep.empty:
        return ["Every layer is without rotary encoding, so there is nothing to compare by depth."]
    low, high = deep.loc[deep[column].idxmin()], deep.loc[deep[column].idxmax()]
    sentences = [f"{name} is lowest in {low['model']}, {bin_name(low)} ({low[column]:.2f}), and highest in "
                 f"{high['model']}, {bin_name(high)} ({high[column]:.2f})."]  # fmt: skip
    if len(deep) == 1:
        sentences = [f"{name} is {low[column]:.2f} in {low['model']}, {bin_name(low)}."]
    falls = deep.dropna(subset=["ap_drop"])
    if falls.empty:
        return sentences
    drops = {str(model): float(np.average(rows_of_run["ap_drop"], weights=rows_of_run["n_heads"]))
             for model, rows_of_run in falls.groupby("model", sort=False)}  # fmt: skip
    largest = falls.loc[falls["ap_drop"].abs().idxmax()]
    return [
        *sentences,
        together({model: _course(drop) for model, drop in drops.items()}),
        f"It {'falls' if largest['ap_drop'] > 0 else 'rises'} most, by {abs(largest['ap_drop']):.2f}, in "
        f"{largest['model']}, {bin_name(largest)}.",
    ]


def _course(drop: float) -> str:
    """The mean course of the published number along the window."""
    if abs(drop) < 0.005:
        return "As published, it hardly changes along the window."
    return f"As published, it {'falls' if drop > 0 else 'rises'} by {abs(drop):.2f} along the window."


BY_CLASS = Figure(
    "plasticity/03_by_taxonomy",
    "Plasticity by class of heads",
    "Every head's plasticity over the window, with queries turned to one place (ap_fixed_overall), by what its scores "
    "are made of (head_class); at the right of each class its mean, with a bootstrap interval over key heads.",
    prepare_plasticity_classes,
    draw_plasticity_classes,
    say_plasticity_classes,
)
DROP = Figure(
    "plasticity/04_ap_drop_by_depth",
    "Plasticity and its drop, by depth",
    "Above, plasticity over the window, with queries turned to one place (ap_fixed_overall); below, how much the "
    "published number falls from the first fifth of the window to the last, by model and depth. Hatched: no heads "
    "there.",
    prepare_drop,
    draw_drop,
    say_drop,
)
