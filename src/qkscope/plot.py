"""Figures of heads from Python: each call returns a matplotlib Figure, drawn from tables or a sample of vectors.

A run is given as an object or by its folder; ``map``, ``distance`` and ``card`` also take a results folder.

>>> import qkscope
>>> run = qkscope.open("runs/my-model")                        # doctest: +SKIP
>>> qkscope.plot.ab_plane(run, heads=[(5, 13), (0, 2)])        # doctest: +SKIP
>>> qkscope.plot.map("runs/my-model", "part_position")         # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import ParamSpec

import pandas as pd
from matplotlib.figure import Figure

from qkscope.analyses.options import PointOptions
from qkscope.config import StudyRunConfig
from qkscope.engine import IN_PROCESS
from qkscope.errors import ConfigError
from qkscope.figures import collagedata, collages
from qkscope.figures.card import draw_card, prepare_card
from qkscope.figures.distance import draw_head_curves, prepare_head_curves
from qkscope.figures.headmap import draw_map, prepare_map
from qkscope.figures.style import house_style
from qkscope.headids import choose_heads, head_name
from qkscope.options import head_pair, head_pairs
from qkscope.results.analyze import analyze
from qkscope.results.job import Job
from qkscope.results.reader import is_results
from qkscope.results.runtables import AnyRun, captured_at, check_run, kept_tables, opened, stored_tables
from qkscope.results.study import Study, StudyRun, build
from qkscope.runs.captured import CapturedSource
from qkscope.runs.run import Run
from qkscope.runs.selection import Selection

P = ParamSpec("P")
_Head = tuple[int, int] | str
_Pairs = Sequence[tuple[int, int]]
_Heads = Sequence[_Head] | str
MOST_POINTS, CARD_POINTS = 8000, 1200
"""Points of each kind per head, at most."""


def _shown_by_notebooks(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Have notebooks show the figure even if nobody imported pyplot, which teaches them to."""

    def as_png(figure: Figure) -> bytes:
        stream = BytesIO()
        figure.savefig(stream, format="png", bbox_inches="tight")
        return stream.getvalue()

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        figure = draw(*args, **kwargs)
        figure.__dict__["_repr_png_"] = lambda: as_png(figure)
        return figure

    return drawn


@_shown_by_notebooks
def pc_plane(
    run: AnyRun,
    heads: _Heads | None = None,
    pcs: tuple[int, int] = (0, 1),
    *,
    seed: int = 42,
    kinds: str = "qk",
    scaled_positions: bool = False,
) -> Figure:
    """Queries and keys on two principal components, for the given heads or for four heads drawn with the seed.

    With ``scaled_positions``, here and below, colours show position / (window − 1), from 0 to 1; if the window is not
    known, position / the largest position shown.
    """
    run = opened(run)
    chosen = head_pairs(heads or draw_heads(run, seed))
    study = heads_study(Job(run), chosen, ("pca",), PointOptions(axes=0, rows=MOST_POINTS, pcs=tuple(sorted(set(pcs)))))
    return components_figure(study, chosen, pcs, kinds, scaled_positions=scaled_positions)


@_shown_by_notebooks
def ab_plane(run: AnyRun, heads: _Heads | None = None, *, seed: int = 42, scaled_positions: bool = False) -> Figure:
    """Queries and keys on the drift axis a and the separation axis b."""
    run = opened(run)
    chosen = head_pairs(heads or draw_heads(run, seed))
    study = heads_study(Job(run), chosen, ("rotation",), PointOptions(axes=0, rows=MOST_POINTS))
    return plane_figure(study, chosen, scaled_positions=scaled_positions)


@_shown_by_notebooks
def complement(run: AnyRun, head: _Head | None = None, *, seed: int = 42, scaled_positions: bool = False) -> Figure:
    """The complement of one head, plane by plane."""
    run = opened(run)
    chosen = head_pair(head or draw_heads(run, seed)[0])
    study = heads_study(Job(run), [chosen], ("planes",), PointOptions(rows=MOST_POINTS))
    return complement_figure(study, chosen, scaled_positions=scaled_positions)


@_shown_by_notebooks
def card(run: AnyRun, head: _Head, *, window: int | None = None) -> Figure:
    """One head on a card of 1200 × 630 pixels: queries and keys, distance curve, four terms, a text, a sentence.

    ``window`` is one of the windows that the run was captured at, by default its own.
    """
    check_run(run)
    head = head_pair(head)
    run = captured_at(run, window)
    if not isinstance(run, Run) and is_results(Path(run)):
        study = _study(run)
    else:
        run = opened(run)
        analyses = ("rotation", "position", "distance", "scores")
        job, points = Job.from_options(run, "analyze"), PointOptions(axes=0, rows=CARD_POINTS)
        stored = stored_tables(job)
        study = heads_study(job, [head], () if stored else analyses, points, intervals=True)
        if stored:
            study = replace(study, tables=stored.tables | study.tables)
    with house_style():
        return draw_card(prepare_card(study, head))


@_shown_by_notebooks
def map(run: AnyRun, column: str) -> Figure:  # noqa: A001  qkscope.plot.map
    """A map of all heads, layers × heads, coloured by a column of ``heads``, ``rotated`` or component 0 of ``qk``."""
    data = prepare_map(_study(run), column)
    with house_style():
        return draw_map(data)


@_shown_by_notebooks
def distance(run: AnyRun, heads: _Heads | None = None, *, seed: int = 42) -> Figure:
    """The distance curves of the given heads, or of four drawn with the seed: predicted line, measured dots."""
    study = _study(run)
    table = study.table("heads")
    all_heads = [] if table is None else list(zip(table["layer"], table["head"], strict=True))
    data = prepare_head_curves(study, head_pairs(heads or choose_heads(all_heads, seed)))
    with house_style():
        return draw_head_curves(data)


def _study(run: AnyRun) -> Study:
    """All tables of one run: those of its folder or of a results folder, or computed for a dataset of vectors."""
    check_run(run)
    if not isinstance(run, Run) and not is_results(Path(run)):
        run = opened(run)
    if isinstance(run, Run) and not isinstance(run.source, CapturedSource):
        (result,) = analyze([Job(run)], target=IN_PROCESS, strict=True)
        return Study((StudyRun(run.model, run.family, window=run.source.window),), result.tables.frames)
    folder = kept_tables(run)
    if len(folder.models) > 1:
        raise ConfigError(f"{folder.path} contains {', '.join(folder.models)}; give a folder with the tables of one")
    label = run.model if isinstance(run, Run) else folder.models[0]
    return build([StudyRunConfig(path=str(folder.path), label=label)])


def draw_heads(run: Run, seed: int = 42) -> list[tuple[int, int]]:
    """The four heads that the published collages show for this seed."""
    return choose_heads([(head.layer, head.head) for head in run.heads], seed)


def heads_study(
    job: Job, heads: _Pairs, analyses: Sequence[str], points: PointOptions, *, intervals: bool = False
) -> Study:
    """Tables and points of a few heads of a run."""
    missing = [head for head in heads if head not in {(h.layer, h.head) for h in job.run.heads}]
    if missing:
        (layer, head), first, last = missing[0], job.run.heads[0], job.run.heads[-1]
        head_range = f"{head_name(first.layer, first.head)} to {head_name(last.layer, last.head)}"
        raise ConfigError(f"{job.run.model} has no head {head_name(layer, head)}; its query heads are {head_range}")
    options = replace(job.options, points=points, intervals=intervals)
    job = replace(job, selection=Selection(exactly=frozenset(heads)), options=options)
    (result,) = analyze([job], analyses, target=IN_PROCESS, strict=True)
    return Study((StudyRun(job.run.model, job.run.family, window=job.run.source.window),), result.tables.frames)


def components_figure(
    study: Study, heads: _Pairs, pcs: tuple[int, int], kinds: str = "qk", *, scaled_positions: bool = False
) -> Figure:
    """Draw heads of a study of one run on two components."""
    data = collagedata.prepare_components(study, _keys(study, heads), pcs)
    rows = data[data["kind"].isin(list(kinds))]
    with house_style():
        return collages.draw_components(_scaled(study, rows, scaled_positions))


def plane_figure(study: Study, heads: _Pairs, *, scaled_positions: bool = False) -> Figure:
    """Draw heads of a study of one run on a and b."""
    data = collagedata.prepare_plane(study, _keys(study, heads))
    with house_style():
        return collages.draw_plane(_scaled(study, data, scaled_positions))


def complement_figure(study: Study, head: tuple[int, int], *, scaled_positions: bool = False) -> Figure:
    """Draw the complement of a head of a study of one run."""
    data = collagedata.prepare_complement(study, _keys(study, [head])[0])
    with house_style():
        return collages.draw_complement(_scaled(study, data, scaled_positions))


def _scaled(study: Study, data: pd.DataFrame, scaled_positions: bool) -> pd.DataFrame:
    return collagedata.scale_positions(study, data) if scaled_positions else data


def _keys(study: Study, heads: _Pairs) -> list[collagedata.HeadKey]:
    return [(study.labels[0], layer, head) for layer, head in heads]
