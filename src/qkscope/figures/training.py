"""What changes over ordered checkpoints (qk-pca 07, 08, 09; qk-rotation 09, 10)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.pca import TAXONOMY
from qkscope.figures.figure import Figure
from qkscope.figures.select import checkpoints, discordant, rows, timeline
from qkscope.figures.style import CLASSES, FAINT, K, Q, canvas, grid, panels, phase_colours, shortened
from qkscope.study import Study

# ---- position on component 0 --------------------------------------------------------------------


def prepare_signal(study: Study) -> pd.DataFrame:
    """Mean and standard deviation over heads of r_q, r_k and |r_k| on component 0, and the discordant share."""
    runs = checkpoints(study)
    frame = rows(study, runs, "pc0", "r_q", "r_k")
    frame = frame.assign(abs_r_k=frame["r_k"].abs(), discordant=discordant(frame))
    return timeline(runs).merge(_mean_sd(frame, ["r_q", "r_k", "abs_r_k", "discordant"]), on="model", sort=False)


def draw_signal(data: pd.DataFrame) -> Drawing:
    """Three lines with bands of one standard deviation."""
    figure = canvas(6.6, 3.4)
    axes = figure.subplots()
    lines = (("r_q", Q, "-", "r_q"), ("r_k", K, "-", "r_k"), ("abs_r_k", K, "--", "|r_k|"))
    ends = spread([float(data[name].iloc[-1]) for name, *_ in lines], 0.075)
    for (name, colour, line, label), at in zip(lines, ends, strict=True):
        _band(axes, data, name, colour, line, label, at, band=name != "abs_r_k")
    axes.axhline(0, color="#777777", linewidth=0.7)
    axes.set_ylabel("correlation with position on PC0")
    low = float((data["r_k"] - data["r_k_sd"]).min())
    axes.set_ylim(min(-0.05, low - 0.05), 1.08)
    _time_axis(axes, data)
    grid(axes)
    return figure


def say_signal(data: pd.DataFrame) -> list[str]:
    """First and last checkpoint, and what a change of signed r_k is made of."""
    first, last = data.iloc[0], data.iloc[-1]
    return [
        f"From {first['model']} to {last['model']}, mean r_q goes {first['r_q']:.2f} → {last['r_q']:.2f}, mean r_k "
        f"{first['r_k']:+.2f} → {last['r_k']:+.2f}, mean |r_k| {first['abs_r_k']:.2f} → {last['abs_r_k']:.2f}.",
        f"Where the sign is defined, the share of heads whose keys drift against their queries goes "
        f"{first['discordant']:.0%} → "
        f"{last['discordant']:.0%}; what changes in r_k but not in |r_k| is that.",
    ]


# ---- classes ------------------------------------------------------------------------------------


def prepare_classes(study: Study) -> pd.DataFrame:
    """Share of each class of heads at each checkpoint."""
    runs = checkpoints(study)
    frame = rows(study, runs, "pc0", "taxonomy")
    shares = frame.groupby("model", sort=False)["taxonomy"].value_counts(normalize=True).unstack(fill_value=0)
    shares = shares.reindex(columns=list(TAXONOMY), fill_value=0.0).reset_index()
    counts = frame.groupby("model", sort=False).size().rename("n_heads").reset_index()
    return timeline(runs).merge(counts, on="model", sort=False).merge(shares, on="model", sort=False)


def draw_classes(data: pd.DataFrame) -> Drawing:
    """Stacked shares, with the larger ones written in."""
    figure = canvas(6.6, 3.4)
    axes = figure.subplots()
    below = np.zeros(len(data))
    x = data["order"].to_numpy()
    for kind, colour in CLASSES.items():
        share = data[kind].to_numpy(float)
        axes.bar(x, share, bottom=below, width=0.82, color=colour, label=kind)
        for at, low, size in zip(x, below, share, strict=True):
            if size >= 0.06:
                light = kind in ("content-focused", "mixed", "q-positional")
                axes.text(at, low + size / 2, f"{size:.0%}", ha="center", va="center", fontsize=6.5,
                          color="#222222" if light else "white")  # fmt: skip
        below += share
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of heads")
    _time_axis(axes, data)
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def say_classes(data: pd.DataFrame) -> list[str]:
    """How the classes move from the first checkpoint to the last."""
    first, last = data.iloc[0], data.iloc[-1]
    moved = [f"{kind} {first[kind]:.0%} → {last[kind]:.0%}" for kind in TAXONOMY]
    return [f"From {first['model']} to {last['model']} ({last['n_heads']:,.0f} heads): " + ", ".join(moved) + "."]


# ---- share of PC0 -------------------------------------------------------------------------------


def prepare_share(study: Study) -> pd.DataFrame:
    """Mean and standard deviation over heads of PC0's share of variance."""
    runs = checkpoints(study)
    frame = rows(study, runs, "pc0", "explained_variance")
    return timeline(runs).merge(_mean_sd(frame, ["explained_variance"]), on="model", sort=False)


def draw_share(data: pd.DataFrame) -> Drawing:
    """One line with its band."""
    figure = canvas(6.6, 3.0)
    axes = figure.subplots()
    _band(axes, data, "explained_variance", "#3d5a3a", "-", "PC0", float(data["explained_variance"].iloc[-1]))
    axes.set_ylabel("PC0's share of pooled variance")
    axes.set_ylim(0, None)
    _time_axis(axes, data)
    grid(axes)
    return figure


def say_share(data: pd.DataFrame) -> list[str]:
    """Start, end, and the largest step."""
    first, last = data.iloc[0], data.iloc[-1]
    steps = data["explained_variance"].diff().abs()
    at = int(steps.iloc[1:].to_numpy().argmax()) + 1
    return [
        f"PC0's mean share goes {first['explained_variance']:.3f} → {last['explained_variance']:.3f}; the largest "
        f"step is "
        f"from {data['model'].iloc[at - 1]} to {data['model'].iloc[at]} "
        f"({data['explained_variance'].diff().iloc[at]:+.3f})."
    ]


# ---- the rotation model -------------------------------------------------------------------------

TRAJECTORY = {
    "r_k_a": "r_k_a",
    "separation_strength": "separation_strength",
    "plane_var_fraction": "plane_var_fraction",
    "bias_strength": "bias per token (score)",
    "bias_window": "bias per window (score)",
}
DECOMPOSITION = {
    "mu_q_a": "mu_q_a (vector units)",
    "alpha_k": "alpha_k per token",
    "alpha_k_window": "alpha_k per window",
    "bias_strength": "bias per token (score)",
    "bias_window": "bias per window (score)",
}


def prepare_trajectory(study: Study) -> pd.DataFrame:
    """Median and quartiles over heads of the rotation model's headline columns."""
    return _quartiles(study, list(TRAJECTORY))


def prepare_decomposition(study: Study) -> pd.DataFrame:
    """Median and quartiles over heads of the two factors of the bias, and of the bias."""
    return _quartiles(study, list(DECOMPOSITION))


def draw_trajectory(data: pd.DataFrame) -> Drawing:
    """One panel per column; bias per token and per window are both there."""
    return _draw_quartiles(data, TRAJECTORY)


def draw_decomposition(data: pd.DataFrame) -> Drawing:
    """One panel per factor."""
    return _draw_quartiles(data, DECOMPOSITION)


def say_trajectory(data: pd.DataFrame) -> list[str]:
    """First to last, and the change where the window changes."""
    first, last = data.iloc[0], data.iloc[-1]
    moved = ", ".join(f"{name} {first[name]:.3g} → {last[name]:.3g}" for name in TRAJECTORY)
    return [f"Medians from {first['model']} to {last['model']}: {moved}.", *_over_windows(data, ["bias"])]


def say_decomposition(data: pd.DataFrame) -> list[str]:
    """Which factor moves the bias."""
    first, last = data.iloc[0], data.iloc[-1]
    moved = ", ".join(f"{name} {first[name]:.3g} → {last[name]:.3g}" for name in DECOMPOSITION)
    return [f"Medians from {first['model']} to {last['model']}: {moved}.", *_over_windows(data, ["alpha_k", "bias"])]


def _over_windows(data: pd.DataFrame, names: list[str]) -> list[str]:
    """What happens per token and per window from the last checkpoint of the first window to the last of all."""
    windows = data["window"].dropna().unique()
    if len(windows) < 2:
        return []
    before, after = data[data["window"] == windows[0]].iloc[-1], data.iloc[-1]
    per_token = {"bias": "bias_strength", "alpha_k": "alpha_k"}
    said = []
    for name in names:
        token, window = per_token[name], f"{name}_window"
        changes = [after[column] / before[column] - 1 if before[column] else math.nan for column in (token, window)]
        said.append(
            f"From a window of {windows[0]:,.0f} to one of {after['window']:,.0f} ({before['model']} to "
            f"{after['model']}), "
            f"{name} per token changes by {changes[0]:+.0%} and per window by {changes[1]:+.0%}."
        )
    return said


def _quartiles(study: Study, columns: list[str]) -> pd.DataFrame:
    runs = checkpoints(study)
    frame = rows(study, runs, "rotated", "alpha_k", "bias_strength")
    when = timeline(runs)
    window = frame["model"].map(when.set_index("model")["window"]).astype(float)
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
    return when.merge(table.reset_index(), on="model", sort=False)


def _draw_quartiles(data: pd.DataFrame, names: dict[str, str]) -> Drawing:
    figure = canvas(8.4, 4.9)
    axes = panels(figure, 2, 3, sharex=True)
    colours = phase_colours(data["phase"].tolist())
    x = data["order"].to_numpy()
    for cell, (column, title) in zip(axes.flat, names.items(), strict=False):
        cell.plot(x, data[column], color="#b9b9b9", linewidth=1.0, zorder=1)
        for phase, colour in colours.items():
            part = data[data["phase"] == phase]
            at = part["order"].to_numpy()
            cell.vlines(at, part[f"{column}_q1"], part[f"{column}_q3"], color=colour, linewidth=1.6)
            cell.plot(at, part[column], linestyle="none", marker="o", markersize=4.5, color=colour)
        cell.set_title(title)
        lowest = float(np.nanmin(data[f"{column}_q1"])) if data[f"{column}_q1"].notna().any() else 0.0
        if lowest >= 0:
            cell.set_ylim(0, None)
        else:
            cell.axhline(0, color="#777777", linewidth=0.7)
        _ticks(cell, data)
        grid(cell)
    for cell in list(axes.flat)[: len(names)][:3]:
        cell.tick_params(axis="x", labelbottom=cell is axes[0, 2])
    _phase_key(axes[1, 2], colours)
    return figure


def _phase_key(axes: Axes, colours: dict[str, str]) -> None:
    axes.axis("off")
    axes.text(0.14, 0.62, "median over heads, bars:\nmiddle half of the heads", fontsize=7, color=FAINT, va="bottom",
              transform=axes.transAxes)  # fmt: skip
    marks = [axes.plot([], [], linestyle="none", marker="o", markersize=4.5, color=colour, label=shortened(phase))[0]
             for phase, colour in colours.items()]  # fmt: skip
    axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(0.06, 0.6), title="", alignment="left")


# ---- pieces -------------------------------------------------------------------------------------


def _mean_sd(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    grouped = frame.groupby("model", sort=False)
    means = grouped[columns].mean().join(grouped[columns].std(ddof=0).add_suffix("_sd"))
    return means.join(grouped.size().rename("n_heads")).reset_index()


def _band(
    axes: Axes, data: pd.DataFrame, name: str, colour: str, line: str, label: str, at: float, *, band: bool = True
) -> None:
    """A line over the checkpoints, labelled at its end; the band is one standard deviation over heads."""
    x, value, sd = (data[column].to_numpy(float) for column in ("order", name, f"{name}_sd"))
    if band:
        axes.fill_between(x, value - sd, value + sd, color=colour, alpha=0.13, linewidth=0)
    axes.plot(x, value, color=colour, linestyle=line, marker="o", markersize=3)
    axes.annotate(label, (x[-1], at), xytext=(6, 0), textcoords="offset points", color=colour, va="center",
                  fontsize=8, annotation_clip=False)  # fmt: skip


def spread(values: list[float], least: float) -> list[float]:
    """Heights for labels near these values, at least so far apart, in the same order.

    >>> [round(x, 2) for x in spread([0.5, 0.52, 0.9], 0.1)]
    [0.46, 0.56, 0.9]
    """
    order = np.argsort(values, kind="stable")
    heights = np.array(values, dtype=float)
    for _ in range(20):
        for low, high in pairwise(order):
            missing = least - (heights[high] - heights[low])
            if missing > 1e-9:
                heights[low] -= missing / 2
                heights[high] += missing / 2
    return [float(height) for height in heights]


def _time_axis(axes: Axes, data: pd.DataFrame) -> None:
    """Checkpoints by name; phases separated by lines and named above the frame."""
    _ticks(axes, data)
    phases = data["phase"].tolist()
    starts = [0] + [i for i in range(1, len(phases)) if phases[i] != phases[i - 1]] + [len(phases)]
    for start, end in pairwise(starts):
        if start:
            axes.axvline(start - 0.5, color="#9a9a9a", linewidth=0.8, linestyle=(0, (2, 2)))
        narrow = (end - start) <= 1 and len(starts) > 3
        axes.annotate(shortened(phases[start], 9 if narrow else 18), ((start + end - 1) / 2, 1.0),
                      xycoords=("data", "axes fraction"), xytext=(0, 4), textcoords="offset points", ha="center",
                      fontsize=6.5 if narrow else 7, color=FAINT)  # fmt: skip
    axes.set_xlim(-0.6, len(phases) - 0.4)


def _ticks(axes: Axes, data: pd.DataFrame) -> None:
    names = [shortened(name, 24) for name in data["model"]]
    axes.set_xticks(data["order"], names, rotation=40, ha="right", rotation_mode="anchor", fontsize=6.5)


SIGNAL = Figure(
    "qk-pca/07_position_signal",
    "Position on PC0 over training",
    "Mean r_q, r_k and |r_k| on PC0 over heads at each checkpoint; bands are one standard deviation over heads.",
    prepare_signal,
    draw_signal,
    say_signal,
)
CLASSES_FIGURE = Figure(
    "qk-pca/08_taxonomy_evolution",
    "Classes of heads over training",
    "Share of heads in each class at each checkpoint.",
    prepare_classes,
    draw_classes,
    say_classes,
)
SHARE = Figure(
    "qk-pca/09_explained_variance_over_training",
    "PC0's share of variance over training",
    "Mean share of the pooled variance on PC0 at each checkpoint; the band is one standard deviation over heads.",
    prepare_share,
    draw_share,
    say_share,
)
TRAJECTORY_FIGURE = Figure(
    "qk-rotation/09_training_trajectory",
    "The rotation model over training",
    "Median over heads at each checkpoint, with the middle half of the heads as bars, coloured by phase. The bias "
    "stands "
    "there per token, as published, and per window: slopes per token shrink when the window grows.",
    prepare_trajectory,
    draw_trajectory,
    say_trajectory,
)
DECOMPOSITION_FIGURE = Figure(
    "qk-rotation/10_bias_decomposition",
    "What the recency bias is made of, over training",
    "Median over heads of the two factors of the bias, mu_q_a and alpha_k, and of the bias, with the middle half of "
    "the "
    "heads as bars; slopes per token and per window.",
    prepare_decomposition,
    draw_decomposition,
    say_decomposition,
)
