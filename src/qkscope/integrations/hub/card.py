"""The card of a pushed run or results: README.md with the Hub's metadata, a sentence, a picture and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from qkscope._version import __version__
from qkscope.analyses.components import TAXONOMY
from qkscope.errors import TableError
from qkscope.figures.headmap import draw_map, prepare_map
from qkscope.figures.write import rendered
from qkscope.report.claims import Claims
from qkscope.report.sections import Measure
from qkscope.report.values import CLASS_COLUMNS, frames_of, mean_of, over_what
from qkscope.results.schema import ABOUT
from qkscope.results.study import Study, select_runs

CARD_FILE, PICTURE_FILE = "README.md", "heads.png"
_MOST_RUNS = 6
"""Largest number of runs (columns) in the table of numbers."""
_MEASURES = (
    Measure("decay", "fall of the mean score per doubling of the distance, in logits", "heads"),
    Measure("decays", "heads that score near keys higher than far ones", "heads", percent=True),
    Measure("position_share", "variance of queries and keys that position alone determines", "heads", percent=True),
    Measure("part_position", "variance of scores that is position", "heads", percent=True),
    Measure("ap_fixed_overall", "attention plasticity, queries turned to one place", "heads"),
    *(
        Measure(column, f"{kind} heads, by the parts of their scores", "heads", percent=True)
        for column, kind in CLASS_COLUMNS.items()
    ),
    *(Measure(kind, f"{kind} heads, by the published classes", "qk", percent=True) for kind in TAXONOMY),
)
_SIZES = (
    (1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10_000_000, "1M<n<10M"),
)  # fmt: skip
_ABOUT_SIDE_TABLES = {
    "points": "sampled vectors of heads on their axes, for pictures",
    "axes": "axes a and b of each head",
    "passage": "every score of a short text in four terms",
}
_MEASURED = (
    f"Measured by qkscope {__version__}: one forward pass per document on the unmodified model, queries and keys of "
    "every head at every token."
)
_COMPUTED = f"Computed by qkscope {__version__} from queries and keys, or from sums of them, of every head."
_TEXTS = (
    "The texts that were read are not in this repository{tokens}. Their licences are those of the texts, and are "
    "neither changed nor granted here. {names}"
)
_NO_TOKENS = ": no text, no token and no token id of theirs"
_SOME_TOKENS = ", but the text of each token that has a sampled vector is"
_SAMPLED = (
    " A run holds queries and keys of some sampled tokens; with the model at hand, those of the first layer tell which "
    "token stood at a sampled position."
)


@dataclass(frozen=True)
class CardFacts:
    """The facts of a card besides the numbers."""

    title: str
    repo: str
    revision: str
    kind: str
    license: str
    measured: Sequence[tuple[str, str]]
    """The measurement as (name, value) rows."""
    tables: Mapping[str, str]
    """File of each table in the repository."""
    n_rows: int
    names: bool
    """True if documents have file names."""
    tokens: bool
    """True if the text of tokens is stored with vectors."""


def picture(study: Study) -> bytes | None:
    """The map of all heads of the last run as a png file; None if there is nothing to map."""
    last = select_runs(study, study.labels[-1:])
    for column in ("part_position", "decay", "bias_window", "r_q"):
        try:
            heads = prepare_map(last, column)
        except TableError:
            continue
        if heads["value"].notna().any():
            return rendered(draw_map(heads), "png")
    return None


def card_text(facts: CardFacts, study: Study, *, pictured: bool) -> str:
    """The text of README.md."""
    title = f"{facts.title}: position and content in every attention head"
    sentence = Claims(study).first.headline
    parts = [
        f"---\n{yaml.safe_dump(_metadata(facts, title), sort_keys=False, allow_unicode=True)}---",
        f"# {_plain(title)}",
        _plain(sentence),
        f"![Each cell is a head; colours are numbers of the table `heads`]({PICTURE_FILE})" if pictured else "",
        _numbers(study),
        "## How it was measured\n\n" + _table(("", ""), facts.measured),
        f"{_MEASURED if facts.kind == 'run' else _COMPUTED} `qkscope analyze --columns` prints what each column means.",
        "## Tables\n\n" + _table(("table", "about"), [(f"`{name}`", _about(name)) for name in facts.tables]),
        _use(facts),
        "## Texts\n\n" + _TEXTS.format(tokens=_SOME_TOKENS if facts.tokens else _NO_TOKENS, names=_names(facts)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(facts: CardFacts, title: str) -> dict[str, object]:
    size = next((name for limit, name in _SIZES if facts.n_rows < limit), "10M<n<100M")
    configs = [
        {"config_name": name, "data_files": file} | ({"default": True} if name == "heads" else {})
        for name, file in facts.tables.items()
    ]
    return {
        "license": facts.license,
        "pretty_name": title,
        "tags": ["qkscope", "attention", "interpretability", "rotary-position-embedding"],
        "size_categories": [size],
    } | ({"configs": configs} if configs else {})


def _numbers(study: Study) -> str:
    """Means over the heads of each run, with their intervals."""
    labels, frames = study.labels[-_MOST_RUNS:], frames_of(study)
    rows, averaged_over = [], []
    for measure in _MEASURES:
        values = [mean_of(study, label, frames[measure.table], measure.column) for label in labels]
        if any(value is not None for value in values):
            rows.append((measure.label, *("–" if value is None else value.text(measure.percent) for value in values)))
            averaged_over += [over_what(value.over) for value in values if value is not None and value.interval()]
    if not rows:
        return ""
    note = f" 95% intervals are {'; '.join(dict.fromkeys(averaged_over))}." if averaged_over else ""
    more = f" The last {_MOST_RUNS} of {len(study.labels)} runs." if len(study.labels) > _MOST_RUNS else ""
    windows = [f", window {window:,}" if (window := study.run(label).window) else "" for label in labels]
    heads = [f"{label}{window}" for label, window in zip(labels, windows, strict=True)]
    return f"{_table(('mean over heads', *heads), rows)}\n\n{(note + more).strip()}".strip()


def _use(facts: CardFacts) -> str:
    """The section with code that reads tables, opens the run and pulls all files."""
    argument, option = (
        ("", "") if facts.revision == "main" else (f', revision="{facts.revision}"', f" --revision {facts.revision}")
    )
    table = "heads" if "heads" in facts.tables else next(iter(facts.tables), None)
    lines = []
    if table is not None:
        lines.append(f'{table} = datasets.load_dataset("{facts.repo}", "{table}"{argument})["train"].to_pandas()')
    if facts.kind == "run":
        lines.append(
            f'run = qkscope.open("{facts.repo}"{argument})  # as a captured run: run.heads, qkscope.rotation(run)'
        )
    needed = ", ".join(name for name in ("datasets", "qkscope") if any(f"{name}." in line for line in lines))
    code = "\n".join([f"import {needed}", "", *lines])
    python = f"```python\n{code}\n```\n\n" if lines else ""
    return f"## Use\n\n{python}```\nqkscope pull {facts.repo}{option} -o FOLDER\n```"


def _names(facts: CardFacts) -> str:
    if facts.kind == "results":
        return "Documents have no names here."
    kind_of_name = "their file names" if facts.names else "the beginning of their SHA-256 as names"
    return f"Documents have {kind_of_name}.{_SAMPLED}"


def _about(table: str) -> str:
    return ABOUT.get(table) or _ABOUT_SIDE_TABLES.get(table, "")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_plain(cell) for cell in line)} |" for line in lines)


def _plain(text: str) -> str:
    """Escape text so that it is neither markup nor the end of a cell."""
    return " ".join(text.replace("<", "&lt;").replace("|", "\\|").replace("[", "\\[").split())
