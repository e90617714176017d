"""The distance curve, measured and predicted from means: head by head, and by depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from qkscope.figures.axes import branches, draw_branches
from qkscope.figures.eachrun import of_each_run
from qkscope.figures.figure import Figure, NotApplicable, models, rows
from qkscope.figures.style import INK, PHASES, canvas, grid, panels, shortened
from qkscope.progress import plural
from qkscope.results.study import Study

_HEADS = 6
"""Number of heads whose curves are drawn: evenly spaced in the order of R²."""


def prepare_curves(study: Study) -> pd.DataFrame:
    """Distance curves of a few heads, and R² of every head (rows without a distance), also off by a constant."""
    table = rows(study, models(study), "distance", "measured", "predicted", "distance_r2")
    head = ["model", "layer", "head"]
    shapes = table.assign(error=table["measured"] - table["predicted"]).groupby(head, sort=False)
    total, off = shapes["measured"].var(ddof=0), shapes["error"].var(ddof=0)
    table = table.merge((1 - off / total.where(total > 0)).rename("shape_r2").reset_index(), on=head, sort=False)
    sliding = {(run.label, layer) for run in study.runs for layer in run.sliding_layers}
    table["sliding"] = [(model, layer) in sliding for model, layer in zip(table["model"], table["layer"], strict=True)]
    heads = table.drop_duplicates(head).sort_values("distance_r2")
    first = heads[heads["model"] == table["model"].iloc[0]]
    examples = first.iloc[np.unique(np.linspace(0, len(first) - 1, min(_HEADS, len(first))).astype(int))]
    example_curves = examples[head].merge(table, on=head, sort=False)
    curve = ["distance_low", "distance_high", "measured", "measured_se", "predicted"]
    columns = ["model", "family", "layer", "head", *curve, "distance_r2", "shape_r2", "sliding"]
    blank = heads.assign(**dict.fromkeys(curve, np.nan))
    return pd.concat([example_curves[columns], blank[columns]], ignore_index=True)


def draw_curves(data: pd.DataFrame) -> Drawing:
    """Measured points with standard errors, predicted lines; below them R² over all heads."""
    curves, heads = data[data["measured"].notna()], data[data["measured"].isna()]
    heads_shown = list(curves.groupby(["model", "layer", "head"], sort=False))
    figure = canvas(7.4, 5.8)
    axes = panels(figure, 3, 3, height_ratios=[1, 1, 0.8])
    for cell, (key, curve) in zip(axes[:2].flat, heads_shown, strict=False):
        _draw_head(cell, curve, f"layer {key[1]}, head {key[2]}")
    for cell in list(axes[:2].flat)[len(heads_shown) :]:
        cell.set_visible(False)
    for cell in axes[1]:
        cell.set_xlabel("distance (tokens)")
    for cell in axes[:2, 0]:
        cell.set_ylabel("mean score (logit)")
    wide = figure.add_subplot(axes[2, 0].get_gridspec()[2, :])
    for cell in axes[2]:
        cell.remove()
    for n, (run, rows_of_run) in enumerate(heads.groupby("model", sort=False)):
        wide.hist(rows_of_run["distance_r2"].clip(lower=0), bins=50, range=(0, 1), color=PHASES[n % len(PHASES)],
                  alpha=0.55, label=shortened(str(run)))  # fmt: skip
    if heads["model"].nunique() > 1:
        wide.legend(loc="upper left")
    wide.set(xlabel="R² of the predicted curve (below 0 counts as 0)", ylabel="heads", xlim=(0, 1))
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


def prepare_depth_curves(study: Study) -> pd.DataFrame:
    """Distance curves of the first model averaged over the heads of each third of its layers."""
    table = rows(study, models(study), "distance", "measured", "predicted")
    first = table[table["model"] == table["model"].iloc[0]]
    last = max(study.last_layer[str(first["model"].iloc[0])], 1)
    first = _on_one_grid(first)
    third = np.minimum(3 * first["layer"] // (last + 1), 2)
    grouped = first.assign(third=third).groupby(["third", "distance_low", "distance_high"])
    table = grouped[["measured", "predicted"]].mean()
    spread = (
        grouped["measured"].quantile(np.array([0.25, 0.75])).unstack().set_axis(["measured_q1", "measured_q3"], axis=1)
    )
    curves = table.join(spread).join(grouped.size().rename("n_heads")).reset_index()
    layers = first.groupby(third)["layer"].agg(first_layer="min", last_layer="max")
    return curves.merge(layers, left_on="third", right_index=True, sort=False).assign(model=first["model"].iloc[0])


def _third(curve: pd.DataFrame) -> str:
    """A third of the layers, by their numbers."""
    first, last = int(curve["first_layer"].iloc[0]), int(curve["last_layer"].iloc[0])
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _on_one_grid(curves: pd.DataFrame) -> pd.DataFrame:
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
    return pd.concat(interpolated, ignore_index=True).assign(model=curves["model"].iloc[0])


def draw_depth_curves(data: pd.DataFrame) -> Drawing:
    """One panel per third, with a common scale."""
    figure = canvas(7.4, 2.9)
    axes = panels(figure, 1, 3, sharey=True)[0]
    for number, cell in enumerate(axes):
        curve = data[data["third"] == number]
        if curve.empty:
            cell.set_visible(False)
            continue
        for branch in branches(curve):
            cell.fill_between(
                branch.x, branch.rows["measured_q1"], branch.rows["measured_q3"], color=INK, alpha=0.1, linewidth=0
            )
        draw_branches(cell, curve, 2.8, 1.5, INK)
        cell.set(xlabel="distance (tokens)")
        cell.set_title(_third(curve))
        grid(cell)
    axes[0].set_ylabel("mean score (logit)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def say_depth_curves(data: pd.DataFrame) -> list[str]:
    """The third whose mean curve spans most, and the R², first and last scores of each."""
    sentences, spans = [], {}
    for number in sorted(data["third"].unique().tolist()):
        curve = data[data["third"] == number]
        total = ((curve["measured"] - curve["measured"].mean()) ** 2).sum()
        r2 = 1 - ((curve["measured"] - curve["predicted"]) ** 2).sum() / total if total > 0 else np.nan
        spans[_third(curve)] = float(curve["measured"].max() - curve["measured"].min())
        near_first = curve.assign(distance=curve["distance_low"].abs()).sort_values("distance")
        near, far = near_first.iloc[0], near_first.iloc[-1]
        sentences.append(
            f"{_third(curve).capitalize()}: {near['measured']:+.2f} logits at distance {near['distance']:,.0f}, "
            f"{far['measured']:+.2f} from {far['distance']:,.0f} on; R² of the mean curve {r2:.3f} "
            f"({plural(int(curve['n_heads'].max()), 'head')})."
        )
    most, least = max(spans, key=lambda name: spans[name]), min(spans, key=lambda name: spans[name])
    model = data["model"].iloc[0]
    claim = f"{model}: the mean score changes with distance by {spans[most]:.2f} logits in {most}"
    return [f"{claim}, most of all, and by {spans[least]:.2f} in {least}, least." if most != least else f"{claim}.",
            *sentences]  # fmt: skip


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
    "Mean score at each distance, averaged over the heads of each third of the layers of the first model, and the same "
    "of its prediction; the band holds the middle half of the heads.",
    prepare_depth_curves,
    draw_depth_curves,
    say_depth_curves,
)
