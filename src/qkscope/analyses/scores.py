"""The parts of a head's scores: position, key, query and content, and the change when keys swap positions.

``scores`` has one row per head whose rotation is known, or whose layer has none. The formulas are in fourterms.py; the
sink gap is from the attention weights that a capture sums (core/reach.py).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from qkscope.analyses.analysis import Analysis, AnalysisResult, Column, Scalars, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.fourterms import LockedMean, four_term_sums, shares, two_way_sums
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import Scale, jackknife
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import ALL_AND_WITHOUT
from qkscope.core.linalg import ratio
from qkscope.core.reach import REACH_COUNTS
from qkscope.headids import TERMS

_MEANINGS = {
    "position": "which depends on where query and key are alone",
    "key": "which depends on which key it is, for the average query",
    "query": "which depends on which query it is, for the average key",
    "content": "which depends on this query and this key",
}
_ANSWER = ": the column to use for how positional a head is"
_TERM_PAIRS = [(a, b) for i, a in enumerate(TERMS) for b in TERMS[i + 1 :]]
HEAD_CLASSES = {
    "position": "#1b4965", "key": "#b2182b", "query": "#4393c3", "content": "#f2c14e", "mixed": "#c9c9c9",
    "flat": "#ececec",
}  # fmt: skip
"""Classes of heads, by the term that most of the variance of their scores comes from, and their colours."""
FLAT = 0.1
"""A head whose scores have a smaller standard deviation, in logits, attends almost evenly, whatever its parts are."""
_TABLE = {
    "positional": "of the scores of one query, its keys moved to each other's positions: explained by position alone",
    "symbolic": "of the same scores: explained by the key alone, at any position",
    "interaction_share": "of the same scores: explained by neither alone",
}
SCORES_TABLE = Table(
    "scores",
    (
        Column(
            "head_class", "",
            "the term with the largest part, beyond the interval of its lead over the next: position, key, query or "
            f"content; else mixed; flat where logit_sd is below {FLAT} logits; empty where the rotation is not known",
            "8", dtype="text",
        ),
        *(
            Column(
                f"part_{term}", "share", f"of the variance of scores that the term {term} accounts for, {meaning}"
                f"{_ANSWER if term == 'position' else ''}; the four parts sum to 1", "8", Scale.LINEAR, signed=True,
            )
            for term, meaning in _MEANINGS.items()
        ),
        Column("logit_sd", "logit", "standard deviation of the scores of sampled pairs", "8", Scale.POSITIVE),
        *(
            Column(
                f"score_{term}", "share",
                f"of the variance of scores: the term {meaning}, without what it shares with other terms",
                "8", Scale.POSITIVE,
            )
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
    measurable = [i for i, parts in enumerate(batch.score_parts) if parts is not None]
    if not measurable:
        return AnalysisResult()
    names = [column.name for column in SCORES_TABLE.columns if column.dtype != "text"]
    numbers = {name: np.full((len(batch), len(ALL_AND_WITHOUT)), np.nan) for name in names}
    for i in measurable:
        for name, values in _of_head(batch, i).items():
            numbers[name][i] = values
    per_head = {name: values[:, 0] for name, values in numbers.items()}
    replicates = {name: values[:, 1:] for name, values in numbers.items()}
    per_head["head_class"] = head_classes(per_head, replicates, batch.usable)
    return AnalysisResult({"scores": TableValues({}, replicates, per_head, np.array(measurable))})


def head_classes(per_head: Columns, replicates: Columns, usable: Float[np.ndarray, "heads 8"]) -> np.ndarray:
    """The class of each head: the term whose part leads the next one's by more than the interval of the lead."""
    parts = np.stack([per_head[f"part_{term}"] for term in TERMS], -1)
    without_group = np.stack([replicates[f"part_{term}"] for term in TERMS], -1)
    defined = ~np.isnan(parts).any(-1)
    order = np.argsort(-np.nan_to_num(parts), axis=-1, kind="stable")
    first, second = (np.take_along_axis(parts, order[:, i : i + 1], -1)[:, 0] for i in (0, 1))
    leads = [np.take_along_axis(without_group, order[:, None, i : i + 1], -1)[..., 0] for i in (0, 1)]
    lead = leads[0] - leads[1]
    present = usable * ~np.isnan(lead)
    interval = jackknife(np.nan_to_num(first - second), np.nan_to_num(lead), present)
    certain = np.isnan(interval.low) | (interval.low > 0)  # with too few documents for an interval: the largest part
    kind = np.array(TERMS, dtype=object)[order[:, 0]]
    kind[~certain] = "mixed"
    kind[np.nan_to_num(per_head["logit_sd"]) < FLAT] = "flat"
    kind[~defined] = None
    return kind


def _of_head(batch: Batch, i: int) -> Columns:
    head, visible_keys, score_parts = batch.heads[i], batch.visible_keys(i), batch.score_parts[i]
    assert head.vectors is not None
    assert score_parts is not None
    pair, scaling = head.vectors.as_double(), float(head.moments.scaling)
    q, k = locked_means(head)
    of_variance = shares(four_term_sums(pair, q, k, scaling, visible_keys).covariance(ALL_AND_WITHOUT))
    parts, variance = score_parts
    tables = ALL_AND_WITHOUT @ two_way_sums(
        pair, None if head.rotary is None else head.rotary.rope, scaling, visible_keys
    )
    total = tables.sum(-1)
    return {
        **{f"part_{term}": parts[:, i] for i, term in enumerate(TERMS)},
        "logit_sd": np.sqrt(np.maximum(variance, 0.0)),
        **{f"score_{term}": of_variance[:, i, i] for i, term in enumerate(TERMS)},
        **{f"score_{a}_{b}": 2 * of_variance[:, TERMS.index(a), TERMS.index(b)] for a, b in _TERM_PAIRS},
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
    Scalars(
        SCORES_TABLE.columns,
        "scores",
        in_runs=(*(f"part_{term}" for term in TERMS), *(f"score_{term}" for term in TERMS)),
    ),
    rotary=True,
)
