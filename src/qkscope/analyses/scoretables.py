"""From scores of queries and keys to tables: the distance curve, plasticity, and what they say of a head as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from qkscope.analyses.causal import bias_causal
from qkscope.analyses.columns import Columns, Tables
from qkscope.analyses.distance import MeanField, distance_curve, score_pairs
from qkscope.analyses.keypairs import KeyPairs, key_pairs
from qkscope.analyses.plasticity import (
    Plasticity,
    ap_fixed,
    fixed_queries,
    over_window,
    parts_of_window,
    plasticity,
)
from qkscope.analyses.tabulate import ENDS
from qkscope.analyses.tabulate import over_window as times_window
from qkscope.analyses.uncertainty import MIN_GROUPS, Scale, interval_columns, usable_groups
from qkscope.core.headmoments import N_GROUPS, HeadMoments, bucket_moments, bucket_width
from qkscope.core.rope import HeadRotary
from qkscope.core.rows import Pair

KEY = ["model", "layer", "head"]
SHARE = {"position_share_of_score": Scale.SHARE}
AP = {
    "ap_overall": Scale.SHARE,
    "ap_first20": Scale.SHARE,
    "ap_last20": Scale.SHARE,
    "ap_drop": Scale.LINEAR,
}
CAUSAL = {"bias_causal": Scale.LINEAR}


def _with_ends(scales: dict[str, Scale]) -> list[str]:
    return [*scales, *(f"{name}{end}" for name in scales for end in ENDS)]


DISTANCE_SCALARS = ["distance_r2", "distance_corr", *_with_ends(SHARE)]
AP_SCALARS = _with_ends(AP)
SCALARS = {"distance": DISTANCE_SCALARS, "plasticity": AP_SCALARS}
"""What each table says of whole heads: columns of it, the same in every row of a head, and columns of ``heads``."""


def with_scalars(heads: pd.DataFrame, table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The table ``heads`` with what another table says of each head as a whole."""
    columns = SCALARS[name]
    if table.empty:
        return heads.assign(**dict.fromkeys(columns, np.nan))
    whole = table.drop_duplicates(KEY)[[*KEY, *columns]]
    merged = heads.drop(columns=columns).merge(whole, on=KEY, how="left")
    return merged.astype(dict.fromkeys(columns, "float64"))[list(heads.columns)]


def heads_from(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame | None:
    """What ``distance`` and ``plasticity`` say of whole heads, where there is no table ``heads``; None if nothing."""
    whole: pd.DataFrame | None = None
    for name, columns in SCALARS.items():
        frame = tables.get(name)
        if frame is None or frame.empty:
            continue
        named = [column for column in (*KEY, "family", "k_head", *columns) if column in frame]
        one = frame.drop_duplicates(KEY)[named]
        if whole is not None:
            new = [column for column in one if column not in whole]
            one = whole.merge(one[[*KEY, *new]], on=KEY, how="outer")
        whole = one
    return whole


@dataclass(frozen=True)
class HeadScores:
    """What the scores of one head are made of."""

    moments: HeadMoments
    pair: Pair | None
    rotary: HeadRotary | None
    field: MeanField | None
    sliding_window: int | None

    @property
    def window(self) -> int:
        """Context length, in tokens."""
        return int(self.moments.window)


# ---- the distance curve -------------------------------------------------------------------------


def distance_tables(index: pd.DataFrame, heads: Sequence[HeadScores], *, intervals: bool = True) -> Tables:
    """``distance``: one row per head and bin of distance; heads without rotary encoding or vectors have none."""
    frames, again = [], []
    for i, head in enumerate(heads):
        if head.field is None or head.pair is None:
            continue
        found = distance_curve(score_pairs(head.pair.as_double(), head.field.scaling), head.field, head.window)
        if not len(found.low):
            continue
        value = np.array([found.position_share_of_score])
        left_out = _usable(found.share_again, head.moments, intervals=intervals)
        again.append(left_out)
        frames.append(
            _repeated(index, i, len(found.low)).assign(
                distance_low=found.low,
                distance_high=found.high,
                n_pairs=found.n_pairs,
                measured=found.measured,
                measured_se=found.measured_se,
                predicted=found.predicted,
                distance_r2=found.r2,
                distance_corr=found.corr,
                position_share_of_score=found.position_share_of_score,
                **_ends(SHARE, {"position_share_of_score": value}, {"position_share_of_score": left_out[None]}),
            )
        )
    if not frames:
        return Tables({})
    return Tables({"distance": pd.concat(frames, ignore_index=True)}, {"position_share_of_score": np.stack(again)})


# ---- the bias over causal pairs -----------------------------------------------------------------


def causal_columns(
    heads: Sequence[HeadScores], *, intervals: bool = True
) -> tuple[Columns, dict[str, Float[np.ndarray, "heads groups"]]]:
    """``bias_causal`` and ``bias_causal_window`` of each head with intervals, and the replicates."""
    found = [
        (np.nan, np.full(N_GROUPS, np.nan)) if head.pair is None else bias_causal(head.pair, head.sliding_window)
        for head in heads
    ]
    value = np.array([one for one, _ in found])
    again = np.stack(
        [_usable(left_out, head.moments, intervals=intervals) for (_, left_out), head in zip(found, heads, strict=True)]
    )
    numbers = {"bias_causal": value}
    numbers |= interval_columns(
        CAUSAL, numbers, {"bias_causal": np.nan_to_num(again)}, (~np.isnan(again)).astype(float)
    )
    numbers |= times_window(numbers, ("bias_causal_window",), np.array([head.window for head in heads]))
    return numbers, {"bias_causal": again}


# ---- plasticity ---------------------------------------------------------------------------------


def plasticity_tables(index: pd.DataFrame, heads: Sequence[HeadScores], *, intervals: bool = True) -> Tables:
    """``plasticity`` (one row per head and query bucket) and ``plasticity_pairs`` (by the distances of pairs).

    Heads that read one key head over one window share their pairs of keys.
    """
    drawn: dict[tuple[object, ...], KeyPairs] = {}
    parts: list[Tables] = []
    for i, one in enumerate(heads):
        if one.pair is None or one.moments.q_buckets is None:
            continue
        row = index.iloc[i]
        reach = row["layer"], row["k_head"], one.window, one.sliding_window
        if reach not in drawn:
            buckets = one.moments.q_buckets.n.shape[-1]
            drawn[reach] = key_pairs(one.pair.k.as_double(), one.window, buckets, sliding_window=one.sliding_window)
        found = _plasticity_of(index.iloc[[i]], one, drawn[reach], intervals=intervals)
        parts += [] if found is None else [found]
    if not parts:
        return Tables({})
    rows = pd.concat([part.frames["plasticity"] for part in parts], ignore_index=True)
    pairs = merged_pairs([part.frames["plasticity_pairs"] for part in parts])
    again = {name: np.concatenate([part.replicates[name] for part in parts]) for name in parts[0].replicates}
    return Tables({"plasticity": rows, "plasticity_pairs": pairs}, again)


def _plasticity_of(index: pd.DataFrame, one: HeadScores, keys: KeyPairs, *, intervals: bool) -> Tables | None:
    """The rows of one head; None if no bucket has any."""
    moments = HeadMoments.stack([one.moments])
    assert moments.q_buckets is not None
    assert moments.q_cells is not None
    n = moments.q_buckets.n
    buckets = n.shape[-1]
    width = bucket_width(one.window, buckets)
    found = plasticity(moments.q_buckets, moments.q_cells, moments.total_q, keys, width)
    there = ~np.isnan(found.ap[0])
    if not there.any():
        return None
    without = np.maximum(n[:, None] - moments.q_cells.n, 0.0)
    scalars, again = (
        {name: getattr(whole, name) for name in AP}
        for whole in (over_window(found.ap, n, one.window), over_window(found.again, without, one.window))
    )
    usable = usable_groups(moments) if intervals else np.zeros((1, N_GROUPS))
    again = {
        name: np.where(_told(name, moments, one.window) * usable > 0, rows, np.nan) for name, rows in again.items()
    }
    columns = scalars | {
        name: np.array([value])
        for scalar, scale in AP.items()
        for name, value in _ends({scalar: scale}, scalars, {scalar: again[scalar]}).items()
    }
    spread = _spread_of_buckets(found, usable)
    frame = _repeated(index, 0, int(there.sum())).assign(
        q_bucket=np.flatnonzero(there),
        q_position=((np.arange(buckets) + 0.5) * width - 0.5)[there],
        bucket_width=width,
        n_queries=n[0, there].astype(np.int64),
        n_pairs=keys.n[there],
        ap=found.ap[0, there],
        ap_se=spread[there],
        ap_published=found.ap_published[0, there],
        ap_fixed=_fixed(one, keys, buckets)[there],
        **{name: float(values[0]) for name, values in columns.items()},
    )
    return Tables({"plasticity": frame, "plasticity_pairs": _by_distance(index, found, keys, there)}, again)


def _told(name: str, moments: HeadMoments, window: int) -> Float[np.ndarray, "1 1"]:
    """1 where enough document groups have queries in every part of the window that a scalar is about, else 0."""
    assert moments.q_cells is not None
    whole, first, last = parts_of_window(moments.q_cells.n.shape[-1], window)
    needed = {"ap_overall": [whole], "ap_first20": [first], "ap_last20": [last], "ap_drop": [first, last]}[name]
    counts = [(moments.q_cells.n[..., part].sum(-1) > 0).sum(-1) for part in needed]
    return (np.min(counts, axis=0) >= MIN_GROUPS).astype(float)[:, None]


def _spread_of_buckets(found: Plasticity, usable: Float[np.ndarray, "1 8"]) -> Float[np.ndarray, "buckets"]:
    """Standard error of ap in each bucket; NaN where leaving out a group leaves no queries."""
    again = np.where(usable[..., None] > 0, found.again, 0.0)
    filled = {"ap": np.nan_to_num(again)}
    spread = interval_columns({"ap": Scale.SHARE}, {"ap": np.nan_to_num(found.ap)}, filled, usable)["ap_se"][0]
    return np.where(np.isnan(again).any((0, 1)), np.nan, spread)


PAIR_KEY = ["model", "family", "layer", "inter_key", "key_to_query"]


def merged_pairs(parts: Sequence[pd.DataFrame], by: Sequence[str] = PAIR_KEY) -> pd.DataFrame:
    """Rows of ``plasticity_pairs`` that agree in these columns added up, each weighted by its pairs."""
    frame = pd.concat(parts, ignore_index=True)
    means = [name for name in ("ap", "ap_published") if name in frame]
    weighted = frame.assign(**{name: frame[name] * frame["n_pairs"] for name in means})
    summed = weighted.groupby(list(by), as_index=False, sort=True)[["n_pairs", *means]].sum()
    return summed.assign(**{name: summed[name] / summed["n_pairs"] for name in means})


def octave(distance: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
    """The power of two at or below each distance, at least 1.

    >>> octave(np.array([0, 1, 3, 4, 100])).tolist()
    [1, 1, 2, 4, 64]
    """
    return 2 ** np.floor(np.log2(np.maximum(distance, 1))).astype(np.int64)


def _by_distance(index: pd.DataFrame, found: Plasticity, keys: KeyPairs, there: np.ndarray) -> pd.DataFrame:
    real = (keys.weight > 0) & there[:, None]
    frame = pd.DataFrame(
        {
            "inter_key": octave(keys.inter_key[real]),
            "key_to_query": octave(keys.key_to_query[real]),
            "ap": found.pairs[0][real],
            "ap_published": found.pairs_published[0][real],
        }
    )
    named = {name: index[name].iloc[0] for name in ("model", "family", "layer")}
    return merged_pairs([frame.assign(**named, n_pairs=1)])


def _fixed(one: HeadScores, keys: KeyPairs, buckets: int) -> Float[np.ndarray, "buckets"]:
    if one.rotary is None or one.pair is None:
        return np.full(buckets, np.nan)
    still = fixed_queries(one.pair.q.as_double(), one.rotary, one.window, buckets)
    return ap_fixed(bucket_moments(still, one.window, buckets), keys)


# ---- pieces -------------------------------------------------------------------------------------


def _repeated(index: pd.DataFrame, i: int, times: int) -> pd.DataFrame:
    return index.loc[index.index[[i] * times]].reset_index(drop=True)


def _usable(again: Float[np.ndarray, "8"], moments: HeadMoments, *, intervals: bool) -> Float[np.ndarray, "8"]:
    """Replicates of the groups that the jackknife deletes; NaN for the others."""
    return np.where((usable_groups(moments) > 0) & intervals, again, np.nan)


def _ends(
    scales: dict[str, Scale], values: Columns, again: dict[str, Float[np.ndarray, "heads groups"]]
) -> dict[str, float]:
    present = ~np.isnan(next(iter(again.values())))
    present &= ~np.isnan(next(iter(values[name] for name in scales)))[:, None]
    filled = {name: np.nan_to_num(rows) for name, rows in again.items()}
    columns = interval_columns(scales, values, filled, present.astype(float))
    return {name: float(column[0]) for name, column in columns.items()}
