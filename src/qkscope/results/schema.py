"""Every column of every table, in order: tables that analyses declare, and tables derived from others."""

from __future__ import annotations

from dataclasses import dataclass

from qkscope.analyses.analysis import INDEX, Column
from qkscope.analyses.catalogue import ANALYSES, DECLARED_TABLES, SCALARS, table_columns
from qkscope.analyses.pca import HEADS_TABLE


def _labels(section: str) -> tuple[Column, Column]:
    return (
        Column("model", "", "label of the model or checkpoint", section, dtype="text"),
        Column("family", "", "label of the model family", section, dtype="text"),
    )


STATISTICS = {
    "mean": "mean of {} over heads",
    "median": "median of {} over heads",
    "low": "lower end of the mean's 95% interval, by document",
    "high": "upper end of it",
}


def _summed_up() -> dict[str, tuple[str, ...]]:
    """Columns of ``runs`` by the table they come from; for tables with several rows per head, of the first row."""
    by_table = {table.name: table.in_runs for analysis in ANALYSES for table in analysis.tables if table.in_runs}
    from_scalars = tuple(name for scalars in SCALARS.values() for name in scalars.in_runs)
    return by_table | {HEADS_TABLE.name: (*HEADS_TABLE.in_runs, *from_scalars)}


@dataclass(frozen=True)
class OtherTable:
    """A table that no analysis computes."""

    about: str
    """A description in one line."""
    keys: tuple[str, ...]
    """Columns that identify a row within its model."""
    columns: tuple[Column, ...]


SUMMED_UP = _summed_up()
DERIVED = {
    "plasticity_links": OtherTable(
        "attention plasticity by class of head, and its rank correlation with other columns",
        ("link", "name"),
        (
            *_labels("5"),
            Column(
                "link",
                "",
                "class: mean ap_overall of a class of heads; rank: Spearman's ρ of ap_overall with a column",
                "5",
                dtype="text",
            ),
            Column("name", "", "the class or the column; abs_ leaves out its sign", "5", dtype="text"),
            Column("n_heads", "heads", "query heads", "5"),
            Column("value", "share or correlation", "the mean or ρ", "5"),
            Column("value_low", "as value", "lower end of its 95% interval, by bootstrap over key heads", "5"),
            Column("value_high", "as value", "upper end of it", "5"),
        ),
    ),
    "runs": OtherTable(
        "one row per run: means over its heads",
        (),
        (
            *_labels("7"),
            Column("phase", "", "part of training, where a study says so", "7", dtype="text"),
            Column("step", "steps", "training step, where a study says so", "7"),
            Column("window", "tokens", "context length", "7", dtype="Int64"),
            Column("n_heads", "heads", "query heads analysed", "7"),
            Column("n_documents", "documents", "measured; of a dataset, those of its first head", "7", dtype="Int64"),
            Column("n_tokens", "tokens", "measured; of a dataset, rows of its first query head", "7", dtype="Int64"),
            Column("loss", "nats per token", "mean loss of the documents, from some tokens of each, if captured", "0"),
            *(
                Column(f"{column}_{name}", f"as {column}", meaning.format(column), "7")
                for columns in SUMMED_UP.values()
                for column in columns
                for name, meaning in STATISTICS.items()
            ),
        ),
    ),
}
"""Tables derived from others."""


def _over_documents(name: str, unit: str, meaning: str, section: str, *, signed: bool = False) -> list[Column]:
    """A column and the columns of its interval over documents."""
    return [
        Column(name, unit, meaning, section, signed=signed),
        Column(f"{name}_low", f"as {name}", f"lower end of the 95% interval of {name}, over documents", section),
        Column(f"{name}_high", f"as {name}", "upper end of it", section),
    ]


_COSTS = [
    *_over_documents("kl", "nats per token", "divergence KL(p‖p') of the changed prediction, if measured", "9"),
    *_over_documents("delta_nll", "nats per token", "measured rise of the loss", "9", signed=True),
]
MEASURED = {
    "effects": OtherTable(
        "what each term of each head does to the prediction (qkscope effects)",
        ("layer", "head", "term"),
        (
            *INDEX,
            Column("term", "", "what is taken away: position, key, query or content", "9", dtype="text"),
            Column("chosen", "", "why it was measured: strongest, random, or empty if it was not", "9", dtype="text"),
            Column("gamma", "share", "how much of the term is taken away", "9"),
            *_over_documents(
                "fisher_information", "nats per token", "of a factor on the term, from backward passes", "9"
            ),
            Column("kl_predicted", "nats per token", "γ²/2 of it: the divergence it predicts", "9"),
            *_COSTS,
        ),
    ),
    "effects_together": OtherTable(
        "what a term of all heads together does to the prediction (qkscope effects)",
        ("change", "over", "position"),
        (
            *_labels("9"),
            Column(
                "change",
                "",
                "a term taken away in all heads; drift: of the keys; control: as much at random",
                "9",
                dtype="text",
            ),
            Column("over", "", "all tokens, or an octave of their positions", "9", dtype="text"),
            Column("position", "tokens", "first position of the octave", "9"),
            Column("n_heads", "heads", "query heads that are changed", "9"),
            Column("gamma", "share", "how much of a term is taken away; 1 for the drift", "9"),
            *_COSTS,
            Column("nll", "nats per token", "the loss without the change", "9"),
        ),
    ),
    "cuts": OtherTable(
        "what it costs to cut key heads to a window (qkscope reach --measure)",
        ("text", "order", "share_cut", "draw"),
        (
            *_labels("10"),
            Column(
                "order",
                "",
                "how key heads are chosen: far, area, lock, measured, reversed, random, all or none",
                "10",
                dtype="text",
            ),
            Column("draw", "index", "which random choice", "10"),
            Column("text", "", "plain: documents; copy: the second copy of a document", "10", dtype="text"),
            Column("w", "tokens", "the window that cut heads keep", "10"),
            Column("share_cut", "share", "of key heads that are cut", "10"),
            Column("cache_saved", "share", "of the key-value cache at the length of the texts", "10"),
            *_over_documents("nll", "nats per token", "the loss with the cut", "10"),
        ),
    ),
}
"""Tables of interventions, written by commands other than ``analyze``."""
_OTHERS = DERIVED | MEASURED
TABLES: dict[str, list[Column]] = {name: table_columns(name) for name in DECLARED_TABLES}
TABLES |= {name: list(table.columns) for name, table in _OTHERS.items()}
KEYS: dict[str, list[str]] = {name: table.row_keys for name, table in DECLARED_TABLES.items()}
KEYS |= {name: list(table.keys) for name, table in _OTHERS.items()}
"""The columns that identify a row within its model; rows are sorted by them."""
ABOUT = {table.name: analysis.about for analysis in ANALYSES for table in analysis.tables}
ABOUT |= {name: table.about for name, table in _OTHERS.items()}
"""A description of each table in one line: that of its analysis."""
TEXTS = frozenset(column.name for columns in TABLES.values() for column in columns if column.dtype == "text")
"""Columns that contain text."""


def column_names(table: str) -> list[str]:
    """The columns of a table, in order."""
    return [column.name for column in TABLES[table]]


def described_columns() -> str:
    """Every column of every table as text, with its unit, meaning and section of docs/method.md."""
    lines = []
    for table, columns in TABLES.items():
        lines += [f"{table}.csv, {table}.parquet: {ABOUT[table]}"]
        width = max(len(column.name) for column in columns)
        lines += [
            f"  {c.name:<{width}}  {c.meaning}" + (f" [{c.unit}]" if c.unit else "") + f" (method {c.section})"
            for c in columns
        ]
        lines.append("")
    return "\n".join(lines).rstrip()
