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

from qkscope.figures.eachrun import together
from qkscope.figures.figure import (
    Figure,
    NotApplicable,
    at_own_windows,
    checkpoints,
    models_alone,
    over_window,
    rows,
    side_by_side,
    with_sliding,
    with_window,
)
from qkscope.figures.style import FAINT, NOT_THERE, canvas, panels, shortened, write_on
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
    """Mean of each column by run and depth bin; layers without rotary encoding in a separate bin.

    Runs with the same few layers, at most as many as bins, have a column for each layer instead.
    """
    layers = {tuple(sorted(heads["layer"].unique().tolist())) for _, heads in frame.groupby("model", sort=False)}
    per_layer = len(layers) == 1 and len(next(iter(layers))) <= DEPTH_BINS
    cells = [str(int(i)) for i in (next(iter(layers)) if per_layer else range(DEPTH_BINS))]
    cells += [NOPE] if any(study.nope[str(label)] for label in frame["model"].unique()) else []
    tables = []
    for label, heads in frame.groupby("model", sort=False):
        bins = heads["layer"] if per_layer else depth_bins(heads["layer"], study.last_layer[str(label)])
        heads = heads.assign(bin=bins.astype(int).astype(str))
        heads.loc[heads["layer"].isin(study.nope[str(label)]), "bin"] = NOPE
        grouped = heads.groupby("bin")
        means = grouped[columns].mean().join(grouped["layer"].agg(first_layer="min", last_layer="max"))
        counts = grouped.size().rename("n_heads")
        tables.append(means.join(counts).reindex(cells).assign(model=label).reset_index(names="bin"))
    table = pd.concat(tables, ignore_index=True)
    table = table.assign(n_heads=table["n_heads"].fillna(0).astype(int), per_layer=per_layer)
    return table[["model", "bin", "per_layer", "first_layer", "last_layer", "n_heads", *columns]]


def bin_name(row: pd.Series) -> str:
    """A bin in words, by the numbers of its layers."""
    first, last = int(row["first_layer"]), int(row["last_layer"])
    return f"layer {first}" if first == last else f"layers {first} to {last}"


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
    kind = "Queries" if column == "r_q" else "Keys"
    deep = data[(data["bin"] != NOPE) & (data["n_heads"] > 0)]
    if deep.empty:
        return ["Every layer is without rotary encoding, so there is nothing to compare by depth."]
    size = column if column == "r_q" else "abs_r_k"
    top, low = deep.loc[deep[size].idxmax()], deep.loc[deep[size].idxmin()]
    name = "r_q" if column == "r_q" else "|r_k|"
    sentences = [
        f"{kind} follow position on PC0 most closely in {top['model']}, {bin_name(top)} (mean {name} {top[size]:.2f})"
        + (f", and least in {low['model']}, {bin_name(low)} ({low[size]:.2f})." if len(deep) > 1 else ".")
    ]
    nope = data[(data["bin"] == NOPE) & (data["n_heads"] > 0)]
    if len(nope):
        means = {
            str(model): f"Layers without rotary encoding have a mean {column} of {_mean(layers, column):.2f}, the "
            f"others {_mean(deep[deep['model'] == model], column):.2f}."
            for model, layers in nope.groupby("model", sort=False)
        }
        sentences.append(together(means))
    if column == "r_k":
        apart = (deep["abs_r_k"] - deep["r_k"]).max()
        if apart >= 0.005:
            sentences.append(f"Signed and absolute mean differ by up to {apart:.2f}, where keys drift against queries.")
        else:
            sentences.append(
                "Signed and absolute means are the same to within 0.005: hardly any keys drift against queries."
            )
    return sentences


def prepare_rotation(study: Study) -> pd.DataFrame:
    """|r_k_a| and the recency bias per window."""
    frame = with_window(study, rows(study, side_by_side(study)[0], "rotated", "r_k_a", "bias_strength"))
    if frame["bias_window"].isna().all():
        raise NotApplicable("the window is not known; state it in the study file")
    frame = with_sliding(study, frame.assign(abs_r_k_a=frame["r_k_a"].abs()))
    return by_depth(frame, study, ["abs_r_k_a", "bias_window", "sliding"])


def draw_rotation(data: pd.DataFrame) -> Drawing:
    """The two maps, one above the other."""
    return two_maps(
        data,
        ("abs_r_k_a", "Reds", "mean |r_k_a|: how closely keys follow position on axis a"),
        (
            "bias_window",
            _form(data["bias_window"]),
            f"mean recency bias {over_window(data)} (q·k); positive: later keys score higher",
        ),
    )


def _form(values: pd.Series) -> str:
    """A format with about two digits for the largest value, and as many decimals for the others.

    >>> _form(pd.Series([12.3, 0.00058])), _form(pd.Series([0.3, -1.25]))
    ('{:.0f}', '{:.1f}')
    """
    largest = float(values.abs().max())
    return f"{{:.{max(0, 1 - math.floor(math.log10(largest))) if largest > 0 else 0}f}}"


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
    halves = {}
    for model, layers in deep.groupby("model", sort=False):
        first = layers["first_layer"] + layers["last_layer"] < layers["last_layer"].max()
        early, late = (_mean(half, "abs_r_k_a") for half in (layers[first], layers[~first]))
        if not math.isnan(early):
            halves[str(model)] = (
                f"Mean |r_k_a| is {early:.2f} in the first half of the layers, {late:.2f} in the second."
            )
    top = deep.loc[deep["bias_window"].abs().idxmax()]
    later = "later" if top["bias_window"] > 0 else "earlier"
    return [
        f"The recency bias is strongest in {top['model']}, {bin_name(top)}: {top['bias_window']:+.3g} "
        f"{over_window(top.to_frame().T)}, in favour of {later} keys.",
        *([together(halves)] if halves else []),
    ]


def _mean(bins: pd.DataFrame, column: str) -> float:
    """Mean over the heads of some bins of a run."""
    return float(np.average(bins[column], weights=bins["n_heads"])) if len(bins) else math.nan


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
        write_on(axes, col, row, _written(form, value), mpl.colormaps[colours](norm(value)), fontsize=6.3)
    axes.set_yticks(range(len(labels)), [shortened(label) for label in labels])
    names, label = _depth_names(data, bins)
    axes.set_xticks(range(len(bins)), names)
    subplot = axes.get_subplotspec()
    if subplot is None or subplot.is_last_row():
        axes.set_xlabel(label)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if NOPE in bins:
        axes.axvline(len(bins) - 1.5, color=FAINT, linewidth=1.2)
    return image


def _written(form: str, value: float) -> str:
    """A number in a cell, without the sign of a zero."""
    text = form.format(value)
    return text.lstrip("-") if float(text) == 0 else text


def _depth_names(data: pd.DataFrame, bins: list[str]) -> tuple[list[str], str]:
    """Names of the bins and of their axis: layers, if all runs have the same in each bin, else shares of the depth."""
    spans = data.dropna(subset=["first_layer"]).groupby("bin")[["first_layer", "last_layer"]]
    alike = bool((spans.nunique() <= 1).all().all()) and set(bins) - {NOPE} <= set(spans.groups)
    if not alike:
        names = [name if name == NOPE else f"{int(name) / DEPTH_BINS:.1f}" for name in bins]
        return names, "depth: layer / last layer, lower edge of the bin"
    filled = data.dropna(subset=["first_layer"]).drop_duplicates("bin")
    spans_of = {
        str(name): "–".join(dict.fromkeys((f"{first:.0f}", f"{last:.0f}")))
        for name, first, last in zip(filled["bin"], filled["first_layer"], filled["last_layer"], strict=True)
    }
    names = [name if name == NOPE else spans_of[name] for name in bins]
    return names, "layer"


def _component(name: str, title: str, column: str, runs: Runs, who: str) -> Figure:
    addition = " The mean of |r_k| stands beside it, for heads can disagree in sign." if column == "r_k" else ""
    shows = (
        f"Mean {column} on PC0 by {who} and depth.{addition} Hatched, if any: no heads there. "
        "Layers without rotary encoding, where there are any, are split out at the right."
    )
    prepare = prepare_component(column, runs)
    folded = at_own_windows(prepare) if runs is checkpoints else None
    return Figure(name, title, shows, prepare, draw_component, say_component, folded)


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
    "Above, how closely keys follow position on axis a; below, the recency bias, mu_q_a · alpha_k times the window or "
    "the reach of a sliding one, by model and depth. Hatched, if any: no heads there.",
    prepare_rotation,
    draw_rotation,
    say_rotation,
)
