"""Points of a head packed for a page: integers of 16 and 8 bits, with the range of each column.

Layout, little-endian: float32 (low, step) of pc0, pc1, a, b and of each coordinate of the complement; uint16 counts of
queries and keys; then, for queries and for keys, uint16 position (in 1/65535 of the window), pc0, pc1, a, b and the
number of the token among the run's words; then, for queries and for keys, uint8 coordinates of the complement. A value
is low + step · number.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import pandas as pd

from qkscope.results.points import TOKEN

WIDE = ("pc0", "pc1", "a", "b")
"""Columns stored with 16 bits."""
COMPLEMENT_AXES = 12
"""Coordinates of the complement, stored with 8 bits each: six planes."""
BUDGET = 11_500_000
"""Maximum number of characters for the points of all heads of a page."""
MOST_ROWS = 300
"""Points of each kind per head, at most."""


def rows_per_kind(n_heads: int) -> int:
    """The largest number of points of each kind per head that keeps the page within its budget.

    >>> rows_per_kind(100), rows_per_kind(1000), rows_per_kind(3000)
    (300, 176, 57)
    """
    per_row = 2 * (2 + len(WIDE)) + COMPLEMENT_AXES
    room = (BUDGET * 3 // 4) // max(n_heads, 1) - 4 * 2 * (len(WIDE) + COMPLEMENT_AXES) - 4
    return max(0, min(MOST_ROWS, room // (2 * per_row)))


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
    return base64.b64encode(blob).decode("ascii")


def point_words(points: pd.DataFrame) -> list[str]:
    """The tokens of a run's points as text, each once; the first, number 0, stands for those that are not known."""
    known = points[TOKEN].dropna().unique().tolist() if TOKEN in points else []
    return ["", *sorted(known)[:65535]]


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
