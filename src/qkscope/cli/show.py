"""What the columns of the tables are, in a terminal."""

from __future__ import annotations

from qkscope.store.columns import TABLES


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
