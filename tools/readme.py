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
        with_range = [c.name.removesuffix("_se") for c in columns if c.name.endswith("_se")]
        parts += [f"#### `{name}.csv`, `{name}.parquet`", "", "| column | unit | meaning |", "|---|---|---|"]
        for column in columns:
            if not column.name.endswith(("_se", "_low", "_high")):
                meaning = column.meaning.replace("|", r"\|")
                parts.append(f"| `{column.name}` | {column.unit} | {meaning} |")
        ranges = ", ".join(f"`{x}`" for x in with_range)
        parts += ["", f"and `X_se`, `X_low`, `X_high` (standard error, 95% interval) for X in {ranges}.", ""]
    return "\n".join(parts)


def updated(text: str) -> str:
    """The text with its column tables brought up to date."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{columns_markdown()}\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(updated(page.read_text()))
