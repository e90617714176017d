"""The rotation model for each model: correlations on axis a, variance in the plane, slopes (qk-rotation 02, 03, 05)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import mean_over_heads, median_over_heads
from qkscope.figures.eachrun import by_run
from qkscope.figures.figure import Figure, at_least_two_runs, rows
from qkscope.figures.style import DRIFT, REST, SEPARATION, K, Q, canvas, family_look, grid, shortened, write_on
from qkscope.results.study import Study


def prepare_bars(study: Study) -> pd.DataFrame:
    """Mean r_q_a and r_k_a of each model."""
    runs, kind = at_least_two_runs(study)
    return _by_model(rows(study, runs, "rotated", "r_q_a", "r_k_a"), ["r_q_a", "r_k_a"]).assign(what=kind)


def draw_bars(data: pd.DataFrame) -> Drawing:
    """A dot for queries and one for keys, with intervals, for each model."""
    figure = canvas(max(3.6, 1.6 + 0.62 * len(data)), 3.3)
    axes = figure.subplots()
    x = np.arange(len(data))
    kinds = ((-0.14, "r_q_a", Q, "o", "queries, r_q_a"), (0.14, "r_k_a", K, "D", "keys, r_k_a"))
    for offset, name, colour, marker, label in kinds:
        axes.vlines(x + offset, data[f"{name}_low"], data[f"{name}_high"], color=colour, linewidth=1.8)
        axes.plot(x + offset, data[name], linestyle="none", marker=marker, markersize=6, color=colour, label=label)
    lowest = float(np.nanmin(data[["r_q_a", "r_k_a", "r_q_a_low", "r_k_a_low"]].to_numpy(float)))
    axes.set_ylim(min(0.5, lowest - 0.05), 1)
    if axes.get_ylim()[0] < 0:
        axes.axhline(0, color="#555555", linewidth=0.7)
    axes.set_ylabel("mean correlation with position on a")
    _model_ticks(axes, data)
    axes.set_xlim(-0.5, len(data) - 0.5)
    figure.legend(loc="outside upper right", ncols=2)
    grid(axes)
    return figure


def say_bars(data: pd.DataFrame) -> list[str]:
    """The number of models in which one class follows position more closely than the other."""
    keys = int((data["r_k_a_low"] > data["r_q_a_high"]).sum())
    queries = int((data["r_q_a_low"] > data["r_k_a_high"]).sum())
    n = f"{len(data)} {data['what'].iloc[0]}"
    claim = (
        "On the drift axis queries and keys follow position about equally, as far as the intervals over key heads "
        f"tell, in all {n}."
    )
    if keys or queries:
        claim = (
            "On the drift axis keys follow position more closely than queries, beyond the intervals over key heads, "
            f"in {keys} of {n}; queries more closely than keys in {queries}."
        )
    return [
        claim,
        f"The means are{_in_the_last(data)}: r_q_a {_number(data, 'r_q_a', '.2f')}, r_k_a "
        f"{_number(data, 'r_k_a', '.2f')}.",
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
    shares = (("var_frac_a", DRIFT, "axis a: drift", "////"), ("var_frac_b", SEPARATION, "axis b: separation", None),
              ("complement", REST, "complement", None))  # fmt: skip
    for name, colour, label, hatch in shares:
        share = data[name].to_numpy(float)
        axes.bar(x, share, bottom=below, width=0.72, color=colour, label=label, hatch=hatch, edgecolor="white", lw=0)
        for position, low, size in zip(x.tolist(), below, share, strict=True):
            if size >= 0.05:
                write_on(axes, position, low + size / 2, f"{size:.0%}", colour, fontsize=6.8)
        below += share
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of pooled variance")
    _model_ticks(axes, data)
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def say_variance(data: pd.DataFrame) -> list[str]:
    """The plane's share, and the share of heads with more variance on b than on a, by run."""
    plane = _number(data.assign(plane=1 - data["complement"]), "plane", ".1%")
    return [
        f"The plane of a and b holds{_in_the_last(data)} {plane} of the variance of queries and keys together.",
        f"Axis b holds more of it than axis a in {_number(data, 'b_over_a', '.0%')} of heads.",
    ]


def prepare_slopes(study: Study) -> pd.DataFrame:
    """Median of |alpha_k| / |alpha_q| of each model."""
    runs, kind = at_least_two_runs(study)
    frame = rows(study, runs, "rotated", "alpha_q", "alpha_k")
    frame = frame[frame["alpha_q"] != 0]
    frame = frame.assign(slope_ratio=frame["alpha_k"].abs() / frame["alpha_q"].abs())
    medians = [
        _labels(heads) | median_over_heads(heads, "slope_ratio") for _, heads in frame.groupby("model", sort=False)
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
    ends = data[["slope_ratio", "slope_ratio_low", "slope_ratio_high"]].to_numpy(float)
    lowest, largest = float(np.nanmin(ends)), max(float(np.nanmax(ends)), 1.15)
    left = min(0.8, 0.95 * lowest)
    axes.set_xlim(left, largest + 0.15 * (largest - left))
    grid(axes, "x")
    return figure


def say_slopes(data: pd.DataFrame) -> list[str]:
    """In how many runs keys drift faster, and the median of each."""
    faster, slower = int((data["slope_ratio_low"] > 1).sum()), int((data["slope_ratio_high"] < 1).sum())
    n = f"{len(data)} {data['what'].iloc[0]}"
    claim = f"Keys and queries drift about equally fast, as far as the intervals tell, in all {n}."
    if faster or slower:
        claim = (
            f"Keys drift faster than queries along a, beyond the interval, in {faster} of {n}, more slowly in {slower}."
        )
    return [
        claim,
        f"The median ratio over heads is{_in_the_last(data)} {_number(data, 'slope_ratio', '.2f')}.",
    ]


def _number(data: pd.DataFrame, column: str, form: str) -> str:
    """The number of each model, or of the last checkpoint."""
    shown = data.tail(1) if data["what"].iloc[0] == "checkpoints" else data
    return by_run({model: f"{number:{form}}" for model, number in zip(shown["model"], shown[column], strict=True)})


def _in_the_last(data: pd.DataFrame) -> str:
    return " in the last one" if data["what"].iloc[0] == "checkpoints" else ""


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
    "Mean correlation with position along axis a, for queries (dots) and keys (diamonds) of each model, with 95% "
    "bootstrap intervals over key heads.",
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
