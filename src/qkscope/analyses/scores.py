"""The parts of a head's scores: position, key, query and content, and the change when keys swap positions.

``scores`` has one row per head whose rotation is known, or whose layer has none. The formulas are in fourterms.py; the
sink gap is from the attention weights that a capture sums (core/reach.py).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from qkscope.analyses.analysis import Analysis, AnalysisResult, Column, Scalars, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.fourterms import LockedMean, four_term_sums, two_way_sums
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import Scale
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import ALL_AND_WITHOUT
from qkscope.core.linalg import ratio
from qkscope.core.reach import REACH_COUNTS
from qkscope.core.visible import VisibleKeys
from qkscope.heads import TERMS

_MEANINGS = {
    "position": "which depends on where query and key are alone",
    "key": "which depends on which key it is, for the average query",
    "query": "which depends on which query it is, for the average key",
    "content": "which depends on this query and this key",
}
_TERM_PAIRS = [(a, b) for i, a in enumerate(TERMS) for b in TERMS[i + 1 :]]
_TABLE = {
    "positional": "of the scores of a query's keys moved to each other's positions: explained by position alone",
    "symbolic": "of the same scores: explained by the key alone, at any position",
    "interaction_share": "of the same scores: explained by neither alone",
}
SCORES_TABLE = Table(
    "scores",
    (
        *(
            Column(f"score_{term}", "share", f"of the variance of scores: the term {meaning}", "8", Scale.POSITIVE)
            for term, meaning in _MEANINGS.items()
        ),
        *(
            Column(
                f"score_{a}_{b}", "share", f"of the variance of scores: twice the covariance of the terms {a} and {b}",
                "8", Scale.LINEAR, signed=True,
            )
            for a, b in _TERM_PAIRS
        ),
        *(Column(name, "share", meaning, "8", Scale.SHARE) for name, meaning in _TABLE.items()),
        Column(
            "sink_gap", "logit", "mean score of the first keys of a document, the sinks, minus that of the others", "8",
            Scale.LINEAR, signed=True,
        ),
    ),
)  # fmt: skip


def compute_scores(batch: Batch) -> AnalysisResult:
    """Compute ``scores``: the shares of each head, and with each document group left out."""
    measurable = [i for i, head in enumerate(batch.heads) if head.vectors is not None and (head.rotary or head.nope)]
    if not measurable:
        return AnalysisResult()
    numbers = {c.name: np.full((len(batch), len(ALL_AND_WITHOUT)), np.nan) for c in SCORES_TABLE.columns}
    for i in measurable:
        for name, values in _of_head(batch.heads[i], batch.visible_keys(i)).items():
            numbers[name][i] = values
    per_head = {name: values[:, 0] for name, values in numbers.items()}
    replicates = {name: values[:, 1:] for name, values in numbers.items()}
    return AnalysisResult({"scores": TableValues({}, replicates, per_head, np.array(measurable))})


def _of_head(head: HeadData, visible_keys: VisibleKeys) -> Columns:
    assert head.vectors is not None
    pair, scaling = head.vectors.as_double(), float(head.moments.scaling)
    q, k = locked_means(head)
    shares = four_term_sums(pair, q, k, scaling, visible_keys).shares(ALL_AND_WITHOUT)
    tables = ALL_AND_WITHOUT @ two_way_sums(
        pair, None if head.rotary is None else head.rotary.rope, scaling, visible_keys
    )
    total = tables.sum(-1)
    return {
        **{f"score_{term}": shares[:, i, i] for i, term in enumerate(TERMS)},
        **{f"score_{a}_{b}": 2 * shares[:, TERMS.index(a), TERMS.index(b)] for a, b in _TERM_PAIRS},
        **{name: np.where(total > 0, ratio(tables[:, i], total), np.nan) for i, name in enumerate(_TABLE)},
        "sink_gap": _sink_gap(head),
    }


def locked_means(head: HeadData) -> tuple[LockedMean, LockedMean]:
    """The position-locked means of a head's queries and keys; plain means in a layer without rotary."""
    moments, rotary = head.moments, head.rotary
    mean_q, mean_k = moments.total_q.mean_x, moments.total_k.mean_x
    if rotary is None:
        none = np.zeros(0, dtype=complex)
        return LockedMean(None, none, mean_q), LockedMean(None, none, mean_k)
    return (
        LockedMean(rotary.rope, rotary.mean_q, mean_q, rotary.temperature),
        LockedMean(rotary.rope, rotary.mean_k, mean_k),
    )


def _sink_gap(head: HeadData) -> Float[np.ndarray, "sets"]:
    if head.reach is None:
        return np.full(len(ALL_AND_WITHOUT), np.nan)
    gap, n = (ALL_AND_WITHOUT @ head.reach.sums[:, REACH_COUNTS.index(name)] for name in ("gap", "n_gap"))
    return np.where(n > 0, ratio(gap, n), np.nan)


SCORES = Analysis(
    "scores",
    "the exact parts of scores: position, key, query, content; and the effect of moving keys to other positions",
    (SCORES_TABLE,),
    compute_scores,
    Scalars(SCORES_TABLE.columns, "scores", in_runs=tuple(f"score_{term}" for term in TERMS)),
    rotary=True,
)
