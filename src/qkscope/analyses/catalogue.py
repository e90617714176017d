"""All analyses, in order. To add one: a new file and a line here."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from qkscope.analyses.analysis import Analysis, Column, Scalars, Table, with_ends
from qkscope.analyses.pca import HEADS_TABLE
from qkscope.errors import ConfigError

_MODULES = (
    "pca",
    "rotation",
    "position",
    "planes",
    "distance",
    "plasticity",
    "scores",
    "reach",
    "roles",
)
"""The file ``x.py`` in this folder declares the analysis ``X``."""

ANALYSES: tuple[Analysis, ...] = tuple(
    getattr(import_module(f"qkscope.analyses.{name}"), name.upper()) for name in _MODULES
)
ANALYSES_BY_NAME = {analysis.name: analysis for analysis in ANALYSES}
DECLARED_TABLES: dict[str, Table] = {table.name: table for analysis in ANALYSES for table in analysis.tables}
"""Every table that an analysis writes."""
SCALARS: dict[str, Scalars] = {a.scalars.table: a.scalars for a in ANALYSES if a.scalars is not None}
"""The columns that ``heads`` has from other tables, by table."""


def table_columns(name: str) -> list[Column]:
    """All columns of a table in order; ``heads`` also has the columns of other analyses about whole heads."""
    from_others = (
        [column for scalars in SCALARS.values() for column in with_ends(scalars.columns)]
        if name == HEADS_TABLE.name
        else []
    )
    return DECLARED_TABLES[name].all_columns(from_others)


def analyses_named(names: Iterable[str]) -> list[Analysis]:
    """The analyses with these names, in the order of the catalogue; an unknown name raises a ``ConfigError``."""
    requested = list(names)
    unknown = [name for name in requested if name not in ANALYSES_BY_NAME]
    if unknown:
        raise ConfigError(f"unknown analysis {unknown[0]!r}; choose from {', '.join(ANALYSES_BY_NAME)}")
    return [analysis for analysis in ANALYSES if analysis.name in requested]
