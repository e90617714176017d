"""The rotation model for each model: correlations on axis a, variance in the plane, slopes (qk-rotation 02, 03, 05)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import mean_over_heads, median_over_heads
from qkscope.figures.figure import Figure, at_least_two_runs, rows
from qkscope.figures.style import K, Q, canvas, error_bars, family_look, grid, shortened
from qkscope.results.study import Study


def prepare_bars(study: Study) -> pd.DataFrame:
    """Mean r_q_a and r_k_a of each model."""
    runs, kind = at_least_two_runs(study)
    return _by_model(rows(study, runs, "rotated", "r_q_a", "r_k_a"), ["r_q_a", "r_k_a"]).assign(what=kind)


def draw_bars(data: pd.DataFrame) -> Drawing:
    """Pairs of bars with intervals."""
    figure = canvas(max(3.6, 1.6 + 0.62 * len(data)), 3.3)
    axes = figure.subplots()
    x = np.arange(len(data))
    for offset, name, colour, label in ((-0.2, "r_q_a", Q, "queries, r_q_a"), (0.2, "r_k_a", K, "keys, r_k_a")):
        axes.bar(x + offset, data[name], width=0.36, color=colour, label=label)
        error_bars(axes, x + offset, data[name], data[f"{name}_low"], data[f"{name}_high"])
    axes.axhline(0, color="#555555", linewidth=0.7)
    axes.set_ylabel("mean correlation with position on a")
    axes.set_ylim(min(0, float(data[["r_q_a", "r_k_a"]].min().min()) * 1.1), 1)
    _model_ticks(axes, data)
    figure.legend(loc="outside upper right", ncols=2)
    grid(axes)
    return figure


def say_bars(data: pd.DataFrame) -> list[str]:
    """The number of models in which keys follow position more closely."""
    keys = int((data["r_k_a_low"] > data["r_q_a_high"]).sum())
    queries = int((data["r_q_a_low"] > data["r_k_a_high"]).sum())
    heads, mean = _pooled(data)
    return [
        f"On axis a keys follow position more closely than queries, beyond the intervals, in {keys} of {len(data)} "
        f"{data['what'].iloc[0]}, queries in {queries}: {heads} r_q_a {mean('r_q_a'):.3f}, r_k_a {mean('r_k_a'):.3f}."
    ]


def prepare_variance(study: Study) -> pd.DataFrame:
    """Mean shares of the pooled variance on a, on b and off both."""
    runs, kind = at_least_two_runs(study)
    frame = rows(study, runs, "rotated", "var_frac_a", "var_frac_b")
    frame = frame.assign(complement=1 - frame["var_frac_a"] - frame["var_frac_b"])
    frame = frame.assign(b_over_a=(frame["var_frac_b"] > frame["var_frac_a"]).astype(float))
    return _by_model(frame, ["var_frac_a", "var_frac_b", "complement", "b_over_a"]).assign(what=kind)


def draw_variance(data: pd.DataFrame) -> Drawing:
    """Stacked bars, labelled with their shares."""
    figure = canvas(max(3.8, 1.6 + 0.62 * len(data)), 3.3)
    axes = figure.subplots()
    below = np.zeros(len(data))
    x = np.arange(len(data))
    shares = (("var_frac_a", "#c98b2b", "axis a: drift"), ("var_frac_b", "#5b7553", "axis b: separation"),
              ("complement", "#d9d9d9", "complement"))  # fmt: skip
    for name, colour, label in shares:
        share = data[name].to_numpy(float)
        axes.bar(x, share, bottom=below, width=0.72, color=colour, label=label)
        for position, low, size in zip(x.tolist(), below, share, strict=True):
            if size >= 0.05:
                axes.text(position, low + size / 2, f"{size:.0%}", ha="center", va="center", fontsize=6.8)
        below += share
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of pooled variance")
    _model_ticks(axes, data)
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def say_variance(data: pd.DataFrame) -> list[str]:
    """The plane's share over all heads, and the share of heads with more variance on b than on a."""
    heads, mean = _pooled(data)
    return [
        f"The plane of a and b holds {1 - mean('complement'):.1%} of the pooled variance {heads} "
        f"({(1 - data['complement']).min():.0%} to {(1 - data['complement']).max():.0%} by "
        f"{data['what'].iloc[0].removesuffix('s')}).",
        f"Axis b holds more of it than axis a in {mean('b_over_a'):.0%} of heads.",
    ]


def prepare_slopes(study: Study) -> pd.DataFrame:
    """Median of |alpha_k| / |alpha_q| of each model."""
    runs, kind = at_least_two_runs(study)
    frame = rows(study, runs, "rotated", "alpha_q", "alpha_k")
    frame = frame[frame["alpha_q"] != 0]
    frame = frame.assign(slope_ratio=frame["alpha_k"].abs() / frame["alpha_q"].abs())
    medians = [
        _labels(heads) | median_over_heads(heads, "slope_ratio") | {"pooled": float(frame["slope_ratio"].median())}
        for _, heads in frame.groupby("model", sort=False)
    ]
    return pd.DataFrame(medians).assign(what=kind)


def draw_slopes(data: pd.DataFrame) -> Drawing:
    """A mark and an interval per model; the line at 1 is equal drift."""
    figure = canvas(5.8, 1.0 + 0.28 * len(data))
    axes = figure.subplots()
    look = family_look(data["family"].tolist())
    y = np.arange(len(data))[::-1]
    for height, (_, row) in zip(y, data.iterrows(), strict=True):
        colour, marker = look[str(row["family"])]
        axes.hlines(height, row["slope_ratio_low"], row["slope_ratio_high"], color=colour, linewidth=1.8)
        axes.plot(row["slope_ratio"], height, marker=marker, markersize=6, color=colour)
        right = np.nanmax([row["slope_ratio"], row["slope_ratio_high"]])
        axes.annotate(f"{row['slope_ratio']:.2f}", (right, height), xytext=(7, 0), textcoords="offset points",
                      va="center", fontsize=7)  # fmt: skip
    axes.axvline(1, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_yticks(y, [shortened(name) for name in data["model"]])
    axes.set_ylim(-0.6, len(data) - 0.4)
    axes.set_xlabel("median |alpha_k| / |alpha_q|; 1: keys and queries drift equally fast")
    largest = float(np.nanmax(data[["slope_ratio", "slope_ratio_high"]].to_numpy(float)))
    axes.set_xlim(0, max(1.15, largest * 1.18))
    grid(axes, "x")
    return figure


def say_slopes(data: pd.DataFrame) -> list[str]:
    """All heads together, and the range over models."""
    faster, slower = int((data["slope_ratio_low"] > 1).sum()), int((data["slope_ratio_high"] < 1).sum())
    trained = data["what"].iloc[0] == "checkpoints"
    heads = "In the last checkpoint" if trained else "Over all heads"
    median = data["slope_ratio"].iloc[-1] if trained else data["pooled"].iloc[0]
    return [
        f"{heads} the median ratio is {median:.2f}; keys drift faster than queries, beyond the interval, in {faster} "
        f"of {len(data)} {data['what'].iloc[0]}, more slowly in {slower} "
        f"({data['slope_ratio'].min():.2f} to {data['slope_ratio'].max():.2f})."
    ]


def _pooled(data: pd.DataFrame) -> tuple[str, Callable[[str], float]]:
    """The heads that a mean is over, in words, and the mean: those of all models, or of the last checkpoint."""
    if data["what"].iloc[0] == "checkpoints":
        return "in the last one", lambda column: float(data[column].iloc[-1])
    return "over all heads", lambda column: float(np.average(data[column], weights=data["n_heads"]))


def _by_model(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame(
        [_labels(heads) | mean_over_heads(heads, columns) for _, heads in frame.groupby("model", sort=False)]
    )


def _labels(heads: pd.DataFrame) -> dict[str, object]:
    return {"model": heads["model"].iloc[0], "family": heads["family"].iloc[0], "n_heads": len(heads)}


def _model_ticks(axes: Axes, data: pd.DataFrame) -> None:
    axes.set_xticks(range(len(data)), [shortened(name) for name in data["model"]], rotation=35, ha="right",
                    rotation_mode="anchor")  # fmt: skip


BARS = Figure(
    "qk-rotation/02_rq_rk_drift_bars",
    "Queries and keys on the drift axis",
    "Mean correlation with position along axis a, for queries and keys of each model, with 95% bootstrap intervals "
    "over key heads.",
    prepare_bars,
    draw_bars,
    say_bars,
)
VARIANCE = Figure(
    "qk-rotation/03_variance_decomposition",
    "Where the variance is",
    "Mean shares of the pooled variance on the drift axis a, on the separation axis b and in their complement.",
    prepare_variance,
    draw_variance,
    say_variance,
)
SLOPES = Figure(
    "qk-rotation/05_slope_ratio",
    "How fast keys drift, compared with queries",
    "Median over heads of |alpha_k| / |alpha_q| in each model, with 95% bootstrap intervals over key heads.",
    prepare_slopes,
    draw_slopes,
    say_slopes,
)
