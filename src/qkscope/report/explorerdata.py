"""One row per head with all its columns: the table of heads in the report and the map in the explorer."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import ENDS, HEAD_KEY
from qkscope.headids import TERMS
from qkscope.results.effects import known_effect
from qkscope.results.schema import QUESTIONS, TABLES, question
from qkscope.results.side import TOKEN
from qkscope.results.study import Study

HEAD_TABLE_COLUMNS = (
    "part_position", "part_key", "part_query", "part_content", "decay", "ap_fixed_overall", "explained_variance", "r_q",
    "r_k", "posvar_q", "posvar_k", "posvar_q_published", "r_q_a", "r_k_a", "bias_window",
    "bias_full_window", "bias_causal_window", "bias_strength", "separation_strength", "plane_var_fraction",
    "active_planes", "position_share_of_score", "ap_drop",
)  # fmt: skip
"""Numbers in the report's table of heads."""


@dataclass(frozen=True)
class Metric:
    """A number per head: its column, unit and meaning."""

    column: str
    unit: str
    meaning: str
    signed: bool
    group: str
    """The question that it belongs to."""
    plain: str = ""
    """Its name in plain words, if it has one."""


def head_frame(study: Study) -> pd.DataFrame:
    """All heads of all runs, in order; columns of component 0, ``heads`` and ``rotated`` side by side."""
    frames = [study.pc0, study.tables.get("heads"), study.tables.get("rotated"), _effects(study)]
    heads: pd.DataFrame | None = None
    for frame in frames:
        if frame is None or frame.empty:
            continue
        if heads is None:
            heads = frame.drop(columns=["pc"], errors="ignore")
            continue
        new = [column for column in frame if column not in heads and column != "pc"]
        heads = heads.merge(frame[[*HEAD_KEY, *new]], on=HEAD_KEY, how="outer", sort=False)
    if heads is None:
        return pd.DataFrame(columns=[*HEAD_KEY, "family", "kind"])
    order = {label: i for i, label in enumerate(study.labels)}
    heads = heads.assign(family=heads["model"].map({run.label: run.family for run in study.runs}))
    heads["kind"] = _kinds(heads)
    ordered = heads.assign(_run=heads["model"].map(order)).sort_values(["_run", "layer", "head"], ignore_index=True)
    return ordered.drop(columns="_run")


def _kinds(heads: pd.DataFrame) -> pd.Series:
    """The class of each head by the parts of its scores or, where they are not known, the published one; or empty."""
    classes = [heads[name].astype(object) for name in ("head_class", "taxonomy_published") if name in heads]
    kinds = pd.Series(None, heads.index, dtype=object)
    for column in classes:
        kinds = kinds.where(kinds.notna(), column)
    return kinds.where(kinds.notna(), "").astype(str)


def _effects(study: Study) -> pd.DataFrame | None:
    """One row per head: the effect of each term, measured where it was, otherwise estimated."""
    effects = study.tables.get("effects")
    if effects is None or effects["kl_predicted"].isna().all():
        return None
    known = effects.assign(effect=known_effect(effects))
    wide = known.pivot_table(index=list(HEAD_KEY), columns="term", values="effect")
    return wide.add_prefix("effect_").rename_axis(columns=None).reset_index()


def metrics(frame: pd.DataFrame) -> list[Metric]:
    """The metrics that exist in the frame, as analyses describe them; without interval ends and row counts."""
    described = {column.name: column for table in ("qk", "heads", "rotated") for column in TABLES[table]}
    available = []
    for name, column in described.items():
        if not column.is_metric or name.endswith(ENDS) or name not in frame:
            continue
        if not pd.api.types.is_numeric_dtype(frame[name]) or frame[name].isna().all():
            continue
        on = " (on component 0)" if column in TABLES["qk"] and "omponent" not in column.meaning else ""
        plain = PLAIN.get(name, "")
        available.append(Metric(name, column.unit, column.meaning + on, column.signed, question(name), plain))
    for term in TERMS:
        if f"effect_{term}" in frame:
            meaning = f"what the prediction changes by without the {term} term of its scores, measured or estimated"
            plain = PLAIN.get(f"effect_{term}", "")
            available.append(Metric(f"effect_{term}", "nats per token", meaning, False, "Cause", plain))
    return sorted(available, key=lambda metric: QUESTIONS.index(metric.group))


def numbers(frame: pd.DataFrame, column: str) -> list[float | None]:
    """A column for JSON: five significant digits, None for missing values."""
    values = frame[column].to_numpy(float, na_value=np.nan)
    return [None if not np.isfinite(value) else float(f"{value:.5g}") for value in values]


PLAIN = {
    "part_position": "position's part of the scores",
    "part_content": "content's part of the scores",
    "part_key": "the key's part of the scores",
    "part_query": "the query's part of the scores",
    "decay": "score lost per doubling of distance",
    "position_share": "position's share of queries and keys",
    "mass_sink": "attention on the first tokens",
    "previous": "attention on the token before",
    "induction": "attention on the token after an earlier copy",
    "ap_fixed_overall": "plasticity that content accounts for",
    "effect_position": "effect of taking position away",
    "effect_content": "effect of taking content away",
    "reach90": "distance within which 90% of attention lies",
    "r_q": "how closely queries follow position",
    "r_k": "how closely keys follow position",
    "bias_window": "published recency bias over the window",
}
"""Names in plain words of the numbers that a reader asks for first."""


def packed_json(value: Any) -> str:
    """A value as JSON, compressed, in base64."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _compressed(text.encode())


def _compressed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode("ascii")


WIDE = ("pc0", "pc1", "a", "b")
"""Columns stored with 16 bits."""
COMPLEMENT_AXES = 12
"""Coordinates of the complement, stored with 8 bits each: six planes."""
BUDGET = 4_200_000
"""Number of characters that the points of all heads of a page should take."""
MOST = 11_500_000
"""Number of characters that they may take, where each head would have too few."""
MOST_ROWS, FEWEST_ROWS = 200, 80
"""Points of each kind per head: at most, and as long as the page may take them."""


def rows_per_kind(n_heads: int) -> int:
    """The number of points of each kind per head that keeps the page within its budget.

    >>> rows_per_kind(100), rows_per_kind(320), rows_per_kind(1000), rows_per_kind(3000)
    (200, 200, 80, 57)
    """

    def room(budget: int) -> int:
        per_row = 2 * (2 + len(WIDE)) + COMPLEMENT_AXES
        return ((budget * 3 // 4) // max(n_heads, 1) - 4 * 2 * (len(WIDE) + COMPLEMENT_AXES) - 4) // (2 * per_row)

    return max(0, min(MOST_ROWS, max(room(BUDGET), min(FEWEST_ROWS, room(MOST)))))


def packed(points: pd.DataFrame, window: int, most: int, vocabulary: Sequence[str] = ("",)) -> str:
    """One head's points in base64; at most ``most`` of each kind, always the same choice."""
    kinds = [_thinned(points[points["kind"] == kind], most) for kind in "qk"]
    all_points = pd.concat(kinds)
    ranges, wide, narrow = [], [], []
    for name in (*WIDE, *(f"svd_{i}" for i in range(COMPLEMENT_AXES))):
        levels = 65535 if name in WIDE else 255
        low, step = _range(all_points, name, levels)
        ranges += [low, step]
    for points_of_kind in kinds:
        wide.append(np.round(points_of_kind["position"].to_numpy(float) * (65535 / max(window, 1))).clip(0, 65535))
        wide += [_levels(points_of_kind, name, *ranges[2 * i : 2 * i + 2]) for i, name in enumerate(WIDE)]
        wide.append(_numbers(points_of_kind, vocabulary))
    for points_of_kind in kinds:
        for i in range(COMPLEMENT_AXES):
            offset = 2 * (len(WIDE) + i)
            narrow.append(_levels(points_of_kind, f"svd_{i}", *ranges[offset : offset + 2]))
    blob = (
        np.asarray(ranges, "<f4").tobytes()
        + np.asarray([len(points_of_kind) for points_of_kind in kinds], "<u2").tobytes()
        + np.concatenate(wide).astype("<u2").tobytes()
        + np.concatenate(narrow).astype("u1").tobytes()
    )
    return _compressed(blob)


def point_words(points: pd.DataFrame) -> list[str]:
    """The tokens of a run's points as text, each once; the first, number 0, stands for unknown tokens."""
    words = points[TOKEN].dropna().unique().tolist() if TOKEN in points else []
    return ["", *sorted(words)[:65535]]


def _numbers(points: pd.DataFrame, vocabulary: Sequence[str]) -> np.ndarray:
    """The number of each point's token in the vocabulary; 0 if it is not there."""
    if TOKEN not in points:
        return np.zeros(len(points))
    number = {word: n for n, word in enumerate(vocabulary)}
    return np.array([number.get(word, 0) for word in points[TOKEN]], dtype=float)


def _thinned(points: pd.DataFrame, most: int) -> pd.DataFrame:
    if len(points) <= most:
        return points
    return points.iloc[np.sort(np.random.default_rng(0).permutation(len(points))[:most])]


def _range(points: pd.DataFrame, name: str, levels: int) -> tuple[float, float]:
    values = points[name].to_numpy(float) if name in points else np.zeros(1)
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 0.0
    low = float(np.float32(values.min()))
    return low, float(values.max() - low) / levels


def _levels(points: pd.DataFrame, name: str, low: float, step: float) -> np.ndarray:
    if name not in points or step <= 0:
        return np.zeros(len(points))
    return np.round((points[name].to_numpy(float) - low) / step).clip(0, 65535 if name in WIDE else 255)


PASSAGE_BUDGET = 12_000_000
"""Maximum number of characters for the passages of all heads of a page."""


def passages(views: Mapping[int, tuple[pd.DataFrame, Sequence[tuple[int, int]]]]) -> dict[tuple[int, int], str]:
    """Passages in base64 by view and number of the head, given the passages and heads of each view, most wanted first.

    Heads whose passage exceeds what is left of the budget have none.
    """
    packed_heads: dict[tuple[int, int], str] = {}
    room = PASSAGE_BUDGET
    for view, (table, heads) in views.items():
        groups = dict(iter(table.groupby(["layer", "head"], sort=False)))
        for i, key in enumerate(heads):
            text = packed_passage(groups[key]) if key in groups else None
            if text is None or len(text) > room:
                continue
            packed_heads[view, i] = text
            room -= len(text)
    return packed_heads


def passage_tokens(table: pd.DataFrame | None) -> list[str]:
    """The tokens of a run's passage; empty if it has none."""
    if table is None or table.empty:
        return []
    first = table[(table["layer"] == table["layer"].iloc[0]) & (table["head"] == table["head"].iloc[0])]
    last = first[first["q_token"] == first["q_token"].max()].sort_values("k_token")
    return [str(text) for text in last["text"]]


def packed_passage(rows: pd.DataFrame) -> str | None:
    """One head's passage in base64; None if a pair of tokens is missing or appears twice."""
    rows = rows.sort_values(["q_token", "k_token"], kind="stable")
    n = int(rows["q_token"].max()) + 1
    sees_all_pairs = len(rows) == n * n  # of an encoder
    query, key = np.indices((n, n)).reshape(2, -1) if sees_all_pairs else np.tril_indices(n)
    if not _complete(rows, (query, key)):
        return None
    units = rows["unit"].to_numpy("<f4")[np.flatnonzero(query == key)]
    levels = [rows[term].to_numpy(float).round().clip(-127, 127).astype("i1") for term in TERMS]
    return _compressed(units.tobytes() + np.concatenate(levels).tobytes())


def _complete(rows: pd.DataFrame, pairs: Sequence[np.ndarray]) -> bool:
    present = (rows["q_token"].to_numpy(), rows["k_token"].to_numpy())
    return len(rows) == len(pairs[0]) and all(np.array_equal(a, b) for a, b in zip(present, pairs, strict=True))
