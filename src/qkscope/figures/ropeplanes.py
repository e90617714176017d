"""The planes that RoPE turns: their variance, how firmly they are locked to position, their part of the bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.figures.eachrun import of_each_run
from qkscope.figures.figure import Figure, models, rows
from qkscope.figures.scoreterms import chosen_runs
from qkscope.figures.style import DRIFT, SEPARATION, K, Q, canvas, grid, panels, shortened
from qkscope.progress import plural
from qkscope.results.study import Study

_MOST_RUNS = 4
"""Runs that are drawn, at most."""


def prepare_spectrum(study: Study) -> pd.DataFrame:
    """Every RoPE plane of every head of each run whose rotation is known, in layers that turn at one speed."""
    table = rows(study, models(study), "planes", "theta", "bias_share")
    shown = chosen_runs(list(table["model"].unique()), _MOST_RUNS)
    turning = pd.concat([_one_rotation(table[table["model"] == label]) for label in shown])
    columns = [
        "model",
        "layer",
        "head",
        "plane",
        "theta",
        "cycles",
        "var_share",
        "lock_q",
        "lock_k",
        "bias_part",
        "bias_share",
        "other_layers",
    ]
    return turning[columns].reset_index(drop=True)


def _one_rotation(table: pd.DataFrame) -> pd.DataFrame:
    """The layers with the most common frequencies; ``other_layers`` counts those that turn at other speeds.

    A plane of a layer with a local base and the same plane of one with a global base are not one plane.
    """
    turning = table[table["theta"] > 0]
    speeds = {
        layer: tuple(np.unique(np.round(np.log(of_layer["theta"].to_numpy(float)), 6)).tolist())
        for layer, of_layer in turning.groupby("layer")
    }
    common = max(speeds.values(), key=list(speeds.values()).count)
    layers = [layer for layer, of_layer in speeds.items() if of_layer == common]
    return table[table["layer"].isin(layers)].assign(other_layers=len(speeds) - len(layers))


def draw_spectrum(data: pd.DataFrame) -> Drawing:
    """Means over heads by plane, run by run; of a single run above a map of its heads by share of the bias."""
    runs = list(data.groupby("model", sort=False))
    figure = canvas(7.4, 5.6 if len(runs) == 1 else 2.3 * len(runs) + 0.4)
    cells = panels(figure, max(len(runs), 2), 1, height_ratios=[1, 1.25] if len(runs) == 1 else None)[:, 0]
    for cell, (run, planes) in zip(cells, runs, strict=False):
        marks = _draw_means(cell, planes)
        if len(runs) > 1:
            cell.set_title(shortened(str(run)))
    names = ["share of the bias", "share of the variance", "lock of queries", "lock of keys"]
    figure.legend(marks, names, loc="outside upper center", ncols=4)
    if len(runs) == 1:
        _draw_heads(figure, cells[1], data)
    return figure


def _draw_means(above: Axes, data: pd.DataFrame) -> list[Any]:
    """Means over the heads of a run, plane by plane."""
    mean = data.groupby("plane")[["cycles", "var_share", "lock_q", "lock_k", "bias_share"]].mean()
    x = mean.index.to_numpy()
    marks = [
        above.bar(x, mean["bias_share"], color=DRIFT, width=0.8),
        *above.plot(x, mean["var_share"], color=SEPARATION, marker="s", markersize=3, linestyle="--"),
        *above.plot(x, mean["lock_q"], color=Q, marker="o", markersize=3),
        *above.plot(x, mean["lock_k"], color=K, marker="D", markersize=3),
    ]
    above.set(ylim=(0, 1), ylabel="mean over heads", xlim=(-0.6, len(x) - 0.4))
    turns = [int(i) for i in np.linspace(0, len(x) - 1, min(len(x), 9))]
    above.set_xticks(turns, [_turns(mean["cycles"].iloc[i]) for i in turns])
    above.set_xlabel("turns over the window, plane by plane")
    grid(above)
    return marks


def _draw_heads(figure: Drawing, below: Axes, data: pd.DataFrame) -> None:
    """A map of the heads of a run: the share of the bias that each plane carries."""
    table = data.pivot_table(index=["layer", "head"], columns="plane", values="bias_share")
    image = below.imshow(table.to_numpy(float), aspect="auto", cmap="Oranges", vmin=0, interpolation="nearest")
    layers = table.index.get_level_values("layer").to_numpy()
    starts = np.flatnonzero(np.r_[True, layers[1:] != layers[:-1]])
    step = max(1, len(starts) // 12)
    below.set_yticks(starts[::step], [f"layer {layer}" for layer in layers[starts[::step]]])
    for start in starts[1:] if len(starts) <= 12 else ():
        below.axhline(start - 0.5, color="white", linewidth=0.8)
    below.set_xlabel("RoPE plane, from the fastest to the slowest")
    below.set_title("share of each head's bias carried by each plane")
    figure.colorbar(image, ax=below, fraction=0.03, pad=0.01).outline.set_visible(False)


def _turns(turns: float) -> str:
    """A number of turns: whole, if there are ten or more.

    >>> _turns(1304.2), _turns(0.163), _turns(0.0)
    ('1,304', '0.16', '0')
    """
    return f"{turns:,.0f}" if turns >= 10 or not turns else f"{turns:.2g}"


def say_spectrum(data: pd.DataFrame) -> list[str]:
    """The planes of a run that carry half of the bias, and their turns over the window."""
    mean = data.groupby("plane")[["cycles", "bias_share", "lock_q", "lock_k"]].mean()
    order = mean["bias_share"].sort_values(ascending=False)
    half = order.index[: int((order.cumsum() < 0.5).sum()) + 1]
    turns = mean.loc[half, "cycles"]
    ends = dict.fromkeys(_turns(float(end)) for end in (turns.min(), turns.max()))
    n_others = int(data["other_layers"].iloc[0])
    count = "planes carries" if len(half) == 1 else "planes carry"
    left_out = (
        f"{plural(n_others, 'layer')} {'turns' if n_others == 1 else 'turn'} at other speeds (another rotary base)"
    )
    return [
        f"{len(half)} of {len(mean)} {count} half of the bias, at {' to '.join(ends)} turns over the window.",
        f"Phases are locked to position at {mean['lock_q'].mean():.2f} for queries and {mean['lock_k'].mean():.2f} for "
        "keys, on average over planes (1: every vector is the same one, turned).",
        *([f"{left_out} and {'is' if n_others == 1 else 'are'} not shown."] if n_others else []),
    ]


def _shows_spectrum(data: pd.DataFrame) -> str:
    """The description of the means, of what is left out, and of the map that a single run has."""
    others = " Layers with another rotary base are left out." if data["other_layers"].any() else ""
    below = " Below, each head's share of the bias by plane." if data["model"].nunique() == 1 else ""
    return (
        "Means over heads for each RoPE plane, from the fastest to the slowest: its share of the pooled variance and "
        f"of the recency bias, and how firmly queries and keys are locked to its rotation.{others}{below}"
    )


SPECTRUM = Figure(
    "rope/01_plane_spectrum",
    "What each RoPE plane carries",
    _shows_spectrum,
    prepare_spectrum,
    draw_spectrum,
    of_each_run(say_spectrum),
)
