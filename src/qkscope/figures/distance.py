"""The distance curve, measured and predicted from means: head by head, and by depth."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.figures.axes import branches, draw_branches
from qkscope.figures.eachrun import of_each_run
from qkscope.figures.figure import Figure, NotApplicable, models, rows, with_sliding
from qkscope.figures.scoreterms import chosen_runs
from qkscope.figures.style import INK, PHASES, canvas, grid, panels, shortened
from qkscope.progress import plural
from qkscope.results.study import Study

_HEADS = 6
"""Number of heads whose curves are drawn, evenly spaced in the order of R²; of each of several runs, half as many."""
_MOST_RUNS = 4
"""Runs whose curves are drawn, at most."""


def prepare_curves(study: Study) -> pd.DataFrame:
    """Distance curves of a few heads, and R² of every head (rows without a distance), also off by a constant."""
    table = rows(study, models(study), "distance", "measured", "predicted", "distance_r2")
    head = ["model", "layer", "head"]
    order = {run.label: i for i, run in enumerate(study.runs)}
    shapes = table.assign(error=table["measured"] - table["predicted"]).groupby(head, sort=False)
    total, off = shapes["measured"].var(ddof=0), shapes["error"].var(ddof=0)
    table = table.merge((1 - off / total.where(total > 0)).rename("shape_r2").reset_index(), on=head, sort=False)
    table = with_sliding(study, table)
    by_r2 = table.drop_duplicates(head).sort_values("distance_r2")
    heads = by_r2.sort_values("model", key=lambda labels: labels.map(order), kind="stable")
    shown = chosen_runs(list(table["model"].unique()), _MOST_RUNS)
    most = _HEADS if len(shown) == 1 else _HEADS // 2
    examples = [_evenly(heads[heads["model"] == label], most) for label in shown]
    example_curves = pd.concat(examples)[head].merge(table, on=head, sort=False)
    curve = ["distance_low", "distance_high", "measured", "measured_se", "predicted"]
    columns = ["model", "family", "layer", "head", *curve, "distance_r2", "shape_r2", "sliding"]
    blank = heads.assign(**dict.fromkeys(curve, np.nan))
    return pd.concat([example_curves[columns], blank[columns]], ignore_index=True)


def _evenly(heads: pd.DataFrame, most: int) -> pd.DataFrame:
    """Heads from the first to the last, at most so many."""
    return heads.iloc[np.unique(np.linspace(0, len(heads) - 1, min(most, len(heads))).astype(int))]


def draw_curves(data: pd.DataFrame) -> Drawing:
    """Measured points with standard errors, predicted lines, a row per run if there are several; below them R²."""
    curves, heads = data[data["measured"].notna()], data[data["measured"].isna()]
    runs = [list(curves.groupby(["layer", "head"], sort=False)) for _, curves in curves.groupby("model", sort=False)]
    names = list(curves["model"].unique())
    grids = runs if len(runs) > 1 else [runs[0][:3], runs[0][3:]]
    figure = canvas(7.4, 2.0 * len(grids) + 1.8)
    axes = panels(figure, len(grids) + 1, 3, height_ratios=[*[1] * len(grids), 0.8])
    for number, heads_shown in enumerate(grids):
        for cell, (key, curve) in zip(axes[number], heads_shown, strict=False):
            _draw_head(cell, curve, f"layer {key[0]}, head {key[1]}")
        for cell in axes[number, len(heads_shown) :]:
            cell.set_visible(False)
        name = f"{shortened(names[number], 20)}\n" if len(runs) > 1 else ""
        axes[number, 0].set_ylabel(f"{name}mean score (logit)")
    for cell in axes[-2]:
        cell.set_xlabel("distance (tokens)")
    wide = figure.add_subplot(axes[-1, 0].get_gridspec()[-1, :])
    for cell in axes[-1]:
        cell.remove()
    for n, (run, rows_of_run) in enumerate(heads.groupby("model", sort=False)):
        share = np.full(len(rows_of_run), 1 / len(rows_of_run)) if len(names) > 1 else None
        wide.hist(rows_of_run["distance_r2"].clip(lower=0), bins=50, range=(0, 1), color=PHASES[n % len(PHASES)],
                  alpha=0.55, label=shortened(str(run)), weights=share)  # fmt: skip
    unit = "heads"
    if len(names) > 1:
        wide.legend(loc="upper center")
        unit = "share of the run's heads"
    wide.set(xlabel="R² of the predicted curve (below 0 counts as 0)", ylabel=unit, xlim=(0, 1))
    grid(wide)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _draw_head(cell: Axes, curve: pd.DataFrame, name: str) -> None:
    """Measured points and predicted line of one head."""
    draw_branches(cell, curve, 2.5, 1.5, INK)
    cell.set_title(f"{name}: R² {curve['distance_r2'].iloc[0]:.3f}", fontsize=7.5)
    grid(cell)


def prepare_head_curves(study: Study, heads: Sequence[tuple[int, int]]) -> pd.DataFrame:
    """Distance curves of these heads of a study of one run, in their order."""
    table = rows(study, models(study), "distance", "measured", "predicted", "distance_r2")
    of_heads = [table[(table["layer"] == layer) & (table["head"] == head)] for layer, head in heads]
    for (layer, head), curve in zip(heads, of_heads, strict=True):
        if curve.empty:
            raise NotApplicable(f"{study.labels[0]} has no distance curve of layer {layer}, head {head}")
    return pd.concat(of_heads, ignore_index=True)


def draw_head_curves(data: pd.DataFrame) -> Drawing:
    """One panel per head."""
    curves = list(data.groupby(["layer", "head"], sort=False))
    columns = min(len(curves), 4)
    n_rows = -(-len(curves) // columns)
    figure = canvas(max(2.2 * columns, 3.6), 0.6 + 2.0 * n_rows)
    axes = panels(figure, n_rows, columns)
    for cell, ((layer, head), curve) in zip(axes.flat, curves, strict=False):
        _draw_head(cell, curve, f"layer {layer}, head {head}")
        cell.set_xlabel("distance (tokens)")
    for cell in list(axes.flat)[len(curves) :]:
        cell.set_visible(False)
    for cell in axes[:, 0]:
        cell.set_ylabel("mean score (logit)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


CLOSE = 0.9
"""R² from which a curve counts as predicted."""


def say_curves(data: pd.DataFrame) -> list[str]:
    """The accuracy with which means predict the curve: in layers with a sliding window and in the others."""
    heads = data[data["measured"].isna()]
    r2, shape = heads["distance_r2"], heads["shape_r2"].median()
    offset = "" if np.isnan(shape) else f"; with a constant offset taken out, {shape:.3f}"
    sentences = [
        f"The mean query and the mean key predict the curve with R² above {CLOSE} in {(r2 > CLOSE).mean():.0%} of "
        f"{plural(len(heads), 'head')}: the median R² is {r2.median():.3f}{offset}.",
        f"The worst predicted head has an R² of {r2.min():.2f}.",
    ]
    sliding = heads["sliding"].astype(bool)
    if sliding.any() and not sliding.all():
        medians = [r2[which].median() for which in (sliding, ~sliding)]
        sentences.append(
            f"In layers with a sliding window the median R² is {medians[0]:.3f}, in the others {medians[1]:.3f}."
        )
    return sentences


_FULL = 3
"""The part of the layers that see everything, in a model where others have a sliding window."""


def prepare_depth_curves(study: Study) -> pd.DataFrame:
    """Distance curves averaged over the heads of each third of the layers of a run.

    If some layers have a sliding window, thirds are of these, and layers that see everything are a part of their own.
    """
    table = with_sliding(study, rows(study, models(study), "distance", "measured", "predicted"))
    shown = chosen_runs(list(table["model"].unique()), _MOST_RUNS)
    parts = []
    for label, curves in table[table["model"].isin(shown)].groupby("model", sort=False):
        part = np.minimum(3 * curves["layer"].to_numpy(int) // (max(study.last_layer[str(label)], 1) + 1), 2)
        if curves["sliding"].any():
            part = np.where(curves["sliding"], part, _FULL)
        for number in np.unique(part).tolist():
            parts.append(_mean_curve(curves[part == number]).assign(model=str(label), part=number))
    return pd.concat(parts, ignore_index=True)


def _mean_curve(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean and quartiles of these curves in each bin, and their layers; scores are relative to each head's mean."""
    bins, head = ["distance_low", "distance_high"], ["layer", "head"]
    on_grid = on_one_grid(curves)
    n_heads = on_grid.groupby(bins)["measured"].transform("size")
    centres = on_grid[n_heads == n_heads.max()].groupby(head)["measured"].mean().rename("centre")
    on_grid = on_grid.merge(centres, on=head)
    grouped = on_grid.assign(**{c: on_grid[c] - on_grid["centre"] for c in ("measured", "predicted")}).groupby(bins)
    quartiles = {f"measured_q{q}": grouped["measured"].quantile(q / 4) for q in (1, 3)}
    means = grouped[["measured", "predicted"]].mean().assign(**quartiles, n_heads=grouped.size()).reset_index()
    layers = " ".join(str(layer) for layer in sorted(curves["layer"].unique()))
    return means.assign(layers=layers, sliding=bool(curves["sliding"].any()))


def _layers(curve: pd.DataFrame) -> str:
    """The layers of a part by their numbers, and what they see if not all layers of the run see the same.

    >>> _layers(pd.DataFrame({"layers": ["5 11 17"], "sliding": [False], "part": [3]}))
    'layers 5, 11, 17, which see everything'
    """
    layers = [int(layer) for layer in str(curve["layers"].iloc[0]).split()]
    whole = layers == list(range(layers[0], layers[-1] + 1)) and len(layers) > 2
    numbers = f"{layers[0]} to {layers[-1]}" if whole or len(layers) > _LISTED else ", ".join(map(str, layers))
    sees = ", which see everything" if curve["part"].iloc[0] == _FULL else ""
    sees = ", with a sliding window" if curve["sliding"].iloc[0] else sees
    return f"{'layer' if len(layers) == 1 else 'layers'} {numbers}{sees}"


_LISTED = 6
"""Layers of a part that are listed, at most."""


def on_one_grid(curves: pd.DataFrame) -> pd.DataFrame:
    """Every head's curve at the bins of the head with most bins; bins depend on the window of the head."""
    interpolated = []
    for branch in branches(curves):
        x = pd.Series(np.log(branch.x), index=branch.rows.index)
        heads = [x[rows].sort_values() for rows in branch.rows.groupby(["layer", "head"]).groups.values()]
        grid = max(heads, key=len)
        for head_x in heads:
            covered = grid[(grid >= head_x.min()) & (grid <= head_x.max())]
            values = {
                name: np.interp(covered, head_x, curves.loc[head_x.index, name]) for name in ("measured", "predicted")
            }
            head = curves.loc[head_x.index[0], ["layer", "head"]].to_dict()
            bins = curves.loc[covered.index, ["distance_low", "distance_high"]]
            interpolated.append(bins.assign(**head, **values))
    return pd.concat(interpolated, ignore_index=True)


def draw_depth_curves(data: pd.DataFrame) -> Drawing:
    """A row per run, a panel per part of its layers, with a common scale within the row."""
    runs, n_parts = list(data.groupby("model", sort=False)), int(data["part"].max()) + 1
    figure = canvas(2.3 * max(n_parts, 3) + 0.4, 2.3 * len(runs) + 0.6)
    axes = panels(figure, len(runs), max(n_parts, 3), sharey="row")
    for row, (run, curves) in zip(axes, runs, strict=True):
        for number, cell in enumerate(row):
            curve = curves[curves["part"] == number]
            if curve.empty:
                cell.set_visible(False)
                continue
            for branch in branches(curve):
                low, high = (branch.rows[name] for name in ("measured_q1", "measured_q3"))
                cell.fill_between(branch.x, low, high, color=INK, alpha=0.1, linewidth=0)
            draw_branches(cell, curve, 2.8, 1.5, INK)
            cell.set(xlabel="distance (tokens)")
            cell.set_title(fill(_layers(curve), 28))
            grid(cell)
        name = f"{shortened(str(run), 20)}\n" if len(runs) > 1 else ""
        row[0].set_ylabel(f"{name}score, from its mean (logit)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def say_depth_curves(data: pd.DataFrame) -> list[str]:
    """The part of each run's layers whose mean curve spans most; of a single run, numbers of each part."""
    runs = dict(iter(data.groupby("model", sort=False)))
    claims = [_say_spans(str(run), curves) for run, curves in runs.items()]
    return claims + ([_say_part(curve) for _, curve in data.groupby("part")] if len(runs) == 1 else [])


def _say_spans(run: str, curves: pd.DataFrame) -> str:
    spans = {_layers(curve): float(np.ptp(curve["measured"].to_numpy())) for _, curve in curves.groupby("part")}
    most, least = max(spans, key=lambda name: spans[name]), min(spans, key=lambda name: spans[name])
    claim = f"{run}: the mean score changes with distance by {spans[most]:.2f} logits in {most}"
    return f"{claim}; that is the most, and {spans[least]:.2f} in {least}, the least." if most != least else f"{claim}."


def _say_part(curve: pd.DataFrame) -> str:
    total = ((curve["measured"] - curve["measured"].mean()) ** 2).sum()
    r2 = 1 - ((curve["measured"] - curve["predicted"]) ** 2).sum() / total if total > 0 else np.nan
    near_first = curve.assign(distance=curve["distance_low"].abs()).sort_values("distance")
    near, far = near_first.iloc[0], near_first.iloc[-1]
    name = _layers(curve)
    return (
        f"{name[0].upper()}{name[1:]}: {near['measured']:+.2f} logits at distance {near['distance']:,.0f}, "
        f"{far['measured']:+.2f} from {far['distance']:,.0f} on; R² of the mean curve {r2:.3f} "
        f"({plural(int(curve['n_heads'].max()), 'head')})."
    )


CURVES = Figure(
    "distance/01_distance_curves",
    "The score at each distance, predicted from means",
    "Mean score over pairs of one document against their distance (points, with standard errors by document) and its "
    "prediction from the mean query and the mean key with their rotation undone (line), for heads from the worst "
    "predicted to the best; below, R² of all heads.",
    prepare_curves,
    draw_curves,
    of_each_run(say_curves),
)
BY_DEPTH = Figure(
    "distance/02_curves_by_depth",
    "The distance curve by depth",
    "Mean score at each distance less the head's mean over distances, averaged over the heads of each third of a run's "
    "layers, and the same of its prediction; the band holds the middle half of the heads. Where some layers have a "
    "sliding window, those that see everything have a panel of their own.",
    prepare_depth_curves,
    draw_depth_curves,
    say_depth_curves,
)
