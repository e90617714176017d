"""explorer.html: a map of all heads by any metric, and all details of the selected head, at one window at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from qkscope._version import __version__
from qkscope.figures.hero import compared_runs
from qkscope.headids import head_name
from qkscope.report.explorerdata import (
    COMPLEMENT_AXES,
    PLAIN,
    head_frame,
    metrics,
    numbers,
    packed,
    packed_json,
    passage_tokens,
    passages,
    point_words,
    rows_per_kind,
)
from qkscope.report.page import render
from qkscope.results.study import Study, StudyRun

FIRST_METRICS = ("part_position", "decay", "bias_window", "r_q", "r_k", "r_k_a", "posvar_q", "explained_variance")
"""Metrics that a page may open on, in order of preference."""


@dataclass(frozen=True)
class View:
    """A run at one window: its tables, and its heads in order."""

    run: StudyRun
    window: int
    """0 if it is not known."""
    tables: dict[str, pd.DataFrame]
    frame: pd.DataFrame = field(repr=False)

    @property
    def label(self) -> str:
        """The label of the run."""
        return self.run.label

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Layer and number of each head."""
        return list(zip(self.frame["layer"].astype(int), self.frame["head"].astype(int), strict=True))

    @property
    def n_positions(self) -> int:
        """The window or, if it is not known, one more than the last position of a point."""
        if self.window:
            return self.window
        points = self.tables.get("points")
        return 1 if points is None or points.empty else int(points["position"].max()) + 1

    @property
    def effects_window(self) -> int | None:
        """The window of the texts on which effects were measured."""
        effects = self.tables.get("effects")
        known = None if effects is None or "window" not in effects else effects["window"].dropna()
        return None if known is None or known.empty else int(known.max())


def views(study: Study) -> list[View]:
    """Each run at each window it has tables at: first those of the study itself, then those at its other windows."""
    runs: dict[tuple[str, int], StudyRun] = {}
    tables: dict[tuple[str, int], dict[str, pd.DataFrame]] = {}
    for part in (study, *study.at.values()):
        by_run = {name: dict(iter(frame.groupby("model", sort=False))) for name, frame in part.tables.items()}
        for run in part.runs:
            key = (run.label, run.window or 0)
            runs.setdefault(key, run)
            own = {name: frames[run.label] for name, frames in by_run.items() if run.label in frames}
            tables[key] = own | tables.get(key, {})
    return [View(run, key[1], tables[key], head_frame(Study((run,), tables[key]))) for key, run in runs.items()]


def explorer_html(study: Study, *, report: str | None = None) -> str:
    """The whole page; ``report`` is the report's file name, if there is one."""
    shown = views(study)
    shown_metrics = metrics(pd.concat([view.frame for view in shown], ignore_index=True))
    columns = [metric.column for metric in shown_metrics]
    start, first = _start(study, shown, columns)
    core = {
        "runs": [{"label": run.label, "family": run.family, "phase": run.phase or ""} for run in study.runs],
        "windows": sorted({view.window for view in shown}),
        "views": [_view(view, study.labels.index(view.label), columns) for view in shown],
        "metrics": [vars(metric) for metric in shown_metrics],
        "named": [name for name in PLAIN if name in columns][:N_NAMED],
        "first": first,
        "start": start,
        "complementAxes": COMPLEMENT_AXES,
        "report": report or "",
    }
    blocks = [("core", packed_json(core))]
    blocks += [(f"detail-{v}", packed_json(_detail(view, columns))) for v, view in enumerate(shown)]
    return render(
        "explorer.html.j2",
        title=study.title or (study.labels[0] if len(study.runs) == 1 else f"{len(study.runs)} runs"),
        blocks=[*blocks, *_points(shown), *_texts(shown, start["window"])],
        report=report,
        version=__version__,
    )


N_NAMED = 12
"""Numbers with a plain name that the page offers first."""


def _start(study: Study, shown: list[View], columns: list[str]) -> tuple[dict[str, Any], str | None]:
    """The first view of the page: the runs that the report's first screen compares, a window of both, a strong head.

    Also the metric shown first: the first of ``FIRST_METRICS`` that this view has.
    """
    labels = compared_runs(study)
    before, label = labels[0] if len(labels) == 2 else None, labels[-1]
    windows = {name: [view.window for view in shown if view.label == name] for name in study.labels}
    window = windows[label][0]  # the study's own comes first
    common = set(windows[label]) & set(windows[before] if before is not None else windows[label])
    if common and window not in common:
        window = max(common)
    view = next(view for view in shown if view.label == label and view.window == window)
    other = None if before is None else study.labels.index(before)
    present = [name for name in columns if name in view.frame and view.frame[name].notna().any()]
    metric = next((name for name in FIRST_METRICS if name in present), present[0] if present else None)
    start = {"run": study.labels.index(label), "other": other, "window": window, "head": _strongest(view, metric)}
    return start, metric


def _strongest(view: View, metric: str | None) -> str | None:
    """The name of the head with the largest value."""
    if metric is None:
        return None
    row = view.frame.loc[view.frame[metric].abs().idxmax()]
    return head_name(row["layer"], row["head"])


def _view(view: View, run: int, columns: list[str]) -> dict[str, Any]:
    """The part of a view that maps, lists and searches need."""
    frame = view.frame
    missing: list[None] = [None] * len(frame)
    return {
        "run": run,
        "window": view.window,
        "positions": view.n_positions,
        "effectsWindow": view.effects_window,
        "nope": sorted(view.run.nope_layers),
        "sliding": sorted(view.run.sliding_layers),
        "layer": frame["layer"].astype(int).tolist(),
        "head": frame["head"].astype(int).tolist(),
        "key": frame["k_head"].fillna(-1).astype(int).tolist() if "k_head" in frame else [],
        "kind": frame["kind"].tolist(),
        "role": frame["role"].fillna("").astype(str).tolist()
        if "role" in frame and frame["role"].notna().any()
        else [],
        "flags": frame["flags"].fillna("").astype(str).tolist() if "flags" in frame else [],
        "values": [numbers(frame, column) if column in frame else missing for column in columns],
    }


def _detail(view: View, columns: list[str]) -> dict[str, Any]:
    """The part of a view that only the panel of one head needs."""
    frame = view.frame
    ends = {
        column: [numbers(frame, f"{column}_low"), numbers(frame, f"{column}_high")]
        for column in columns
        if f"{column}_low" in frame and frame[f"{column}_low"].notna().any()
    }
    points, passage = view.tables.get("points"), view.tables.get("passage")
    return {
        "ends": ends,
        "planes": _planes(view),
        "rope": _rows(view, "planes", ROPE),
        "distance": _rows(view, "distance", CURVE),
        "plasticity": _rows(view, "plasticity", _PROFILE),
        "words": [""] if points is None else point_words(points),
        "tokens": passage_tokens(passage),
    }


ROPE = ("cycles", "var_share", "lock_q", "lock_k", "bias_share")
_PROFILE = ("q_position", "ap", "ap_se", "ap_published", "ap_fixed")
CURVE = ("distance_low", "distance_high", "measured", "measured_se", "predicted")


def _rows(view: View, table: str, columns: tuple[str, ...]) -> list[list[list[float | None]]]:
    """For each head of the view, its rows of a table: one list per column; empty if it has no rows."""
    rows = view.tables.get(table)
    if rows is None or not set(columns) <= set(rows):
        return []
    by_head = dict(iter(rows.dropna(subset=[columns[0]]).groupby(["layer", "head"])))
    return [[numbers(by_head[key], column) for column in columns] if key in by_head else [] for key in view.heads]


def _planes(view: View) -> list[list[list[float]]]:
    """For each head of the view, (share, angle_r, frequency, active) of each plane; empty if it has no planes."""
    table = view.tables.get("planes")
    if table is None or not {"var_share", "angle_r", "frequency", "active"} <= set(table):
        return []
    own_rows = table[table["view"] == "svd"] if "view" in table else table
    by_head = {key: rows.sort_values("plane") for key, rows in own_rows.groupby(["layer", "head"])}
    planes: list[list[list[float]]] = []
    for key in view.heads:
        if key not in by_head:
            planes.append([])
            continue
        values = by_head[key][["var_share", "angle_r", "frequency", "active"]].astype(float).fillna(0.0).to_numpy()
        planes.append([[float(f"{value:.4g}") for value in row] for row in values])
    return planes


def _points(shown: list[View]) -> list[tuple[str, str]]:
    """(element id, base64) of each head that has points: ``points-VIEW-HEAD`` by their numbers in the page."""
    groups: dict[tuple[int, int], pd.DataFrame] = {}
    for v, view in enumerate(shown):
        table = view.tables.get("points")
        if table is None or table.empty:
            continue
        by_head = dict(iter(table.groupby(["layer", "head"], sort=False)))
        groups |= {(v, i): by_head[key] for i, key in enumerate(view.heads) if key in by_head}
    n_rows = rows_per_kind(len(groups))
    words = {v: point_words(shown[v].tables["points"]) for v in sorted({v for v, _ in groups})}
    return [
        (f"points-{v}-{i}", packed(points, shown[v].n_positions, n_rows, words[v]))
        for (v, i), points in groups.items()
        if n_rows
    ]


def _texts(shown: list[View], window: int) -> list[tuple[str, str]]:
    """(element id, base64) of each head that has a passage: ``text-VIEW-HEAD`` by their numbers in the page.

    Views at the window that the page opens at come first, and of these the last run.
    """
    order = sorted(range(len(shown)), key=lambda v: (shown[v].window != window, -v))
    tables = {v: table for v in order if (table := shown[v].tables.get("passage")) is not None}
    packed_heads = passages({v: (table, shown[v].heads) for v, table in tables.items()})
    return [(f"text-{v}-{i}", text) for (v, i), text in packed_heads.items()]
