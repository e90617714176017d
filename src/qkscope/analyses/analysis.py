"""The parts of an analysis: its tables, their columns, and a function from a batch of heads to values.

Index columns, intervals, flags, csv and parquet, summary, ``--only``, ``--columns``, docs/columns.md, the explorer's
colours and the reader of results are all derived from the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from qkscope.analyses.batch import Batch
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import Scale

HEAD_KEY = ["model", "layer", "head"]
"""The columns that identify a query head in every table."""
ENDS = ("_se", "_low", "_high")
_ColumnType = Literal["", "text", "boolean", "Int64"]


@dataclass(frozen=True)
class Column:
    """A column: its name, unit, meaning, and the section of docs/method.md that defines it."""

    name: str
    unit: str
    meaning: str
    section: str
    scale: Scale | None = None
    """The scale its interval is built on; None: no interval."""
    signed: bool = False
    """True if zero is the middle of its colour scale."""
    dtype: _ColumnType = ""
    """Text, or a nullable boolean or integer; otherwise the dtype of the values."""
    per_token: str = ""
    """A column per token: this one and its interval are that column times how far back the queries see."""
    headline: bool | None = None
    """True if the summary gives its mean over heads; by default if it has an interval of its own."""
    interval_note: str = ""
    """Appended to the meaning of its interval columns."""

    @property
    def stored_as(self) -> str:
        """The dtype of the column in a table about heads, in which any value may be missing."""
        return "object" if self.dtype == "text" else self.dtype or "float64"

    @property
    def in_summary(self) -> bool:
        """True if the summary gives its mean over heads."""
        return self.scale is not None if self.headline is None else self.headline

    @property
    def is_metric(self) -> bool:
        """True if it is a number that describes a head, not an index, a row count or a label."""
        return self.dtype != "text" and self.unit not in ("index", "rows", "tokens", "true/false")

    def ends(self) -> list[Column]:
        """The columns of its interval: ``X_se``, ``X_low``, ``X_high``; none without a scale."""
        if self.scale is None:
            return []
        meanings = (
            "jackknife standard error of",
            "lower end of the 95% interval of",
            "upper end of the 95% interval of",
        )
        return [
            Column(f"{self.name}{end}", f"as {self.name}", f"{meaning} {self.name}{self.interval_note}", "6")
            for end, meaning in zip(ENDS, meanings, strict=True)
        ]


INDEX = (
    Column("model", "", "label of the model or checkpoint", "0", dtype="text"),
    Column("family", "", "label of the model family", "0", dtype="text"),
    Column("layer", "index", "layer, from 0", "0"),
    Column("head", "index", "query head within the layer, from 0", "0"),
    Column("k_head", "index", "key head it reads", "0"),
)
NOTES = (
    Column(
        "nope", "true/false", "the layer has no rotary encoding; empty where the source does not say", "7",
        dtype="boolean",
    ),
    Column(
        "sliding_window", "tokens",
        "how far back the layer's queries see; empty: to the beginning, or not known", "7", dtype="Int64",
    ),
)  # fmt: skip
FLAGS = Column(
    "flags", "",
    "cautions about the row, joined by ';': low_n, few_documents, constant_q, constant_k, nonfinite_q=N, "
    "nonfinite_k=N, repeated_q=N, repeated_k=N, weak_axis (rotated), ambiguous_class (qk), ambiguous_role (roles); "
    "heads has all of them", "6",
    dtype="text",
)  # fmt: skip
COUNTS = (
    Column("n_q", "rows", "query vectors used", "0"),
    Column("n_k", "rows", "key vectors used", "0"),
)


def with_ends(columns: Iterable[Column]) -> list[Column]:
    """The columns, followed by those of their intervals."""
    columns = list(columns)
    return [*columns, *(end for column in columns for end in column.ends())]


def one_per_head(frame: pd.DataFrame) -> pd.DataFrame:
    """The first row of each head; columns that describe the whole head are equal in all its rows."""
    return frame.drop_duplicates(["layer", "head"])


Means = dict[str, tuple[pd.Series, Float[np.ndarray, "heads groups"] | None, Scale]]
"""Numbers per head by name, with replicates if there are any, and the scale of the interval."""


@dataclass(frozen=True)
class Table:
    """One table of an analysis: its columns besides those that name a head."""

    name: str
    columns: tuple[Column, ...]
    keys: tuple[str, ...] = ()
    """Columns that distinguish the rows of a head."""
    about_heads: bool = True
    """True if rows belong to heads; otherwise the table declares all its columns itself."""
    notes: bool = False
    """True if it has the columns NOTES, which describe the head's layer."""
    flags: bool = False
    """True if it has the column ``flags``."""
    raises: Callable[[Batch, Columns], dict[str, Bool[np.ndarray, "heads"]]] | None = None
    """Computes flags of this table from a batch and its columns with their intervals: True for heads that have them."""
    interval_order: tuple[str, ...] = ()
    """The order of its intervals, if it differs from that of the columns."""
    in_runs: tuple[str, ...] = ()
    """Columns whose mean over heads goes into the table ``runs``."""
    needed: tuple[str, ...] = ()
    """Columns, besides the keys, that a table from another program must have."""
    merge: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    """Merges rows of different heads that have equal keys."""
    whole_heads: Callable[[pd.DataFrame], pd.DataFrame] = one_per_head
    """Selects the rows that describe whole heads."""
    further_means: Callable[[pd.DataFrame, Columns], Means] | None = None
    """Further numbers per head, not columns, whose means the summary also gives."""

    @property
    def row_keys(self) -> list[str]:
        """The columns that identify a row within its model; rows are sorted by them."""
        return [*(("layer", "head") if self.about_heads else ()), *self.keys]

    @property
    def required(self) -> list[str]:
        """Columns that a table from another program must have."""
        texts = {column.name for column in self.columns if column.dtype == "text"}
        return [*(key for key in self.row_keys if key not in texts), *self.needed]

    def all_columns(self, further: Iterable[Column] = ()) -> list[Column]:
        """All columns in order; ``further`` are those of other analyses."""
        by_name = {column.name: column for column in self.columns}
        ordered = [by_name[name] for name in self.interval_order] or list(self.columns)
        return [
            *(INDEX if self.about_heads else ()),
            *self.columns,
            *further,
            *(NOTES if self.notes else ()),
            *(end for column in ordered for end in column.ends()),
            *((FLAGS,) if self.flags else ()),
        ]


@dataclass(frozen=True)
class Scalars:
    """The numbers of an analysis that describe whole heads: columns of its table that ``heads`` has too."""

    columns: tuple[Column, ...]
    table: str
    """The table they come from."""
    in_runs: tuple[str, ...] = ()
    of: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    """Computes them from the table if they are not columns of it: one row per head."""


@dataclass(frozen=True)
class TableValues:
    """The results for a batch, for one table.

    Arrays have one value per head, or per head and further axes (``heads *rest``). With ``head``, they have one value
    per row, and a head may have any number of rows.
    """

    columns: Columns
    replicates: Columns = field(default_factory=dict)
    """Values of the columns with each document group left out (``heads groups *rest``); NaN where undefined."""
    per_head: Columns = field(default_factory=dict)
    """One value per head, the same in all its rows."""
    head: Int[np.ndarray, "rows"] | None = None
    """Index in the batch of each row's head, ascending."""
    rows: Bool[np.ndarray, "heads *rest"] | None = None
    """True for rows that exist; None: all."""
    most: Columns = field(default_factory=dict)
    """Largest value per head that a column can have; intervals end there. NaN: no limit."""
    documents: Columns = field(default_factory=dict)
    """For shares of counted rows: the number of documents per head that they come from."""


@dataclass(frozen=True)
class AnalysisResult:
    """All results of an analysis for a batch."""

    tables: dict[str, TableValues] = field(default_factory=dict)
    complete: dict[str, Columns | pd.DataFrame] = field(default_factory=dict)
    """Tables that are not about heads, and data that is not a table of the catalogue, with all their columns."""


@dataclass(frozen=True)
class Analysis:
    """An analysis of heads: one file, and one line in the catalogue."""

    name: str
    about: str
    """A description in one line."""
    tables: tuple[Table, ...]
    compute: Callable[[Batch], AnalysisResult]
    scalars: Scalars | None = None
    """The columns for ``heads``."""
    axes: bool = False
    """True if it needs the axes a and b; heads without any drift have no such axes and are left out."""
    buckets: bool = False
    """True if it needs moments of the queries in position buckets."""
    rotary: bool = False
    """True if it needs means with the rotation undone."""
    chance: bool = False
    """True if it needs the coherence that planes without structure reach on the run's tokens."""
    summary: Callable[[dict[str, pd.DataFrame]], dict[str, object]] | None = None
    """Entries of the summary besides means over heads."""

    def table(self, name: str) -> Table:
        """The table called ``name``."""
        return next(table for table in self.tables if table.name == name)


def single_table(
    name: str, about: str, columns: Iterable[Column], compute: Callable[[Batch], TableValues], *, rotary: bool = False
) -> Analysis:
    """An analysis of one table with one row per head, all of whose columns go into ``heads`` too."""
    columns_of_table = tuple(columns)
    return Analysis(
        name,
        about,
        (Table(name, columns_of_table),),
        lambda batch: AnalysisResult({name: compute(batch)}),
        Scalars(columns_of_table, name),
        rotary=rotary,
    )
