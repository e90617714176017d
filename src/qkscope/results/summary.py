"""summary.json: how the tables of each model were computed, and means over heads with their intervals."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from qkscope._version import __version__
from qkscope.analyses.analysis import Analysis, Table
from qkscope.analyses.tables import Columns, Tables
from qkscope.analyses.uncertainty import Scale, jackknife
from qkscope.errors import HeadError, TableError
from qkscope.files.readers import read_json
from qkscope.results.schema import MEASURED, TEXTS

SUMMARY = "summary.json"
_TEXTS = TEXTS | {"text"}
"""Columns that contain text, of tables and of passages."""


@dataclass(frozen=True)
class Failure:
    """A head that could not be analysed, and why."""

    model: str
    error: HeadError

    def __str__(self) -> str:
        return f"{self.model} {self.error}"


@dataclass(frozen=True)
class ModelResults:
    """The tables of one model, the heads that are missing from them, and what they were computed from."""

    model: str
    family: str
    source: Mapping[str, object]
    """Identity of the data that was read."""
    count_extent: Callable[[], Mapping[str, Any]]
    """Computes ``extent``; for a dataset this reads a head."""
    config: Mapping[str, object]
    """The command and its options, or the content of a config file."""
    analyses: tuple[Analysis, ...]
    n_heads: int
    failures: list[Failure]
    tables: Tables

    @property
    def n_failed(self) -> int:
        """Heads that are missing from a table."""
        return len({failure.error.head for failure in self.failures})

    @cached_property
    def extent(self) -> Mapping[str, Any]:
        """The numbers of documents and tokens, and the mean loss."""
        return self.count_extent()


def updated_summary(summary: dict[str, Any], results: Sequence[ModelResults], wall_seconds: float) -> dict[str, Any]:
    """The summary with the results of these models."""
    summary |= {"qkscope": __version__, "versions": _versions(), "wall_seconds": round(wall_seconds, 3)}
    for result in results:
        entry = summary["models"].setdefault(result.model, {})
        entry |= {"family": result.family, "dataset": dict(result.source)} | dict(result.extent)
        entry |= {analysis.name: summarize(result, analysis) for analysis in result.analyses}
    return summary


def summarize(results: ModelResults, analysis: Analysis) -> dict[str, Any]:
    """Counts, configuration, headline means, failures and further entries of one analysis of one model."""
    entry: dict[str, Any] = {
        "config": results.config,
        "heads": results.n_heads,
        "heads_failed": results.n_failed,
        "failures": [str(failure.error) for failure in results.failures],
        "headline": headline(results.tables, analysis.tables, results.extent.get("n_documents")),
    }
    return entry | (analysis.summary(results.tables.frames) if analysis.summary is not None else {})


ENOUGH_DOCUMENTS, FEW_DOCUMENTS = 32, 8
WIDENED = 1.75
"""Factor on the width of a mean's interval with FEW_DOCUMENTS or fewer: a few heads whose axes are hardly determined
dominate a mean's spread, and 8 documents do not show how far they move."""


def widening(n_documents: int | None) -> float:
    """The factor on the width of a mean's interval: 1 from ENOUGH_DOCUMENTS on.

    >>> widening(8), widening(20), widening(100)
    (1.75, 1.375, 1.0)
    """
    missing = ENOUGH_DOCUMENTS - (n_documents if n_documents is not None else ENOUGH_DOCUMENTS)
    return 1.0 + (WIDENED - 1.0) * min(max(missing / (ENOUGH_DOCUMENTS - FEW_DOCUMENTS), 0.0), 1.0)


def headline(computed: Tables, tables: Sequence[Table], n_documents: int | None = None) -> dict[str, dict[str, float]]:
    """Means over heads of the headline columns of these tables, each with its interval by document group."""
    values: dict[str, dict[str, float]] = {}
    for table in tables:
        frame = computed.frames.get(table.name)
        if frame is not None and not frame.empty and table.about_heads:
            values |= _means(table, table.whole_heads(frame), computed.replicates, widening(n_documents))
    return {name: mean for name, mean in values.items() if np.isfinite(mean["mean"])}


def _means(table: Table, rows: pd.DataFrame, replicates: Columns, wider: float) -> dict[str, dict[str, float]]:
    columns = [column for column in table.columns if column.in_summary]
    means = {
        column.name: _mean(rows[column.name], replicates.get(column.name), column.scale or Scale.LINEAR, wider)
        for column in columns
    }
    if table.further_means is not None:
        means |= {name: _mean(*values, wider=wider) for name, values in table.further_means(rows, replicates).items()}
    return means


def _mean(
    per_head: pd.Series,
    replicates: Float[np.ndarray, "heads groups"] | None,
    scale: Scale = Scale.LINEAR,
    wider: float = 1.0,
) -> dict[str, float]:
    """Mean over heads; with an interval if all heads have the same document groups, and enough of them."""
    values = per_head.astype(float)
    mean = float(values.mean()) if values.notna().any() else float("nan")
    if replicates is None or not np.isfinite(mean):
        return {"mean": mean}
    if len(replicates) == len(values):
        replicates = replicates[values.notna().to_numpy()]  # a head without the number does not enter its mean
    present = ~np.isnan(replicates)
    if not (present == present[0]).all():
        return {"mean": mean}
    over_heads = np.where(present[0], np.nan_to_num(replicates).mean(0), 0.0)
    # A mean of correlations is not a correlation; a mean of shares is a share.
    mean_scale = {
        Scale.CORRELATION: Scale.LINEAR, Scale.MAGNITUDE: Scale.SHARE, Scale.PROPORTION: Scale.SHARE
    }.get(scale, scale)  # fmt: skip
    interval = jackknife(np.array([mean]), over_heads[None], present[:1].astype(float), mean_scale, wider)
    if np.isnan(interval.se[0]):
        return {"mean": mean}
    return {"mean": mean, "low": float(interval.low[0]), "high": float(interval.high[0])}


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary written earlier, or an empty one; an unreadable file is an error."""
    path = folder / SUMMARY
    if not path.exists():
        return {"models": {}}
    try:
        models = read_json(path)["models"]
        return {"models": {name: dict(entry) for name, entry in models.items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TableError(f"{path} cannot be read ({error!r}); move it away or write elsewhere") from None


def summary_bytes(summary: Mapping[str, Any]) -> bytes:
    """The content of the file."""
    return f"{json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)}\n".encode()


MEASURED_OF = "measured"
"""Entry of a model: the weights, the run and a digest of the rows of each table that its run does not give again."""


def record_rows(entry: dict[str, Any], name: str, rows: pd.DataFrame, source: Mapping[str, object]) -> None:
    """Record in a model's entry what its rows of a table belong to, so that they are known from those of others."""
    of_run = {key: source[key] for key in ("weights", "digest") if key in source}
    entry.setdefault(MEASURED_OF, {})[name] = of_run | {"rows": _rows_digest(rows)}


def foreign_rows(models: Mapping[str, Any], name: str, frame: pd.DataFrame) -> str | None:
    """Return the first model whose rows of a table are not those that its entry records; None if there is none.

    Without any entries, as beside tables of other programs, all are accepted.
    """
    for label, rows in frame.groupby("model", sort=False) if models else ():
        entry = models.get(str(label))
        records = entry.get(MEASURED_OF) if isinstance(entry, dict) else None
        recorded = records.get(name) if isinstance(records, dict) else None
        if not isinstance(recorded, dict) or recorded.get("rows") not in (None, _rows_digest(rows)):
            return str(label)
    return None


def _rows_digest(rows: pd.DataFrame) -> str:
    """Return the SHA-256 of a table's values, the same for its parquet and its csv file."""
    sha256 = hashlib.sha256()
    for name in sorted(map(str, rows.columns)):
        column = rows[name]
        if name in _TEXTS:
            content = "\0".join(map(str, column.where(column.notna(), ""))).encode()
        else:
            with np.errstate(over="ignore"):  # single precision, since csv files may be read with other last bits
                numbers = column.astype("float64").to_numpy().astype(np.float32)
            content = np.where(np.isnan(numbers), np.float32(np.nan), numbers).tobytes()
        sha256.update(name.encode() + b"\0" + content)
    return sha256.hexdigest()


def is_other(entry: Mapping[str, Any], source: Mapping[str, object], key: str) -> bool:
    """Return True if a model's tables are known to be of another run (``digest``) or other ``weights``."""
    recorded = entry.get("dataset")
    known, new = recorded.get(key) if isinstance(recorded, dict) else None, source.get(key)
    return known is not None and new is not None and known != new


def other_measured(entry: Mapping[str, Any], source: Mapping[str, object]) -> list[str]:
    """Names of the tables of interventions of a model's entry that were measured on other weights than a run's."""
    records, weights = entry.get(MEASURED_OF), source.get("weights")
    if not isinstance(records, dict) or weights is None:
        return []
    tables = {name: of_table for name, of_table in records.items() if name in MEASURED and isinstance(of_table, dict)}
    return [name for name, of_table in tables.items() if of_table.get("weights") not in (None, weights)]


def _versions() -> dict[str, str]:
    packages = ["numpy", "scipy", "pandas", "pyarrow"]
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def merged_headline(summary: Any) -> dict[str, dict[str, float]]:
    """Means and intervals of all analyses of one model; entries of any other form are left out."""
    means: dict[str, dict[str, float]] = {}
    entries: Iterable[Any] = summary.values() if isinstance(summary, dict) else ()
    for entry in entries:
        headline = entry.get("headline") if isinstance(entry, dict) else None
        for name, value in headline.items() if isinstance(headline, dict) else ():
            if isinstance(value, dict) and all(isinstance(x, int | float) for x in value.values()) and "mean" in value:
                means[str(name)] = {key: float(x) for key, x in value.items()}
    return means
