"""Changes over ordered checkpoints: position, classes and share of PC0 (qk-pca 07, 08, 09)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.components import TAXONOMY
from qkscope.figures.axes import band, mean_sd, spread, time_axis
from qkscope.figures.componenttracks import component_tracks
from qkscope.figures.figure import Figure, checkpoints, discordant, rows, timeline
from qkscope.figures.style import CLASSES, K, Q, canvas, grid
from qkscope.results.study import Study

# ---- position on component 0 --------------------------------------------------------------------


def prepare_signal(study: Study) -> pd.DataFrame:
    """Mean and standard deviation over heads of r_q, r_k and |r_k| on component 0, and the discordant share."""
    runs = checkpoints(study)
    frame = rows(study, runs, "pc0", "r_q", "r_k")
    frame = frame.assign(abs_r_k=frame["r_k"].abs(), discordant=discordant(frame))
    table = timeline(runs).merge(mean_sd(frame, ["r_q", "r_k", "abs_r_k", "discordant"]), on="model", sort=False)
    tracks = component_tracks(study, runs)
    if tracks is None:
        return table
    return table.merge(_to_last_pc0(tracks, runs[-1].label), on="model", how="left", sort=False)


def _to_last_pc0(tracks: pd.DataFrame, last: str) -> pd.DataFrame:
    """Means over heads of r_q and |r_k| along the direction that is PC0 at the last checkpoint."""
    head = ["layer", "head", "track"]
    ends = tracks[(tracks["model"] == last) & (tracks["pc"] == 0)][head]
    path = tracks.merge(ends, on=head, sort=False)
    path = path.assign(followed_abs_r_k=path["r_k"].abs(), already_pc0=(path["pc"] == 0).astype(float))
    path = path.rename(columns={"r_q": "followed_r_q", "match_angle": "followed_angle"})
    columns = ["followed_r_q", "followed_abs_r_k", "followed_angle", "already_pc0"]
    return path.groupby("model", sort=False)[columns].mean().reset_index()


def draw_signal(data: pd.DataFrame) -> Drawing:
    """Three lines with bands of one standard deviation; dotted: the direction that is PC0 at the last checkpoint."""
    figure = canvas(6.6, 3.4)
    axes = figure.subplots()
    for name, colour in (("followed_r_q", Q), ("followed_abs_r_k", K)):
        if name in data and (data["already_pc0"] < 1).any():
            axes.plot(data["order"], data[name], color=colour, linestyle=":", linewidth=1.1)
            axes.set_title("dotted: along what is PC0 at the last checkpoint", fontsize=7, loc="right", pad=16)
    lines = (("r_q", Q, "-", "r_q"), ("r_k", K, "-", "r_k"), ("abs_r_k", K, "--", "|r_k|"))
    ends = spread([float(data[name].iloc[-1]) for name, *_ in lines], 0.075)
    for (name, colour, line, label), height in zip(lines, ends, strict=True):
        band(axes, data, name, colour, line, label, height, band=name != "abs_r_k")
    axes.axhline(0, color="#777777", linewidth=0.7)
    axes.set_ylabel("correlation with position on PC0")
    low = float((data["r_k"] - data["r_k_sd"]).min())
    axes.set_ylim(min(-0.05, low - 0.05), 1.08)
    time_axis(axes, data)
    grid(axes)
    return figure


def say_signal(data: pd.DataFrame) -> list[str]:
    """The change from the first checkpoint to the last, and the part of it that is a change of sign."""
    first, last = data.iloc[0], data.iloc[-1]
    return [
        f"From {first['model']} to {last['model']}, mean r_q goes {first['r_q']:.2f} → {last['r_q']:.2f}, mean r_k "
        f"{first['r_k']:+.2f} → {last['r_k']:+.2f}, mean |r_k| {first['abs_r_k']:.2f} → {last['abs_r_k']:.2f}.",
        "Where the sign is defined, the share of heads whose keys drift against their queries goes "
        f"{first['discordant']:.0%} → {last['discordant']:.0%}; what changes in r_k but not in |r_k| is that.",
        *_say_component_tracks(data),
    ]


def _say_component_tracks(data: pd.DataFrame) -> list[str]:
    if "already_pc0" not in data:
        return []
    first, turns = data.iloc[0], data["followed_angle"].iloc[1:]
    return [
        f"Followed back from checkpoint to checkpoint, the direction that is PC0 in the end was PC0 at the first one "
        f"in {first['already_pc0']:.0%} of heads, with r_q {first['followed_r_q']:.2f} and |r_k| "
        f"{first['followed_abs_r_k']:.2f} there; it turns by {turns.iloc[0]:.0f}° to the second checkpoint and by "
        f"{turns.iloc[-1]:.0f}° to the last (mean over heads)."
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


def _draw_classes(data: pd.DataFrame) -> Drawing:
    """Stacked shares, the larger ones labelled."""
    figure = canvas(6.6, 3.4)
    axes = figure.subplots()
    below = np.zeros(len(data))
    x = data["order"].to_numpy()
    for kind, colour in CLASSES.items():
        share = data[kind].to_numpy(float)
        axes.bar(x, share, bottom=below, width=0.82, color=colour, label=kind)
        for position, low, size in zip(x, below, share, strict=True):
            if size >= 0.06:
                light = kind in ("content-focused", "mixed", "q-positional")
                axes.text(position, low + size / 2, f"{size:.0%}", ha="center", va="center", fontsize=6.5,
                          color="#222222" if light else "white")  # fmt: skip
        below += share
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of heads")
    time_axis(axes, data)
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def _say_classes(data: pd.DataFrame) -> list[str]:
    """The change of the class shares from the first checkpoint to the last."""
    first, last = data.iloc[0], data.iloc[-1]
    changes = [f"{kind} {first[kind]:.0%} → {last[kind]:.0%}" for kind in TAXONOMY]
    return [f"From {first['model']} to {last['model']} ({last['n_heads']:,.0f} heads): " + ", ".join(changes) + "."]


# ---- share of PC0 -------------------------------------------------------------------------------


def prepare_share(study: Study) -> pd.DataFrame:
    """Mean and standard deviation over heads of PC0's share of variance."""
    runs = checkpoints(study)
    frame = rows(study, runs, "pc0", "explained_variance")
    return timeline(runs).merge(mean_sd(frame, ["explained_variance"]), on="model", sort=False)


def draw_share(data: pd.DataFrame) -> Drawing:
    """One line with its band."""
    figure = canvas(6.6, 3.0)
    axes = figure.subplots()
    band(axes, data, "explained_variance", "#3d5a3a", "-", "PC0", float(data["explained_variance"].iloc[-1]))
    axes.set_ylabel("PC0's share of pooled variance")
    axes.set_ylim(0, None)
    time_axis(axes, data)
    grid(axes)
    return figure


def say_share(data: pd.DataFrame) -> list[str]:
    """Start, end, and the largest step."""
    first, last = data.iloc[0], data.iloc[-1]
    steps = data["explained_variance"].diff().abs()
    step = int(steps.iloc[1:].to_numpy().argmax()) + 1
    return [
        f"PC0's mean share goes {first['explained_variance']:.3f} → {last['explained_variance']:.3f}; the largest step "
        f"is from {data['model'].iloc[step - 1]} to {data['model'].iloc[step]} "
        f"({data['explained_variance'].diff().iloc[step]:+.3f})."
    ]


SIGNAL = Figure(
    "qk-pca/07_position_signal",
    "Position on PC0 over training",
    "Mean r_q, r_k and |r_k| on PC0 over heads at each checkpoint; bands are one standard deviation over heads. "
    "Dotted, where it differs: r_q and |r_k| along the direction that is PC0 at the last checkpoint, followed "
    "back from one to the next.",
    prepare_signal,
    draw_signal,
    say_signal,
)
CLASSES_FIGURE = Figure(
    "qk-pca/08_taxonomy_evolution",
    "Classes of heads over training",
    "Share of heads in each class at each checkpoint.",
    prepare_classes,
    _draw_classes,
    _say_classes,
)
SHARE = Figure(
    "qk-pca/09_explained_variance_over_training",
    "PC0's share of variance over training",
    "Mean share of the pooled variance on PC0 at each checkpoint; the band is one standard deviation over heads.",
    prepare_share,
    draw_share,
    say_share,
)
