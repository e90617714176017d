"""Panels of the first screen: a map of heads, each cell a bar of four parts, and a text in two heads."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

import numpy as np
import pandas as pd

from qkscope.analyses.roles import class_and_role
from qkscope.figures.hero import compared_runs, heads_of_interest
from qkscope.figures.scoreterms import share_in_words
from qkscope.headids import TERMS, head_name
from qkscope.results.study import Study

PARTS = [f"part_{term}" for term in TERMS]
_MOST_MAPS = 4
"""Models whose maps stand beside each other, at most."""
_MOST_BARS = 1500
"""Heads of a map whose cells are bars; cells of larger maps have one colour, that of the largest part."""
_NARROW = 12
"""Layers, and heads of a layer, of maps that fit beside the curve; in larger ones layers go from left to right."""
_STRONG = 0.9
"""Share of the tokens that are not in full colour."""
_SINKS = 4
"""First tokens of a passage, which would hide the differences between all others."""


@dataclass(frozen=True)
class Bar:
    """A segment of a bar: a term, where it begins and how wide it is, as shares of the bar."""

    term: str
    start: float
    width: float
    label: str = ""
    """The part in words."""


@dataclass(frozen=True)
class MapCell:
    """A head of a map."""

    link: str
    """Fragment of the explorer's address."""
    row: int
    column: int
    title: str
    bars: list[Bar]
    """Empty for flat heads."""


@dataclass(frozen=True)
class HeadMap:
    """All heads of a run."""

    label: str
    across: bool
    """Layers are columns; otherwise rows."""
    rows: list[int]
    columns: list[int]
    cells: list[MapCell]


@dataclass(frozen=True)
class Word:
    """A word of a text, and how its key scores relative to the average key, from −1 to 1."""

    text: str
    strength: float
    is_query: bool


@dataclass(frozen=True)
class TextPanel:
    """A text in one head: the scores of one query with each key, and the parts of all scores of the head."""

    title: str
    link: str
    words: list[Word]
    query: str
    bars: list[Bar]


def explorer_link(label: str, layer: int, head: int) -> str:
    """The fragment of the explorer's address that opens a head of a run."""
    return f"{head_name(layer, head)};run={quote(label, safe='')}"


def head_maps(study: Study) -> list[HeadMap]:
    """Maps of the last checkpoint or of the models, as far as they fit; empty without parts of scores."""
    heads = study.table("heads", *PARTS)
    if heads is None:
        return []
    labels = [run.label for run in study.runs if run.label in compared_runs(study)]
    shown = labels[:_MOST_MAPS] if all(run.phase is None and run.step is None for run in study.runs) else labels[-1:]
    runs = {label: heads[heads["model"] == label].dropna(subset=PARTS) for label in shown}
    n_layers = max(rows["layer"].nunique() for rows in runs.values())
    n_heads = sum(rows["head"].nunique() for rows in runs.values())
    across = max(n_layers, n_heads) > _NARROW
    return [_map(label, rows, across=across) for label, rows in runs.items() if len(rows)]


def _map(label: str, heads: pd.DataFrame, *, across: bool) -> HeadMap:
    layers, numbers = (sorted(heads[name].astype(int).unique()) for name in ("layer", "head"))
    cells = []
    for row in heads.to_dict("records"):
        layer, head, kind = int(row["layer"]), int(row["head"]), class_and_role(row.get("head_class"), row.get("role"))
        bars = [] if row.get("head_class") == "flat" else bars_of([row[part] for part in PARTS])
        if len(heads) > _MOST_BARS and bars:
            bars = [Bar(max(bars, key=lambda bar: bar.width).term, 0.0, 1.0)]
        parts = ", ".join(f"{term} {share_in_words(row[f'part_{term}'])}" for term in TERMS)
        title = f"layer {layer}, head {head}{f' · {kind}' if kind else ''}: {parts}"
        place = (numbers.index(head), layers.index(layer))
        cells.append(MapCell(explorer_link(label, layer, head), *(place if across else place[::-1]), title, bars))
    return HeadMap(label, across, *((numbers, layers) if across else (layers, numbers)), cells)


def bars_of(parts: list[float]) -> list[Bar]:
    """The four parts as segments of one bar; a part below zero, a covariance, has none.

    >>> [(bar.term, round(bar.start, 2), round(bar.width, 2)) for bar in bars_of([0.6, -0.1, 0.0, 0.6])]
    [('position', 0.0, 0.5), ('content', 0.5, 0.5)]
    """
    sizes = np.clip(np.asarray(parts, dtype=float), 0, None)
    ends = np.cumsum(sizes) / sizes.sum()
    return [
        Bar(term, float(end - size / sizes.sum()), float(size / sizes.sum()), share_in_words(part))
        for term, size, end, part in zip(TERMS, sizes, ends, parts, strict=True)
        if size > 0
    ]


def text_panels(study: Study) -> list[TextPanel]:
    """A text in the head with most position and in that with most content; empty without passages."""
    passage, heads = study.tables.get("passage"), study.table("heads", *PARTS)
    if passage is None or heads is None:
        return []
    label = compared_runs(study)[-1]
    panels = []
    for term, (layer, head) in heads_of_interest(study).items():
        rows = passage[(passage["model"] == label) & (passage["layer"] == layer) & (passage["head"] == head)]
        numbers = heads[(heads["model"] == label) & (heads["layer"] == layer) & (heads["head"] == head)].iloc[0]
        text = _text(rows, term)
        if text is not None:
            kind = class_and_role(numbers.get("head_class"), numbers.get("role"))
            run = f"{label}, " if len(compared_runs(study)) > 1 else ""
            title = f"{run}layer {layer}, head {head}" + (f" · {kind}" if kind else "")
            bars = bars_of([numbers[part] for part in PARTS])
            panels.append(TextPanel(title, explorer_link(label, layer, head), *text, bars))
    return panels


def _text(rows: pd.DataFrame, term: str) -> tuple[list[Word], str] | None:
    """The words up to a query, with its scores; the query whose scores differ most by this term, in the later half.

    Of content, by the one key beyond the nearest words that stands out most. None if the text is too short.
    """
    scores = rows[["q_token", "k_token", "text"]].assign(
        score=rows["unit"] * rows[list(TERMS)].sum(axis=1), part=rows["unit"] * rows[term]
    )
    scores = scores[scores["k_token"] <= scores["q_token"]]
    distant = scores[(scores["k_token"] >= _SINKS) & (scores["q_token"] - scores["k_token"] >= _SINKS)]
    distant = distant[distant["q_token"] > rows["q_token"].max() // 2]
    if distant.empty:
        return None
    grouped = distant.groupby("q_token")["part"]
    query = int((grouped.max() - grouped.mean() if term == "content" else grouped.std(ddof=0)).idxmax())
    of_query = scores[scores["q_token"] == query].sort_values("k_token")
    away = of_query["score"].to_numpy(float) - of_query["score"].to_numpy(float)[_SINKS:].mean()
    full = float(np.quantile(np.abs(away[_SINKS:]), _STRONG))
    strength = np.clip(away / max(full, 1e-12), -1, 1)
    last = scores[scores["q_token"] == rows["q_token"].max()].sort_values("k_token")
    tokens = [str(text) for text in last["text"]]
    end = next((k for k in range(query + 1, len(tokens)) if not _goes_on(tokens[k - 1], tokens[k])), len(tokens))
    return _words(tokens[:end], [*strength.tolist()[:-1], *[0.0] * (end - query)])


def _goes_on(before: str, token: str) -> bool:
    """True if a token is the next part of the word before it."""
    return token[:1].isalnum() and before[-1:].isalnum()


def _words(tokens: list[str], strength: list[float]) -> tuple[list[Word], str]:
    """Tokens joined into words, each as strong as its strongest token; the last word has the query in it.

    >>> _words(["In", " the", " light", "house", "."], [0.1, -0.2, 0.3, -0.9, 0.0])[0][2]
    Word(text=' lighthouse', strength=-0.9, is_query=False)
    """
    joined: list[tuple[str, float]] = []
    for token, own in zip(tokens, strength, strict=True):
        text, last = token.replace("\n", " "), joined[-1] if joined else ("", 0.0)
        if _goes_on(last[0], text):
            joined[-1] = (last[0] + text, max(last[1], own, key=abs))
        else:
            joined.append((text, own))
    words = [Word(text, own, False) for text, own in joined[:-1]]
    return [*words, Word(joined[-1][0], 0.0, True)], joined[-1][0].strip()
