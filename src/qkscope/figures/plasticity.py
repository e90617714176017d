"""Attention plasticity: along the window, by the distances of keys, over training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.plasticity import merged_pairs
from qkscope.figures.axes import band, mean_sd, spread, ticks, time_axis
from qkscope.figures.eachrun import of_each_run, together
from qkscope.figures.figure import Figure, NotApplicable, checkpoints, is_checkpoint, models, rows, timeline
from qkscope.figures.scoreterms import chosen_runs
from qkscope.figures.style import FAINT, INK, canvas, family_look, grid, panels, phase_colours, shortened
from qkscope.progress import plural
from qkscope.results.study import Study

_MIN_PAIRS = 20
"""Cells of the map with fewer pairs are empty."""
_MOST_RUNS = 4
"""Runs that have a map, at most."""
VARIANTS = {"ap": ("exact", INK, "-"), "ap_fixed": ("queries turned to one place", "#1f8a70", "-"),
            "ap_published": ("published model", "#b5651d", "--")}  # fmt: skip


# ---- along the window ---------------------------------------------------------------------------


def prepare_profile(study: Study) -> pd.DataFrame:
    """Mean over heads of each variant at each position in the window, with the middle half of the heads, by run."""
    frame = rows(study, list(study.runs), "plasticity", "ap", "q_position", "bucket_width")
    windows = {run.label: run.window for run in study.runs}
    last = frame.groupby("model")["q_position"].transform("max") + frame["bucket_width"] / 2
    window = frame["model"].map(windows).astype(float).fillna(last)
    frame = frame.assign(place=frame["q_position"] / window)
    for name in VARIANTS:
        frame[name] = frame.get(name, np.nan)
    grouped = frame.groupby(["model", "q_bucket"], sort=False)
    table = grouped[["place", *VARIANTS]].mean()
    table = table.join(grouped["ap"].quantile(0.25).rename("ap_q1")).join(grouped["ap"].quantile(0.75).rename("ap_q3"))
    table = table.join(grouped.size().rename("n_heads")).reset_index().assign(layer=np.nan, head=np.nan)
    # The run whose heads are drawn: the first model, or the last checkpoint.
    run_with_heads = study.labels[-1] if all(is_checkpoint(run) for run in study.runs) else study.labels[0]
    heads = frame[frame["model"] == run_with_heads][["model", "q_bucket", "place", "ap", "layer", "head"]]
    table = pd.concat([table, heads], ignore_index=True)
    order = {run.label: i for i, run in enumerate(study.runs)}
    table = table.sort_values(["model", "q_bucket"], key=lambda c: c.map(order) if c.name == "model" else c)
    labels = {run.label: (run.family, run.phase or "", is_checkpoint(run)) for run in study.runs}
    for i, name in enumerate(("family", "phase", "checkpoint")):
        table[name] = [labels[model][i] for model in table["model"]]
    return table.reset_index(drop=True)


def draw_profile(data: pd.DataFrame) -> Drawing:
    """One run in three variants; next to it every run."""
    labels = list(dict.fromkeys(data["model"]))
    run_with_heads = labels[-1] if data["checkpoint"].all() else labels[0]
    figure = canvas(7.4 if len(labels) > 1 else 4.8, 3.2)
    axes = panels(figure, 1, 2 if len(labels) > 1 else 1, sharey=True)[0]
    single, data = data[data["head"].notna()], data[data["head"].isna()]
    profile = data[data["model"] == run_with_heads]
    for _, head in single.groupby(["layer", "head"]):
        axes[0].plot(head["place"], head["ap"], color=FAINT, alpha=0.35, linewidth=0.5)
    for name, (label, colour, line) in VARIANTS.items():
        if profile[name].notna().any():
            marker = "o" if line == "-" else None
            axes[0].plot(profile["place"], profile[name], color=colour, linestyle=line, marker=marker, markersize=2.5,
                         label=label)  # fmt: skip
    axes[0].legend(loc="lower left", fontsize=6.8)
    axes[0].set_title(shortened(run_with_heads, 34))
    axes[0].set_ylabel("attention plasticity, mean over heads")
    if len(labels) > 1:
        _every_run(axes[1], data)
    for cell in axes:
        cell.set(xlim=(0, 1.0), ylim=(0, 1), xlabel="place of the query in the window")
        grid(cell)
    return figure


def _every_run(axes: Axes, data: pd.DataFrame) -> None:
    by = "family" if data["family"].nunique() > 1 else "model"
    families = {name: colour for name, (colour, _) in family_look(data[by].tolist()).items()}
    phases = phase_colours([phase for phase, c in zip(data["phase"], data["checkpoint"], strict=True) if c])
    profiles = list(data.groupby("model", sort=False))
    labelled_groups = set()
    for i, (_, profile) in enumerate(profiles):
        first = profile.iloc[0]
        colour = phases[first["phase"]] if first["checkpoint"] else families[first[by]]
        group = first["phase"] if first["checkpoint"] else first[by]
        label = None if group in labelled_groups else shortened(group or "all runs", 24)
        labelled_groups.add(group)
        axes.plot(
            profile["place"], profile["ap"], color=colour, alpha=0.45 + 0.55 * (i + 1) / len(profiles), label=label
        )
    axes.legend(loc="lower left", fontsize=6.8)
    axes.set_title(f"every run, exact{'; later runs stronger' if data['checkpoint'].any() else ''}")


def say_profile(data: pd.DataFrame) -> list[str]:
    """Plasticity at the beginning and the end of the window, and the means of the variants."""
    courses, means = {}, {}
    data = data[data["head"].isna()]
    for model, profile in data.groupby("model", sort=False):
        first, last = profile.iloc[0], profile.iloc[-1]
        change = last["ap"] - first["ap"]
        course = "hardly changes" if abs(change) < _SAME else "falls" if change < 0 else "rises"
        courses[str(model)] = f"Plasticity {course} along the window: {first['ap']:.2f} → {last['ap']:.2f}."
        variants = ", ".join(
            f"{label} {profile[name].mean():.2f}"
            for name, (label, *_) in VARIANTS.items()
            if profile[name].notna().any()
        )
        means[str(model)] = f"Means over the window of {plural(int(profile['n_heads'].max()), 'head')}: {variants}."
    return [together(courses), together(means)]


_SAME = 0.01
"""Plasticities that differ by less are told as about the same."""


# ---- by the distances of keys -------------------------------------------------------------------


def prepare_pairs(study: Study) -> pd.DataFrame:
    """Plasticity of pairs of keys of each run by their distance from each other and from the query."""
    frame = rows(study, models(study), "plasticity_pairs", "ap", "n_pairs")
    shown = chosen_runs(list(frame["model"].unique()), _MOST_RUNS)
    runs = [frame[frame["model"] == label] for label in shown]
    table = pd.concat([merged_pairs(run, ["model", "inter_key", "key_to_query"]) for run in runs])
    table = table[table["n_pairs"] >= _MIN_PAIRS].reset_index(drop=True)
    if table.empty:
        raise NotApplicable(f"no pair of octaves holds {_MIN_PAIRS} pairs of keys")
    return table


def draw_pairs(data: pd.DataFrame) -> Drawing:
    """A row per run, one map per variant, one colour scale."""
    columns = [name for name in ("ap", "ap_published") if name in data and data[name].notna().any()]
    runs = list(data.groupby("model", sort=False))
    figure = canvas(3.6 * len(columns) + 0.5, 2.6 * len(runs) + 0.6)
    axes = panels(figure, len(runs), len(columns), sharey="row")
    norm = Normalize(float(data[columns].min().min()), max(float(data[columns].max().max()), 1e-6))
    for row, (run, pairs) in zip(axes, runs, strict=True):
        for cell, column in zip(row, columns, strict=True):
            table = pairs.pivot(index="inter_key", columns="key_to_query", values=column).sort_index(ascending=True)
            image = cell.imshow(table.to_numpy(float), origin="lower", cmap="BuGn", norm=norm, aspect="auto")
            cell.set_facecolor("#d9d9d9")
            _octaves(cell, table)
            name = f"{shortened(str(run), 20)}, " if len(runs) > 1 else ""
            cell.set_title(f"{name}{VARIANTS[column][0]}")
        row[0].set_ylabel("between the keys (tokens)")
    for cell in axes[-1]:
        cell.set_xlabel("from the later key to the query (tokens)")
    bar = figure.colorbar(image, ax=list(axes.flat), fraction=0.03, pad=0.01)
    bar.outline.set_visible(False)
    bar.set_label("plasticity")
    return figure


def _octaves(axes: Axes, table: pd.DataFrame) -> None:
    for values, set_ticks in ((table.columns, axes.set_xticks), (table.index, axes.set_yticks)):
        step = max(1, len(values) // 7)
        set_ticks(range(0, len(values), step), [_short(int(v)) for v in values[::step]])


def _short(n: int) -> str:
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)


def say_pairs(data: pd.DataFrame) -> list[str]:
    """Near keys compared with distant keys, of one run."""
    median = data["inter_key"].median()
    near, far = data[data["inter_key"] <= median], data[data["inter_key"] > median]
    counted = f"{int(data['n_pairs'].sum()):,} pairs of keys."
    if far.empty:
        return [f"All pairs are of one octave of distance: {counted}"]
    means = [float(np.average(pairs["ap"], weights=pairs["n_pairs"])) for pairs in (near, far)]
    edge = 2 * int(near["inter_key"].max()) - 1
    order = (
        "about as often as"
        if abs(means[0] - means[1]) < _SAME
        else ("more often than" if means[0] > means[1] else "less often than")
    )
    return [
        f"The query decides between keys up to {edge:,} tokens apart {order} between keys farther apart: plasticity "
        f"{means[0]:.2f} against {means[1]:.2f}.",
        counted,
    ]


# ---- over training ------------------------------------------------------------------------------

OVER_TRAINING = {
    "ap_fixed_overall": ("queries turned to one place", "#1f8a70", "-"),
    "ap_first20": ("published, first fifth", "#e0a030", "--"),
    "ap_overall": ("published, whole window", INK, "-"),
    "ap_last20": ("published, last fifth", "#5c4b8a", ":"),
}
"""Columns with their names, colours and lines."""


def prepare_training(study: Study) -> pd.DataFrame:
    """Mean and standard deviation over heads at each checkpoint, and the median of the recency bias."""
    runs = checkpoints(study)
    frame = rows(study, runs, "heads", "ap_first20", "ap_overall", "ap_last20")
    columns = [name for name in OVER_TRAINING if name in frame and frame[name].notna().any()]
    data = timeline(runs).merge(mean_sd(frame, columns), on="model", sort=False)
    rotated = study.table("rotated", "bias_window")
    if rotated is None:
        return data
    return data.merge(
        rotated.groupby("model")["bias_window"].median().reset_index(), on="model", how="left", sort=False
    )


def _lines(data: pd.DataFrame) -> dict[str, tuple[str, str, str]]:
    """The lines that there are: where the rotation is not known, queries cannot be turned to one place."""
    return {name: look for name, look in OVER_TRAINING.items() if name in data}


def draw_training(data: pd.DataFrame) -> Drawing:
    """Lines, filled between the published number at both ends of the window; below, the recency bias."""
    biased = "bias_window" in data and bool(data["bias_window"].notna().any())
    figure = canvas(6.6, 4.6 if biased else 3.4)
    cells = panels(figure, 2 if biased else 1, 1, sharex=True, height_ratios=[2.4, 1] if biased else [1])[:, 0]
    axes, lines = cells[0], _lines(data)
    ends = spread([float(data[name].iloc[-1]) for name in lines], 0.07)
    axes.fill_between(data["order"], data["ap_first20"], data["ap_last20"], color=FAINT, alpha=0.2, linewidth=0)
    for (name, (label, colour, line)), height in zip(lines.items(), ends, strict=True):
        band(axes, data, name, colour, line, label, height, band=False)
    axes.set(ylim=(0, 1), ylabel="attention plasticity, mean over heads")
    time_axis(axes, data)
    _windows(axes, data["window"].tolist())
    grid(axes)
    if biased:
        cells[1].plot(data["order"], data["bias_window"], color=INK, marker="o", markersize=3)
        cells[1].axhline(0, color="#777777", linewidth=0.7)
        cells[1].set_ylabel("median bias\nover the window")
        ticks(cells[1], data)
        axes.set_xlabel("")
        axes.tick_params(axis="x", labelbottom=False)
        grid(cells[1])
    return figure


def _windows(axes: Axes, windows: Sequence[float]) -> None:
    """The window of each checkpoint, if they differ: bucket widths depend on it, and plasticity on bucket widths."""
    if len({w for w in windows if w == w}) < 2:
        return
    for x, window in enumerate(windows):
        if window == window:
            axes.text(x, 0.02, _short(int(window)), ha="center", fontsize=6.3, color=FAINT)


def say_training(data: pd.DataFrame) -> list[str]:
    """From the first checkpoint to the last."""
    first, last = data.iloc[0], data.iloc[-1]
    changes = [f"{label} {first[name]:.2f} → {last[name]:.2f}" for name, (label, *_) in _lines(data).items()]
    sentences = [f"From {first['model']} to {last['model']}, mean plasticity goes: {'; '.join(changes)}."]
    windows = data["window"].dropna().unique()
    if len(windows) > 1:
        sentences.append(
            f"The window goes from {windows[0]:,.0f} to {windows[-1]:,.0f} tokens and the buckets with it: a wider "
            "bucket holds more of RoPE's motion, which counts as variety of queries."
        )
    return sentences


def _shows_profile(data: pd.DataFrame) -> str:
    """The description of the variants that there are."""
    names = {"ap_fixed": "with the queries of a bucket turned to one place",
             "ap_published": "by the published model of queries"}  # fmt: skip
    beside = " and ".join(name for column, name in names.items() if data[column].notna().any())
    return (
        "How often a query could turn the order of two earlier keys, 4p(1 − p) averaged over pairs of keys and heads, "
        "against where in the window the query stands."
        + (f" Beside the exact value: {beside}." if beside else "")
        + " Thin lines are heads."
    )


def _shows_pairs(data: pd.DataFrame) -> str:
    """The description of the variants that there are."""
    variants = "; exact, and by the published model" if data["ap_published"].notna().any() else ""
    return (
        "Mean plasticity of pairs of keys by how far they are from each other and from the query, averaged over "
        f"heads{variants}. Distances are in octaves; grey: fewer than {_MIN_PAIRS} pairs."
    )


PROFILE_FIGURE = Figure(
    "plasticity/01_profile",
    "Plasticity along the window",
    _shows_profile,
    prepare_profile,
    draw_profile,
    say_profile,
)
PAIRS = Figure(
    "plasticity/02_pair_heatmap",
    "Which pairs of keys are up to the query",
    _shows_pairs,
    prepare_pairs,
    draw_pairs,
    of_each_run(say_pairs),
)
TRAINING = Figure(
    "plasticity/05_over_training",
    "Plasticity over training",
    "Mean plasticity over heads at each checkpoint: with queries turned to one place (ap_fixed_overall), and as "
    "published (ap_overall), over the window, in its first fifth and in its last; what lies between is filled. Below, "
    "the median recency bias, where it is known.",
    prepare_training,
    draw_training,
    say_training,
)
