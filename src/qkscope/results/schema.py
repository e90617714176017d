"""Every column of every table, in order: tables that analyses declare, and tables derived from others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from qkscope.analyses.analysis import ENDS, INDEX, Column
from qkscope.analyses.catalogue import ANALYSES, DECLARED_TABLES, SCALARS, table_columns
from qkscope.analyses.pca import HEADS_TABLE
from qkscope.errors import TableError


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


_EVALUATED = Column("window", "tokens", "of the texts on which it was measured", "9", dtype="Int64")
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
            Column(
                "chosen", "", "why it was measured: named, strongest, random, or empty if it was not", "9", dtype="text"
            ),
            _EVALUATED,
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
        ("change", "heads", "over", "position"),
        (
            *_labels("9"),
            Column(
                "change",
                "",
                "a term taken away in these heads; drift: of the keys; control: as much at random",
                "9",
                dtype="text",
            ),
            Column("heads", "", "all, the named ones, or as many random others", "9", dtype="text"),
            Column("over", "", "all tokens, or an octave of their positions", "9", dtype="text"),
            Column("position", "tokens", "first position of the octave", "9"),
            Column("n_heads", "heads", "query heads that are changed", "9"),
            _EVALUATED,
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
    "needles": OtherTable(
        "what is still found in long text with key heads cut to a window (qkscope reach --measure)",
        ("text", "order", "share_cut", "depth"),
        (
            *_labels("10"),
            Column(
                "order", "", "how key heads are chosen: none, far, area, lock, measured or random", "10", dtype="text"
            ),
            Column("text", "", "passkey: one number in the text; pair: one of ten, by its word", "10", dtype="text"),
            Column("w", "tokens", "the window that cut heads keep", "10"),
            Column("share_cut", "share", "of key heads that are cut", "10"),
            Column("depth", "share", "of the text before the number; empty: over all depths", "10"),
            Column("n_questions", "questions", "that were asked", "10"),
            *_over_documents("accuracy", "share", "of numbers that the model generates as stated", "10"),
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
ABOUT[HEADS_TABLE.name] = "one row per head: its class and, of all analyses, the numbers about whole heads"
ABOUT |= {name: table.about for name, table in _OTHERS.items()}
"""A description of each table in one line: that of its analysis."""
TEXTS = frozenset(column.name for columns in TABLES.values() for column in columns if column.dtype == "text")
"""Columns that contain text."""


_GROUPS = {
    "Cause": ("effect_", "part_", "logit_sd", "score_", "position_share_of_score", "positional", "symbolic",
              "interaction_share"),
    "Reach": ("mass_", "reach", "sink", "curve_area", "previous", "echo", "induction", "entropy", "max_logit"),
    "Plasticity": ("ap_",),
    "Bias": ("decay", "curve_range", "bias", "alpha", "mu_", "amplification", "slope", "distance", "content_offset",
             "query_term", "interaction", "constant"),
    "Class": ("fisher", "separation", "lda", "plane_var", "r_squared"),
    "Rotation": ("active", "strong", "turning", "omega", "residual", "angle"),
}  # fmt: skip
"""Questions, and the prefixes of their columns; all other columns are about position."""
QUESTIONS = ("Position", "Bias", "Cause", "Reach", "Plasticity", "Class", "Rotation")
"""Questions in the order in which they are shown."""


def question(column: str) -> str:
    """The question that a column belongs to.

    >>> question("decay"), question("r_q"), question("positional_overhead"), question("effect_position")
    ('Bias', 'Position', 'Position', 'Cause')
    """
    if column == "positional_overhead":
        return "Position"
    return next((name for name, starts in _GROUPS.items() if column.startswith(starts)), "Position")


def column_names(table: str) -> list[str]:
    """The columns of a table, in order."""
    return [column.name for column in TABLES[table]]


def described_columns(words: Sequence[str] = ()) -> str:
    """The columns with one of these words in their name or meaning, by table; without words, all.

    The columns of an interval stand with the one they belong to; those of ``heads`` are grouped by question.
    """
    lines = []
    for table, columns in TABLES.items():
        names = {column.name for column in columns}
        shown = [
            column
            for column in columns
            if not _belonging_to(column.name, names)
            and (not words or any(word.lower() in f"{column.name} {column.meaning}".lower() for word in words))
        ]
        if not shown:
            continue
        lines += ["", f"{table}.csv, {table}.parquet: {ABOUT[table]}"]
        width, title = max(len(column.name) for column in shown), ""
        if table == HEADS_TABLE.name:
            shown.sort(key=lambda column: QUESTIONS.index(question(column.name)) if column.is_metric else -1)
        for column in shown:
            if table == HEADS_TABLE.name and column.is_metric and title != question(column.name):
                title = question(column.name)
                lines.append(f" {title}")
            lines.append(_described(column, names, width))
    if not lines:
        every = {column.name for columns in TABLES.values() for column in columns}
        close = get_close_matches(words[0], sorted(name for name in every if not _belonging_to(name, every)), 3)
        hint = f"did you mean {' or '.join(close)}?" if close else "qkscope analyze --columns lists all"
        raise TableError(f"no column has {' or '.join(map(repr, words))} in its name or meaning; {hint}")
    return "\n".join(lines[1:])


def _belonging_to(name: str, names: set[str]) -> str:
    """The column that an end of an interval, or a statistic of ``runs``, belongs to; empty for all others."""
    for end in (*ENDS, "_median"):
        stem = name.removesuffix(end)
        if stem != name and names & {stem, f"{stem}_mean"}:
            return stem if stem in names else f"{stem}_mean"
    return ""


def _described(column: Column, names: set[str], width: int) -> str:
    """One line on a column: its name, meaning, unit, section of docs/method.md, and the columns of its interval."""
    stem = column.name.removesuffix("_mean")
    ends = [
        name.removeprefix(stem) for name in sorted(names, reverse=True) if _belonging_to(name, names) == column.name
    ]
    unit = f" [{column.unit}]" if column.unit else ""
    interval = f"; also {', '.join(ends)}" if ends else ""
    return f"  {column.name:<{width}}  {column.meaning}{unit} (method {column.section}{interval})"
