"""The passage of a run packed for a page: for each head every score in four terms, 8 bits each.

Layout, little-endian, of n tokens: float32 unit of each query token; then, for position, key, query and content, one
int8 for each query and each key up to it. A term is unit · number, in logits.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.heads import TERMS
from qkscope.study.study import Study

PASSAGE_BUDGET = 12_000_000
"""Maximum number of characters for the passages of all heads of a page."""


def passages(study: Study, heads: dict[str, list[tuple[int, int]]]) -> dict[tuple[str, int, int], str]:
    """Base64 of every head that has a passage, given the heads of each run; the last run first, while there is room."""
    table = study.tables.get("passage")
    if table is None or table.empty:
        return {}
    packed_heads: dict[tuple[str, int, int], str] = {}
    groups = dict(iter(table.groupby(["model", "layer", "head"], sort=False)))
    room = PASSAGE_BUDGET
    for label in reversed(study.labels):
        for layer, head in heads[label]:
            rows = groups.get((label, layer, head))
            text = None if rows is None else packed_passage(rows)
            if text is None or len(text) > room:
                continue
            packed_heads[label, layer, head] = text
            room -= len(text)
    return packed_heads


def passage_tokens(study: Study, label: str) -> list[str]:
    """The tokens of a run's passage; empty if it has none."""
    table = study.tables.get("passage")
    own = None if table is None else table[table["model"] == label]
    if own is None or own.empty:
        return []
    first = own[(own["layer"] == own["layer"].iloc[0]) & (own["head"] == own["head"].iloc[0])]
    last = first[first["q_token"] == first["q_token"].max()].sort_values("k_token")
    return [str(text) for text in last["text"]]


def packed_passage(rows: pd.DataFrame) -> str | None:
    """One head's passage in base64; None if a pair of tokens is missing or appears twice."""
    rows = rows.sort_values(["q_token", "k_token"], kind="stable")
    n = int(rows["q_token"].max()) + 1
    every = len(rows) == n * n  # of an encoder
    query, key = np.indices((n, n)).reshape(2, -1) if every else np.tril_indices(n)
    if not _complete(rows, (query, key)):
        return None
    units = rows["unit"].to_numpy("<f4")[np.flatnonzero(query == key)]
    levels = [rows[term].to_numpy(float).round().clip(-127, 127).astype("i1") for term in TERMS]
    return base64.b64encode(units.tobytes() + np.concatenate(levels).tobytes()).decode("ascii")


def _complete(rows: pd.DataFrame, pairs: Sequence[np.ndarray]) -> bool:
    found = (rows["q_token"].to_numpy(), rows["k_token"].to_numpy())
    return len(rows) == len(pairs[0]) and all(np.array_equal(a, b) for a, b in zip(found, pairs, strict=True))
