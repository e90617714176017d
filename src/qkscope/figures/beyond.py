"""Past the published set: RoPE's own planes, published formulas beside exact ones."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.figures.figure import Figure, NotApplicable
from qkscope.figures.select import models, rows, with_window
from qkscope.figures.style import K, Q, canvas, family_look, grid, panels, shortened
from qkscope.study.study import Study


def prepare_spectrum(study: Study) -> pd.DataFrame:
    """Every RoPE plane of every head of the first model that knows its rotation."""
    table = rows(study, models(study), "planes", "theta", "bias_share")
    first = table[table["model"] == table["model"].iloc[0]]
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
    ]
    return first[columns].reset_index(drop=True)


def draw_spectrum(data: pd.DataFrame) -> Drawing:
    """Means over heads by plane, above a map of heads × planes coloured by share of the bias."""
    figure = canvas(7.4, 5.6)
    above, below = figure.subplots(2, 1, height_ratios=[1, 1.25])
    mean = data.groupby("plane")[["cycles", "var_share", "lock_q", "lock_k", "bias_share"]].mean()
    x = mean.index.to_numpy()
    above.bar(x, mean["bias_share"], color="#c98b2b", width=0.8, label="share of the bias")
    above.plot(x, mean["var_share"], color="#5b7553", marker="s", markersize=3, label="share of the variance")
    above.plot(x, mean["lock_q"], color=Q, marker="o", markersize=3, label="lock of queries")
    above.plot(x, mean["lock_k"], color=K, marker="o", markersize=3, label="lock of keys")
    above.set(ylim=(0, 1), ylabel="mean over heads", xlim=(-0.6, len(x) - 0.4))
    turns = [int(i) for i in np.linspace(0, len(x) - 1, min(len(x), 9))]
    above.set_xticks(turns, [f"{mean['cycles'].iloc[i]:.3g}" for i in turns])
    above.set_xlabel("turns over the window, plane by plane")
    figure.legend(loc="outside upper center", ncols=4)
    grid(above)
    table = data.pivot_table(index=["layer", "head"], columns="plane", values="bias_share")
    image = below.imshow(table.to_numpy(float), aspect="auto", cmap="YlOrBr", vmin=0, interpolation="nearest")
    layers = table.index.get_level_values("layer").to_numpy()
    starts = np.flatnonzero(np.r_[True, layers[1:] != layers[:-1]])
    step = max(1, len(starts) // 12)
    below.set_yticks(starts[::step], [f"layer {layer}" for layer in layers[starts[::step]]])
    below.set_xlabel("RoPE plane, from the fastest to the slowest")
    below.set_title("share of each head's bias carried by each plane")
    figure.colorbar(image, ax=below, fraction=0.03, pad=0.01).outline.set_visible(False)
    return figure


def say_spectrum(data: pd.DataFrame) -> list[str]:
    """Which turns carry the bias."""
    mean = data.groupby("plane")[["cycles", "bias_share", "lock_q", "lock_k"]].mean()
    order = mean["bias_share"].sort_values(ascending=False)
    half = order.index[: int((order.cumsum() < 0.5).sum()) + 1]
    turns = mean.loc[half, "cycles"]
    return [
        f"{data['model'].iloc[0]}: {len(half)} of {len(mean)} planes carry half of the bias; they make "
        f"{turns.min():.2g} to "
        f"{turns.max():.2g} turns over the window.",
        f"Phases are locked to position at {mean['lock_q'].mean():.2f} for queries and {mean['lock_k'].mean():.2f} "
        f"for keys, "
        "on average over planes (1: every vector is the same one, turned).",
    ]


def prepare_audit(study: Study) -> pd.DataFrame:
    """Published and exact positional variance of every head, and its bias per token and per window."""
    variance = rows(
        study, list(study.runs), "heads", "posvar_q", "posvar_q_published", "posvar_k", "posvar_k_published"
    )
    bias = with_window(study, rows(study, list(study.runs), "rotated", "bias_strength"))
    key = ["model", "layer", "head"]
    columns = ["posvar_q", "posvar_q_published", "posvar_k", "posvar_k_published"]
    both = variance[[*key, "family", *columns]].merge(bias[[*key, "bias_strength", "bias_window"]], on=key, sort=False)
    if both.empty:
        raise NotApplicable("heads.csv and rotated.csv have no head in common")
    return both.assign(window=both["model"].map({run.label: run.window for run in study.runs}).astype(float))


def draw_audit(data: pd.DataFrame) -> Drawing:
    """Two clouds about the diagonal, and the bias of each run in both units."""
    figure = canvas(7.4, 5.4)
    axes = panels(figure, 2, 2)
    look = family_look(data["family"].tolist())
    for cell, kind, name in ((axes[0, 0], "q", "queries"), (axes[0, 1], "k", "keys")):
        for family, (colour, marker) in look.items():
            part = data[data["family"] == family]
            cell.scatter(part[f"posvar_{kind}"], part[f"posvar_{kind}_published"], s=8, color=colour, marker=marker,
                         alpha=0.6, linewidths=0, rasterized=True, label=shortened(family) or "all")  # fmt: skip
        top = float(data[[f"posvar_{kind}", f"posvar_{kind}_published"]].max().max()) * 1.05
        cell.plot([0, top], [0, top], color="#777777", linewidth=0.9, linestyle=(0, (4, 3)))
        cell.set(xlabel="exact", ylabel="published formula", xlim=(0, top), ylim=(0, top))
        cell.set_title(f"positional variance of {name}")
        grid(cell)
    labels = list(dict.fromkeys(data["model"]))
    for cell, column, name in ((axes[1, 0], "bias_strength", "per token"), (axes[1, 1], "bias_window", "per window")):
        parts = [data.loc[data["model"] == label, column].dropna().to_numpy(float) for label in labels]
        middle = [np.quantile(part, [0.25, 0.5, 0.75]) if len(part) else np.full(3, np.nan) for part in parts]
        low, mid, high = np.array(middle).T
        cell.vlines(range(len(labels)), low, high, color="#8a6d3b", linewidth=1.6)
        cell.plot(range(len(labels)), mid, linestyle="none", marker="o", markersize=4, color="#8a6d3b")
        cell.set_xticks(range(len(labels)), [shortened(label, 20) for label in labels], rotation=40, ha="right",
                        rotation_mode="anchor", fontsize=6)  # fmt: skip
        cell.set_title(f"recency bias {name}: median and middle half")
        cell.axhline(0, color="#777777", linewidth=0.7)
        grid(cell)
    return figure


def say_audit(data: pd.DataFrame) -> list[str]:
    """How far apart the two formulas are."""
    said = []
    for kind, name in (("q", "queries"), ("k", "keys")):
        part = data[data[f"posvar_{kind}"] > 0]
        ratio = (part[f"posvar_{kind}_published"] / part[f"posvar_{kind}"]).median()
        said.append(f"For {name} the published formula gives {ratio:.2f} times the exact share, in the median head.")
    return said


SPECTRUM = Figure(
    "rope/01_plane_spectrum",
    "What each RoPE plane carries",
    "Above, means over heads for each RoPE plane: its share of the pooled variance and of the recency bias, and how "
    "firmly "
    "queries and keys are locked to its rotation. Below, each head's share of the bias by plane.",
    prepare_spectrum,
    draw_spectrum,
    say_spectrum,
)
AUDIT = Figure(
    "audit/01_published_vs_exact",
    "Published formulas beside exact ones",
    "Every head's positional variance by the published formula against the exact share, with the diagonal; below, the "
    "recency bias of each run per token and per window.",
    prepare_audit,
    draw_audit,
    say_audit,
)
