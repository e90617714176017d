"""Rewrite the column tables of README.md from their descriptions in the code.

python -m tools.readme
"""

from pathlib import Path

from qkscope.store.columns import STATISTICS, SUMMED_UP, TABLES

ROOT = Path(__file__).parent.parent
START, END = "<!-- columns: written by tools/readme.py -->", "<!-- end of columns -->"


def columns_markdown() -> str:
    """One table per table; columns that come in sets, such as X_se, X_low, X_high, share a line."""
    return "\n".join(line for name in TABLES for line in _table(name))


def _table(name: str) -> list[str]:
    names = {column.name for column in TABLES[name]}
    if name == "runs":
        ends, of = tuple(f"_{x}" for x in STATISTICS), [x for part in SUMMED_UP.values() for x in part]
        what = "mean and median over heads, and the mean's 95% interval by document"
    else:
        ends, what = ("_se", "_low", "_high"), "standard error, 95% interval"
        of = [x for one in TABLES[name] if f"{(x := one.name.removesuffix('_se'))}_low" in names and x != one.name]
    shared = {f"{x}{end}" for x in of for end in ends}
    lines = [f"#### `{name}.csv`, `{name}.parquet`", "", "| column | unit | meaning |", "|---|---|---|"]
    for column in TABLES[name]:
        if column.name not in shared:
            meaning = column.meaning.replace("|", r"\|")
            lines.append(f"| `{column.name}` | {column.unit} | {meaning} |")
    sets, listed = ", ".join(f"`X{end}`" for end in ends), ", ".join(f"`{x}`" for x in of)
    return [*lines, "", *([f"and {sets} ({what}) for X in {listed}.", ""] if of else [])]


def updated(text: str) -> str:
    """The text with its column tables brought up to date."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{columns_markdown()}\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(updated(page.read_text()))
