"""The picture of the front page: all heads before, after and their difference, and one head at a glance (front 01)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Drawing

from qkscope.figures.axes import branches
from qkscope.figures.collagedata import drift
from qkscope.figures.collages import draw_cloud, draw_drifts
from qkscope.figures.figure import Figure, NotApplicable, before_and_after, models, needed
from qkscope.figures.style import PHASES, canvas, grid, shortened
from qkscope.results.study import Study

MAPPED = {
    "decay": ("heads", "fall of the score per doubling of distance (logits)"),
    "bias_window": ("rotated", "bias over the window"),
    "r_q": ("pc0", "queries' correlation with position on PC0"),
}
"""Columns that the maps may show, in order of preference, with their tables and titles."""


def compared_runs(study: Study) -> tuple[Study, list[str]]:
    """The study at a window where the runs are comparable, and the one or two runs that the maps show."""
    try:
        labels = list(before_and_after(study))
    except NotApplicable:
        return study, [models(study)[-1].label]
    compared = study.compared if set(labels) <= set(study.compared.labels) else study
    return compared, labels


def strongest_head(study: Study) -> tuple[str, tuple[int, int], str]:
    """The last run of the maps, its head with the largest value, and the column of the maps."""
    compared, labels = compared_runs(study)
    for column, (table, _) in MAPPED.items():
        frame = compared.pc0 if table == "pc0" else compared.table(table, column)
        rows = None if frame is None else frame[frame["model"] == labels[-1]].dropna(subset=[column])
        if rows is not None and len(rows):
            row = rows.loc[rows[column].abs().idxmax()]
            return labels[-1], (int(row["layer"]), int(row["head"])), column
    raise NotApplicable("there is no number of heads to map")


def prepare_hero(study: Study) -> pd.DataFrame:
    """Numbers of the maps, points of one head, and its distance curves, in the column ``part``."""
    compared, labels = compared_runs(study)
    last, (layer, head), column = strongest_head(study)
    table = MAPPED[column][0]
    frame = needed(compared.pc0 if table == "pc0" else compared.table(table, column), column)
    maps = frame[frame["model"].isin(labels)][["model", "layer", "head"]].assign(value=frame[column], part="map")
    maps = maps.sort_values("model", key=lambda names: names.map(labels.index), kind="stable").assign(column=column)
    parts = [maps]
    parts += [part for part in (cloud_of(study, last, layer, head), curves_of(study, labels, layer, head)) if len(part)]
    return pd.concat(parts, ignore_index=True).assign(shown_layer=layer, shown_head=head)


def cloud_of(study: Study, label: str, layer: int, head: int) -> pd.DataFrame:
    """Points of a head on a and b, and the drift of their means; empty if there are none."""
    points = study.table("points", "a", "b")
    if points is None:
        return pd.DataFrame()
    of_head = points[(points["model"] == label) & (points["layer"] == layer) & (points["head"] == head)]
    cloud = (
        of_head[["model", "layer", "head", "kind", "position"]]
        .assign(x=of_head["a"], y=of_head["b"])
        .dropna(subset=["x"])
    )
    return pd.concat([cloud, *(drift(cloud[cloud["kind"] == kind], kind) for kind in "qk")]).assign(part="cloud")


def curves_of(study: Study, labels: list[str], layer: int, head: int) -> pd.DataFrame:
    """Distance curves of a head in these runs; empty if there are none."""
    curves = study.table("distance", "distance_low", "distance_high", "measured", "predicted")
    if curves is None:
        return pd.DataFrame()
    of_head = curves[curves["model"].isin(labels) & (curves["layer"] == layer) & (curves["head"] == head)]
    return of_head[["model", "layer", "head", "distance_low", "distance_high", "measured", "predicted"]].assign(
        part="curve"
    )


def draw_hero(data: pd.DataFrame) -> Drawing:
    """Maps on one scale, their difference on its own, then clouds with drifts, then the curves."""
    maps = data[data["part"] == "map"]
    runs = list(maps["model"].unique())
    cloud, curve = (data[data["part"] == part] for part in ("cloud", "curve"))
    n_maps = len(runs) + (len(runs) == 2)
    widths = [1.0] * n_maps + [1.7] * (len(cloud) > 0) + [1.7] * (len(curve) > 0)
    figure = canvas(min(2.4 * sum(widths), 11.0), 3.2)
    cells = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    _draw_maps(figure, list(cells[:n_maps]), maps, runs)
    head = f"layer {int(data['shown_layer'].iloc[0])}, head {int(data['shown_head'].iloc[0])}"
    other_cells = iter(cells[n_maps:])
    if len(cloud):
        cell = next(other_cells)
        draw_cloud(cell, cloud, Normalize(0, max(float(cloud["position"].max()), 1.0)), 5.0)
        draw_drifts(cell, cloud)
        cell.set(xticks=[], yticks=[], xlabel="axis of drift", ylabel="axis of separation")
        cell.set_title(f"{head}: queries (blue), keys (red)\nfrom early (pale) to late (strong)")
    if len(curve):
        cell = next(other_cells)
        for number, (run, rows) in enumerate(curve.groupby("model", sort=False)):
            colour = PHASES[number % len(PHASES)]
            for branch in branches(rows):
                branch.points(cell, 2.6, colour)
                branch.curve(cell, 1.3, colour, shortened(str(run)))
        cell.set(xscale="log", xlabel="distance to the key (tokens)", ylabel="mean score (logits)")
        cell.set_title("its mean score: measured (dots)\nand predicted from means (line)")
        cell.legend()
        grid(cell)
    return figure


def _draw_maps(figure: Drawing, cells: list[Axes], maps: pd.DataFrame, runs: list[str]) -> None:
    column = str(maps["column"].iloc[0])
    grids = [maps[maps["model"] == run].pivot(index="layer", columns="head", values="value") for run in runs]
    values_of_runs = maps["value"].dropna()
    signed = bool((values_of_runs < 0).any())
    largest = float(values_of_runs.abs().max()) or 1.0
    for cell, run, values in zip(cells, runs, grids, strict=False):
        image = cell.imshow(
            values, cmap="PuOr_r" if signed else "YlOrBr", vmin=-largest if signed else 0, vmax=largest, aspect="auto"
        )
        cell.set_title(shortened(run, 22))
    bar = figure.colorbar(image, ax=cells[: len(runs)], location="bottom", aspect=40, pad=0.02)
    bar.set_label(MAPPED[column][1], fontsize=7)
    if len(runs) == 2:
        change = grids[1].sub(grids[0])
        largest = float(np.nanmax(np.abs(change))) or 1.0
        image = cells[2].imshow(change, cmap="PuOr_r", vmin=-largest, vmax=largest, aspect="auto")
        cells[2].set_title("difference")
        bar = figure.colorbar(image, ax=cells[2], location="bottom", aspect=20, pad=0.02)
        bar.set_label("second − first", fontsize=7)
    for cell in cells:
        cell.set_xlabel("head")
        cell.spines[:].set_visible(False)
    cells[0].set_ylabel("layer")


def say_hero(data: pd.DataFrame) -> list[str]:
    """The mean over heads of each map, and the head that is shown."""
    maps = data[data["part"] == "map"]
    column = str(maps["column"].iloc[0])
    means = [f"{run}: {rows['value'].mean():.3g}" for run, rows in maps.groupby("model", sort=False)]
    return [
        f"Mean over heads of the {MAPPED[column][1]}: {'; '.join(means)}. Shown is layer "
        f"{int(data['shown_layer'].iloc[0])}, head {int(data['shown_head'].iloc[0])}, which has the largest."
    ]


HERO = Figure(
    "front/01_hero",
    "All heads, and one of them",
    "Each cell is a head. Beside the maps, one head: its queries and keys on the axes of drift and separation, with "
    "how their means move from the first position to the last, and its mean score by distance.",
    prepare_hero,
    draw_hero,
    say_hero,
)
