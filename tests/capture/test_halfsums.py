"""Sums from half-precision vectors against the plain ones on the very same numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qkscope.capture.rope import LayerRope
from qkscope.capture.sums import halfsums, layersums
from qkscope.capture.sums.finish import layer_moments
from qkscope.capture.sums.gramsums import GramSums
from qkscope.capture.sums.halfsums import RowSums
from qkscope.capture.sums.layersums import LayerSums
from qkscope.capture.sums.tokens import BatchTokens, Plan

HEADS, KEY_HEADS, D = 4, 2, 16


def rope(layout: str = "half", sign: int = 1, start: int = 0, planes: int = 8) -> LayerRope:
    return LayerRope([0.1] * planes, 1.25, layout, start, sign, False, False, None)


def passes(rng: np.random.Generator, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, BatchTokens]]:
    """Two passes of two documents of unequal length, far from zero; the second goes on where the first stopped.

    The last begins within a bucket, as text after an image does.
    """
    mean = 10.0 * rng.standard_normal((HEADS + KEY_HEADS, 1, D))
    found = []
    for first, columns, lengths in ((0, 90, [90, 70]), (90, 50, [50, 0]), (0, 96, [20, 96])):
        x = mean + rng.standard_normal((2, HEADS + KEY_HEADS, columns, D))
        q, k = (torch.from_numpy(part).to(dtype) for part in (x[:, :HEADS], x[:, HEADS:]))
        groups = np.array([3, 5]) if len(found) < 2 else np.array([5, 6])
        found.append((q, k, BatchTokens(first, np.array(lengths), groups, [np.arange(0)] * 2)))
    q, k, _ = found[1]
    between = BatchTokens(60, np.array([50, 45]), np.array([1, 2]), [np.arange(0)] * 2, begins=np.array([20, 0]))
    return [*found, (q, k, between)]


def moments(plan: Plan, calls, turns, *, half: bool, monkeypatch, way: type = RowSums):
    monkeypatch.setattr(layersums, "supports", lambda _q, _k: half)
    if way is GramSums:
        monkeypatch.setattr(layersums, "trusted", lambda *_: True)
        monkeypatch.setattr(layersums, "far_means", lambda q, k, _: torch.zeros(q.shape[1] + k.shape[1], q.shape[-1]))
    sums = LayerSums(plan, turns)
    for q, k, tokens in calls:
        t = torch.arange(tokens.first, tokens.first + q.shape[2])[:, None]
        angle = t * 100.0 ** (-torch.arange(turns.planes) / turns.planes)
        seen = SimpleNamespace(q=q if half else q.float(), k=k if half else k.float())
        sums.add(seen, tokens, (1.25 * angle.cos(), 1.25 * angle.sin()))
    assert (type(sums.half) is way) if half else sums.half is None
    return layer_moments(sums)


@pytest.mark.parametrize("way", [RowSums, GramSums])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [("half", 1, 0, 8), ("interleaved", -1, 4, 4)])
def test_sums_agree_with_those_in_full_precision(way, dtype, options, monkeypatch):
    layout, sign, start, planes = options
    plan, turns = Plan(150, 5, 4), rope(layout, sign, start, planes)
    calls = passes(np.random.default_rng(0), dtype)
    exact = moments(plan, calls, turns, half=False, monkeypatch=monkeypatch)
    found = moments(plan, calls, turns, half=True, monkeypatch=monkeypatch, way=way)
    for name in ("q", "k", "q_buckets"):
        one, two = getattr(found, name), getattr(exact, name)
        np.testing.assert_array_equal(one.n, two.n)
        spread = np.sqrt(np.maximum(np.diagonal(two.scatter, axis1=-2, axis2=-1), 1e-12))
        scale = np.where(
            spread[..., :, None] * spread[..., None, :] > 1e-9, spread[..., :, None] * spread[..., None, :], 1
        )
        assert np.abs((one.scatter - two.scatter) / scale).max() < (1e-2 if dtype is torch.bfloat16 else 1e-3)
        deviation = spread / np.sqrt(np.maximum(two.n, 1))[..., None]
        assert np.abs(one.mean - two.mean).max() < 1e-2 * deviation.max()
        np.testing.assert_allclose(one.mean_t, two.mean_t, atol=1e-9)
        np.testing.assert_allclose(one.var_t, two.var_t, rtol=1e-6, atol=1e-9)
    for name in ("q_cells", "k_cells"):
        one, two = getattr(found, name), getattr(exact, name)
        np.testing.assert_array_equal(one.n, two.n)
        np.testing.assert_allclose(one.mean_x, two.mean_x, atol=5e-3)
        np.testing.assert_allclose(one.mean_t, two.mean_t, atol=1e-9)
    counts = exact.q.n.max()
    for name in ("unrotated_q", "unrotated_k"):
        np.testing.assert_allclose(getattr(found, name) / counts, getattr(exact, name) / counts, atol=2e-3)


@pytest.mark.parametrize("way", [RowSums, GramSums])
def test_positions_are_exact_in_wide_buckets(way, monkeypatch):
    """8,192 positions in a bucket: more than half precision can count."""
    length, plan = 16_384, Plan(16_384, 2, 4)
    q = torch.ones(1, 1, length, 2, dtype=torch.bfloat16)
    q[..., 0] = torch.arange(length) % 2
    tokens = BatchTokens(0, np.array([length]), np.array([0]), [np.arange(0)])
    found = moments(plan, [(q, q, tokens)], rope(planes=1), half=True, monkeypatch=monkeypatch, way=way)
    t = np.arange(4, length)
    assert float(found.q.var_t[0, 0]) == pytest.approx(t.var(), rel=1e-12)
    exact = np.cov(t % 2, t, bias=True)[0, 1]
    assert float(found.q.cov_xt[0, 0, 0]) == pytest.approx(exact, abs=0.02)


def test_long_calls_are_copied_in_parts(monkeypatch):
    calls = passes(np.random.default_rng(1), torch.bfloat16)
    plan = Plan(150, 5, 4)
    whole = moments(plan, calls, rope(), half=True, monkeypatch=monkeypatch, way=RowSums)
    monkeypatch.setattr(halfsums, "TOKENS_AT_ONCE", 60)
    parts = moments(plan, calls, rope(), half=True, monkeypatch=monkeypatch, way=RowSums)
    np.testing.assert_allclose(parts.q.scatter, whole.q.scatter, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(parts.unrotated_k, whole.unrotated_k, rtol=1e-4, atol=1e-2)
    np.testing.assert_array_equal(parts.k_cells.n, whole.k_cells.n)


@pytest.mark.parametrize("way", [RowSums, GramSums])
def test_what_does_not_count_need_not_be_finite(way, monkeypatch):
    """Padding and the first positions of a document may hold anything."""
    calls = passes(np.random.default_rng(2), torch.bfloat16)[:1]
    plan = Plan(150, 5, 4)
    whole = moments(plan, calls, rope(), half=True, monkeypatch=monkeypatch, way=way)
    (q, k, tokens) = calls[0]
    for x in (q, k):
        x[:, :, :4] = float("nan")
        x[1, :, 70:] = float("inf")
    found = moments(plan, [(q, k, tokens)], rope(), half=True, monkeypatch=monkeypatch, way=way)
    np.testing.assert_array_equal(found.q.scatter, whole.q.scatter)
    np.testing.assert_array_equal(found.unrotated_k, whole.unrotated_k)
