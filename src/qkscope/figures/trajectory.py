"""The rotation model over ordered checkpoints (qk-rotation 09, 10)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.figures.axes import ticks
from qkscope.figures.figure import Figure, checkpoints, rows, timeline
from qkscope.figures.style import canvas, grid, panels, phase_colours, shortened
from qkscope.results.study import Study

TRAJECTORY = {
    "r_k_a": "r_k_a",
    "separation_strength": "separation_strength",
    "plane_var_fraction": "plane_var_fraction",
    "bias_strength": "bias per token (score)",
    "bias_window": "bias per window (score)",
    "decay": "decay: logits per doubling of distance",
}
DECOMPOSITION = {
    "mu_q_a": "mu_q_a (vector units)",
    "alpha_k": "alpha_k per token",
    "alpha_k_window": "alpha_k per window",
    "bias_strength": "bias per token (score)",
    "bias_window": "bias per window (score)",
    "decay": "decay: logits per doubling of distance",
}
"""Columns and their titles; the last needs no window, and is at the window of comparison."""


def prepare_trajectory(study: Study) -> pd.DataFrame:
    """Median and quartiles over heads of the rotation model's headline columns."""
    return _quartiles(study, [name for name in TRAJECTORY if name != "decay"])


def prepare_decomposition(study: Study) -> pd.DataFrame:
    """Median and quartiles over heads of the two factors of the bias, and of the bias."""
    return _quartiles(study, [name for name in DECOMPOSITION if name != "decay"])


def draw_trajectory(data: pd.DataFrame) -> Drawing:
    """One panel per column; the bias per token and per window."""
    return _draw_quartiles(data, TRAJECTORY)


def draw_decomposition(data: pd.DataFrame) -> Drawing:
    """One panel per factor."""
    return _draw_quartiles(data, DECOMPOSITION)


def say_trajectory(data: pd.DataFrame) -> list[str]:
    """The change from first to last, and the change when the window changes."""
    first, last = data.iloc[0], data.iloc[-1]
    changes = ", ".join(f"{name} {first[name]:.3g} → {last[name]:.3g}" for name in TRAJECTORY if name != "decay")
    return [f"Medians from {first['model']} to {last['model']}: {changes}.", *_over_windows(data, ["bias"])]


def say_decomposition(data: pd.DataFrame) -> list[str]:
    """The change of each factor of the bias."""
    first, last = data.iloc[0], data.iloc[-1]
    changes = ", ".join(f"{name} {first[name]:.3g} → {last[name]:.3g}" for name in DECOMPOSITION if name != "decay")
    return [f"Medians from {first['model']} to {last['model']}: {changes}.", *_over_windows(data, ["alpha_k", "bias"])]


def _over_windows(data: pd.DataFrame, names: list[str]) -> list[str]:
    """Changes per token and per window from the last checkpoint with the first window to the last checkpoint."""
    windows = data["window"].dropna().unique()
    if len(windows) < 2:
        return []
    before, after = data[data["window"] == windows[0]].iloc[-1], data.iloc[-1]
    per_token = {"bias": "bias_strength", "alpha_k": "alpha_k"}
    sentences = []
    for name in names:
        token, window = per_token[name], f"{name}_window"
        changes = [
            after[column] / before[column] - 1 if before[column] else math.nan
            for column in (token, window, f"{window}_compared")
        ]
        at_one_window = (
            f" With both at a window of {after['compare_at']:,.0f} it changes by {changes[2]:+.0%}."
            if math.isfinite(changes[2])
            else ""
        )
        sentences.append(
            f"From a window of {windows[0]:,.0f} to one of {after['window']:,.0f} ({before['model']} to "
            f"{after['model']}), {name} per token changes by {changes[0]:+.0%} and per window by {changes[1]:+.0%}, by "
            f"lines that do not compare across windows.{at_one_window}"
        )
    if before["decay"] and math.isfinite(before["decay"]) and math.isfinite(after["decay"]):
        sentences.append(
            f"Decay, which does, goes {before['decay']:.3g} → {after['decay']:.3g} logits per doubling of the distance."
        )
    return sentences


def _quartiles(study: Study, columns: list[str]) -> pd.DataFrame:
    runs = checkpoints(study)
    frame = rows(study, runs, "rotated", "alpha_k", "bias_strength")
    run_times = timeline(runs)
    window = frame["model"].map(run_times.set_index("model")["window"]).astype(float)
    if "window" in frame:
        window = frame["window"].fillna(window)
    frame = frame.assign(
        alpha_k_window=frame["alpha_k"] * window,
        bias_window=frame["bias_strength"] * window,
    )
    for column in columns:
        if column not in frame:
            frame[column] = math.nan
    grouped = frame.groupby("model", sort=False)[columns]
    table = grouped.median()
    for name, level in (("q1", 0.25), ("q3", 0.75)):
        table = table.join(grouped.quantile(level).add_suffix(f"_{name}"))
    table = table.join(_compared(study)).join(_decay(study))
    return run_times.assign(compare_at=study.compare_at or math.nan).merge(table.reset_index(), on="model", sort=False)


def _compared(study: Study) -> pd.DataFrame:
    """Medians over heads of slopes per window at the window of comparison."""
    frame = study.compared.tables.get("rotated")
    columns = ["alpha_k_window", "bias_window"]
    if study.compare_at is None or frame is None or not set(columns) <= set(frame):
        return pd.DataFrame(columns=[f"{name}_compared" for name in columns], dtype=float)
    return frame.groupby("model")[columns].median().add_suffix("_compared")


def _decay(study: Study) -> pd.DataFrame:
    """Median and quartiles over heads of decay: at the window of comparison, for runs captured at it."""
    frame, names = study.compared.tables.get("heads"), ["decay_q1", "decay", "decay_q3"]
    if frame is None or "decay" not in frame:
        return pd.DataFrame(columns=names, dtype=float)
    quartiles = frame.groupby("model")["decay"].quantile(np.array([0.25, 0.5, 0.75])).unstack()
    return quartiles.set_axis(names, axis=1)


def _draw_quartiles(data: pd.DataFrame, names: dict[str, str]) -> Drawing:
    figure = canvas(8.4, 5.2)
    axes = panels(figure, 2, 3, sharex=True)
    colours = phase_colours(data["phase"].tolist())
    present = {name: title for name, title in names.items() if data[name].notna().any()}
    for cell, (column, title) in zip(axes.flat, present.items(), strict=False):
        cell.plot(data["order"], data[column], color="#b9b9b9", linewidth=1.0, zorder=1)
        for phase, colour in colours.items():
            rows_of_phase = data[data["phase"] == phase]
            order = rows_of_phase["order"].to_numpy()
            cell.vlines(
                order, rows_of_phase[f"{column}_q1"], rows_of_phase[f"{column}_q3"], color=colour, linewidth=1.6
            )
            cell.plot(order, rows_of_phase[column], linestyle="none", marker="o", markersize=4.5, color=colour)
        cell.set_title(title)
        lowest = float(np.nanmin(data[f"{column}_q1"])) if data[f"{column}_q1"].notna().any() else 0.0
        if lowest >= 0:
            cell.set_ylim(0, None)
        else:
            cell.axhline(0, color="#777777", linewidth=0.7)
        ticks(cell, data)
        grid(cell)
    for cell in list(axes.flat)[len(present) :]:
        cell.set_visible(False)
    for cell in axes[0]:
        cell.set_xlabel("")
        cell.tick_params(axis="x", labelbottom=cell is axes[0, 2] and len(present) < 6)
    marks = [
        axes[0, 0].plot([], [], linestyle="none", marker="o", markersize=4.5, color=colour, label=shortened(phase))[0]
        for phase, colour in colours.items()
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks))
    return figure


TRAJECTORY_FIGURE = Figure(
    "qk-rotation/09_training_trajectory",
    "The rotation model over training",
    "Median over heads at each checkpoint, with the middle half of the heads as bars, coloured by phase. The bias "
    "stands there per token, as published, and per window, each at the run's own window: a line's slope per token "
    "shrinks and times the window grows with the window, even if the head does not change.",
    prepare_trajectory,
    draw_trajectory,
    say_trajectory,
)
DECOMPOSITION_FIGURE = Figure(
    "qk-rotation/10_bias_decomposition",
    "What the recency bias is made of, over training",
    "Median over heads of the two factors of the bias, mu_q_a and alpha_k, and of the bias, with the middle half of "
    "the heads as bars; slopes per token and per window.",
    prepare_decomposition,
    draw_decomposition,
    say_decomposition,
)
