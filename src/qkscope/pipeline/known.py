"""Tables of a run that are there already, so that it need not be analysed again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qkscope._version import __version__
from qkscope.analyses.catalogue import ANALYSES, DECLARED_TABLES
from qkscope.errors import TableError
from qkscope.files.readers import UNREADABLE, read_json
from qkscope.pipeline.job import Job
from qkscope.results.reader import is_results
from qkscope.results.summary import SUMMARY
from qkscope.results.tables import read_table


def known_tables(job: Job, folders: Iterable[Path]) -> Path | None:
    """The first of these results folders that has every table of a job as it would be computed; None if none has."""
    return next((folder for folder in folders if _has_all(job, folder)), None)


def _has_all(job: Job, folder: Path) -> bool:
    """Whether a folder is of this run alone, by this version, complete and with the same choices."""
    digest = job.run.source.identity().get("digest")
    if digest is None or not is_results(folder):
        return False
    try:
        summary = read_json(folder / SUMMARY)
        (label, entry), *others = summary["models"].items()
        same = summary["qkscope"] == __version__ and entry["dataset"]["digest"] == digest
        named = not others and label == job.run.model and entry["family"] == job.run.family
        whole = all(_is_whole(job, entry[analysis.name]) for analysis in ANALYSES)
        return same and named and whole and all(read_table(folder, name) is not None for name in DECLARED_TABLES)
    except (TableError, LookupError, AttributeError, *UNREADABLE):
        return False


def _is_whole(job: Job, entry: dict[str, Any]) -> bool:
    """Whether an analysis was of all heads, with intervals and the job's choices."""
    config = entry["config"]
    chosen = config["command"] in ("analyze", "report") and config.get("decay_range") == job.decay_range
    return (
        chosen and config.get("intervals", True) and (entry["heads"], entry["heads_failed"]) == (len(job.run.heads), 0)
    )
