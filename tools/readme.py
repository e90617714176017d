"""Rewrite the column tables of README.md from their descriptions in the code.

python -m tools.readme
"""

from pathlib import Path

from qkscope.store.columns import TABLES

ROOT = Path(__file__).parent.parent
START, END = "<!-- columns: written by tools/readme.py -->", "<!-- end of columns -->"


def columns_markdown() -> str:
    """One table per table; the three columns of an interval share a line."""
    parts = []
    for name, columns in TABLES.items():
        names = {c.name for c in columns}
        with_range = [x for c in columns if (x := c.name.removesuffix("_se")) != c.name and f"{x}_low" in names]
        ends = {f"{x}{end}" for x in with_range for end in ("_se", "_low", "_high")}
        parts += [f"#### `{name}.csv`, `{name}.parquet`", "", "| column | unit | meaning |", "|---|---|---|"]
        for column in columns:
            if column.name not in ends:
                meaning = column.meaning.replace("|", r"\|")
                parts.append(f"| `{column.name}` | {column.unit} | {meaning} |")
        ranges = ", ".join(f"`{x}`" for x in with_range)
        said = f"and `X_se`, `X_low`, `X_high` (standard error, 95% interval) for X in {ranges}."
        parts += ["", said, ""] if with_range else [""]
    return "\n".join(parts)


def updated(text: str) -> str:
    """The text with its column tables brought up to date."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{columns_markdown()}\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(updated(page.read_text()))
