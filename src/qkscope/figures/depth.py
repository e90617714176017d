"""Runs × depth heat maps: r_q and r_k on component 0 (qk-pca 03, 04, 10, 11), drift and bias (qk-rotation 06)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Rectangle

from qkscope.figures.figure import Figure, NotApplicable, checkpoints, models_alone, rows, side_by_side, with_window
from qkscope.figures.style import FAINT, NOT_THERE, canvas, panels, shortened
from qkscope.results.study import Study, StudyRun

DEPTH_BINS = 10
NOPE = "NoPE"
Runs = Callable[[Study], list[StudyRun]]


def depth_bins(layer: pd.Series, last: int) -> pd.Series:
    """Depth = layer / last layer in 10 equal bins, the last closed at 1.

    >>> depth_bins(pd.Series([0, 3, 9]), 9).tolist()
    [0, 3, 9]
    """
    # In integers: rounding of 10·layer/last could put a layer on the wrong side of an edge.
    return (DEPTH_BINS * layer // max(last, 1)).clip(upper=DEPTH_BINS - 1).astype(int)


def by_depth(frame: pd.DataFrame, study: Study, columns: list[str]) -> pd.DataFrame:
    """Mean of each column by run and depth bin; layers without rotary encoding in a separate bin."""
    tables = []
    depths = {study.last_layer[str(label)] + 1 for label in frame["model"].unique()}
    # With fewer layers than bins some would be empty: then each layer has its own.
    by_layer = len(depths) == 1 and max(depths) < DEPTH_BINS
    n_bins = max(depths) if by_layer else DEPTH_BINS
    cells = [str(i) for i in range(n_bins)] + ([NOPE] if any(study.nope[m] for m in frame["model"].unique()) else [])
    for label, heads in frame.groupby("model", sort=False):
        bins = heads["layer"] if by_layer else depth_bins(heads["layer"], study.last_layer[str(label)])
        heads = heads.assign(bin=bins.astype(int).astype(str))
        heads.loc[heads["layer"].isin(study.nope[str(label)]), "bin"] = NOPE
        means = heads.groupby("bin")[columns].mean()
        counts = heads.groupby("bin").size().rename("n_heads")
        tables.append(means.join(counts).reindex(cells).assign(model=label).reset_index(names="bin"))
    table = pd.concat(tables, ignore_index=True)
    table = table.assign(n_heads=table["n_heads"].fillna(0).astype(int), n_bins=n_bins)
    return table[["model", "bin", "n_bins", "n_heads", *columns]]


def bin_name(row: pd.Series) -> str:
    """A bin in words: a layer, or a tenth of the depth."""
    if row["n_bins"] < DEPTH_BINS:
        return f"layer {int(row['bin'])}"
    return f"depth bin {int(row['bin']) + 1} of {DEPTH_BINS}"


def prepare_component(column: str, runs: Runs) -> Callable[[Study], pd.DataFrame]:
    """A function that prepares r_q or r_k on component 0; r_k together with |r_k|."""

    def prepare(study: Study) -> pd.DataFrame:
        frame = rows(study, runs(study), "pc0", column)
        columns = [column]
        if column == "r_k":
            frame, columns = frame.assign(abs_r_k=frame["r_k"].abs()), ["r_k", "abs_r_k"]
        return by_depth(frame, study, columns)

    return prepare


def draw_component(data: pd.DataFrame) -> Drawing:
    """One map, or two for r_k and |r_k|."""
    columns = [name for name in ("r_q", "r_k", "abs_r_k") if name in data]
    titles = {"r_q": "mean r_q on PC0", "r_k": "mean r_k on PC0, signed", "abs_r_k": "mean |r_k| on PC0"}
    n = data["model"].nunique()
    figure = canvas(6.6, (0.75 + 0.25 * n) * len(columns) + 0.1)
    axes = panels(figure, len(columns), 1, sharex=True)[:, 0]
    for cell, column in zip(axes, columns, strict=True):
        signed = bool((data[column] < 0).any())
        colours = "RdBu_r" if signed else "Blues" if column == "r_q" else "Reds"
        scale = Normalize(-1, 1) if signed else Normalize(0, 1)
        image = heat_map(cell, data, column, colours, scale, "{:.2f}")
        cell.set_title(titles[column])
        bar = figure.colorbar(image, ax=cell, fraction=0.04, pad=0.015, ticks=[-1, 0, 1] if signed else [0, 0.5, 1])
        bar.outline.set_visible(False)
    return figure


def say_component(data: pd.DataFrame) -> list[str]:
    """The bins with the highest and lowest mean."""
    column = "r_q" if "r_q" in data else "r_k"
    deep = data[(data["bin"] != NOPE) & (data["n_heads"] > 0)]
    if deep.empty:
        return ["Every layer is without rotary encoding, so there is nothing to compare by depth."]
    top, low = deep.loc[deep[column].idxmax()], deep.loc[deep[column].idxmin()]
    sentences = [
        f"Highest mean {column}: {top[column]:.2f} in {top['model']} at {bin_name(top)}; lowest: {low[column]:+.2f} in "
        f"{low['model']} at {bin_name(low)}."
    ]
    nope = data[(data["bin"] == NOPE) & (data["n_heads"] > 0)]
    if len(nope):
        nope_mean = np.average(nope[column], weights=nope["n_heads"])
        rotary_mean = np.average(deep[column], weights=deep["n_heads"])
        sentences.append(
            f"Layers without rotary encoding have a mean {column} of {nope_mean:.2f}, the others {rotary_mean:.2f}."
        )
    if "abs_r_k" in data:
        apart = (deep["abs_r_k"] - deep["r_k"]).max()
        sentences.append(
            f"Signed and absolute mean differ by up to {apart:.2f}: that much is heads drifting the other way."
        )
    return sentences


def prepare_rotation(study: Study) -> pd.DataFrame:
    """|r_k_a| and the recency bias per window."""
    frame = with_window(study, rows(study, side_by_side(study)[0], "rotated", "r_k_a", "bias_strength"))
    if frame["bias_window"].isna().all():
        raise NotApplicable("the window is not known; state it in the study file")
    return by_depth(frame.assign(abs_r_k_a=frame["r_k_a"].abs()), study, ["abs_r_k_a", "bias_window"])


def draw_rotation(data: pd.DataFrame) -> Drawing:
    """The two maps, one above the other."""
    return two_maps(
        data,
        ("abs_r_k_a", "Reds", "mean |r_k_a|: how closely keys follow position on axis a"),
        ("bias_window", "{:.2g}", "mean recency bias over the window (score); positive: later keys score higher"),
    )


def two_maps(data: pd.DataFrame, share: tuple[str, str, str], signed: tuple[str, str, str]) -> Drawing:
    """Draw a share (column, colours, title) above a signed number (column, format, title), each with its scale."""
    figure = canvas(6.8, 1.4 + 0.5 * data["model"].nunique())
    above, below = panels(figure, 2, 1)[:, 0]
    image = heat_map(above, data, share[0], share[1], Normalize(0, 1), "{:.2f}")
    above.set_title(share[2])
    figure.colorbar(image, ax=above, fraction=0.04, pad=0.015, ticks=[0, 0.5, 1]).outline.set_visible(False)
    largest = max(float(data[signed[0]].abs().max()), 1e-12)
    if (data[signed[0]] < 0).any():
        image = heat_map(below, data, signed[0], "PuOr_r", TwoSlopeNorm(0, -largest, largest), signed[1])
    else:
        image = heat_map(below, data, signed[0], "Oranges", Normalize(0, largest), signed[1])
    below.set_title(signed[2])
    figure.colorbar(image, ax=below, fraction=0.04, pad=0.015).outline.set_visible(False)
    return figure


def say_rotation(data: pd.DataFrame) -> list[str]:
    """Early layers compared with late ones, and the bin with the strongest bias."""
    deep = data[(data["bin"] != NOPE) & (data["n_heads"] > 0)]
    if deep.empty:
        return ["Every layer is without rotary encoding, so there is nothing to compare by depth."]
    half = 2 * deep["bin"].astype(int) < deep["n_bins"]
    first, second = (np.average(layers["abs_r_k_a"], weights=layers["n_heads"]) if len(layers) else math.nan
                     for layers in (deep[half], deep[~half]))  # fmt: skip
    top = deep.loc[deep["bias_window"].idxmax()]
    return [
        f"Mean |r_k_a| is {first:.2f} in the first half of the layers and {second:.2f} in the second.",
        f"The bias per window is largest in {top['model']}, {bin_name(top)}: {top['bias_window']:.3g}.",
    ]


def heat_map(axes: Axes, data: pd.DataFrame, column: str, colours: str, norm: Normalize, form: str) -> Any:
    """Rows = runs, columns = depth bins; every cell annotated, cells without heads hatched."""
    labels, bins = list(dict.fromkeys(data["model"])), list(dict.fromkeys(data["bin"]))
    cells = data.pivot(index="model", columns="bin", values=column).loc[labels, bins].to_numpy(float)
    image = axes.imshow(np.ma.masked_invalid(cells), cmap=colours, norm=norm, aspect="auto")
    for (row, col), value in np.ndenumerate(cells):
        if math.isnan(value):
            axes.add_patch(
                Rectangle((col - 0.5, row - 0.5), 1, 1, facecolor="white", edgecolor="#bbbbbb", hatch=NOT_THERE, lw=0)
            )
            continue
        red, green, blue, _ = mpl.colormaps[colours](norm(value))
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
        axes.text(
            col, row, form.format(value), ha="center", va="center", fontsize=6.3, color="white" if dark else "#222"
        )
    axes.set_yticks(range(len(labels)), [shortened(label) for label in labels])
    by_layer = bool(data["n_bins"].iloc[0] < DEPTH_BINS)
    names = [name if name == NOPE or by_layer else f"{int(name) / DEPTH_BINS:.1f}" for name in bins]
    axes.set_xticks(range(len(bins)), names)
    subplot = axes.get_subplotspec()
    if subplot is None or subplot.is_last_row():
        axes.set_xlabel("layer" if by_layer else "depth: layer / last layer, lower edge of the bin")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if NOPE in bins:
        axes.axvline(len(bins) - 1.5, color=FAINT, linewidth=1.2)
    return image


def _component(name: str, title: str, column: str, runs: Runs, who: str) -> Figure:
    addition = " The mean of |r_k| stands beside it, for heads can disagree in sign." if column == "r_k" else ""
    shows = (
        f"Mean {column} on PC0 by {who} and depth.{addition} Hatched: no heads there. "
        "Layers without rotary encoding, where there are any, are split out at the right."
    )
    return Figure(name, title, shows, prepare_component(column, runs), draw_component, say_component)


R_Q = _component("qk-pca/03_layer_heatmap_rq", "Queries and position, by depth", "r_q", models_alone, "model")
R_K = _component("qk-pca/04_layer_heatmap_rk", "Keys and position, by depth", "r_k", models_alone, "model")
R_Q_TRAINING = _component(
    "qk-pca/10_checkpoint_heatmap_rq", "Queries and position, by depth over training", "r_q", checkpoints, "checkpoint"
)
R_K_TRAINING = _component(
    "qk-pca/11_checkpoint_heatmap_rk", "Keys and position, by depth over training", "r_k", checkpoints, "checkpoint"
)
ROTATION_BY_DEPTH = Figure(
    "qk-rotation/06_layer_heatmaps",
    "Drift and recency bias, by depth",
    "Above, how closely keys follow position on axis a; below, the recency bias over the window (mu_q_a · alpha_k · "
    "window), by model and depth. Hatched: no heads there.",
    prepare_rotation,
    draw_rotation,
    say_rotation,
)
