"""The only wiring: runs → moments → analyses → tables, head group by head group, in one read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import numpy as np
import pandas as pd

from qkscope.analyses.distance import mean_field
from qkscope.analyses.pca import components
from qkscope.analyses.rotation import Centering, has_drift
from qkscope.analyses.spectrum import chance_coherence, tokens_of
from qkscope.analyses.tabulate import (
    PcaOptions,
    RotationOptions,
    Tables,
    pca_tables,
    rotation_model,
    rotation_tables,
)
from qkscope.analyses.vectortables import (
    DISTANCE_SCALARS,
    PLANE_ROWS,
    HeadScores,
    HeadVectors,
    PointOptions,
    both_views,
    distance_table,
    of_model,
    omega_columns,
    planes_table,
    points_table,
    rope_table,
    with_active_planes,
    with_distance,
)
from qkscope.config import Config
from qkscope.core.headmoments import HeadMoments
from qkscope.engine import for_each
from qkscope.errors import ConfigError, HeadError
from qkscope.heads import HeadId
from qkscope.load import Loaded, LoadedHead, Reading
from qkscope.run import Run, open_run
from qkscope.store.columns import TABLES
from qkscope.store.tables import arranged

Analysis = Literal["pca", "rotation", "planes", "distance"]
ANALYSES: dict[Analysis, tuple[str, ...]] = {
    "pca": ("qk", "heads"),
    "rotation": ("rotated",),
    "planes": ("planes",),
    "distance": ("distance",),
}
"""Each analysis and the tables it writes."""


@dataclass(frozen=True)
class Selection:
    """Which query heads of a run are analysed."""

    layers: frozenset[int] | None = None
    heads: frozenset[int] | None = None
    sample: int | None = None
    seed: int = 0
    exactly: frozenset[tuple[int, int]] | None = None
    """(layer, head) of the heads wanted."""

    def of(self, run: Run) -> list[HeadId]:
        """The chosen heads by (layer, head); a sample is ``random.Random(seed).sample`` over that order."""
        chosen = [
            head
            for head in run.heads
            if (self.layers is None or head.layer in self.layers)
            and (self.heads is None or head.head in self.heads)
            and (self.exactly is None or (head.layer, head.head) in self.exactly)
        ]
        if not chosen:
            raise ConfigError(
                f"{run.model}: none of its {len(run.heads)} query heads is in the chosen layers and heads"
            )
        if self.sample is not None and self.sample < len(chosen):
            chosen = sorted(random.Random(self.seed).sample(chosen, self.sample))
        return chosen


@dataclass(frozen=True)
class Job:
    """One run and everything that is to be done with it."""

    run: Run
    selection: Selection = field(default_factory=Selection)
    pca: PcaOptions = field(default_factory=PcaOptions)
    rotation: RotationOptions = field(default_factory=RotationOptions)
    points: PointOptions | None = None
    """Which vectors are written out for pictures, if any."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The configuration it came from, for the record."""


@dataclass(frozen=True)
class Failure:
    """A head that could not be analysed, and why."""

    model: str
    error: HeadError

    def __str__(self) -> str:
        return f"{self.model} {self.error}"


@dataclass(frozen=True)
class Outcome:
    """The tables of one job, and the heads that are missing from them."""

    job: Job
    analyses: tuple[Analysis, ...]
    n_heads: int
    tables: Tables
    failures: list[Failure]

    @property
    def n_failed(self) -> int:
        """Heads that are missing from a table."""
        return len({failure.error.head for failure in self.failures})


@dataclass(frozen=True)
class Task:
    """The query heads that read one key head: what one worker does at a time."""

    job: Job
    heads: tuple[HeadId, ...]
    analyses: tuple[Analysis, ...]
    intervals: bool
    chance: float | None
    """What the coherence of structureless planes stays below, from the tokens of the first head."""


OnDone = Callable[[int, int, list[Failure]], None]
"""Called with heads done, heads in all and the failures just found."""


def analyze(
    jobs: Sequence[Job],
    analyses: Iterable[Analysis] = tuple(ANALYSES),
    *,
    workers: int | None = None,
    intervals: bool = True,
    strict: bool = False,
    on_done: OnDone | None = None,
) -> list[Outcome]:
    """Analyse every chosen head of every job; a head that fails is reported and the others go on, unless strict."""
    names = [job.run.model for job in jobs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"several sources are labelled {', '.join(sorted(twice))}; give each a label of its own")
    tasks = [task for job in jobs for task in _tasks(job, tuple(analyses), intervals)]
    total, done = sum(len(task.heads) for task in tasks), 0
    results: dict[int, tuple[Tables, list[Failure]]] = {}
    if on_done is not None:
        on_done(0, total, [])
    for index, result in for_each(do_task, tasks, workers):
        results[index] = result
        done += len(tasks[index].heads)
        if strict and result[1]:
            raise result[1][0].error
        if on_done is not None:
            on_done(done, total, result[1])
    return [_outcome(job, tasks, results, tuple(analyses)) for job in jobs]


def do_task(task: Task) -> tuple[Tables, list[Failure]]:
    """Read one key head and the query heads that read it, and tabulate them."""
    run = task.job.run
    loaded, errors = run.source.load(task.heads, _reading(task))
    tables, failed = _tabulate(task, loaded)
    return tables, [Failure(run.model, error) for error in [*errors, *failed]]


def _tabulate(task: Task, loaded: Loaded) -> tuple[Tables, list[HeadError]]:
    """Both analyses of the heads at once; if the mathematics fails, head by head, to see whose it is."""
    try:
        return _tabulate_together(task, loaded) if loaded else (Tables({}), [])
    except (np.linalg.LinAlgError, FloatingPointError) as error:
        if len(loaded) == 1:
            head = loaded[0].head
            return Tables({}), [HeadError(head, f"cannot be analysed ({error})", task.job.run.source.file(head))]
    parts = [_tabulate(task, [one]) for one in loaded]
    names = {name: None for tables, _ in parts for name in tables.frames}
    frames = {
        name: pd.concat([t.frames[name] for t, _ in parts if name in t.frames], ignore_index=True) for name in names
    }
    return Tables(frames, _concat_replicates([tables for tables, _ in parts])), [e for _, es in parts for e in es]


def _tabulate_together(task: Task, loaded: Loaded) -> tuple[Tables, list[HeadError]]:
    run, job = task.job.run, task.job
    parts, errors = [], []
    if "pca" in task.analyses:
        moments = HeadMoments.stack([one.moments for one in loaded])
        parts.append(pca_tables(_index(run, loaded), moments, job.pca, intervals=task.intervals))
    if {"rotation", "planes"} & set(task.analyses) or job.points is not None:
        drifting = _drifting(loaded, job.rotation.centering)
        kept = {one.head for one in drifting}
        errors = [_no_drift(run, one.head) for one in loaded if one.head not in kept]
        if drifting:
            parts.append(_off_moments(task, drifting))
    if "distance" in task.analyses:
        found = distance_table(_index(run, loaded), [_scores(one) for one in loaded])
        parts.append(Tables({"distance": found} if len(found) else {}))
    frames = {name: frame for tables in parts for name, frame in tables.frames.items()}
    replicates = {name: values for tables in parts for name, values in tables.replicates.items()}
    return Tables({name: _with_notes(run, frame, name) for name, frame in frames.items()}, replicates), errors


def _off_moments(task: Task, loaded: Loaded) -> Tables:
    """What needs the axes a and b: the rotation model, the planes of its complement, points."""
    job, index = task.job, _index(task.job.run, loaded)
    moments = HeadMoments.stack([one.moments for one in loaded])
    model = rotation_model(moments, job.rotation)
    vectors = of_model(model, [one.vectors for one in loaded], moments.window.tolist())
    tables = Tables({})
    if "rotation" in task.analyses:
        tables = rotation_tables(index, moments, job.rotation, model, intervals=task.intervals)
        tables.frames["rotated"] = tables.frames["rotated"].join(omega_columns(vectors))
    if "planes" in task.analyses:
        found = both_views(planes_table(index, vectors, task.chance), _rope_view(index, loaded))
        tables.frames.update({"planes": found} if len(found) else {})
    points = _points(task, index, loaded, vectors)
    tables.frames.update({"points": pd.concat(points, ignore_index=True)} if points else {})
    return tables


def _rope_view(index: pd.DataFrame, loaded: Loaded) -> list[pd.DataFrame]:
    return [
        rope_table(
            index.iloc[[i]],
            one.rotary,
            one.moments.total_q,
            one.moments.total_k,
            one.vectors,
            int(one.moments.window),
        )
        for i, one in enumerate(loaded)
        if one.rotary is not None and one.vectors is not None
    ]


def _scores(one: LoadedHead) -> HeadScores:
    moments, field = one.moments, None
    if one.rotary is not None:
        field = mean_field(one.rotary, moments.total_q, moments.total_k, float(moments.scaling))
    return HeadScores(field, one.vectors, int(moments.window))


def _points(
    task: Task, index: pd.DataFrame, loaded: Loaded, vectors: Sequence[HeadVectors | None]
) -> list[pd.DataFrame]:
    options = task.job.points
    if options is None:
        return []
    count = max(options.pcs) + 1
    return [
        points_table(index.iloc[[i]], head, components(one.moments.total_q, one.moments.total_k, count), options)
        for i, (one, head) in enumerate(zip(loaded, vectors, strict=True))
        if head is not None and head.enough and options.of(one.head.layer, one.head.head)[0]
    ]


def _drifting(loaded: Loaded, centering: Centering) -> Loaded:
    """The heads of which axis a is defined."""
    return [one for one in loaded if has_drift(one.moments.total_q, one.moments.total_k, centering)]


def _reading(task: Task) -> Reading:
    """What the analyses need beside the moments: pairs by token, vectors."""
    paired = "rotation" in task.analyses and task.job.rotation.pairing == "token"
    sample = PLANE_ROWS if {"rotation", "planes", "distance"} & set(task.analyses) else 0
    if task.job.points is not None:
        sample = max(PLANE_ROWS, task.job.points.rows)
    return replace(task.job.run.reading, paired=paired, sample=sample)


def _chance(run: Run, heads: list[HeadId]) -> float | None:
    """The limit of chance coherence on the tokens of the first head that can be read; None if none of three can."""
    for head in heads[:3]:
        loaded, _ = run.source.load([head], replace(run.reading, sample=PLANE_ROWS))
        vectors = loaded[0].vectors if loaded else None
        if vectors is not None and min(len(np.unique(rows.example_id)) for rows in (vectors.q, vectors.k)) > 1:
            return chance_coherence(*tokens_of(vectors), int(loaded[0].moments.window))
    return None


def _with_notes(run: Run, frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """The columns of a head table that say what kind of layer it is, and those that other analyses fill."""
    if table not in ("heads", "rotated"):
        return frame
    notes = {layer: run.source.layer_notes(layer) for layer in set(frame["layer"])}
    noted = frame.assign(
        nope=pd.array([notes[layer].nope for layer in frame["layer"]], dtype="boolean"),
        sliding_window=pd.array([notes[layer].sliding_window for layer in frame["layer"]], dtype="Int64"),
    )
    if table == "heads":
        noted["active_planes"], noted["active_share"] = pd.array([None] * len(noted), dtype="Int64"), np.nan
        noted = noted.assign(**dict.fromkeys(DISTANCE_SCALARS, np.nan))
    return noted


# ---- the same from Python -----------------------------------------------------------------------


def pca(run: Run, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Combined QK PCA of every head: the table ``qk``. A head that fails raises."""
    return _table(Job(run, pca=options or PcaOptions()), "pca", "qk", workers, intervals)


def head_table(
    run: Run, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True
) -> pd.DataFrame:
    """Positional variance, separability and amplification of every head: the table ``heads``."""
    return _table(Job(run, pca=options or PcaOptions()), "pca", "heads", workers, intervals)


def rotation(
    run: Run, options: RotationOptions | None = None, *, workers: int = 1, intervals: bool = True
) -> pd.DataFrame:
    """Planar rotation model of every head: the table ``rotated``. A head that fails raises."""
    return _table(Job(run, rotation=options or RotationOptions()), "rotation", "rotated", workers, intervals)


def planes(run: Run, *, workers: int = 1) -> pd.DataFrame:
    """Planes of the complement of a and b, head by head: the table ``planes``."""
    return _table(Job(run), "planes", "planes", workers, intervals=False)


def distance(run: Run, *, workers: int = 1) -> pd.DataFrame:
    """The distance curve of every head that knows its rotation: the table ``distance``."""
    return _table(Job(run), "distance", "distance", workers, intervals=False)


def tables(run: Run, *, points: PointOptions | None = None, workers: int = 1) -> dict[str, pd.DataFrame]:
    """All tables at once, from one read; ``points`` says of which heads vectors are added, for pictures."""
    (outcome,) = analyze([Job(run, points=points)], workers=workers, strict=True)
    return outcome.tables.frames


def job_from_config(config: Config) -> Job:
    """Open the run that a config describes, with its choices."""
    data = config.data
    run = open_run(
        data.dataset,
        data.revision,
        model=config.model,
        family=config.family,
        q_per_kv=data.q_per_kv,
        window=data.window,
        max_samples=data.max_samples,
        seed=data.seed,
    )
    layers, heads = (None if chosen is None else frozenset(chosen) for chosen in (data.layers, data.heads))
    return Job(
        run,
        Selection(layers, heads, data.sample_heads, data.seed),
        PcaOptions(**config.pca.model_dump()),
        RotationOptions(**config.rotation.model_dump()),
        config=config.model_dump(mode="json"),
    )


def _table(job: Job, analysis: Analysis, name: str, workers: int, intervals: bool) -> pd.DataFrame:
    (outcome,) = analyze([job], [analysis], workers=workers, intervals=intervals, strict=True)
    return outcome.tables.frames[name]


# ---- pieces -------------------------------------------------------------------------------------


def _tasks(job: Job, analyses: tuple[Analysis, ...], intervals: bool) -> list[Task]:
    chosen = job.selection.of(job.run)
    by_key = groupby(chosen, lambda head: head.key_head(job.run.source.q_per_kv))
    chance = _chance(job.run, chosen) if "planes" in analyses else None
    return [Task(job, tuple(heads), analyses, intervals, chance) for _, heads in by_key]


def _outcome(
    job: Job,
    tasks: list[Task],
    results: dict[int, tuple[Tables, list[Failure]]],
    analyses: tuple[Analysis, ...],
) -> Outcome:
    """Put the results of a job's tasks together, in the order of the tasks."""
    mine = [results[index] for index, task in enumerate(tasks) if task.job is job]
    frames = {}
    for name in (table for analysis in analyses for table in ANALYSES[analysis]):
        parts = [tables.frames[name] for tables, _ in mine if name in tables.frames]
        empty = pd.DataFrame(columns=[column.name for column in TABLES[name]])
        frames[name] = arranged(name, pd.concat(parts, ignore_index=True)) if parts else empty
    if {"heads", "planes"} <= frames.keys():
        frames["heads"] = with_active_planes(frames["heads"], frames["planes"])
    if {"heads", "distance"} <= frames.keys():
        frames["heads"] = with_distance(frames["heads"], frames["distance"])
    points = [tables.frames["points"] for tables, _ in mine if "points" in tables.frames]
    frames |= {"points": pd.concat(points, ignore_index=True)} if points else {}
    replicates = _concat_replicates([tables for tables, _ in mine])
    n_heads = sum(len(task.heads) for task in tasks if task.job is job)
    return Outcome(
        job, analyses, n_heads, Tables(frames, replicates), [failure for _, failures in mine for failure in failures]
    )


def _concat_replicates(parts: list[Tables]) -> dict[str, np.ndarray]:
    names = {name: None for tables in parts for name in tables.replicates}
    return {
        name: np.concatenate([tables.replicates[name] for tables in parts if name in tables.replicates])
        for name in names
    }


def _no_drift(run: Run, head: HeadId) -> HeadError:
    reason = "no linear drift with position at all, so axis a is undefined"
    return HeadError(head, reason, run.source.file(head))


def _index(run: Run, loaded: Loaded) -> pd.DataFrame:
    heads = [one.head for one in loaded]
    return pd.DataFrame(
        {
            "model": run.model,
            "family": run.family,
            "layer": [head.layer for head in heads],
            "head": [head.head for head in heads],
            "k_head": [run.source.key_head(head).head for head in heads],
        }
    )
