"""Sentences about several runs: what holds of each one, with its own numbers, and never of their heads pooled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

NAMED = 3
"""Runs of which each number is told; of more, the smallest and the largest."""
_ONE = r"(?:≈ |≤ )?[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?%?(?: \[[^\]]*\])?"
_NUMBER = re.compile(rf"(?<![\w.|])({_ONE}(?: (?:of|to|→) {_ONE})*|\[[-+−\d][^\]]*\])")
"""A number with its interval, its whole and what it becomes, or an interval; not the digits of PC0 or l05h13."""


def together(sentences: Mapping[str, str], *, brief: bool = False) -> str:
    """One sentence for several runs, given that of each; in brief, a number of three runs is a range too.

    Where the sentences differ in numbers alone, each number is told by run; where in words, runs with the same words
    stand together behind their names.

    >>> together({"A": "Of 30 planes 5 turn.", "B": "Of 30 planes 7 turn."})
    'Of 30 planes 5 (A), 7 (B) turn.'
    >>> together({"A": "It falls by 5.", "B": "It rises by 7.", "C": "It falls by 9."})
    'A, C: It falls by 5 (A), 9 (C). B: It rises by 7.'
    >>> together({name: f"A share of {n}%." for n, name in enumerate("ABCD")})
    'A share of 0% (A) to 3% (D).'
    >>> three = {"A": "5 of 9 heads, in [4, 6].", "B": "7 of 8 heads, in [6, 8].", "C": "6 of 7 heads, in [5, 7]."}
    >>> together(three, brief=True)
    '5 of 9 (A) to 7 of 8 (B) heads, in [4, 6] (A) to [6, 8] (B).'
    """
    listed = NAMED - brief
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name, sentence in sentences.items():
        parts = _NUMBER.split(sentence)
        alike.setdefault(tuple(parts[::2]), {})[name] = parts[1::2]
    if len(alike) == 1:
        return _merged(*next(iter(alike.items())), listed)
    groups = [f"{named(list(runs), len(sentences))}: {_merged(words, runs, listed)}" for words, runs in alike.items()]
    if len(groups) <= NAMED:
        return (" " if all(group.endswith(".") for group in groups) else "; ").join(groups)
    first, last = (f"{name}: {sentences[name]}" for name in (*list(sentences)[:1], *list(sentences)[-1:]))
    return f"{first} {last} The other {len(sentences) - 2} runs are in the tables."


def named(names: Sequence[str], n_all: int | None = None) -> str:
    """A few names, or how many there are of how many.

    >>> named(["A", "B"]), named(list("ABCD"), 5), named(list("ABCD"))
    ('A, B', '4 of 5 runs', '4 runs, A to D')
    """
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{len(names)} of {n_all} runs" if n_all else f"{len(names)} runs, {names[0]} to {names[-1]}"


def by_run(numbers: Mapping[str, str], listed: int = NAMED) -> str:
    """A number of each run behind it, or the smallest and the largest; alone if all have the same one.

    >>> by_run({"A": "5% [4%, 6%]", "B": "7%"}), by_run({"A": "5", "B": "5"})
    ('5% [4%, 6%] (A), 7% (B)', '5')
    """
    if len(set(numbers.values())) == 1:
        return next(iter(numbers.values()))
    if len(numbers) <= listed:
        return ", ".join(f"{number} ({name})" for name, number in numbers.items())
    in_order = sorted(numbers, key=lambda name: _size(numbers[name]))
    return " to ".join(f"{numbers[name]} ({name})" for name in (in_order[0], in_order[-1]))


def _size(number: str) -> float:
    """The first number of a text."""
    first = re.findall(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", number)[0]
    return float(first.replace(",", "").replace("−", "-"))


def _merged(words: Sequence[str], numbers: Mapping[str, Sequence[str]], listed: int) -> str:
    """Words with the numbers of each run between them."""
    columns = zip(*numbers.values(), strict=True)
    told = [by_run(dict(zip(numbers, column, strict=True)), listed) for column in columns]
    sentence = "".join(part for pair in zip(words, [*told, ""], strict=True) for part in pair)
    same = len(numbers) > 1 and told and all(len(set(column)) == 1 for column in zip(*numbers.values(), strict=True))
    return f"In each run: {sentence}" if same else sentence


def of_each_run(say: Callable[[pd.DataFrame], list[str]]) -> Callable[[pd.DataFrame], list[str]]:
    """The sentences of a figure about one run, made into those about several: each sees the rows of one run."""

    def say_each(data: pd.DataFrame) -> list[str]:
        runs = {str(model): say(rows) for model, rows in data.groupby("model", sort=False)}
        if len({len(lines) for lines in runs.values()}) == 1:
            return [together(dict(zip(runs, lines, strict=True))) for lines in zip(*runs.values(), strict=True)]
        return [together({name: " ".join(lines) for name, lines in runs.items()})]

    return say_each
