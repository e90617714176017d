"""Attention plasticity of every head, bucket by bucket of queries, and by the distances of pairs of keys.

``plasticity`` has one row per head and bucket, ``plasticity_pairs`` one per layer and pair of distances. The formulas
are in pairplasticity.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from qkscope.analyses.analysis import Analysis, AnalysisResult, Column, Scalars, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.pairplasticity import (
    FixedPlasticity,
    Plasticity,
    ap_fixed,
    bucket_plasticity,
    fixed_queries,
    parts_of_window,
    plasticity_over_window,
)
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import MIN_GROUPS, Scale, jackknife, usable_groups
from qkscope.core.bucketspread import BucketSpread
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import N_GROUPS, HeadMoments, bucket_width
from qkscope.core.keypairs import KeyPairs, key_pairs
from qkscope.core.moments import Moments

PAIR_KEY = ["model", "family", "layer", "inter_key", "key_to_query"]


def merged_pairs(frame: pd.DataFrame, by: Sequence[str] = PAIR_KEY) -> pd.DataFrame:
    """Rows of ``plasticity_pairs`` merged by these columns: counts are added, means are weighted by ``n_pairs``."""
    means = [name for name in ("ap", "ap_published") if name in frame]
    weighted = frame.assign(**{name: frame[name] * frame["n_pairs"] for name in means})
    summed = weighted.groupby(list(by), as_index=False, sort=True)[["n_pairs", *means]].sum()
    return summed.assign(**{name: summed[name] / summed["n_pairs"] for name in means})


AP = (
    Column(
        "ap_overall", "share",
        "attention plasticity over the window: mean of ap over buckets, weighted by queries; it counts RoPE's turning "
        "inside a bucket as freedom of the query, so a positional head may be near 1: use ap_fixed_overall",
        "5", Scale.SHARE,
    ),
    Column(
        "ap_first20", "share", "the same over buckets with their middle in the first fifth of the window", "5",
        Scale.SHARE,
    ),
    Column("ap_last20", "share", "the same in the last fifth", "5", Scale.SHARE),
    Column("ap_drop", "share", "ap_first20 − ap_last20", "5", Scale.LINEAR, signed=True),
    Column(
        "ap_fixed_overall", "share",
        "attention plasticity that is due to content: ap_overall of queries turned to one place per bucket first; "
        "empty without rotary", "5", Scale.SHARE,
    ),
)  # fmt: skip
PLASTICITY_TABLE = Table(
    "plasticity",
    (
        Column(
            "q_bucket", "index", "position bucket of the queries, from 0; bucket 0 has no earlier keys and no row", "5"
        ),
        Column("q_position", "tokens", "middle of the bucket", "5"),
        Column("bucket_width", "tokens", "positions per bucket, on which plasticity depends", "5"),
        Column("n_queries", "rows", "queries in the bucket", "5"),
        Column("n_pairs", "pairs", "pairs of earlier keys", "5"),
        Column("ap", "share", "mean of 4p(1 − p) over pairs, p from the bucket's mean and full covariance", "5"),
        Column(
            "ap_se",
            "share",
            "its jackknife standard error by document group; how groups differ in the spread of queries is estimated",
            "5",
        ),
        Column("ap_published", "share", "the same by the published model: linear drift, and variances only", "5"),
        Column(
            "ap_fixed",
            "share",
            "the same of queries turned to the middle of the bucket first; empty without rotary",
            "5",
        ),
        *AP,
    ),
    keys=("q_bucket",),
    needed=("ap",),
)
PAIRS_TABLE = Table(
    "plasticity_pairs",
    (
        Column("model", "", "label of the model or checkpoint", "5", dtype="text"),
        Column("family", "", "label of the model family", "5", dtype="text"),
        Column("layer", "index", "layer, from 0; all its heads together", "5"),
        Column("inter_key", "tokens", "distance of the two keys: this and up to twice it", "5"),
        Column("key_to_query", "tokens", "distance of the later key and the middle of the query bucket: likewise", "5"),
        Column("n_pairs", "pairs", "pairs of keys, added up over buckets and heads", "5"),
        Column("ap", "share", "mean plasticity of these pairs", "5"),
        Column("ap_published", "share", "the same by the published model", "5"),
    ),
    keys=("layer", "inter_key", "key_to_query"),
    about_heads=False,
    merge=merged_pairs,
)


def compute_plasticity(batch: Batch) -> AnalysisResult:
    """Compute both tables. Heads that read the same key head over the same window share their pairs of keys."""
    key_pairs_by_reach: dict[tuple[object, ...], KeyPairs] = {}
    rows: dict[int, Columns] = {}
    pairs: list[pd.DataFrame] = []
    per_head = {column.name: np.full(len(batch), np.nan) for column in AP}
    replicates_by_name = {column.name: np.full((len(batch), N_GROUPS), np.nan) for column in AP}
    for i, head_data in enumerate(batch.heads):
        if head_data.vectors is None or head_data.q_buckets is None or head_data.moments.q_cells is None:
            continue
        reach = head_data.key_head, int(head_data.moments.window), head_data.sliding_window
        if reach not in key_pairs_by_reach:
            key_pairs_by_reach[reach] = _pairs(head_data)
        plasticity = _HeadPlasticity(head_data, key_pairs_by_reach[reach], intervals=batch.options.intervals)
        if not plasticity.has_row.any():
            continue
        rows[i] = plasticity.rows()
        pairs.append(plasticity.by_distance(batch.index, i))
        for name, (value, replicates) in plasticity.scalars().items():
            per_head[name][i], replicates_by_name[name][i] = value, replicates
    if not rows:
        return AnalysisResult()
    columns = {
        name: np.concatenate([columns_of_head[name] for columns_of_head in rows.values()])
        for name in next(iter(rows.values()))
    }
    head = np.concatenate([np.full(len(columns_of_head["ap"]), i) for i, columns_of_head in rows.items()])
    merged = merged_pairs(pd.concat(pairs, ignore_index=True))
    values = TableValues(columns, replicates_by_name, per_head, head)
    return AnalysisResult({"plasticity": values}, {"plasticity_pairs": merged})


class _HeadPlasticity:
    """The plasticity of one head."""

    def __init__(self, head: HeadData, keys: KeyPairs, *, intervals: bool) -> None:
        moments, q_buckets = HeadMoments.stack([head.moments]), head.q_buckets
        assert q_buckets is not None
        assert moments.q_cells is not None
        if isinstance(q_buckets, Moments):
            q_buckets = BucketSpread.of(q_buckets, moments.total_q[0], keys.delta)
        q_buckets = q_buckets[None]
        self.head, self.keys, self.moments, self.cells = head, keys, moments, moments.q_cells
        self.n, self.window = q_buckets.n, int(head.moments.window)
        self.width = bucket_width(self.window, self.n.shape[-1])
        self.result: Plasticity = bucket_plasticity(q_buckets, self.cells, moments.q, moments.total_q, keys, self.width)
        self.usable = usable_groups(moments) if intervals else np.zeros((1, N_GROUPS))
        self.fixed = self._fixed()
        self.has_row = ~np.isnan(self.result.ap[0])

    def rows(self) -> Columns:
        """One row per bucket with enough queries and at least one pair."""
        has_row, buckets = self.has_row, self.n.shape[-1]
        return {
            "q_bucket": np.flatnonzero(has_row),
            "q_position": ((np.arange(buckets) + 0.5) * self.width - 0.5)[has_row],
            "bucket_width": np.full(int(has_row.sum()), self.width),
            "n_queries": self.n[0, has_row].astype(np.int64),
            "n_pairs": self.keys.n[has_row],
            "ap": self.result.ap[0, has_row],
            "ap_se": self._spread()[has_row],
            "ap_published": self.result.ap_published[0, has_row],
            "ap_fixed": self.fixed.ap[0, has_row],
        }

    def scalars(self) -> dict[str, tuple[float, Float[np.ndarray, "8"]]]:
        """Numbers over the window, and with each document group left out where enough groups have queries."""
        n_left = np.maximum(self.n[:, None] - self.cells.n, 0.0)
        over_window = plasticity_over_window(self.result.ap, self.n, self.window)
        replicates = plasticity_over_window(self.result.replicates, n_left, self.window)
        fixed = plasticity_over_window(self.fixed.ap, self.fixed.n, self.window).ap_overall
        enough = {column.name: (self._has_enough_groups(column.name) * self.usable)[0] > 0 for column in AP}
        return {
            name: (float(getattr(over_window, name)[0]), np.where(enough[name], getattr(replicates, name)[0], np.nan))
            for name in enough
            if name != "ap_fixed_overall"
        } | {"ap_fixed_overall": (float(fixed[0]), np.where(enough["ap_fixed_overall"], fixed[1:], np.nan))}

    def by_distance(self, index: Columns, i: int) -> pd.DataFrame:
        """The pairs of keys of head i, with their distances in octaves."""
        real = (self.keys.weight > 0) & self.has_row[:, None]
        frame = pd.DataFrame(
            {
                "inter_key": octave(self.keys.inter_key[real]),
                "key_to_query": octave(self.keys.key_to_query[real]),
                "ap": self.result.pairs[0][real],
                "ap_published": self.result.pairs_published[0][real],
            }
        )
        labels = {name: index[name][i] for name in ("model", "family", "layer")}
        return frame.assign(**labels, n_pairs=1)

    def _has_enough_groups(self, name: str) -> Float[np.ndarray, "1 1"]:
        """1 if enough document groups have queries in every part of the window that a scalar is about, else 0."""
        all_buckets, first, last = parts_of_window(self.cells.n.shape[-1], self.window)
        parts = {"ap_first20": [first], "ap_last20": [last], "ap_drop": [first, last]}
        needed = parts.get(name, [all_buckets])
        counts = [(self.cells.n[..., mask].sum(-1) > 0).sum(-1) for mask in needed]
        return (np.min(counts, axis=0) >= MIN_GROUPS).astype(float)[:, None]

    def _spread(self) -> Float[np.ndarray, "buckets"]:
        """Standard error of ``ap`` in each bucket; NaN where leaving out a group leaves no queries."""
        replicates = np.where(self.usable[..., None] > 0, self.result.replicates, 0.0)
        spread = jackknife(np.nan_to_num(self.result.ap), np.nan_to_num(replicates), self.usable, Scale.SHARE).se[0]
        return np.where(np.isnan(replicates).any((0, 1)), np.nan, spread)

    def _fixed(self) -> FixedPlasticity:
        buckets = self.n.shape[-1]
        if self.head.rotary is None or self.head.vectors is None:
            unknown = np.full((1 + N_GROUPS, buckets), np.nan)
            return FixedPlasticity(unknown, np.zeros_like(unknown))
        turned_queries = fixed_queries(self.head.vectors.q.as_double(), self.head.rotary, self.window, buckets)
        return ap_fixed(turned_queries, self.keys, self.window)


def _pairs(head: HeadData) -> KeyPairs:
    """The pairs of keys that a captured run recorded variances along, or pairs drawn from the sampled keys."""
    assert head.vectors is not None
    assert head.q_buckets is not None
    keys, window = head.vectors.k.as_double(), int(head.moments.window)
    if head.pairs is not None:
        return KeyPairs.of(keys, head.pairs, window)
    return key_pairs(keys, window, head.q_buckets.n.shape[-1], sliding_window=head.sliding_window)


def octave(distance: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
    """The power of two at or below each distance, at least 1.

    >>> octave(np.array([0, 1, 3, 4, 100])).tolist()
    [1, 1, 2, 4, 64]
    """
    return 2 ** np.floor(np.log2(np.maximum(distance, 1))).astype(np.int64)


PLASTICITY = Analysis(
    "plasticity",
    "whether the order of two keys is fixed or depends on the query, by bucket of queries",
    (PLASTICITY_TABLE, PAIRS_TABLE),
    compute_plasticity,
    Scalars(AP, "plasticity", in_runs=("ap_fixed_overall", "ap_overall", "ap_first20", "ap_last20", "ap_drop")),
    buckets=True,
    rotary=True,
)
