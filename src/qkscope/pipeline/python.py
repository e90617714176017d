"""Python interface: one function per analysis; each returns a table as a DataFrame. A failed head raises."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qkscope.analyses.catalogue import ANALYSES_BY_NAME, named
from qkscope.analyses.options import PcaOptions, PointOptions, RotationOptions
from qkscope.engine import Place
from qkscope.pipeline.analyze import analyze, write_results
from qkscope.pipeline.job import Job
from qkscope.results.folder import check_results_folder
from qkscope.runs.run import Run
from qkscope.runs.selection import Selection

_log = logging.getLogger("qkscope")


def pca(run: Run, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Combined QK PCA of every head: the table ``qk``."""
    return _table(Job(run, pca=options or PcaOptions()), "pca", "qk", workers, intervals)


def head_table(
    run: Run, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True
) -> pd.DataFrame:
    """Positional variance, separability and amplification of every head: the table ``heads``."""
    return _table(Job(run, pca=options or PcaOptions()), "pca", "heads", workers, intervals)


def rotation(
    run: Run, options: RotationOptions | None = None, *, workers: int = 1, intervals: bool = True
) -> pd.DataFrame:
    """Planar rotation model of every head: the table ``rotated``."""
    return _table(Job(run, rotation=options or RotationOptions()), "rotation", "rotated", workers, intervals)


def planes(run: Run, *, workers: int = 1) -> pd.DataFrame:
    """Planes of the complement of a and b, and RoPE planes, of every head: the table ``planes``."""
    return _table(Job(run), "planes", "planes", workers, intervals=False)


def position(run: Run, *, decay_range: int | None = None, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """What position alone says about every head whose rotation is known: the table ``position``.

    ``decay`` is over distances up to ``decay_range``, by default half of what the queries see.
    """
    return _table(Job(run, decay_range=decay_range), "position", "position", workers, intervals)


def distance(run: Run, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The distance curve of every head whose rotation is known: the table ``distance``."""
    return _table(Job(run), "distance", "distance", workers, intervals)


def scores(run: Run, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """What the scores of every head are made of: the table ``scores``."""
    return _table(Job(run), "scores", "scores", workers, intervals)


def reach(run: Run, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """How far back every head attends, measured and predicted: the table ``reach``."""
    return _table(Job(run), "reach", "reach", workers, intervals)


def plasticity(run: Run, *, buckets: int | None = None, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Attention plasticity of every head and position bucket: the table ``plasticity``."""
    return _table(Job(run, buckets=buckets), "plasticity", "plasticity", workers, intervals)


def tables(run: Run, *, points: PointOptions | None = None, workers: int = 1) -> dict[str, pd.DataFrame]:
    """All tables at once, from one read; ``points`` selects the heads whose vectors are added, for figures."""
    (outcome,) = analyze([Job(run, points=points)], place=Place(workers), strict=True)
    return {name: frame for name, frame in outcome.tables.frames.items() if name != "axes"}


def analyze_runs(
    runs: Run | Sequence[Run],
    folder: str | Path | None = None,
    *,
    only: Sequence[str] | None = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    sample_heads: int | None = None,
    seed: int = 0,
    points: PointOptions | None = None,
    buckets: int | None = None,
    decay_range: int | None = None,
    intervals: bool = True,
    strict: bool = True,
    workers: int = 1,
) -> dict[str, pd.DataFrame]:
    """The tables of one or several runs, as ``qkscope analyze`` computes and, with a ``folder``, writes them.

    ``only`` names analyses; ``layers``, ``heads`` and ``sample_heads`` choose query heads. A head that cannot be
    analysed raises or, unless ``strict``, is left out with a warning.
    """
    given = [runs] if isinstance(runs, Run) else list(runs)
    of_layers, of_heads = (None if some is None else frozenset(some) for some in (layers, heads))
    chosen = Selection(of_layers, of_heads, sample_heads, seed)
    said: dict[str, Any] = {"command": "analyze", "layers": None if layers is None else sorted(layers)}
    said |= {"heads": None if heads is None else sorted(heads), "sample_heads": sample_heads, "seed": seed}
    said |= {} if decay_range is None else {"decay_range": decay_range}
    said |= {} if intervals else {"intervals": False}
    options: dict[str, Any] = {"points": points, "buckets": buckets, "decay_range": decay_range, "config": said}
    jobs = [Job(run, chosen, **options) for run in given]
    if folder is not None:
        check_results_folder(Path(folder))
    started = time.monotonic()
    names = [analysis.name for analysis in named(ANALYSES_BY_NAME if only is None else only)]
    outcomes = analyze(jobs, names, place=Place(workers), intervals=intervals, strict=strict)
    for failure in (failure for outcome in outcomes for failure in outcome.failures):
        _log.warning("left out: %s", failure)
    if folder is not None:
        write_results(Path(folder), outcomes, wall_seconds=time.monotonic() - started)
    frames = [outcome.tables.frames for outcome in outcomes]
    return {
        name: pd.concat([of_run[name] for of_run in frames], ignore_index=True) for name in frames[0] if name != "axes"
    }


def _table(job: Job, analysis: str, name: str, workers: int, intervals: bool) -> pd.DataFrame:
    (outcome,) = analyze([job], [analysis], place=Place(workers), intervals=intervals, strict=True)
    return outcome.tables.frames[name]
