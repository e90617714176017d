"""The recency bias over heads: its distribution, and its correlation with separation (qk-rotation 04, 07)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.acrossheads import clusters, correlation
from qkscope.figures.eachrun import of_each_run
from qkscope.figures.figure import Figure, NotApplicable, models, over_window, rows, with_sliding, with_window
from qkscope.figures.style import FAINT, canvas, family_look, grid, panels, shortened
from qkscope.progress import plural
from qkscope.results.study import Study

PER = {"bias_strength": "per token", "bias_window": "per window"}


def prepare_histograms(study: Study) -> pd.DataFrame:
    """Bias of every head, per token and per window."""
    frame = with_window(study, rows(study, models(study), "rotated", "bias_strength"))
    return with_sliding(study, frame)[["model", "family", "layer", "head", "sliding", *PER]]


def draw_histograms(data: pd.DataFrame) -> Drawing:
    """A row per run, coloured by family; a column per unit, if windows differ and the units with them."""
    look = family_look(data["family"].tolist())
    runs = list(data.groupby("model", sort=False))
    window = _one_window(data)
    columns = ["bias_window"] if window else [name for name in PER if data[name].notna().any()]
    figure = canvas(3.5 * max(len(columns), 1.5) + 0.2, 0.8 + 1.15 * len(runs))
    axes = panels(figure, len(runs), len(columns), sharex="col")
    for column, name in enumerate(columns):
        edges = _edges(data[name].to_numpy(float))
        for cell, (run, heads) in zip(axes[:, column], runs, strict=True):
            biases, (colour, _) = heads[name].to_numpy(float), look[str(heads["family"].iloc[0])]
            cell.hist(np.clip(biases, edges[0], edges[-1]), bins=edges, color=colour, alpha=0.85)
            cell.axvline(0, color="#333333", linewidth=0.9)
            cell.set_title(
                f"{shortened(str(run))}: {np.mean(biases > 0):.0%} positive of {len(biases):,}", fontsize=7.5
            )
            cell.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4), useMathText=True)
            cell.yaxis.get_major_locator().set_params(integer=True)
            grid(cell)
        unit = over_window(data).replace(" or", "\nor") if name == "bias_window" else PER[name]
        axes[-1, column].set_xlabel(
            f"recency bias {unit} (q·k){f'; per token: divided by {window:,}' if window else ''}"
        )
    for cell in axes[:, 0]:
        cell.set_ylabel("heads")
    return figure


def say_histograms(data: pd.DataFrame) -> list[str]:
    """Share of a run's heads that favour later keys, and the median bias."""
    later, n = (data["bias_strength"] > 0).mean(), plural(len(data), "head")
    favours = f"In {len(data):,} of {n}" if later == 1 else f"In {later:.1%} of {n}"
    window = f", {data['bias_window'].median():.3g} {over_window(data)}" if data["bias_window"].notna().any() else ""
    where = f"{favours} the average query favours later keys (a positive bias)."
    return [
        where if later else f"In none of {n} does the average query favour later keys (a positive bias).",
        f"The bias of the median head is {data['bias_strength'].median():.3g} per token{window}.",
    ]


def _one_window(data: pd.DataFrame) -> int | None:
    """The window by which every head's bias per token is multiplied; None if it is not one."""
    ratio = (data["bias_window"] / data["bias_strength"]).replace([np.inf, -np.inf], np.nan).dropna()
    return round(ratio.iloc[0]) if len(ratio) and ratio.max() / ratio.min() < 1.001 else None


def prepare_separation(study: Study) -> pd.DataFrame:
    """Bias and separation of every head; of one family, each run stands for itself."""
    frame = with_window(study, rows(study, models(study), "rotated", "bias_strength", "separation_strength"))
    if frame["family"].nunique() < 2:
        frame = frame.assign(family=frame["model"])
    if frame["family"].nunique() < 2:
        raise NotApplicable("there is one model, so no families to compare")
    key = ["k_head"] if "k_head" in frame else []
    return frame[["model", "family", "layer", "head", *key, "separation_strength", *PER]]


def draw_separation(data: pd.DataFrame) -> Drawing:
    """A panel per family and one for all, with r in each title; also per window if windows differ."""
    look = family_look(data["family"].tolist())
    names = ["bias_strength", *([] if _one_window(data) or data["bias_window"].isna().all() else ["bias_window"])]
    families = [(family, data[data["family"] == family]) for family in look]
    across = len(families) + 1
    figure = canvas(max(4.2, 2.35 * across), 0.5 + 2.5 * len(names))
    axes = panels(figure, len(names), across, sharex=True, sharey="row")
    for row, name in zip(axes, names, strict=True):
        for cell, (family, heads) in zip(row, families, strict=False):
            _cloud(cell, heads, name, look)
            cell.set_title(f"{shortened(family, 18) or 'no family'}: {_r_text(heads, name)}")
        _cloud(row[-1], data, name, look)
        row[-1].set_title(f"all heads: {_r_text(data, name)}")
        row[0].set_ylabel(f"recency bias {PER[name]}")
    for cell in axes[-1]:
        cell.set_xlabel("separation_strength")
    return figure


def say_separation(data: pd.DataFrame) -> list[str]:
    """The pooled correlation and those within families, and whether their signs are clear."""
    name = "bias_strength"
    groups = "runs" if (data["family"] == data["model"]).all() else "families"
    families = {str(family): heads for family, heads in data.groupby("family", sort=False)}
    signs = {family: _sign(heads, name) for family, heads in families.items()}
    pooled = _sign(data, name)
    opposite = [family for family, sign in signs.items() if sign * pooled < 0]
    if opposite:
        claim = (
            f"Pooled over {groups}, bias (per token) and separation {_together(pooled)}, within {', '.join(opposite)} "
            "the other way: the pooled value does not hold there"
        )
    elif pooled and all(sign == pooled for sign in signs.values()):
        claim = f"Bias (per token) and separation {_together(pooled)}, within each of the {groups} as over all heads"
    elif len(set(signs.values()) - {0}) > 1:
        claim = f"Bias (per token) and separation go together in some {groups} and against each other in others"
    else:
        claim = f"The sign of the correlation of bias (per token) and separation is not clear in all {groups}"
    within = ", ".join(f"{family} {_r_text(heads, name)}" for family, heads in families.items())
    return [
        f"{claim}.",
        f"Over all {plural(len(data), 'head')} {_r_text(data, name)}; within {groups}: {within}.",
    ]


def _together(sign: int) -> str:
    return "go together" if sign > 0 else "go against each other"


def _r_text(heads: pd.DataFrame, name: str) -> str:
    r = correlation(heads["separation_strength"], heads[name])
    return f"too few heads ({len(heads)}) for r" if np.isnan(r) else f"r = {r:+.2f}"


def _sign(heads: pd.DataFrame, name: str) -> int:
    """The sign of r, by Fisher's interval over key heads; 0 if it is not clear."""
    r, n = correlation(heads["separation_strength"], heads[name]), int(clusters(heads).max()) + 1
    clear = n > 3 and not np.isnan(r) and abs(np.arctanh(np.clip(r, -0.999999, 0.999999))) > 1.96 / np.sqrt(n - 3)
    return int(np.sign(r)) if clear else 0


def _cloud(axes: Axes, heads: pd.DataFrame, name: str, look: dict[str, tuple[str, str]]) -> None:
    for family, members in heads.groupby("family", sort=False):
        colour, marker = look[str(family)]
        axes.scatter(members["separation_strength"], members[name], s=7, color=colour, marker=marker, alpha=0.6,
                     linewidths=0, rasterized=True)  # fmt: skip
    x, y = heads["separation_strength"].to_numpy(float), heads[name].to_numpy(float)
    if len(x) > 2 and x.std() > 0:
        slope, height = np.polyfit(x, y, 1)
        ends = np.array([x.min(), x.max()])
        axes.plot(ends, slope * ends + height, color="#333333", linewidth=1.0)
    axes.axhline(0, color=FAINT, linewidth=0.7)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
    grid(axes)


def _edges(values: np.ndarray) -> np.ndarray:
    """Edges of forty bins over zero and the middle 98% of values; other values are counted in the outermost bins."""
    low, high = np.nanquantile(values, [0.01, 0.99])
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = -1.0, 1.0
    return np.linspace(low, high, 41)


HISTOGRAMS = Figure(
    "qk-rotation/04_bias_strength",
    "The recency bias of every head",
    "Distribution over heads of mu_q_a · alpha_k, by run: over the window (in layers with a sliding window over their "
    "reach) and, where these differ, per token as published beside it. The outermost bins hold what lies beyond the "
    "middle 98% of heads.",
    prepare_histograms,
    draw_histograms,
    of_each_run(say_histograms),
)
SEPARATION = Figure(
    "qk-rotation/07_bias_vs_separation",
    "Bias and separation: together, and family by family",
    "Every head's recency bias against its separation_strength, with a least-squares line, within each family and over "
    "all. A pooled correlation can have the opposite sign of those within (Simpson's paradox).",
    prepare_separation,
    draw_separation,
    say_separation,
)
