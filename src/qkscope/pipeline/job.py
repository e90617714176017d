"""Jobs, the tasks they are split into, and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qkscope.analyses.analysis import Analysis
from qkscope.analyses.options import AnalysisOptions, PcaOptions, PointOptions, RotationOptions
from qkscope.analyses.passage import PASSAGE_ANALYSIS
from qkscope.analyses.points import POINTS_ANALYSIS
from qkscope.analyses.tables import Tables
from qkscope.config import Config
from qkscope.errors import HeadError
from qkscope.heads import HeadId
from qkscope.results.summary import ModelResults
from qkscope.runs.run import Run, open_run
from qkscope.runs.selection import Selection


@dataclass(frozen=True)
class Job:
    """One run and everything to compute from it."""

    run: Run
    selection: Selection = field(default_factory=Selection)
    pca: PcaOptions = field(default_factory=PcaOptions)
    rotation: RotationOptions = field(default_factory=RotationOptions)
    points: PointOptions | None = None
    """Which vectors are written for figures, if any."""
    buckets: int | None = None
    """Number of position buckets for plasticity, for a dataset; in a captured run it is fixed."""
    decay_range: int | None = None
    """Distances up to this one count for decay; None: half of what the queries see."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The configuration it came from; recorded in the summary."""

    @classmethod
    def from_config(cls, config: Config) -> Job:
        """Open the run that a config describes, with its options."""
        data = config.data
        run = open_run(
            data.dataset,
            data.revision,
            model=config.model,
            family=config.family,
            q_per_kv=data.q_per_kv,
            window=data.window,
            rope=data.rope,
            max_samples=data.max_samples,
            seed=data.seed,
            skip_first=data.skip_first,
        )
        layers, heads = (None if chosen is None else frozenset(chosen) for chosen in (data.layers, data.heads))
        return cls(
            run,
            Selection(layers, heads, data.sample_heads, data.seed),
            PcaOptions(**config.pca.model_dump()),
            RotationOptions(**config.rotation.model_dump()),
            buckets=data.buckets,
            config=config.model_dump(mode="json"),
        )


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

    def results(self) -> ModelResults:
        """What goes into a results folder."""
        run = self.job.run
        return ModelResults(
            model=run.model,
            family=run.family,
            source=run.source.identity() | {"q_per_kv": run.source.q_per_kv},
            extent=vars(run.source.extent(self.job.selection.of(run))),
            config=self.job.config,
            analyses=self.analyses,
            n_heads=self.n_heads,
            n_failed=self.n_failed,
            failures=[str(failure.error) for failure in self.failures],
            tables=self.tables,
        )


@dataclass(frozen=True)
class Task:
    """The query heads of one or several key heads: the unit of work of a worker."""

    job: Job
    groups: tuple[tuple[HeadId, ...], ...]
    """The query heads of each key head; a key head is read once."""
    names: tuple[str, ...]
    """Names of the requested analyses."""
    intervals: bool
    chance: float | None
    """Coherence below which a plane counts as chance, from the tokens of the first head."""

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return sum(map(len, self.groups))

    @property
    def options(self) -> AnalysisOptions:
        """The job's options, as analyses receive them."""
        job = self.job
        return AnalysisOptions(job.pca, job.rotation, job.points, self.intervals, job.decay_range, self.chance)


def with_points(analyses: tuple[Analysis, ...], job: Job) -> tuple[Analysis, ...]:
    """The analyses and, if the job requests points for figures, those and the passage."""
    return analyses if job.points is None else (*analyses, POINTS_ANALYSIS, PASSAGE_ANALYSIS)
