"""Results in a terminal: the columns of the tables, and the headline numbers of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from qkscope.pipeline import Outcome
from qkscope.results import headline, summarize
from qkscope.store.columns import TABLES

_SAYS = {
    "explained_variance": "share of the variance on component 0",
    "r_q": "correlation of queries with position on component 0",
    "r_k": "the same of keys, signed",
    "abs_r_k": "the same of keys, absolute",
    "posvar_q_published": "positional variance of queries, published formula",
    "posvar_q": "positional variance of queries, exact",
    "posvar_k_published": "positional variance of keys, published formula",
    "posvar_k": "positional variance of keys, exact",
    "r_k_a": "correlation of keys with position on axis a",
    "plane_var_fraction": "share of the variance in the plane of a and b",
    "bias_strength": "recency bias on axis a, score per token",
    "bias_full": "recency bias in all dimensions, score per token",
    "positive_bias_share": "share of heads that favour later keys",
}


def columns_text() -> str:
    """Every column of every table, with its unit, meaning and section of docs/method.md."""
    lines = []
    for table, columns in TABLES.items():
        lines.append(f"{table}.csv, {table}.parquet")
        width = max(len(column.name) for column in columns)
        lines += [
            f"  {c.name:<{width}}  {c.meaning}" + (f" [{c.unit}]" if c.unit else "") + f" (method {c.section})"
            for c in columns
        ]
        lines.append("")
    return "\n".join(lines).rstrip()


def show_results(outcome: Outcome, folder: Path) -> None:
    """Print the headline means with their intervals, the classes of heads and where the tables are."""
    console = Console()
    table = Table("mean over heads", "value", "95% interval", title=f"{outcome.job.run.model}: {outcome.n_heads} heads")
    table.caption = "Intervals are by document and centred at the bias-corrected value, which may differ from the mean."
    values = headline(outcome)
    for name, says in _SAYS.items():
        value = values[name]
        span = f"{value['low']:.3g} … {value['high']:.3g}" if "low" in value else "—"
        table.add_row(f"{says} ({name})", f"{value['mean']:.3g}", span)
    console.print(table)
    shares = summarize(outcome, "pca")["taxonomy"]
    console.print("classes: " + ", ".join(f"{share:.0%} {kind}" for kind, share in shares.items()), highlight=False)
    console.print(f"results: {folder.resolve()}", highlight=False, soft_wrap=True)
