"""Plasticity head by head: by class, and by depth."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import mean_over_heads, rank_correlation
from qkscope.analyses.components import TAXONOMY
from qkscope.figures.depth import NOPE, bin_name, by_depth, two_maps
from qkscope.figures.figure import Figure, NotApplicable, models, rows
from qkscope.figures.style import CLASSES, canvas, error_bars, grid
from qkscope.results.study import Study

# ---- by class of heads --------------------------------------------------------------------------

MOST_MODELS = 4
"""Number of models that sentences are written about, at most."""
RANKED = ("bias_full_window", "posvar_q", "posvar_k", "amplification_window")


def prepare_plasticity_classes(study: Study) -> pd.DataFrame:
    """Each head's plasticity, its class, and the columns that plasticity is ranked against."""
    frame = rows(study, models(study), "heads", "ap_overall", "taxonomy_published")
    rotated = study.table("rotated", "bias_full_window")
    if rotated is not None:
        frame = frame.merge(rotated[["model", "layer", "head", "bias_full_window"]], on=["model", "layer", "head"],
                            how="left")  # fmt: skip
    key = ["k_head"] if "k_head" in frame else []
    columns = [name for name in RANKED if name in frame]
    return frame[["model", "layer", "head", *key, "taxonomy_published", "ap_overall", *columns]].reset_index(drop=True)


def draw_plasticity_classes(data: pd.DataFrame) -> Drawing:
    """Every head as a point, next to the mean and interval of its class."""
    kinds = [kind for kind in TAXONOMY if (data["taxonomy_published"] == kind).any()]
    figure = canvas(6.6, 3.2)
    axes = figure.subplots()
    for x, kind in enumerate(kinds):
        heads = data[data["taxonomy_published"] == kind].sort_values("ap_overall")
        # From the lowest to the highest: the place of a point within its column is its rank, and nothing is random.
        across = np.linspace(-0.28, 0.28, len(heads)) if len(heads) > 1 else np.zeros(1)
        axes.scatter(x + across, heads["ap_overall"], s=7, color=CLASSES[kind], alpha=0.75, linewidths=0,
                     rasterized=True)  # fmt: skip
        mean = mean_over_heads(heads, ["ap_overall"])
        error_bars(axes, [x + 0.38], [mean["ap_overall"]], [mean["ap_overall_low"]], [mean["ap_overall_high"]])
    counts = data["taxonomy_published"].value_counts()
    axes.set_xticks(range(len(kinds)), [f"{kind}\n{counts[kind]} heads" for kind in kinds])
    axes.set(ylim=(0, 1), ylabel="attention plasticity of the head", xlim=(-0.6, len(kinds) - 0.4))
    grid(axes)
    return figure


def say_plasticity_classes(data: pd.DataFrame) -> list[str]:
    """Means by class, and rank correlations, model by model: pooled over models they could have the opposite sign."""
    models = list(dict.fromkeys(data["model"]))
    several_models = len(models) > 1
    return [
        f"{model}: {line}" if several_models else line
        for model in models[:MOST_MODELS]
        for line in _say_model(data[data["model"] == model])
    ]


def _say_model(data: pd.DataFrame) -> list[str]:
    means = []
    for kind in TAXONOMY:
        heads = data[data["taxonomy_published"] == kind]
        if len(heads):
            mean = mean_over_heads(heads, ["ap_overall"])
            means.append(f"{kind} {mean['ap_overall']:.2f}{_range(mean, 'ap_overall')}")
    lines = [f"mean plasticity by class: {', '.join(means)}."]
    ranks = []
    for name in RANKED:
        heads = data.dropna(subset=[name]) if name in data else data.iloc[:0]
        if len(heads) > 2:
            rank = rank_correlation(heads, "ap_overall", name)
            ranks.append(f"{name} {rank['rho']:+.2f}{_range(rank, 'rho')}")
    return lines + ([f"rank correlation with plasticity: {', '.join(ranks)}."] if ranks else [])


def _range(values: dict[str, float], name: str) -> str:
    low, high = values[f"{name}_low"], values[f"{name}_high"]
    return "" if np.isnan(low) else f" ({low:.2f} to {high:.2f})"


# ---- by depth -----------------------------------------------------------------------------------


def prepare_drop(study: Study) -> pd.DataFrame:
    """Plasticity and its drop along the window, by depth."""
    frame = rows(study, models(study), "heads", "ap_overall")
    if "ap_drop" not in frame or frame["ap_drop"].isna().all():
        raise NotApplicable("no head has plasticity at both ends of the window; take more buckets")
    return by_depth(frame, study, ["ap_overall", "ap_drop"])


def draw_drop(data: pd.DataFrame) -> Drawing:
    """Two maps, one above the other."""
    return two_maps(
        data,
        ("ap_overall", "cividis", "mean plasticity over the window"),
        ("ap_drop", "{:+.2f}", "drop from the first fifth of the window to the last; positive: later is less divided"),
    )


def say_drop(data: pd.DataFrame) -> list[str]:
    """The bins where plasticity is lowest, and where it falls most."""
    deep = data[(data["bin"] != NOPE) & (data["n_heads"] > 0)].dropna(subset=["ap_overall"])
    if deep.empty:
        return ["Every layer is without rotary encoding, so there is nothing to compare by depth."]
    low = deep.loc[deep["ap_overall"].idxmin()]
    sentences = [f"Lowest: {low['ap_overall']:.2f} in {low['model']} at {bin_name(low)}."]
    falls = deep.dropna(subset=["ap_drop"])
    if len(falls):
        largest = falls.loc[falls["ap_drop"].idxmax()]
        mean = float(np.average(falls["ap_drop"], weights=falls["n_heads"]))
        sentences.append(
            f"Over all heads it falls by {mean:+.3f} along the window, most ({largest['ap_drop']:+.2f}) in "
            f"{largest['model']} at {bin_name(largest)}."
        )
    return sentences


BY_CLASS = Figure(
    "plasticity/03_by_taxonomy",
    "Plasticity by class of heads",
    "Every head's plasticity over the window by its class on PC0; at the right of each class its mean, with a "
    "bootstrap interval over key heads.",
    prepare_plasticity_classes,
    draw_plasticity_classes,
    say_plasticity_classes,
)
DROP = Figure(
    "plasticity/04_ap_drop_by_depth",
    "Plasticity and its drop, by depth",
    "Above, plasticity over the window; below, how much it falls from the first fifth of the window to the last, by "
    "model and depth. Hatched: no heads there.",
    prepare_drop,
    draw_drop,
    say_drop,
)
