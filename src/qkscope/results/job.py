"""Jobs: a run with its options, the tasks it is split into, and tables that exist already."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkscope._version import __version__
from qkscope.analyses.analysis import Analysis
from qkscope.analyses.catalogue import ANALYSES, DECLARED_TABLES
from qkscope.analyses.options import AnalysisOptions, PcaOptions, PointOptions, RotationOptions
from qkscope.analyses.sidetables import PASSAGE_ANALYSIS, POINTS_ANALYSIS
from qkscope.errors import QkscopeError, TableError
from qkscope.files.readers import UNREADABLE, read_json
from qkscope.files.runfolder import MANIFEST
from qkscope.headids import HeadId
from qkscope.options import defaults, from_record, from_values, record
from qkscope.results.config import Config
from qkscope.results.frames import read_table
from qkscope.results.reader import TABLES_FOLDER, is_results
from qkscope.results.summary import SUMMARY
from qkscope.runs.run import Run, open_run
from qkscope.runs.selection import DatasetOptions, Selection

OPTION_CLASSES = (DatasetOptions, Selection, AnalysisOptions)
"""The classes whose options decide the content of a run's tables."""


@dataclass(frozen=True)
class Job:
    """One run and everything to compute from it."""

    run: Run
    selection: Selection = field(default_factory=Selection)
    options: AnalysisOptions = field(default_factory=AnalysisOptions)
    config: Mapping[str, object] = field(default_factory=dict)
    """The command and the options that were given, for the summary."""

    @classmethod
    def from_options(
        cls,
        run: Run,
        command: str,
        values: Mapping[str, Any] | None = None,
        points: PointOptions | None = None,
    ) -> Job:
        """Return the job that a command's options describe, with a record of them."""
        values = defaults(*OPTION_CLASSES) | dict(values or {})
        selection, options = from_values(Selection, values), from_values(AnalysisOptions, values, points=points)
        recorded = record(selection, from_values(DatasetOptions, values), options)
        return cls(run, selection, options, {"command": command} | recorded)

    @classmethod
    def from_config(cls, config: Config, *, intervals: bool = True) -> Job:
        """Open the run that a config describes, with its options."""
        data = config.data
        values = data.model_dump()
        run = open_run(
            data.dataset, data.revision, model=config.model, family=config.family, seed=data.seed,
            **from_values(DatasetOptions, values | {"rope_theta": None}).keywords() | {"rope": data.rope},
        )  # fmt: skip
        pca, rotation = PcaOptions(**config.pca.model_dump()), RotationOptions(**config.rotation.model_dump())
        option_values = defaults(AnalysisOptions) | values | {"intervals": intervals}
        options = from_values(AnalysisOptions, option_values, pca=pca, rotation=rotation)
        return cls(run, from_values(Selection, values), options, config.model_dump(mode="json"))

    def would_write(self, config: Mapping[str, Any]) -> bool:
        """Return True if tables recorded with this ``config`` have the options of this job."""
        if config["command"] not in ("analyze", "report"):
            return False
        return all(record(from_record(cls, config)) == record(from_record(cls, self.config)) for cls in OPTION_CLASSES)


@dataclass(frozen=True)
class Task:
    """The query heads of one or several key heads: the unit of work of a worker."""

    job: Job
    groups: tuple[tuple[HeadId, ...], ...]
    """The query heads of each key head; a key head is read once."""
    names: tuple[str, ...]
    """Names of the requested analyses."""

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return sum(map(len, self.groups))


def with_points(analyses: tuple[Analysis, ...], job: Job) -> tuple[Analysis, ...]:
    """The analyses and, if the job requests points for figures, those and the passage."""
    return analyses if job.options.points is None else (*analyses, POINTS_ANALYSIS, PASSAGE_ANALYSIS)


def find_cached_tables(job: Job, folders: Iterable[Path]) -> Path | None:
    """Return the first of these results folders that has every table of a job as it would be computed."""
    return next((folder for folder in folders if _has_all(job, folder)), None)


def may_keep_tables(job: Job, run_folder: Path) -> bool:
    """Return True if a run's folder may keep the tables of this job: it has none, and they are what ``analyze`` writes.

    A run without a name of its own is labelled by its folder; only under this label are kept tables found again.
    """
    tables, same_label = run_folder / TABLES_FOLDER, job.run.model == run_folder.absolute().name
    usual = same_label and not job.run.family and job.would_write({"command": "analyze"})
    local = usual and (run_folder / MANIFEST).is_file() and not tables.exists()
    return local and os.access(run_folder, os.W_OK)


def _has_all(job: Job, folder: Path) -> bool:
    """Return True if a folder has this run alone, by this version, all its heads and the same options."""
    digest = job.run.source.identity().get("digest")
    if digest is None or not is_results(folder):
        return False
    try:
        summary = read_json(folder / SUMMARY)
        (label, entry), *other_models = summary["models"].items()
        same_data = summary["qkscope"] == __version__ and entry["dataset"]["digest"] == digest
        same_labels = not other_models and label == job.run.model and entry["family"] == job.run.family
        records, n_heads = [entry[analysis.name] for analysis in ANALYSES], len(job.run.heads)
        complete = all((record["heads"], record["heads_failed"]) == (n_heads, 0) for record in records)
        if not (
            same_data and same_labels and complete and all(job.would_write(record["config"]) for record in records)
        ):
            return False
        return all(read_table(folder, name) is not None for name in DECLARED_TABLES)
    except (TableError, LookupError, AttributeError, QkscopeError, *UNREADABLE):
        return False
