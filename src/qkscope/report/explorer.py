"""explorer.html: a map of all heads by any metric, and all details of the selected head."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pandas as pd
from markupsafe import Markup

from qkscope._version import __version__
from qkscope.figures.figure import NotApplicable
from qkscope.figures.hero import compared_runs, strongest_head
from qkscope.report.explorerdata import (
    COMPLEMENT_AXES,
    head_frame,
    metrics,
    numbers,
    packed,
    passage_tokens,
    passages,
    point_words,
    rows_per_kind,
)
from qkscope.report.page import render
from qkscope.results.study import Study, StudyRun

FIRST_METRICS = ("part_position", "decay", "bias_window", "r_q", "r_k", "r_k_a", "posvar_q", "explained_variance")
"""The metric shown first is the first of these that exists."""


def explorer_html(study: Study, *, report: str | None = None) -> str:
    """The whole page; ``report`` is the report's file name, if there is one."""
    frame = head_frame(study)
    shown_metrics = metrics(frame)
    columns = [metric.column for metric in shown_metrics]
    by_run = {run.label: frame[frame["model"] == run.label].reset_index(drop=True) for run in study.runs}
    points = _points(study, by_run)
    texts = _texts(study, by_run)
    data = {
        "runs": [
            _run(run, by_run[run.label], columns, _last_position(study, run))
            | {"tokens": passage_tokens(study, run.label), "words": _words(study, run.label)}
            for run in study.runs
        ],
        "metrics": [vars(metric) for metric in shown_metrics],
        "start": _start(study),
        "preferred": [
            *FIRST_METRICS,
            "part_content",
            "effect_position",
            "reach90",
            "ap_fixed_overall",
            "position_share",
        ],
        "first": next((name for name in FIRST_METRICS if name in columns), columns[0] if columns else None),
        "planes": [_planes(study, run.label, by_run[run.label]) for run in study.runs],
        "rope": [_rows(study, "planes", run.label, by_run[run.label], ROPE) for run in study.runs],
        "distance": [_rows(study, "distance", run.label, by_run[run.label], CURVE) for run in study.runs],
        "plasticity": [_rows(study, "plasticity", run.label, by_run[run.label], _PROFILE) for run in study.runs],
        "complementAxes": COMPLEMENT_AXES,
    }
    return render(
        "explorer.html.j2",
        title=study.title or (study.labels[0] if len(study.runs) == 1 else f"{len(study.runs)} runs"),
        data=data,
        points=points,
        texts=texts,
        report=report,
        version=__version__,
        plotly=plotly_js(),
    )


def _start(study: Study) -> dict[str, Any]:
    """The first view of the page: the last run, its strongest head, and the run that it is compared with."""
    try:
        label, (layer, head), _ = strongest_head(study)
    except NotApplicable:
        return {"run": len(study.runs) - 1, "other": None, "head": None}
    _, labels = compared_runs(study)
    other = study.labels.index(labels[0]) if len(labels) > 1 else None
    return {"run": study.labels.index(label), "other": other, "head": f"l{layer:02d}h{head:02d}"}


def plotly_js() -> Markup:
    """Plotly's JavaScript library, as its Python package ships it."""
    return Markup((files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8"))


def _last_position(study: Study, run: StudyRun) -> int:
    """The number of positions: the window, or one more than the last position if the window is unknown."""
    if run.window:
        return run.window
    points = study.tables.get("points")
    if points is None or run.label not in set(points["model"]):
        return 1
    return int(points.loc[points["model"] == run.label, "position"].max()) + 1


def _run(run: StudyRun, frame: pd.DataFrame, columns: list[str], window: int) -> dict[str, Any]:
    ends = {
        column: [numbers(frame, f"{column}_low"), numbers(frame, f"{column}_high")]
        for column in columns
        if f"{column}_low" in frame and frame[f"{column}_low"].notna().any()
    }
    return {
        "label": run.label,
        "family": run.family,
        "phase": run.phase or "",
        "window": window,
        "nope": sorted(run.nope_layers),
        "sliding": sorted(run.sliding_layers),
        "layer": frame["layer"].astype(int).tolist(),
        "head": frame["head"].astype(int).tolist(),
        "key": frame["k_head"].fillna(-1).astype(int).tolist() if "k_head" in frame else [],
        "kind": frame["kind"].tolist(),
        "flags": frame["flags"].fillna("").astype(str).tolist() if "flags" in frame else [],
        "values": [numbers(frame, column) for column in columns],
        "ends": ends,
    }


ROPE = ("cycles", "var_share", "lock_q", "lock_k", "bias_share")
_PROFILE = ("q_position", "ap", "ap_se", "ap_published", "ap_fixed")
CURVE = ("distance_low", "distance_high", "measured", "measured_se", "predicted")


def _rows(
    study: Study, table: str, label: str, frame: pd.DataFrame, columns: tuple[str, ...]
) -> list[list[list[float | None]]]:
    """For each head of the run, its rows of a table: one list per column; empty if it has no rows."""
    rows = study.tables.get(table)
    if rows is None or not set(columns) <= set(rows):
        return []
    own_rows = rows[rows["model"] == label].dropna(subset=[columns[0]])
    by_head = dict(iter(own_rows.groupby(["layer", "head"])))
    heads = zip(frame["layer"].astype(int), frame["head"].astype(int), strict=True)
    return [[numbers(by_head[key], column) for column in columns] if key in by_head else [] for key in heads]


def _planes(study: Study, label: str, frame: pd.DataFrame) -> list[list[list[float]]]:
    """For each head of the run, (share, angle_r, frequency, active) of each plane; empty if it has no planes."""
    table = study.tables.get("planes")
    if table is None or not {"var_share", "angle_r", "frequency", "active"} <= set(table):
        return []
    own_rows = table[table["model"] == label]
    if "view" in own_rows:
        own_rows = own_rows[own_rows["view"] == "svd"]
    by_head = {key: rows.sort_values("plane") for key, rows in own_rows.groupby(["layer", "head"])}
    planes: list[list[list[float]]] = []
    for layer, head in zip(frame["layer"], frame["head"], strict=True):
        rows_of_head = by_head.get((int(layer), int(head)))
        if rows_of_head is None:
            planes.append([])
            continue
        values = rows_of_head[["var_share", "angle_r", "frequency", "active"]].astype(float).fillna(0.0).to_numpy()
        planes.append([[float(f"{value:.4g}") for value in row] for row in values])
    return planes


def _points(study: Study, by_run: dict[str, pd.DataFrame]) -> list[tuple[str, str]]:
    """(element id, base64) of each head that has points: ``points-RUN-HEAD`` by their numbers in the page."""
    table = study.tables.get("points")
    if table is None or table.empty:
        return []
    groups = dict(iter(table.groupby(["model", "layer", "head"], sort=False)))
    n_rows = rows_per_kind(len(groups))
    elements = []
    for r, run in enumerate(study.runs):
        frame, vocabulary = by_run[run.label], _words(study, run.label)
        window = _last_position(study, run)
        for i, (layer, head) in enumerate(zip(frame["layer"], frame["head"], strict=True)):
            points_of_head = groups.get((run.label, int(layer), int(head)))
            if points_of_head is not None and n_rows:
                elements.append((f"points-{r}-{i}", packed(points_of_head, window, n_rows, vocabulary)))
    return elements


def _words(study: Study, label: str) -> list[str]:
    """The tokens of a run's points as text."""
    table = study.tables.get("points")
    return [""] if table is None else point_words(table[table["model"] == label])


def _texts(study: Study, by_run: dict[str, pd.DataFrame]) -> list[tuple[str, str]]:
    """(element id, base64) of each head that has a passage: ``text-RUN-HEAD`` by their numbers in the page."""
    heads = {
        label: list(zip(frame["layer"].astype(int), frame["head"].astype(int), strict=True))
        for label, frame in by_run.items()
    }
    packed_heads = passages(study, heads)
    return [
        (f"text-{r}-{i}", text)
        for r, label in enumerate(study.labels)
        for i, key in enumerate(heads[label])
        if (text := packed_heads.get((label, *key))) is not None
    ]
