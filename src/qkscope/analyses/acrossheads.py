"""Means, medians and rank correlations over heads, with bootstrap intervals over key heads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd
from jaxtyping import Float

from qkscope.core.linalg import ratio

_DRAWS = 1000
_LEVEL = 0.95


def mean_over_heads(frame: pd.DataFrame, columns: Sequence[str]) -> dict[str, float]:
    """Mean of each column and its interval: ``X``, ``X_low``, ``X_high``.

    Query heads that read the same key head are drawn together, because they share its keys.
    """
    numbers = frame[list(columns)].to_numpy(float)
    groups = clusters(frame)
    n = int(groups.max()) + 1 if len(groups) else 0
    sums = np.stack([np.bincount(groups, weights=column, minlength=n) for column in numbers.T])
    counts = np.bincount(groups, minlength=n).astype(float)
    weights = _draws(n)
    bootstrap_means = (sums @ weights.T) / np.maximum(counts @ weights.T, 1e-300)
    means: dict[str, float] = {}
    for name, value, draws in zip(columns, numbers.mean(0), bootstrap_means, strict=True):
        means |= {name: float(value)} | _ends(name, draws, n)
    return means


def median_over_heads(frame: pd.DataFrame, column: str) -> dict[str, float]:
    """Median of a column and its interval: ``X``, ``X_low``, ``X_high``."""
    numbers, groups = frame[column].to_numpy(float), clusters(frame)
    n = int(groups.max()) + 1 if len(groups) else 0
    order = np.argsort(numbers, kind="stable")
    weights = _draws(n)[:, groups[order]].cumsum(-1)
    middle = (weights >= weights[:, -1:] / 2).argmax(-1)
    return {column: float(np.median(numbers))} | _ends(column, numbers[order][middle], n)


def rank_correlation(frame: pd.DataFrame, x: str, y: str) -> dict[str, float]:
    """Spearman's ρ of two columns over heads and its interval: ``rho``, ``rho_low``, ``rho_high``."""
    groups = clusters(frame)
    n = int(groups.max()) + 1 if len(groups) else 0
    ranks = np.stack([frame[name].astype(float).rank().to_numpy() for name in (x, y)]) - (len(frame) + 1) / 2
    products = np.stack([np.ones(len(frame)), *ranks, ranks[0] ** 2, ranks[1] ** 2, ranks[0] * ranks[1]])
    sums = np.stack([np.bincount(groups, weights=row, minlength=n) for row in products])
    rho = _pearson(sums.sum(-1)[:, None])[0] if len(frame) > 2 else float("nan")
    return {"rho": float(rho)} | _ends("rho", _pearson(sums @ _draws(n).T), n)


def _pearson(sums: Float[np.ndarray, "6 draws"]) -> Float[np.ndarray, "draws"]:
    """Correlations from n, Σx, Σy, Σx², Σy², Σxy; 0 where a variance is zero."""
    n, x, y, xx, yy, xy = sums
    n = np.maximum(n, 1.0)
    return ratio(xy - x * y / n, np.sqrt(np.maximum((xx - x**2 / n) * (yy - y**2 / n), 0.0)))


def clusters(frame: pd.DataFrame) -> np.ndarray:
    """Index of the key head that each row's head reads; of the head itself if the table has no ``k_head``."""
    key = "k_head" if "k_head" in frame else "head"
    return frame.groupby(["model", "layer", key], sort=False).ngroup().to_numpy()


@cache
def _draws(n: int) -> Float[np.ndarray, "draws n"]:
    """The number of times each of n clusters is drawn in each bootstrap draw."""
    if n == 0:
        return np.zeros((_DRAWS, 0))
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=_DRAWS).astype(float)


def _ends(name: str, draws: Float[np.ndarray, "draws"], n: int) -> dict[str, float]:
    if n < 2:  # with one cluster all draws are the same
        return {f"{name}_low": float("nan"), f"{name}_high": float("nan")}
    low, high = np.quantile(draws, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return {f"{name}_low": float(low), f"{name}_high": float(high)}


def correlation(x: pd.Series, y: pd.Series) -> float:
    """Pearson's r; NaN for fewer than three rows or zero variance."""
    a, b = x.to_numpy(float), y.to_numpy(float)
    if len(a) < 3 or a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
