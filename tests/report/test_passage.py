"""Passages packed for a page."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pandas as pd

from qkscope.headids import TERMS
from qkscope.report import explorerdata as passage
from qkscope.report.explorerdata import packed_passage, passage_tokens, passages
from tests.studies import PASSAGE, make_passage

N, PAIRS = len(PASSAGE), len(PASSAGE) * (len(PASSAGE) + 1) // 2


def rows(heads: int = 1, model: str = "m") -> pd.DataFrame:
    index = pd.DataFrame({"model": model, "layer": 0, "head": range(heads)})
    return make_passage(index, np.random.default_rng(1))


def test_what_is_packed_is_read_back():
    table = rows().assign(unit=lambda frame: 0.5 + frame["q_token"] / 8)
    mixed = table.sample(frac=1, random_state=0)
    blob = zlib.decompress(base64.b64decode(packed_passage(mixed) or ""))
    assert len(blob) == 4 * N + 4 * PAIRS
    np.testing.assert_array_equal(np.frombuffer(blob, "<f4", N), 0.5 + np.arange(N) / 8)
    levels = np.frombuffer(blob, "i1", offset=4 * N).reshape(4, PAIRS)
    for term, values in zip(TERMS, levels, strict=True):
        np.testing.assert_array_equal(values, table[term])


def test_a_passage_with_gaps_or_twice_the_same_pair_is_left_out():
    table = rows()
    assert packed_passage(table.drop(index=5)) is None
    assert packed_passage(pd.concat([table, table.tail(1)])) is None
    assert packed_passage(table.assign(k_token=table["k_token"].replace(3, 2))) is None


def test_tokens_are_those_of_the_last_query():
    assert passage_tokens(rows(2)) == list(PASSAGE)
    assert passage_tokens(rows(2).iloc[:0]) == []
    assert passage_tokens(None) == []


def test_the_views_most_wanted_come_first_and_the_page_stays_small(monkeypatch):
    heads = [(0, head) for head in range(3)]
    views = {5: (rows(3), heads), 2: (rows(3), heads)}
    assert len(passages(views)) == 6
    sizes = [len(text) for text in passages(views).values()]
    monkeypatch.setattr(passage, "PASSAGE_BUDGET", sum(sizes[:4]))
    kept = passages(views)
    assert list(kept) == [(5, 0), (5, 1), (5, 2), (2, 0)]
    assert sum(map(len, kept.values())) <= passage.PASSAGE_BUDGET
