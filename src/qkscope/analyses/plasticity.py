"""Attention plasticity of every head, bucket by bucket of queries, and by the distances of pairs of keys.

``plasticity`` has one row per head and bucket, ``plasticity_pairs`` one per layer and pair of distances. The formulas
stand in pairplasticity.py, the pairs of keys in keypairs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from qkscope.analyses.analysis import Analysis, Column, Found, Scalars, Table, Values
from qkscope.analyses.batch import Batch
from qkscope.analyses.keypairs import KeyPairs, key_pairs
from qkscope.analyses.pairplasticity import (
    Plasticity,
    ap_fixed,
    bucket_plasticity,
    fixed_queries,
    parts_of_window,
    plasticity_over_window,
)
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import MIN_GROUPS, Scale, jackknife, usable_groups
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import N_GROUPS, HeadMoments, bucket_moments, bucket_width

PAIR_KEY = ["model", "family", "layer", "inter_key", "key_to_query"]


def merged_pairs(frame: pd.DataFrame, by: Sequence[str] = PAIR_KEY) -> pd.DataFrame:
    """Rows of ``plasticity_pairs`` that agree in these columns added up, each weighted by its pairs."""
    means = [name for name in ("ap", "ap_published") if name in frame]
    weighted = frame.assign(**{name: frame[name] * frame["n_pairs"] for name in means})
    summed = weighted.groupby(list(by), as_index=False, sort=True)[["n_pairs", *means]].sum()
    return summed.assign(**{name: summed[name] / summed["n_pairs"] for name in means})


AP = (
    Column(
        "ap_overall", "share", "attention plasticity over the window: mean of ap over buckets, weighted by queries",
        "5", Scale.SHARE,
    ),
    Column(
        "ap_first20", "share", "the same over buckets with their middle in the first fifth of the window", "5",
        Scale.SHARE,
    ),
    Column("ap_last20", "share", "the same in the last fifth", "5", Scale.SHARE),
    Column("ap_drop", "share", "ap_first20 − ap_last20", "5", Scale.LINEAR, signed=True),
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
        Column("ap_se", "share", "its jackknife standard error by document group", "5"),
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


def compute_plasticity(batch: Batch) -> Found:
    """Both tables. Heads that read one key head over one window share their pairs of keys."""
    drawn: dict[tuple[object, ...], KeyPairs] = {}
    rows: dict[int, Columns] = {}
    pairs: list[pd.DataFrame] = []
    per_head = {column.name: np.full(len(batch), np.nan) for column in AP}
    left_out = {column.name: np.full((len(batch), N_GROUPS), np.nan) for column in AP}
    for i, one in enumerate(batch.heads):
        if one.vectors is None or one.moments.q_buckets is None:
            continue
        window = int(one.moments.window)
        reach = one.key_head, window, one.sliding_window
        if reach not in drawn:
            buckets = one.moments.q_buckets.n.shape[-1]
            drawn[reach] = key_pairs(one.vectors.k.as_double(), window, buckets, sliding_window=one.sliding_window)
        found = _HeadPlasticity(one, drawn[reach], intervals=batch.options.intervals)
        if not found.there.any():
            continue
        rows[i] = found.rows()
        pairs.append(found.by_distance(batch.index, i))
        for name, (value, again) in found.scalars().items():
            per_head[name][i], left_out[name][i] = value, again
    if not rows:
        return Found()
    columns = {name: np.concatenate([part[name] for part in rows.values()]) for name in next(iter(rows.values()))}
    head = np.concatenate([np.full(len(part["ap"]), i) for i, part in rows.items()])
    merged = merged_pairs(pd.concat(pairs, ignore_index=True))
    values = Values(columns, left_out, per_head, head)
    return Found({"plasticity": values}, {"plasticity_pairs": merged})


class _HeadPlasticity:
    """The plasticity of one head."""

    def __init__(self, one: HeadData, keys: KeyPairs, *, intervals: bool) -> None:
        moments = HeadMoments.stack([one.moments])
        assert moments.q_buckets is not None
        assert moments.q_cells is not None
        self.one, self.keys, self.moments, self.cells = one, keys, moments, moments.q_cells
        self.n, self.window = moments.q_buckets.n, int(one.moments.window)
        self.width = bucket_width(self.window, self.n.shape[-1])
        self.found: Plasticity = bucket_plasticity(moments.q_buckets, self.cells, moments.total_q, keys, self.width)
        self.usable = usable_groups(moments) if intervals else np.zeros((1, N_GROUPS))
        self.there = ~np.isnan(self.found.ap[0])

    def rows(self) -> Columns:
        """One row per bucket that has any."""
        there, buckets = self.there, self.n.shape[-1]
        return {
            "q_bucket": np.flatnonzero(there),
            "q_position": ((np.arange(buckets) + 0.5) * self.width - 0.5)[there],
            "bucket_width": np.full(int(there.sum()), self.width),
            "n_queries": self.n[0, there].astype(np.int64),
            "n_pairs": self.keys.n[there],
            "ap": self.found.ap[0, there],
            "ap_se": self._spread()[there],
            "ap_published": self.found.ap_published[0, there],
            "ap_fixed": self._fixed()[there],
        }

    def scalars(self) -> dict[str, tuple[float, Float[np.ndarray, "8"]]]:
        """Over the window, and with each document group left out where enough groups have queries."""
        without = np.maximum(self.n[:, None] - self.cells.n, 0.0)
        whole = plasticity_over_window(self.found.ap, self.n, self.window)
        again = plasticity_over_window(self.found.again, without, self.window)
        return {
            column.name: (
                float(getattr(whole, column.name)[0]),
                np.where(self._told(column.name) * self.usable > 0, getattr(again, column.name), np.nan)[0],
            )
            for column in AP
        }

    def by_distance(self, index: Columns, i: int) -> pd.DataFrame:
        """Pairs of keys by their distances, in octaves."""
        real = (self.keys.weight > 0) & self.there[:, None]
        frame = pd.DataFrame(
            {
                "inter_key": octave(self.keys.inter_key[real]),
                "key_to_query": octave(self.keys.key_to_query[real]),
                "ap": self.found.pairs[0][real],
                "ap_published": self.found.pairs_published[0][real],
            }
        )
        named = {name: index[name][i] for name in ("model", "family", "layer")}
        return merged_pairs(frame.assign(**named, n_pairs=1))

    def _told(self, name: str) -> Float[np.ndarray, "1 1"]:
        """1 where enough document groups have queries in every part of the window that a scalar is about, else 0."""
        whole, first, last = parts_of_window(self.cells.n.shape[-1], self.window)
        needed = {"ap_overall": [whole], "ap_first20": [first], "ap_last20": [last], "ap_drop": [first, last]}[name]
        counts = [(self.cells.n[..., part].sum(-1) > 0).sum(-1) for part in needed]
        return (np.min(counts, axis=0) >= MIN_GROUPS).astype(float)[:, None]

    def _spread(self) -> Float[np.ndarray, "buckets"]:
        """Standard error of ap in each bucket; NaN where leaving out a group leaves no queries."""
        again = np.where(self.usable[..., None] > 0, self.found.again, 0.0)
        spread = jackknife(np.nan_to_num(self.found.ap), np.nan_to_num(again), self.usable, Scale.SHARE).se[0]
        return np.where(np.isnan(again).any((0, 1)), np.nan, spread)

    def _fixed(self) -> Float[np.ndarray, "buckets"]:
        buckets = self.n.shape[-1]
        if self.one.rotary is None or self.one.vectors is None:
            return np.full(buckets, np.nan)
        still = fixed_queries(self.one.vectors.q.as_double(), self.one.rotary, self.window, buckets)
        return ap_fixed(bucket_moments(still, self.window, buckets), self.keys)


def octave(distance: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
    """The power of two at or below each distance, at least 1.

    >>> octave(np.array([0, 1, 3, 4, 100])).tolist()
    [1, 1, 2, 4, 64]
    """
    return 2 ** np.floor(np.log2(np.maximum(distance, 1))).astype(np.int64)


PLASTICITY = Analysis(
    "plasticity",
    "whether the order of two keys is fixed or up to the query, by bucket of queries",
    (PLASTICITY_TABLE, PAIRS_TABLE),
    compute_plasticity,
    Scalars(AP, "plasticity", in_runs=("ap_overall", "ap_first20", "ap_last20", "ap_drop")),
    buckets=True,
    rotary=True,
)
