"""Every score of a run's passage in four terms, for the explorer: 8 bits each, in units of the query's largest.

One row per head, query token and key token up to it, in encoders every key token; the formulas are in fourterms.py.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import Analysis, Found
from qkscope.analyses.batch import Batch
from qkscope.analyses.fourterms import terms
from qkscope.analyses.scores import locked_means
from qkscope.core.headdata import HeadData
from qkscope.heads import TERMS

LEVELS = 127


def compute_passage(batch: Batch) -> Found:
    """``passage``: the scores of each head that has a passage and whose rotation is known."""
    frames = []
    for i, head in enumerate(batch.heads):
        if head.passage is not None and (head.rotary or head.nope):
            named = {name: batch.index[name][i] for name in ("model", "layer", "head")}
            frames.append(passage_scores(head).assign(**named))
    return Found(complete={"passage": pd.concat(frames, ignore_index=True)} if frames else {})


def passage_scores(head: HeadData) -> pd.DataFrame:
    """Columns q_token, k_token (their places), text (the key's), unit (logits per level) and the terms, as levels."""
    passage = head.passage
    assert passage is not None
    at = np.arange(len(passage.tokens))
    locked_q, locked_k = (mean.at(at) for mean in locked_means(head))
    parts = terms(passage.q, passage.k, locked_q, locked_k, float(head.moments.scaling))
    query, key = np.indices((len(at), len(at))).reshape(2, -1) if head.both else np.tril_indices(len(at))
    seen = parts[:, query, key]
    largest = np.zeros(len(at))
    np.maximum.at(largest, query, np.abs(seen).max(0))
    unit = np.where(largest > 0, largest / LEVELS, 1.0)
    levels = {term: np.round(values / unit[query]).astype(np.int8) for term, values in zip(TERMS, seen, strict=True)}
    index = {"q_token": query.astype(np.int16), "k_token": key.astype(np.int16)}
    text = pd.Categorical([passage.tokens[i] for i in key.tolist()])
    return pd.DataFrame(index | {"text": text, "unit": unit[query].astype(np.float32)} | levels)


PASSAGE_ANALYSIS = Analysis("passage", "every score of a short text in four terms", (), compute_passage, rotary=True)
