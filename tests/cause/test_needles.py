"""Questions about statements in long text: where they stand, and what readers of known reach answer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from qkscope.cause import needles
from qkscope.cause.choice import Cut
from qkscope.cause.needles import DEPTHS, PAIR, PASSKEY, SHORTEST

LENGTH = 1200


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, text: str, **_options):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids) -> str:
        return "".join(map(chr, ids))


@dataclass
class Reader:
    """A model whose next token is what followed the latest occurrence of the last characters within its reach."""

    reach: int = 10**6
    context: int = 8
    device: str = "cpu"

    def __call__(self, input_ids, past_key_values, use_cache):
        assert use_cache
        past_key_values.read = [*past_key_values.read, *input_ids[0].tolist()]
        read = past_key_values.read
        ending, seen = read[-self.context :], read[-self.reach :]
        logits = torch.zeros(1, input_ids.shape[1], 128)
        starts = [n for n in range(len(seen) - self.context) if seen[n : n + self.context] == ending]
        logits[0, -1, seen[starts[-1] + self.context] if starts else 0] = 1.0
        return SimpleNamespace(logits=logits)


def documents(n: int = 2) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.integers(33, 47, LENGTH)) for _ in range(n)]  # punctuation: no letters, no digits


def found(reader: Reader, stack: needles.Haystack) -> list[bool]:
    next_tokens = SimpleNamespace(model=reader, head=None)
    return needles.answered(next_tokens, stack, Letters(), SimpleNamespace(read=[]))


def test_statements_stand_at_their_depths_and_texts_keep_their_length():
    stacks = needles.haystacks(documents(), Letters(), 2, seed=0)
    assert len(stacks) == 2 * (len(DEPTHS) + 1)
    for stack in stacks:
        text, last = Letters().decode(stack.ids.tolist()), stack.questions[-1]
        assert LENGTH - 70 < len(stack.ids) + len(last.ids) + last.tokens <= LENGTH
        for question in stack.questions:
            assert text.index(question.answer) / len(text) == pytest.approx(question.depth, abs=0.1)
    kinds = [question.kind for stack in stacks for question in stack.questions]
    assert kinds.count(PASSKEY) == kinds.count(PAIR) == 2 * len(DEPTHS)
    again = needles.haystacks(documents(), Letters(), 2, seed=0)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(stacks, again, strict=True))


def test_a_reader_of_everything_finds_all_and_one_of_short_reach_what_is_near():
    for stack in needles.haystacks(documents(), Letters(), 1, seed=1):
        assert all(found(Reader(), stack))
        assert not any(found(Reader(reach=60), stack))
        reach = 600
        for question, right in zip(stack.questions, found(Reader(reach=reach), stack), strict=True):
            far = len(stack.ids) * (1 - question.depth)
            assert right == (far < reach) or abs(far - reach) < 150


def test_shares_are_counted_at_each_depth_and_over_all():
    right = {(PASSKEY, depth): [depth > 0.5] * 5 for depth in DEPTHS}
    right |= {(PAIR, depth): [text < 2 for text in range(5)] for depth in DEPTHS}
    table = pd.DataFrame(needles._accuracies(right))
    keys = table[table["text"] == PASSKEY].set_index("depth")
    assert keys["accuracy"].tolist() == [0] * 5 + [1] * 5 + [0.5]
    assert keys["n_questions"].tolist() == [5] * 10 + [50]
    pairs = table[(table["text"] == PAIR) & table["depth"].isna()].iloc[0]
    assert pairs["accuracy"] == pytest.approx(0.4)
    assert 0 <= pairs["accuracy_low"] < 0.4 < pairs["accuracy_high"] <= 1
    assert np.isnan(pd.DataFrame(needles._accuracies({key: [True] for key in right}))["accuracy_low"]).all()


def test_each_order_is_asked_once_and_random_choices_once():
    cuts = [Cut(8, 4, [], order) for order in ("none", "all", "far", "lock", "reversed", "random", "random", "far")]
    assert [cut.order for cut in needles.chosen_cuts(cuts)] == ["none", "far", "lock", "random"]
    assert needles.chosen_cuts(cuts)[1] is cuts[2]


def test_short_texts_and_tokenizers_without_numbers_are_left_out():
    assert needles.why_not(Letters(), documents()) is None
    short = needles.why_not(Letters(), [torch.zeros(SHORTEST - 1)])
    assert short == "texts of 511 tokens are too short to ask for passkeys; give texts of 512 or more"

    class Wordless(Letters):
        def decode(self, ids) -> str:
            return "?" * len(ids)

    assert "does not keep numbers" in needles.why_not(Wordless(), documents())


def test_lines_say_what_is_found_or_that_the_model_finds_nothing():
    rows = [
        {"text": kind, "depth": np.nan, "order": order, "accuracy": share, "n_questions": 40}
        for kind, shares in ((PASSKEY, (1.0, 0.5)), (PAIR, (0.0, 0.0)))
        for order, share in zip(("none", "far"), shares, strict=True)
    ]
    assert needles.needles_in_lines(pd.DataFrame(rows)) == [
        "passkeys found, of 40: none 100%, far 50%",
        "key–value pairs: this model finds none of 40, even without a cut",
    ]
