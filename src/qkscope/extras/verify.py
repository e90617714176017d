"""Whether a captured run is what was captured, and whether tables are what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Bool

from qkscope.analyses.catalogue import ANALYSES, DECLARED_TABLES
from qkscope.engine import Place
from qkscope.errors import DatasetError, HeadError, TableError
from qkscope.files.checksums import CHECKSUMS, compare
from qkscope.files.runfolder import RunFolder
from qkscope.pipeline.analyze import analyze
from qkscope.pipeline.job import Job
from qkscope.results.tables import read_table
from qkscope.runs.captured import CapturedSource
from qkscope.runs.run import open_run
from qkscope.runs.selection import Selection
from qkscope.runs.source import WHOLE

_TOLERANCE = 1e-6
"""Relative difference up to which numbers are the same: other processors round differently."""


def check_run(folder: Path) -> list[str]:
    """What is wrong with a run's own files; nothing, if all is well."""
    run = RunFolder.open(folder)
    found = list(_files(folder))
    for said in run.manifest["layers"]:
        try:
            run.layer(said["layer"])
        except DatasetError as error:
            found.append(str(error))
    source = CapturedSource(run)
    for head in sorted({*source.query_heads, *map(source.key_head, source.query_heads)}):
        try:
            source.rows(head, WHOLE)
        except (DatasetError, HeadError) as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _files(folder: Path) -> Iterator[str]:
    differences = compare(folder)
    if differences is None:
        yield f"{folder / CHECKSUMS} is missing, so its files cannot be compared with what was written"
        return
    yield from differences


def check_tables(folder: Path, tables: Path, model: str | None = None, workers: int | None = None) -> list[str]:
    """What differs between tables on disk and those that follow from the run."""
    held = {name: frame for name in DECLARED_TABLES if (frame := read_table(tables, name)) is not None}
    if not held:
        raise TableError(f"{tables} holds no tables")
    label = model or _label(held, folder)
    mine = {name: frame[frame["model"] == label].reset_index(drop=True) for name, frame in held.items()}
    wanted = [one for one in ANALYSES if any(len(mine.get(table.name, ())) for table in one.tables)]
    intervals = any(frame[c].notna().any() for frame in mine.values() for c in frame.columns if c.endswith("_se"))
    family = next((str(frame["family"].iloc[0]) for frame in mine.values() if len(frame) and "family" in frame), "")
    run = open_run(folder, model=label, family=family)
    heads = frozenset((int(a), int(b)) for frame in mine.values() for a, b in _heads(frame))
    names = [analysis.name for analysis in wanted]
    (outcome,) = analyze([Job(run, Selection(exactly=heads))], names, place=Place(workers), intervals=intervals)
    found = [str(failure) for failure in outcome.failures]
    for analysis in wanted:
        for table in analysis.tables:
            if table.name in mine:
                found += _differences(table.name, mine[table.name], outcome.tables.frames[table.name])
    return found


def _heads(frame: pd.DataFrame) -> Iterator[tuple[int, int]]:
    """Which heads a table is about, where it is about heads."""
    return zip(frame["layer"], frame["head"], strict=True) if "head" in frame else iter(())


def _label(held: dict[str, pd.DataFrame], folder: Path) -> str:
    labels = sorted({str(label) for frame in held.values() for label in frame["model"].unique()})
    if folder.absolute().name in labels:
        return folder.absolute().name
    if len(labels) == 1:
        return labels[0]
    raise TableError(f"the tables hold {', '.join(labels)}; say with --model which of them came from {folder}")


def _differences(name: str, held: pd.DataFrame, derived: pd.DataFrame) -> list[str]:
    if len(held) != len(derived):
        return [f"{name}: {len(held)} rows there, {len(derived)} follow from the run"]
    found = []
    for column in derived.columns:
        same = _same(held[column], derived[column])
        if not same.all():
            row = int(np.flatnonzero(~same)[0])
            where = ", ".join(f"{key} {held[key].iloc[row]}" for key in ("layer", "head", "pc") if key in held)
            found.append(
                f"{name}.{column}: {int((~same).sum())} of {len(held)} rows differ, first at {where}: "
                f"{held[column].iloc[row]} there, {derived[column].iloc[row]} follows from the run"
            )
    return found


def _same(there: pd.Series, now: pd.Series) -> Bool[np.ndarray, "rows"]:
    """Which values are the same: numbers within the tolerance, of the largest of them too; everything else exactly."""
    if pd.api.types.is_float_dtype(now) or pd.api.types.is_float_dtype(there):
        a, b = (part.astype(float).to_numpy() for part in (there, now))
        largest = float(np.nanmax(np.abs(b), initial=0.0))
        return np.isclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)
    both_missing = there.isna().to_numpy() & now.isna().to_numpy()
    return both_missing | (there.astype(str).to_numpy() == now.astype(str).to_numpy())
