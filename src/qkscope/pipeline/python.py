"""Python interface: one function per analysis; each returns a table as a DataFrame. A failed head raises."""

from __future__ import annotations

import pandas as pd

from qkscope.analyses.options import PcaOptions, PointOptions, RotationOptions
from qkscope.engine import Place
from qkscope.pipeline.analyze import analyze
from qkscope.pipeline.job import Job
from qkscope.runs.run import Run


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


def _table(job: Job, analysis: str, name: str, workers: int, intervals: bool) -> pd.DataFrame:
    (outcome,) = analyze([job], [analysis], place=Place(workers), intervals=intervals, strict=True)
    return outcome.tables.frames[name]
