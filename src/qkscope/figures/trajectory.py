"""The rotation model over ordered checkpoints (qk-rotation 09, 10)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.figures.axes import ticks
from qkscope.figures.figure import Figure, at_own_windows, checkpoints, rows, timeline
from qkscope.figures.style import canvas, grid, panels, phase_colours, shortened
from qkscope.results.study import Study

BIAS = {"bias_strength": "bias per token (q·k)", "bias_window": "bias over the window (q·k)"}
TRAJECTORY = {
    "r_k_a": "r_k_a: keys on the drift axis",
    "separation_strength": "separation_strength",
    "plane_var_fraction": "share of variance in the plane",
    **BIAS,
    "decay": "decay: logits per doubling of distance",
}
DECOMPOSITION = {
    "mu_q_a": "mu_q_a (vector units)",
    "alpha_k": "alpha_k per token",
    "alpha_k_window": "alpha_k over the window",
    **BIAS,
}
"""Columns and their titles. At one window a slope over the window is one number times that per token: left out."""


def prepare_trajectory(study: Study) -> pd.DataFrame:
    """Median and quartiles over heads of the rotation model's headline columns."""
    return _quartiles(study, TRAJECTORY)


def prepare_decomposition(study: Study) -> pd.DataFrame:
    """Median and quartiles over heads of the two factors of the bias, and of the bias."""
    return _quartiles(study, DECOMPOSITION)


def draw_trajectory(data: pd.DataFrame) -> Drawing:
    """One panel per column."""
    return _draw_quartiles(data, TRAJECTORY)


def draw_decomposition(data: pd.DataFrame) -> Drawing:
    """One panel per factor."""
    return _draw_quartiles(data, DECOMPOSITION)


def say_trajectory(data: pd.DataFrame) -> list[str]:
    """The changes of keys, plane and decay, if they are larger than heads differ, and all medians."""
    first, last = data.iloc[0], data.iloc[-1]
    phrases = [
        f"{what} {words[_course(first, last, name)]} (median {name} {first[name]:.2g} → {last[name]:.2g})"
        for name, (what, words) in _COURSES.items()
        if np.isfinite([first[name], last[name]]).all() and min(first[name], last[name]) > 0
    ]
    claim = f"From {first['model']} to {last['model']} {', '.join(phrases[:-1])} and {phrases[-1]}."
    return [*([claim] if len(phrases) > 1 else []), *_say_changes(data, TRAJECTORY)]


_COURSES = {
    "r_k_a": ("keys follow position on the drift axis", ("about as closely", "more closely", "less closely")),
    "plane_var_fraction": ("the plane of a and b holds", ("about as much variance", "more variance", "less variance")),
    "decay": ("scores fall with distance", ("about as fast", "faster", "more slowly")),
}
"""For each column what it measures, and words for about the same, more and less of it."""


def _course(first: pd.Series, last: pd.Series, name: str) -> int:
    """1 or −1 if the medians are each outside the middle half of the other's heads, else 0."""
    for sign, near, far in ((1, "q3", "q1"), (-1, "q1", "q3")):
        if sign * (last[name] - first[f"{name}_{near}"]) > 0 and sign * (last[f"{name}_{far}"] - first[name]) > 0:
            return sign
    return 0


def say_decomposition(data: pd.DataFrame) -> list[str]:
    """The factor that changes most, and the change of each."""
    first, last = data.iloc[0], data.iloc[-1]
    changes = {
        name: last[name] / first[name] - 1
        for name in ("mu_q_a", "alpha_k", "bias_strength")
        if first[name] and np.isfinite(last[name] / first[name])
    }
    if len(changes) < 3 or min(first["mu_q_a"] * last["mu_q_a"], first["alpha_k"] * last["alpha_k"]) <= 0:
        return _say_changes(data, DECOMPOSITION)
    bias, query, keys = (_change(changes[name]) for name in ("bias_strength", "mu_q_a", "alpha_k"))
    return [
        f"From {first['model']} to {last['model']} the median bias per token changes {bias}; of its factors the mean "
        f"query on a (mu_q_a) changes {query}, the keys' drift (alpha_k) {keys}.",
        *_say_changes(data, DECOMPOSITION),
    ]


def _change(change: float) -> str:
    """A relative change in words.

    >>> _change(-0.55), _change(39.2)
    ('by -55%', '40-fold')
    """
    return f"by {change:+.0%}" if change < 2 else f"{change + 1:.0f}-fold"


def _say_changes(data: pd.DataFrame, names: dict[str, str]) -> list[str]:
    """Medians at both ends; where the window changes too, that it does."""
    first, last = data.iloc[0], data.iloc[-1]
    shown = [name for name in _shown(data, names) if np.isfinite([first[name], last[name]]).all()]
    changes = ", ".join(f"{name} {first[name]:.3g} → {last[name]:.3g}" for name in shown)
    sentences = [f"Medians over heads from {first['model']} to {last['model']}: {changes}."]
    if data["window"].nunique() > 1:
        sentences.append(
            f"The window goes from {first['window']:,.0f} to {last['window']:,.0f} tokens, and with it slopes, "
            "correlations and shares, whatever training does; only decay, over the same distances, compares."
        )
    return sentences


def _shown(data: pd.DataFrame, names: dict[str, str]) -> dict[str, str]:
    """The columns that are drawn: those with values and, over the window, where windows differ."""
    several = data["window"].nunique() > 1
    there = {name: title for name, title in names.items() if data[name].notna().any()}
    return {name: title for name, title in there.items() if several or not name.endswith("_window")}


def _quartiles(study: Study, names: dict[str, str]) -> pd.DataFrame:
    runs = checkpoints(study)
    frame = rows(study, runs, "rotated", "alpha_k", "bias_strength")
    times = timeline(runs)
    window = frame["model"].map(times.set_index("model")["window"]).astype(float)
    if "window" in frame:
        window = frame["window"].fillna(window)
    frame = frame.assign(alpha_k_window=frame["alpha_k"] * window, bias_window=frame["bias_strength"] * window)
    heads = study.table("heads", "decay")
    if heads is not None and "decay" in names:
        key = ["model", "layer", "head"]
        frame = frame.drop(columns="decay", errors="ignore").merge(heads[[*key, "decay"]], on=key, how="left")
    columns = [*names]
    for column in columns:
        if column not in frame:
            frame[column] = math.nan
    grouped = frame.groupby("model", sort=False)[columns]
    table = grouped.median()
    for end, level in (("q1", 0.25), ("q3", 0.75)):
        table = table.join(grouped.quantile(level).add_suffix(f"_{end}"))
    return times.merge(table.reset_index(), on="model", sort=False)


def _draw_quartiles(data: pd.DataFrame, names: dict[str, str]) -> Drawing:
    shown = _shown(data, names)
    columns = 2 if len(shown) in (2, 4) else 3
    n_rows = -(-len(shown) // columns)
    figure = canvas(2.8 * columns, 2.1 * n_rows + 0.9)
    axes = panels(figure, n_rows, columns)
    colours = phase_colours(data["phase"].tolist())
    for number, (cell, (column, title)) in enumerate(zip(axes.flat, shown.items(), strict=False)):
        _draw_medians(cell, data, column, colours)
        cell.set_title(title)
        ticks(cell, data)
        if number + columns < len(shown):  # the panel below has the same
            cell.set_xlabel("")
            cell.tick_params(axis="x", labelbottom=False)
    marks = [
        axes[0, 0].plot([], [], linestyle="none", marker="o", markersize=4.5, color=colour, label=shortened(phase))[0]
        for phase, colour in colours.items()
    ]
    free = list(axes.flat)[len(shown) :]
    for cell in free:
        cell.set_axis_off()
    if free:
        free[0].legend(handles=marks, loc="center")
    else:
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks))
    return figure


def _draw_medians(cell: Axes, data: pd.DataFrame, column: str, colours: dict[str, str]) -> None:
    """Medians and the middle half of heads at each checkpoint, coloured by phase."""
    cell.plot(data["order"], data[column], color="#b9b9b9", linewidth=1.0, zorder=1)
    for phase, colour in colours.items():
        of_phase = data[data["phase"] == phase]
        cell.vlines(of_phase["order"], of_phase[f"{column}_q1"], of_phase[f"{column}_q3"], color=colour, linewidth=1.6)
        cell.plot(of_phase["order"], of_phase[column], linestyle="none", marker="o", markersize=4.5, color=colour)
    if float(np.nanmin(data[f"{column}_q1"])) >= 0:
        cell.set_ylim(0, None)
    else:
        cell.axhline(0, color="#777777", linewidth=0.7)
    grid(cell)


TRAJECTORY_FIGURE = Figure(
    "qk-rotation/09_training_trajectory",
    "The rotation model over training",
    "Median over heads at each checkpoint, with the middle half of the heads as bars, coloured by phase. Where windows "
    "differ the bias stands there per token, as published, and over the window: a line's slope per token shrinks and "
    "times the window grows with the window, even if the head does not change.",
    prepare_trajectory,
    draw_trajectory,
    say_trajectory,
    at_own_windows(prepare_trajectory),
)
DECOMPOSITION_FIGURE = Figure(
    "qk-rotation/10_bias_decomposition",
    "What the recency bias is made of, over training",
    "Median over heads of the two factors of the bias, mu_q_a and alpha_k, and of the bias, with the middle half of "
    "the heads as bars, coloured by phase.",
    prepare_decomposition,
    draw_decomposition,
    say_decomposition,
    at_own_windows(prepare_decomposition),
)
