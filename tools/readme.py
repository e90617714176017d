"""Rewrite the generated parts of README.md and docs: columns and options from the code, measurements from results.

python -m tools.readme
"""

from dataclasses import MISSING
from pathlib import Path

from benchmarks import growth, results

from qkscope.capture.options import CaptureOptions, ExecutionOptions, ModelOptions, TextOptions, VectorSampling
from qkscope.integrations.hub import PushOptions
from qkscope.options import OptionSpec, option_specs
from qkscope.results.job import OPTION_CLASSES
from qkscope.results.schema import ABOUT, STATISTICS, SUMMED_UP, TABLES

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/capture.md", "docs/columns.md", "docs/formats.md", "docs/hub.md", "docs/speed.md")


def columns_markdown() -> str:
    """A Markdown table for each table; columns that come in sets, such as X_se, X_low, X_high, share a line."""
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
    about = f"{ABOUT[name][0].upper()}{ABOUT[name][1:]}."
    lines = [f"## `{name}.csv`, `{name}.parquet`", "", about, "", "| column | unit | meaning |", "|---|---|---|"]
    for column in TABLES[name]:
        if column.name not in shared:
            meaning = column.meaning.replace("|", r"\|")
            lines.append(f"| `{column.name}` | {column.unit} | {meaning} |")
    sets, bases = ", ".join(f"`X{end}`" for end in ends), ", ".join(f"`{x}`" for x in of)
    return [*lines, "", *([f"and {sets} ({what}) for X in {bases}.", ""] if of else [])]


def options_markdown() -> str:
    """Every option of ``qkscope capture`` that a dataclass declares."""
    return _options(ModelOptions, TextOptions, CaptureOptions, VectorSampling, ExecutionOptions)


def analyze_options_markdown() -> str:
    """Every option of ``qkscope analyze`` that a dataclass declares."""
    return _options(*OPTION_CLASSES)


def push_options_markdown() -> str:
    """Every option of ``qkscope push`` that a dataclass declares."""
    return _options(PushOptions)


def _options(*classes: type) -> str:
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *map(_option, option_specs(*classes))]) + "\n"


def _option(one: OptionSpec) -> str:
    name = one.name.upper() if one.about.argument else f"--{one.name.replace('_', '-')}"
    silent = one.default is None or one.default is False or one.default is MISSING
    default = "" if silent else "yes" if one.default is True else f"`{one.default}`"
    return f"| `{name}` | {default} | {one.about.help} |"


def speed_markdown() -> str:
    """The measurements, and the machine they are from."""
    found = results.load()
    return f"{results.markdown(*found)}\n\n{results.machine(*found)}.\n"


def growth_markdown() -> str:
    """The growth of time and memory."""
    return growth.markdown(results.load()[0]["growth"]) + "\n"


PARTS = {
    "columns": columns_markdown,
    "options": options_markdown,
    "analyze options": analyze_options_markdown,
    "push options": push_options_markdown,
    "speed": speed_markdown,
    "growth": growth_markdown,
}


def updated(text: str) -> str:
    """Return the text with every generated part brought up to date."""
    for name, write in PARTS.items():
        start, end = f"<!-- {name}: written by tools/readme.py -->", f"<!-- end of {name} -->"
        if start in text:
            before, _, rest = text.partition(start)
            _, _, after = rest.partition(end)
            text = f"{before}{start}\n\n{write()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(updated(path.read_text()))
