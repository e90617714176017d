"""The share of passkeys and of key–value pairs that a model still finds in long text with key heads cut to a window.

A passkey is a number that one sentence in the text states; a key–value pair is one of ten such statements, each about
another word, at ten depths. The model is asked at the end of the text, and its most likely tokens must be the number.
Losses cannot replace this: a cut that hides what was asked costs little on the average token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import DynamicCache

from qkscope.capture.corpus import tokenizer_errors
from qkscope.capture.watch import backbone
from qkscope.cause.ablation import NextTokens, PassPlan, seconds_of_a_pass
from qkscope.cause.choice import Cut
from qkscope.cause.intervene import check_free, windowed_layers
from qkscope.progress import plural
from qkscope.results.effects import mean_with_interval
from qkscope.results.schema import column_names

PASSKEY, PAIR = "passkey", "pair"
DEPTHS = tuple((number + 0.5) / 10 for number in range(10))
"""Depths of statements, as shares of the text before the question."""
SHORTEST = 512
"""Tokens of the shortest text in which something is asked."""
WORDS = ("river", "apple", "stone", "tiger", "cloud", "bread", "chair", "piano", "green", "north")
_TOLD_ORDERS = ("none", "far", "area", "lock", "measured", "random")
_SPARE = 3
"""Tokens that an answer may be longer than the number's own, such as a space."""


@dataclass(frozen=True)
class Question:
    """A question at the end of a text, and the number that is right."""

    kind: str
    depth: float
    ids: torch.Tensor
    answer: str
    tokens: int
    """Most tokens that are generated."""


@dataclass(frozen=True)
class Haystack:
    """A text with statements in it, and the questions about them."""

    ids: torch.Tensor
    questions: list[Question]


def why_not(tokenizer: Any, documents: Sequence[torch.Tensor]) -> str | None:
    """Return the reason why nothing can be asked in these texts, in words; None if it can."""
    shortest = min(map(len, documents))
    if shortest < SHORTEST:
        return f"texts of {shortest} tokens are too short to ask for passkeys; give texts of {SHORTEST} or more"
    with tokenizer_errors():
        number = str(tokenizer.decode(_encoded("\nThe pass key is 40317.", tokenizer).tolist()))
    return None if "40317" in number else "the tokenizer does not keep numbers as they are, so no passkey can be asked"


def haystacks(documents: Sequence[torch.Tensor], tokenizer: Any, texts: int, seed: int) -> list[Haystack]:
    """Return, ``texts`` times, a haystack for a passkey at each depth and one of ten pairs."""
    rng, stacks = np.random.default_rng(seed), []
    for number in range(texts):
        document = documents[number % len(documents)].cpu()
        for depth in DEPTHS:
            key = str(rng.integers(10_000, 100_000))
            stated = f"\nThe pass key is {key}. Remember it. The pass key is {key}.\n"
            asked = "\nWhat is the pass key? The pass key is"
            question = _question(PASSKEY, depth, asked, key, tokenizer)
            stacks.append(_stack(document, [_encoded(stated, tokenizer)], [question]))
        words, keys = rng.permutation(WORDS), rng.choice(np.arange(10_000, 100_000), len(DEPTHS), replace=False)
        pairs = list(zip(DEPTHS, map(str, words), map(str, keys), strict=True))
        stated_pairs = [_encoded(f"\nThe code of {word} is {key}.\n", tokenizer) for _, word, key in pairs]
        questions = [
            _question(PAIR, depth, f"\nWhat is the code of {word}? The code of {word} is", key, tokenizer)
            for depth, word, key in pairs
        ]
        stacks.append(_stack(document, stated_pairs, questions))
    return stacks


def _encoded(text: str, tokenizer: Any) -> torch.Tensor:
    with tokenizer_errors():
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)


def _question(kind: str, depth: float, asked: str, key: str, tokenizer: Any) -> Question:
    return Question(kind, depth, _encoded(asked, tokenizer), key, len(_encoded(f" {key}", tokenizer)) + _SPARE)


def _stack(document: torch.Tensor, statements: list[torch.Tensor], questions: list[Question]) -> Haystack:
    """Put one statement at the depth of its question, or several at all depths, into the start of a document."""
    longest = max(len(question.ids) + question.tokens for question in questions)
    hay = document[: len(document) - sum(map(len, statements)) - longest]
    cuts = [round(question.depth * len(hay)) for question in questions]
    parts = [hay[: cuts[0]]]
    for statement, start, end in zip(statements, cuts, [*cuts[1:], len(hay)], strict=True):
        parts += [statement, hay[start:end]]
    return Haystack(torch.cat(parts), questions)


def answered(next_tokens: NextTokens, stack: Haystack, tokenizer: Any, cache: Any) -> list[bool]:
    """Return which questions about a haystack are answered right; the text is read once, into an empty cache."""
    device, right = next_tokens.model.device, []
    with torch.no_grad():
        _next_token(next_tokens, stack.ids.to(device), cache)
        for number, question in enumerate(stack.questions):
            last = number == len(stack.questions) - 1
            following, generated, ids = cache if last else copy.deepcopy(cache), [], question.ids.to(device)
            for _ in range(question.tokens):
                generated.append(_next_token(next_tokens, ids, following))
                ids = torch.tensor(generated[-1:], device=device)
            with tokenizer_errors():
                text = str(tokenizer.decode(generated))
            right.append(text.strip().startswith(question.answer))
    return right


def _next_token(next_tokens: NextTokens, ids: torch.Tensor, cache: Any) -> int:
    """Return the most likely token after these, which are read into the cache."""
    options: dict[str, Any] = {"input_ids": ids[None], "past_key_values": cache, "use_cache": True}
    if next_tokens.head is None:
        logits = next_tokens.model(**options).logits[0, -1:]
    else:
        logits = next_tokens.logits(backbone(next_tokens.model)(**options).last_hidden_state[0, -1:])
    return int(logits[-1].argmax())


def chosen_cuts(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the cuts whose answers are counted: none, and by each order and at random once, of the first share."""
    first: dict[str, Cut] = {}
    for cut in cuts:
        first.setdefault(cut.order, cut)
    return [first[order] for order in _TOLD_ORDERS if order in first]


def needle_plan(
    model: Any, documents: Sequence[torch.Tensor], cuts: Sequence[Cut], texts: int, plan: PassPlan
) -> PassPlan:
    """Return a plan of passes with those that the questions take; steps of generation count as parts of a pass."""
    step = seconds_of_a_pass(model, documents[0][:8]) / plan.seconds
    per_text = len(DEPTHS) + 1 + 2 * len(DEPTHS) * (5 + _SPARE) * step
    what = f"to ask for passkeys and pairs with {plural(len(chosen_cuts(cuts)), 'cut')}"
    return replace(plan, passes=plan.passes | {what: texts * per_text * len(chosen_cuts(cuts))})


def needle_table(
    locked: Any,
    documents: Sequence[torch.Tensor],
    tokenizer: Any,
    cuts: Sequence[Cut],
    model: str,
    texts: int,
    seed: int,
    on_done: Callable[[int, int], None] = lambda _done, _in_all: None,
) -> pd.DataFrame:
    """Return the table ``needles``: the share of right answers with each cut, at each depth and over all."""
    check_free(locked.model)
    stacks, told = haystacks(documents, tokenizer, texts, seed), chosen_cuts(cuts)
    next_tokens = NextTokens.of(locked.model, documents[0].to(locked.model.device))
    in_all, rows, done = max(len(cut.heads) for cut in cuts), [], 0
    for cut in told:
        right: dict[tuple[str, float], list[bool]] = {}
        with windowed_layers(locked.model, locked.layers, cut.windows, cut.sinks):
            for stack in stacks:
                answers = answered(next_tokens, stack, tokenizer, DynamicCache(config=locked.model.config))
                for question, answer in zip(stack.questions, answers, strict=True):
                    right.setdefault((question.kind, question.depth), []).append(answer)
                done += 1
                on_done(done, len(stacks) * len(told))
        about = {"model": model, "family": "", "order": cut.order, "w": cut.window}
        about["share_cut"] = len(cut.heads) / max(in_all, 1)
        rows += [about | row for row in _accuracies(right)]
    return pd.DataFrame(rows, columns=column_names("needles"))


def _accuracies(right: Mapping[tuple[str, float], list[bool]]) -> list[dict[str, Any]]:
    """Return rows of the share of right answers: at each depth and, with an interval over texts, over all depths."""
    rows = []
    for kind in (PASSKEY, PAIR):
        table = np.array([right[kind, depth] for depth in DEPTHS], dtype=float)
        for depth, answers in zip(DEPTHS, table, strict=True):
            rows.append({"text": kind, "depth": depth, "accuracy": answers.mean(), "n_questions": len(answers)})
        mean, low, high = mean_with_interval(table.sum(0), np.full(table.shape[1], len(DEPTHS)))
        rows.append({"text": kind, "depth": np.nan, "accuracy": mean, "n_questions": table.size})
        rows[-1] |= {"accuracy_low": max(low, 0.0), "accuracy_high": min(high, 1.0)}
    return rows


def needles_in_lines(table: pd.DataFrame) -> list[str]:
    """Return a line for each kind of question: the share of right answers of each cut."""
    lines = []
    for kind, name in ((PASSKEY, "passkeys"), (PAIR, "key–value pairs")):
        rows = table[(table["text"] == kind) & table["depth"].isna()]
        if rows.loc[rows["order"] == "none", "accuracy"].eq(0).all():
            lines.append(f"{name}: this model finds none of {rows['n_questions'].iloc[0]}, even without a cut")
            continue
        shares = ", ".join(f"{row.order} {row.accuracy:.0%}" for row in rows.itertuples())
        lines.append(f"{name} found, of {rows['n_questions'].iloc[0]}: {shares}")
    return lines
