"""Changes over ordered checkpoints: position, classes and share of PC0 (qk-pca 07, 08, 09)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.components import TAXONOMY
from qkscope.figures.axes import band, mean_sd, spread, time_axis
from qkscope.figures.componenttracks import component_tracks
from qkscope.figures.figure import Figure, at_own_windows, checkpoints, discordant, rows, timeline
from qkscope.figures.style import CLASSES, K, Q, canvas, grid, panels, write_on
from qkscope.progress import plural
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
    """Queries left, keys right; dotted: the direction that is PC0 at the last checkpoint."""
    figure = canvas(8.4, 3.4)
    cells = panels(figure, 1, 2, sharey=True)[0]
    followed = "already_pc0" in data and bool((data["already_pc0"] < 1).any())
    lines = (
        (cells[0], Q, {"r_q": ("r_q", "-"), "followed_r_q": ("r_q, followed", ":")}),
        (cells[1], K, {"r_k": ("r_k", "-"), "abs_r_k": ("|r_k|", "--"), "followed_abs_r_k": ("|r_k|, followed", ":")}),
    )
    low = float((data["r_k"] - data["r_k_sd"]).min())
    for cell, colour, looks in lines:
        shown = {name: look for name, look in looks.items() if followed or not name.startswith("followed")}
        ends = spread([float(data[name].iloc[-1]) for name in shown], 0.085)
        for (name, (label, line)), height in zip(shown.items(), ends, strict=True):
            band(cell, data, name, colour, line, label, height, band=name in ("r_q", "r_k"))
        cell.axhline(0, color="#777777", linewidth=0.7)
        cell.set_ylim(max(min(-0.05, low - 0.05), -1.05), 1.08)
        time_axis(cell, data)
        grid(cell)
    cells[0].set_ylabel("correlation with position on PC0")
    return figure


def say_signal(data: pd.DataFrame) -> list[str]:
    """The change from the first checkpoint to the last, and the part of it that is a change of sign."""
    first, last = data.iloc[0], data.iloc[-1]
    sentences = [
        f"From {first['model']} to {last['model']}, mean r_q goes {first['r_q']:.2f} → {last['r_q']:.2f}, mean r_k "
        f"{first['r_k']:+.2f} → {last['r_k']:+.2f}, mean |r_k| {first['abs_r_k']:.2f} → {last['abs_r_k']:.2f}, over "
        f"{plural(int(last['n_heads']), 'head')} that differ by ±{last['r_q_sd']:.2f} in r_q."
    ]
    if np.isfinite([first["discordant"], last["discordant"]]).all():
        sentences.append(
            "Where the sign is defined, the share of heads whose keys drift against their queries goes "
            f"{first['discordant']:.0%} → {last['discordant']:.0%}; what changes in r_k but not in |r_k| is that."
        )
    return [*sentences, *_say_component_tracks(data)]


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
    frame = rows(study, runs, "pc0", "taxonomy_published")
    shares = frame.groupby("model", sort=False)["taxonomy_published"].value_counts(normalize=True).unstack(fill_value=0)
    shares = shares.reindex(columns=list(TAXONOMY), fill_value=0.0).reset_index()
    counts = frame.groupby("model", sort=False).size().rename("n_heads").reset_index()
    return timeline(runs).merge(counts, on="model", sort=False).merge(shares, on="model", sort=False)


HATCHES = {"k-positional": "////", "content-focused": "...."}
"""Hatches of classes that without colours would look like their neighbours."""


def _draw_classes(data: pd.DataFrame) -> Drawing:
    """Stacked shares, the larger ones labelled."""
    figure = canvas(6.6, 3.4)
    axes = figure.subplots()
    below = np.zeros(len(data))
    x = data["order"].to_numpy()
    for kind, colour in CLASSES.items():
        share = data[kind].to_numpy(float)
        if not share.any():
            continue
        axes.bar(x, share, bottom=below, width=0.82, color=colour, label=kind, hatch=HATCHES.get(kind),
                 edgecolor="white", linewidth=0)  # fmt: skip
        for position, low, size in zip(x, below, share, strict=True):
            if size >= 0.06:
                write_on(axes, position, low + size / 2, f"{size:.0%}", colour, fontsize=6.5)
        below += share
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of heads")
    time_axis(axes, data)
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def _say_classes(data: pd.DataFrame) -> list[str]:
    """The class whose share changes most, and all shares at both ends."""
    first, last = data.iloc[0], data.iloc[-1]
    changes = {kind: last[kind] - first[kind] for kind in TAXONOMY}
    most = max(changes, key=lambda kind: abs(changes[kind]))
    start = f"From {first['model']} to {last['model']} ({plural(int(last['n_heads']), 'head')})"
    if not changes[most]:
        return [f"{start} no class has more heads or fewer: " + ", ".join(f"{k} {last[k]:.0%}" for k in TAXONOMY) + "."]
    shares = ", ".join(f"{kind} {first[kind]:.0%} → {last[kind]:.0%}" for kind in TAXONOMY if kind != most)
    return [
        f"{start} the class whose share changes most is {most}: {first[most]:.0%} → {last[most]:.0%}.",
        f"The other classes: {shares}.",
    ]


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
    steps = data["explained_variance"].diff()
    step = int(steps.abs().iloc[1:].to_numpy().argmax()) + 1
    return [
        f"From {first['model']} to {last['model']} PC0's mean share of the pooled variance goes "
        f"{first['explained_variance']:.1%} → {last['explained_variance']:.1%}, over heads that differ by "
        f"±{last['explained_variance_sd']:.1%}.",
        f"The largest step is from {data['model'].iloc[step - 1]} to {data['model'].iloc[step]}: "
        f"{100 * steps.iloc[step]:+.1f} points.",
    ]


SIGNAL = Figure(
    "qk-pca/07_position_signal",
    "Position on PC0 over training",
    "Mean over heads of r_q (left) and of r_k and |r_k| (right) on PC0 at each checkpoint; bands are one standard "
    "deviation over heads. Dotted, where it differs: along the direction that is PC0 at the last checkpoint, "
    "followed back from one to the next.",
    prepare_signal,
    draw_signal,
    say_signal,
    at_own_windows(prepare_signal),
)
CLASSES_FIGURE = Figure(
    "qk-pca/08_taxonomy_evolution",
    "Classes of heads over training",
    "Share of heads in each class at each checkpoint.",
    prepare_classes,
    _draw_classes,
    _say_classes,
    at_own_windows(prepare_classes),
)
SHARE = Figure(
    "qk-pca/09_explained_variance_over_training",
    "PC0's share of variance over training",
    "Mean share of the pooled variance on PC0 at each checkpoint; the band is one standard deviation over heads.",
    prepare_share,
    draw_share,
    say_share,
    at_own_windows(prepare_share),
)
