"""The distance curve, measured and predicted from means: head by head, and by depth."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.figures.axes import branches, draw_branches
from qkscope.figures.figure import Figure, models, rows
from qkscope.figures.style import INK, canvas, grid, panels
from qkscope.results.study import Study

_HEADS = 6
"""Number of heads whose curves are drawn: evenly spaced in the order of R²."""


def prepare_curves(study: Study) -> pd.DataFrame:
    """Distance curves of a few heads, and R² of every head (rows without a distance)."""
    table = rows(study, models(study), "distance", "measured", "predicted", "distance_r2")
    heads = table.drop_duplicates(["model", "layer", "head"]).sort_values("distance_r2")
    first = heads[heads["model"] == table["model"].iloc[0]]
    examples = first.iloc[np.unique(np.linspace(0, len(first) - 1, min(_HEADS, len(first))).astype(int))]
    example_curves = examples[["model", "layer", "head"]].merge(table, on=["model", "layer", "head"], sort=False)
    columns = [
        "model",
        "family",
        "layer",
        "head",
        "distance_low",
        "distance_high",
        "measured",
        "measured_se",
        "predicted",
        "distance_r2",
    ]
    blank = heads.assign(**dict.fromkeys(columns[4:9], np.nan))
    return pd.concat([example_curves[columns], blank[columns]], ignore_index=True)


def draw_curves(data: pd.DataFrame) -> Drawing:
    """Measured points with standard errors, predicted lines; below them R² over all heads."""
    curves, heads = data[data["measured"].notna()], data[data["measured"].isna()]
    heads_shown = list(curves.groupby(["model", "layer", "head"], sort=False))
    figure = canvas(7.4, 5.8)
    axes = panels(figure, 3, 3, height_ratios=[1, 1, 0.8])
    for cell, (key, curve) in zip(axes[:2].flat, heads_shown, strict=False):
        draw_branches(cell, curve, 2.5, 1.5, INK)
        cell.set_title(f"layer {key[1]}, head {key[2]}: R² {curve['distance_r2'].iloc[0]:.3f}", fontsize=7.5)
        grid(cell)
    for cell in list(axes[:2].flat)[len(heads_shown) :]:
        cell.set_visible(False)
    for cell in axes[1]:
        cell.set_xlabel("distance (tokens)")
    for cell in axes[:2, 0]:
        cell.set_ylabel("mean score (logit)")
    wide = figure.add_subplot(axes[2, 0].get_gridspec()[2, :])
    for cell in axes[2]:
        cell.remove()
    wide.hist(heads["distance_r2"].clip(lower=0), bins=50, range=(0, 1), color="#d2691e", alpha=0.85)
    wide.set(xlabel="R² of the predicted curve (below 0 counts as 0)", ylabel="heads", xlim=(0, 1))
    grid(wide)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def say_curves(data: pd.DataFrame) -> list[str]:
    """The accuracy with which means predict the curve."""
    r2 = data.loc[data["measured"].isna(), "distance_r2"]
    return [
        f"Over {len(r2):,} heads the median R² is {r2.median():.3f}; it is above 0.9 in {(r2 > 0.9).mean():.0%} of "
        f"them and {r2.min():.2f} in the worst."
    ]


THIRDS = ("first third of the layers", "middle third", "last third")


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
    return curves.assign(model=first["model"].iloc[0])


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
        cell.set_title(THIRDS[number])
        grid(cell)
    axes[0].set_ylabel("mean score (logit)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def say_depth_curves(data: pd.DataFrame) -> list[str]:
    """R² of each third's mean curve, and its first and last scores."""
    sentences = []
    for number in sorted(data["third"].unique().tolist()):
        curve = data[data["third"] == number]
        total = ((curve["measured"] - curve["measured"].mean()) ** 2).sum()
        r2 = 1 - ((curve["measured"] - curve["predicted"]) ** 2).sum() / total if total > 0 else np.nan
        earlier = curve[curve["distance_low"] > 0]
        near, far = earlier.iloc[0], earlier.iloc[-1]
        sentences.append(
            f"{THIRDS[number].capitalize()}: {near['measured']:+.2f} at distance {near['distance_low']:,.0f}, "
            f"{far['measured']:+.2f} beyond {far['distance_low']:,.0f}; R² of the mean curve {r2:.3f} "
            f"({int(curve['n_heads'].max()):,} heads)."
        )
    return sentences


CURVES = Figure(
    "distance/01_distance_curves",
    "The score at each distance, predicted from means",
    "Mean score over pairs of one document against their distance (points, with standard errors by document) and its "
    "prediction from the mean query and the mean key with their rotation undone (line), for heads from the worst "
    "predicted to the best; below, R² of all heads.",
    prepare_curves,
    draw_curves,
    say_curves,
)
BY_DEPTH = Figure(
    "distance/02_curves_by_depth",
    "The distance curve by depth",
    "Mean score at each distance, averaged over the heads of each third of the layers, and the same of its prediction; "
    "the band holds the middle half of the heads.",
    prepare_depth_curves,
    draw_depth_curves,
    say_depth_curves,
)
