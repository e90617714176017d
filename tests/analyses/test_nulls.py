"""The null of position_r: how it is computed, and how often noise passes it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import lfilter

from qkscope.analyses.nulls import _balanced, null_r95
from qkscope.analyses.rotationmodel import rotation_model
from qkscope.core.moments import Moments
from qkscope.core.planted import plant
from qkscope.core.rows import Pair, Rows


def like_text(rng: np.random.Generator, likeness: float, documents: int = 32, length: int = 512, d: int = 16) -> Rows:
    """Noise of which neighbours are alike, with a level of its own in each document; 64 tokens of each are kept."""
    drawn = rng.standard_normal((documents, length, d)) * np.sqrt(1 - likeness**2)
    drawn[:, 0] /= np.sqrt(1 - likeness**2)
    x = lfilter([1.0], [1.0, -likeness], drawn, axis=1) + 0.5 * rng.standard_normal((documents, 1, d))
    kept = np.array([np.sort(rng.choice(length, 64, replace=False)) for _ in range(documents)])
    rows = np.take_along_axis(x, kept[..., None], 1).reshape(-1, d)
    return Rows(rows, kept.reshape(-1), np.repeat(np.arange(documents), 64))


def null_of(pair: Pair, seed: int = 0) -> float:
    """Compute the null with the drift of each class, and the covariance without it, from the same rows."""
    return null_r95(pair, pooled_cov(undrifted(pair)), [slope(rows) for rows in (pair.q, pair.k)], seed)


def pooled_cov(pair: Pair) -> np.ndarray:
    return np.cov(np.concatenate([pair.q.x, pair.k.x]).T, bias=True)


def slope(rows: Rows) -> np.ndarray:
    late = rows.position - rows.position.mean()
    return late @ rows.x / (late @ late)


def undrifted(pair: Pair) -> Pair:
    """Each class without its linear drift."""
    return Pair(
        *(
            Rows(rows.x - np.outer(rows.position - rows.position.mean(), slope(rows)), rows.position, rows.example_id)
            for rows in (pair.q, pair.k)
        )
    )


def position_r(pair: Pair) -> float:
    q, k = (Moments.from_rows(rows.x, rows.position) for rows in (pair.q, pair.k))
    return float(rotation_model(q, k).position_r)


@pytest.mark.parametrize("likeness", [0.0, 0.9, 0.98])
def test_noise_seldom_passes_however_alike_its_neighbours(likeness: float):
    rng = np.random.default_rng(int(100 * likeness))
    passed = 0
    for _ in range(100):
        pair = Pair(like_text(rng, likeness), like_text(rng, likeness))
        passed += position_r(pair) > null_of(pair)
    # 5% by construction; more than 11 of 100 has probability 0.4%.
    assert passed <= 11


def test_drift_passes():
    head = plant(16, alpha_q=1e-3, alpha_k=1e-3, n=2000, documents=32)
    pair = Pair(head.q, head.k)
    assert position_r(pair) > 1.5 * null_of(pair)


def test_signed_parts_are_positions_read_backwards():
    """Compute the same draws with the positions written out."""
    rng = np.random.default_rng(2)
    pair = Pair(like_text(rng, 0.5, documents=6), like_text(rng, 0.5, documents=6))
    still = undrifted(pair)
    rows = still.q.concat(still.k)
    sign = balanced(np.bincount(rows.example_id), 5)
    ends = np.array(
        [[rows.position[rows.example_id == e].min(), rows.position[rows.example_id == e].max()] for e in range(6)]
    )
    found = []
    for draw in sign:
        back = draw[rows.example_id] < 0
        t = np.where(back, ends[rows.example_id].sum(-1) - rows.position, rows.position)
        q, k = slice(0, len(pair.q)), slice(len(pair.q), None)
        found.append(
            float(rotation_model(Moments.from_rows(rows.x[q], t[q]), Moments.from_rows(rows.x[k], t[k])).position_r)
        )
    assert null_of(pair, seed=5) == pytest.approx(np.quantile(found, 0.95), rel=1e-9)


def balanced(n: np.ndarray, seed: int) -> np.ndarray:
    """Documents in random order, each into the half with fewer rows; both halves are as likely to be read backwards."""
    rng, signs = np.random.default_rng(seed), []
    orders = [rng.permutation(len(n)) for _ in range(200)]
    turns = np.where(rng.random(200) < 0.5, -1.0, 1.0)
    for order, turn in zip(orders, turns, strict=True):
        sign, excess = np.zeros(len(n)), 0.0
        for document in order:
            sign[document] = -1.0 if excess > 0 else 1.0
            excess += sign[document] * n[document]
        signs.append(turn * sign)
    return np.array(signs)


def test_both_halves_have_about_as_many_tokens():
    n = np.array([900, 100, 500, 400, 300, 200, 600, 800])
    assert np.abs(_balanced(n, np.random.default_rng(0)) @ n).max() <= n.max()


def test_a_strong_drift_does_not_raise_the_null():
    """The null of a head, and of the same head with its drift removed: within a fifth of each other."""
    for seed in range(5):
        head = plant(16, alpha_q=4e-3, alpha_k=4e-3, n=2000, documents=32, sigma_document=0.5, seed=seed)
        pair = Pair(head.q, head.k)
        assert null_of(pair) == pytest.approx(null_of(undrifted(pair)), rel=0.2)


@pytest.mark.parametrize("documents", [1, 5])
def test_few_documents_have_no_null(documents: int):
    few = Rows(np.random.default_rng(0).standard_normal((20, 3)), np.arange(20), np.arange(20) * documents // 20)
    assert np.isnan(null_r95(Pair(few, few), np.eye(3), [np.zeros(3)] * 2))
