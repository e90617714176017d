"""Results on documents they were not fitted to."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from qkscope.analyses.heldout import held_out, lda_accuracy
from qkscope.analyses.rotationmodel import rotation_model
from qkscope.core.headmoments import group_moments
from qkscope.core.moments import Moments
from qkscope.core.planted import plant
from qkscope.core.rows import Pair, Rows
from tests.helpers import moments_of, moments_of_rows


def test_r_on_other_documents_is_that_of_the_other_half():
    head = plant(12, n=3000, documents=16)
    found = held_out(moments_of(head))
    expected = []
    for side in (0, 1):
        q, k = (
            Moments.from_rows(rows.x[rows.example_id % 2 == side], rows.position[rows.example_id % 2 == side])
            for rows in (head.q, head.k)
        )
        a = rotation_model(q, k).a
        other = head.q.take(np.flatnonzero(head.q.example_id % 2 != side))
        expected.append(np.corrcoef(other.x @ a, other.position)[0, 1])
    assert found.r_q_heldout[0] == pytest.approx(np.mean(expected), rel=1e-9)


def test_noise_keeps_no_r_on_other_documents():
    """Axis a always finds some r in many dimensions; other documents do not confirm it."""
    heads = [plant(64, alpha_q=0.0, alpha_k=0.0, n=600, documents=16, seed=s) for s in range(20)]
    moments = moments_of(*heads)
    fitted = rotation_model(moments.total_q, moments.total_k).position_r
    assert fitted.mean() > 0.15
    assert abs(held_out(moments).r_q_heldout.mean()) < 0.04


def test_a_half_without_documents_says_nothing():
    head = plant(6, n=400, documents=4)
    even = Rows(head.q.x, head.q.position, head.q.example_id * 2)
    keys = Rows(head.k.x, head.k.position, head.k.example_id * 2)
    assert np.isnan(held_out(moments_of_rows(even, keys)).r_k_heldout[0])
    axes = np.eye(6)[:2]
    assert np.isnan(lda_accuracy(group_moments(even), group_moments(keys), Pair(even, keys), axes)[0])


def test_the_line_is_scikit_learns_on_the_other_half():
    head = plant(8, mu_q=(0.5, 0.8), mu_k=(0.0, 0.0), n=2000, documents=16)
    axes = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 2)))[0].T
    axes[0] = head.truth.b
    axes[1] -= (axes[1] @ axes[0]) * axes[0]
    axes[1] /= np.linalg.norm(axes[1])
    accuracy, again = lda_accuracy(group_moments(head.q), group_moments(head.k), Pair(head.q, head.k), axes)
    x = np.concatenate([head.q.x, head.k.x]) @ axes.T
    y = np.repeat([1, 0], [len(head.q), len(head.k)])
    odd = np.concatenate([head.q.example_id, head.k.example_id]) % 2 == 1
    scores = []
    for side in (odd, ~odd):
        model = LinearDiscriminantAnalysis(priors=[0.5, 0.5]).fit(x[~side], y[~side])
        right = model.predict(x[side]) == y[side]
        scores.append((right[y[side] == 1].mean() + right[y[side] == 0].mean()) / 2)
    assert accuracy == pytest.approx(np.mean(scores), abs=2e-3)
    assert again.shape == (8,)
    assert np.abs(again - accuracy).max() < 0.05


def test_one_component_has_a_line_too():
    """The line is a threshold if there is one axis; position plays no part."""
    head = plant(8, mu_q=(0.5, 1.5), mu_k=(0.0, -1.5), n=2000, documents=16)
    accuracy, _ = lda_accuracy(group_moments(head.q), group_moments(head.k), Pair(head.q, head.k), head.truth.b[None])
    on_q, on_k = head.q.x @ head.truth.b, head.k.x @ head.truth.b
    middle = (on_q.mean() + on_k.mean()) / 2
    assert accuracy == pytest.approx(((on_q > middle).mean() + (on_k <= middle).mean()) / 2, abs=0.01)
