"""The null of position_r: how it is computed, and how often noise passes it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import lfilter

from qkscope.analyses.nulls import null_r95
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


def pooled_cov(pair: Pair) -> np.ndarray:
    return np.cov(np.concatenate([pair.q.x, pair.k.x]).T, bias=True)


def position_r(pair: Pair) -> float:
    q, k = (Moments.from_rows(rows.x, rows.position) for rows in (pair.q, pair.k))
    return float(rotation_model(q, k).position_r)


@pytest.mark.parametrize("likeness", [0.0, 0.9, 0.98])
def test_noise_seldom_passes_however_alike_its_neighbours(likeness: float):
    rng = np.random.default_rng(int(100 * likeness))
    passed = 0
    for _ in range(100):
        pair = Pair(like_text(rng, likeness), like_text(rng, likeness))
        passed += position_r(pair) > null_r95(pair, pooled_cov(pair))
    # 5% by construction; more than 11 of 100 has probability 0.4%.
    assert passed <= 11


def test_drift_passes():
    head = plant(16, alpha_q=1e-3, alpha_k=1e-3, n=2000, documents=32)
    pair = Pair(head.q, head.k)
    assert position_r(pair) > 1.5 * null_r95(pair, pooled_cov(pair))


def test_signed_parts_are_positions_read_backwards():
    """The same draws, with the positions written out."""
    rng = np.random.default_rng(2)
    pair = Pair(like_text(rng, 0.5, documents=6), like_text(rng, 0.5, documents=6))
    rows = pair.q.concat(pair.k)
    sign = np.where(np.random.default_rng(5).random((200, 6)) < 0.5, -1, 1)
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
    assert null_r95(pair, pooled_cov(pair), seed=5) == pytest.approx(np.quantile(found, 0.95), rel=1e-9)


def test_one_document_has_no_null():
    one = Rows(np.random.default_rng(0).standard_normal((20, 3)), np.arange(20), np.zeros(20, dtype=int))
    assert np.isnan(null_r95(Pair(one, one), np.eye(3)))
