"""Figures of heads from Python: each call returns a matplotlib Figure, drawn from a sample of the head's vectors.

>>> import qkscope
>>> run = qkscope.open("runs/my-model")                        # doctest: +SKIP
>>> qkscope.plot.ab_plane(run, heads=[(5, 13), (0, 2)])        # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from qkscope.analyses.options import PointOptions
from qkscope.engine import IN_PROCESS
from qkscope.errors import ConfigError
from qkscope.figures import collagedata, collages
from qkscope.figures.card import draw_card, prepare_card
from qkscope.figures.style import house_style
from qkscope.heads import choose_heads
from qkscope.results.analyze import analyze
from qkscope.results.job import Job
from qkscope.results.study import Study, StudyRun
from qkscope.runs.run import Run
from qkscope.runs.selection import Selection

_Heads = Sequence[tuple[int, int]]
MOST_POINTS, CARD_POINTS = 8000, 1200
"""Points of each kind per head, at most."""


def pc_plane(
    run: Run,
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
    chosen = list(heads or draw_heads(run, seed))
    study = heads_study(Job(run), chosen, ("pca",), PointOptions(axes=0, rows=MOST_POINTS, pcs=tuple(sorted(set(pcs)))))
    return components_figure(study, chosen, pcs, kinds, scaled_positions=scaled_positions)


def ab_plane(run: Run, heads: _Heads | None = None, *, seed: int = 42, scaled_positions: bool = False) -> Figure:
    """Queries and keys on the drift axis a and the separation axis b."""
    chosen = list(heads or draw_heads(run, seed))
    study = heads_study(Job(run), chosen, ("rotation",), PointOptions(axes=0, rows=MOST_POINTS))
    return plane_figure(study, chosen, scaled_positions=scaled_positions)


def complement(
    run: Run, head: tuple[int, int] | None = None, *, seed: int = 42, scaled_positions: bool = False
) -> Figure:
    """The complement of one head, plane by plane."""
    chosen = head or draw_heads(run, seed)[0]
    study = heads_study(Job(run), [chosen], ("planes",), PointOptions(rows=MOST_POINTS))
    return complement_figure(study, chosen, scaled_positions=scaled_positions)


def card(run: Run, head: tuple[int, int]) -> Figure:
    """One head on a card of 1200 × 630 pixels: queries and keys, distance curve, four terms, a sentence."""
    analyses = ("rotation", "position", "distance", "scores")
    study = heads_study(Job(run), [head], analyses, PointOptions(axes=0, rows=CARD_POINTS), intervals=True)
    with house_style():
        return draw_card(prepare_card(study, head))


def draw_heads(run: Run, seed: int = 42) -> list[tuple[int, int]]:
    """The four heads that the published collages show for this seed."""
    return choose_heads([(head.layer, head.head) for head in run.heads], seed)


def heads_study(
    job: Job, heads: _Heads, analyses: Sequence[str], points: PointOptions, *, intervals: bool = False
) -> Study:
    """Tables and points of a few heads of a run."""
    missing = [head for head in heads if head not in {(h.layer, h.head) for h in job.run.heads}]
    if missing:
        (layer, head), first, last = missing[0], job.run.heads[0], job.run.heads[-1]
        head_range = f"l{first.layer:02d}h{first.head:02d} to l{last.layer:02d}h{last.head:02d}"
        raise ConfigError(f"{job.run.model} has no head l{layer:02d}h{head:02d}; its query heads are {head_range}")
    options = replace(job.options, points=points, intervals=intervals)
    job = replace(job, selection=Selection(exactly=frozenset(heads)), options=options)
    (result,) = analyze([job], analyses, target=IN_PROCESS, strict=True)
    return Study((StudyRun(job.run.model, job.run.family, window=job.run.source.window),), result.tables.frames)


def components_figure(
    study: Study, heads: _Heads, pcs: tuple[int, int], kinds: str = "qk", *, scaled_positions: bool = False
) -> Figure:
    """Draw heads of a study of one run on two components."""
    data = collagedata.prepare_components(study, _keys(study, heads), pcs)
    rows = data[data["kind"].isin(list(kinds))]
    with house_style():
        return collages.draw_components(_scaled(study, rows, scaled_positions))


def plane_figure(study: Study, heads: _Heads, *, scaled_positions: bool = False) -> Figure:
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


def _keys(study: Study, heads: _Heads) -> list[collagedata.HeadKey]:
    return [(study.labels[0], layer, head) for layer, head in heads]
