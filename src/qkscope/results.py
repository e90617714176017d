"""A results folder: tables that hold one set of rows per model, and a summary of how they came about.

Analysing a model again replaces its rows and leaves those of other models alone, so that a study can be
computed model by model into one folder.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from qkscope._version import __version__
from qkscope.analyses.links import plasticity_links
from qkscope.analyses.pca import TAXONOMY
from qkscope.analyses.scoretables import AP, CAUSAL, SCALARS, SHARE, heads_from, with_scalars
from qkscope.analyses.tabulate import HEAD_INTERVALS, LINE_INTERVAL, PC_INTERVALS, ROTATION_INTERVALS
from qkscope.analyses.uncertainty import Scale, jackknife
from qkscope.analyses.vectortables import with_active_planes
from qkscope.errors import TableError
from qkscope.jobs import ANALYSES, Analysis, Outcome
from qkscope.runrow import run_row
from qkscope.sources import Extent
from qkscope.store.atomic import locked, remove_leftovers
from qkscope.store.axes import AXES, axes_bytes, read_axes
from qkscope.store.columns import TABLES
from qkscope.store.points import POINTS, points_bytes, read_points
from qkscope.store.regular import read_text
from qkscope.store.tables import read_table, write_tables
from qkscope.tablefolder import merged_headline

SUMMARY = "summary.json"
HEADLINES = {
    "qk": ["explained_variance", "r_q", "r_k"],
    "heads": [*HEAD_INTERVALS, "lda_accuracy"],
    "rotated": [*ROTATION_INTERVALS, *CAUSAL],
    "distance": ["distance_r2", "distance_corr", *SHARE],
    "plasticity": [*AP],
}
"""Columns whose mean over heads the summary gives; those of ``qk`` on component 0."""
DERIVED = ("plasticity_links", "runs")
"""Tables that follow from others."""
_OURS = re.compile(
    "|".join(re.escape(name) for table in TABLES for name in (f"{table}.csv", f"{table}.parquet"))
    + "|".join(["", *map(re.escape, (AXES, POINTS, SUMMARY))])
)
"""Files of a results folder."""
INTERVALS = PC_INTERVALS | HEAD_INTERVALS | ROTATION_INTERVALS | SHARE | AP | CAUSAL | LINE_INTERVAL


def check_folder(folder: Path, tables: Sequence[str]) -> None:
    """Raise now what writing would raise after all the work: a folder or a table that is not ours to replace."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise TableError(f"cannot write to {folder} ({nearest} is no folder that can be written); choose another")
    for name in TABLES if tables else ():
        if (folder / f"{name}.csv").is_dir() or (folder / f"{name}.parquet").is_dir():
            raise TableError(f"{folder / name}.csv or .parquet is a folder; move it away or write elsewhere")
        read_table(folder, name)
    if tables:
        read_axes(folder)
        read_points(folder)
    _read_summary(folder)


def write_results(folder: Path, outcomes: Sequence[Outcome], *, wall_seconds: float) -> list[Path]:
    """Write tables and summary.json; returns the csv files. A model of which no head succeeded changes nothing."""
    worth = [outcome for outcome in outcomes if outcome.n_failed < outcome.n_heads]
    if not worth:
        raise TableError(f"no head could be analysed; {folder} is left as it was")
    names = [name for name in worth[0].tables.frames if name not in ("points", "axes")]
    models = [outcome.job.run.model for outcome in worth]
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        remove_leftovers(folder, _OURS)
        frames = {name: _with_kept_rows(folder, name, [o.tables.frames[name] for o in worth], models) for name in names}
        frames = _linked(folder, frames)
        summary = _read_summary(folder)
        extents = {outcome.job.run.model: _extent(outcome) for outcome in worth}
        summary |= {"qkscope": __version__, "versions": _versions(), "wall_seconds": round(wall_seconds, 3)}
        for outcome in worth:
            entry = summary["models"].setdefault(outcome.job.run.model, {})
            entry |= {"family": outcome.job.run.family, "dataset": _identity(outcome)}
            entry |= vars(extents[outcome.job.run.model])
            entry |= {analysis: summarize(outcome, analysis) for analysis in outcome.analyses}
        frames |= _derived(folder, frames, summary["models"])
        text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        return write_tables(folder, frames, {SUMMARY: text.encode()} | _vectors(folder, worth))


def _linked(folder: Path, frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """What ``planes`` and ``distance`` say about whole heads goes into ``heads``, whichever table is new."""
    heads = frames["heads"] if "heads" in frames else read_table(folder, "heads")
    if heads is None:
        return frames
    for name in ("planes", *SCALARS):
        table = frames[name] if name in frames else read_table(folder, name)
        if table is not None and len(heads):
            heads = with_active_planes(heads, table) if name == "planes" else with_scalars(heads, table, name)
            frames = frames | {"heads": heads}
    return frames


def _derived(
    folder: Path, frames: dict[str, pd.DataFrame], models: dict[str, dict[str, Any]]
) -> dict[str, pd.DataFrame]:
    """What follows from the tables of all models in the folder: links of plasticity, and one row per run."""
    whole = {name: frames[name] if name in frames else read_table(folder, name) for name in ("qk", "heads", "rotated")}
    tables = {name: frame for name, frame in whole.items() if frame is not None}
    if "heads" not in tables:
        others = {name: frames[name] if name in frames else read_table(folder, name) for name in SCALARS}
        told = heads_from({name: frame for name, frame in others.items() if frame is not None})
        tables |= {} if told is None else {"heads": told}
    rows = []
    for model, entry in models.items():
        mine = {name: frame[frame["model"] == model] for name, frame in tables.items()}
        if not any(len(frame) for frame in mine.values()):
            continue
        rotated = mine.get("rotated")
        window = int(rotated["window"].max()) if rotated is not None and len(rotated) else None
        named = {"model": model, "family": entry.get("family") or "", "phase": "", "step": np.nan, "window": window}
        counts: dict[str, Any] = {"n_heads": max(len(_per_head(frame)) for frame in mine.values())}
        counts |= {name: entry.get(name) for name in ("n_documents", "n_tokens")}
        rows.append(named | counts | run_row(mine, merged_headline(entry), window))
    found = {"runs": pd.DataFrame(rows)} if rows else {}
    heads = tables.get("heads")
    if heads is not None and "taxonomy" in heads and heads["ap_overall"].notna().any():
        found["plasticity_links"] = plasticity_links(heads, tables.get("rotated"))
    return found


def _extent(outcome: Outcome) -> Extent:
    return outcome.job.run.source.extent(outcome.job.selection.of(outcome.job.run))


def _per_head(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop_duplicates(["layer", "head"])


def _vectors(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """Points and axes, where there are any: they are no tables, and have files of their own."""
    files: dict[str, bytes] = {}
    for name, file, content in (("points", POINTS, points_bytes), ("axes", AXES, axes_bytes)):
        parts = [o.tables.frames[name] for o in outcomes if name in o.tables.frames]
        files |= {file: content(folder, pd.concat(parts, ignore_index=True))} if parts else {}
    return files


def summarize(outcome: Outcome, analysis: Analysis) -> dict[str, Any]:
    """Counts, configuration, headline means, taxonomy shares and failures of one analysis of one model."""
    said: dict[str, Any] = {
        "config": outcome.job.config,
        "heads": outcome.n_heads,
        "heads_failed": outcome.n_failed,
        "failures": [str(failure.error) for failure in outcome.failures],
        "headline": headline(outcome, ANALYSES[analysis]),
    }
    heads = outcome.tables.frames.get("heads")
    if analysis == "pca" and heads is not None and len(heads):
        shares = heads["taxonomy"].value_counts(normalize=True)
        said["taxonomy"] = {kind: float(shares.get(kind, 0.0)) for kind in TAXONOMY}
    return said


def _identity(outcome: Outcome) -> dict[str, Any]:
    source = outcome.job.run.source
    return source.identity() | {"q_per_kv": source.q_per_kv}


def headline(outcome: Outcome, tables: Sequence[str] = tuple(HEADLINES)) -> dict[str, dict[str, float]]:
    """Means over heads of the headline columns of these tables, each with its interval by document group."""
    values: dict[str, dict[str, float]] = {}
    again = outcome.tables.replicates
    for table in tables:
        columns = HEADLINES.get(table, [])
        frame = outcome.tables.frames.get(table)
        if not columns or frame is None or frame.empty:
            continue
        rows = frame[frame["pc"] == 0] if table == "qk" else _per_head(frame)
        values |= {name: _mean(rows[name], again.get(name), INTERVALS.get(name, Scale.LINEAR)) for name in columns}
        if table == "qk":
            values["abs_r_k"] = _mean(rows["r_k"].abs(), np.abs(again["r_k"]) if "r_k" in again else None)
            values["discordant_share"] = _mean((rows["concordant"] == False).fillna(False), None)  # noqa: E712
        if table == "rotated":
            # A share of signs does not vary smoothly, and the jackknife has nothing to say about it.
            values["positive_bias_share"] = _mean(rows["bias_strength"] > 0, None)
    return {name: said for name, said in values.items() if np.isfinite(said["mean"])}


def _mean(
    per_head: pd.Series, replicates: Float[np.ndarray, "heads groups"] | None, scale: Scale = Scale.LINEAR
) -> dict[str, float]:
    """Mean over heads; with an interval where every head has the same, and enough, document groups."""
    known = per_head.astype(float)
    mean = float(known.mean()) if known.notna().any() else float("nan")
    if replicates is None or not np.isfinite(mean):
        return {"mean": mean}
    present = ~np.isnan(replicates)
    if not (present == present[0]).all():
        return {"mean": mean}
    over_heads = np.where(present[0], np.nan_to_num(replicates).mean(0), 0.0)
    # A mean of correlations is no correlation; a mean of shares is a share.
    kept = Scale.SHARE if scale in (Scale.SHARE, Scale.PROPORTION) else Scale.LINEAR
    interval = jackknife(np.array([mean]), over_heads[None], present[:1].astype(float), kept)
    if np.isnan(interval.se[0]):
        return {"mean": mean}
    return {"mean": mean, "low": float(interval.low[0]), "high": float(interval.high[0])}


def _with_kept_rows(folder: Path, name: str, new: list[pd.DataFrame], models: list[str]) -> pd.DataFrame:
    """New rows, and those of other models that the folder already holds."""
    old = read_table(folder, name)
    kept = [] if old is None else [old[~old["model"].isin(models)]]
    parts = [part for part in (*kept, *new) if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else new[0]


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    if not path.exists():
        return {"models": {}}
    try:
        models = json.loads(read_text(path))["models"]
        return {"models": {name: dict(entry) for name, entry in models.items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TableError(f"{path} cannot be read ({error!r}); move it away or write elsewhere") from None


def _versions() -> dict[str, str]:
    packages = ["numpy", "scipy", "pandas", "pyarrow"]
    return {"python": platform.python_version()} | {name: version(name) for name in packages}
