"""Data that the layers of a pass share, and data that they must not share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qkscope.analyses.positionlocked import LockedSums, locked_split
from qkscope.capture.rope import LayerRope
from qkscope.capture.sums import layersums
from qkscope.capture.sums.finish import layer_moments
from qkscope.capture.sums.layersums import LayerSums, waves
from qkscope.capture.sums.tokens import BatchTokens, Plan
from qkscope.core.rope import Rope


def seen(device: str, d: int = 4) -> Any:
    q, k = (torch.randn(1, heads, 8, d, device=device) for heads in (2, 1))
    return SimpleNamespace(q=q, k=k, layer=0, rotary=None)


def test_layers_on_another_device_do_not_get_the_weights_of_the_first():
    """The device without memory stands for a second GPU."""
    tokens, plan = BatchTokens(0, np.array([8]), np.array([0]), [np.array([], int)]), Plan(16, 2, 0)
    for device in ("cpu", "meta", "cpu"):
        LayerSums(plan, None).add(seen(device), tokens, None)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("start", [0, 2])
def test_waves_undo_the_rotation(layout, start):
    rope = LayerRope([0.3, 0.01], 1.5, layout, start, -1, False, False, None)  # type: ignore[arg-type]
    t = torch.arange(8)
    angles = tuple(wave(t[:, None] * torch.tensor([0.3, 0.01])) * 1.5 for wave in (torch.cos, torch.sin))
    still = torch.randn(2, 2, dtype=torch.complex64)
    turned = 1.5 * still[:, None] * torch.exp(-1j * t[:, None] * torch.tensor([0.3, 0.01]))
    x = torch.randn(1, 2, 8, 8)
    first, second = rope.coordinates
    x[0, :, :, first], x[0, :, :, second] = turned.real, turned.imag
    sums = LayerSums(Plan(16, 2, 0), rope)
    call = SimpleNamespace(q=x, k=x[:, :1], layer=0, rotary=None)
    sums.add(call, BatchTokens(0, np.array([8]), np.array([3]), [np.array([], int)]), angles)  # type: ignore[arg-type]
    assert sums.q is not None
    assert sums.q.unrotated is not None
    found = torch.view_as_complex(sums.q.unrotated[:, 3]) / 8
    torch.testing.assert_close(found, (1.5 * still).to(torch.complex128), rtol=1e-5, atol=1e-6)
    cos, _ = waves(angles, torch.ones(1, 8), rope, 8).tables  # type: ignore[arg-type]
    unturned = torch.ones(8, dtype=torch.bool)
    unturned[first] = unturned[second] = False
    assert not cos[..., unturned].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-3)])
def test_shares_are_exact_where_the_mean_is_200_standard_deviations(dtype, tolerance, monkeypatch):
    """Relative to the variance about μ̃, each rounding of its square counts 40,000 times.

    Vectors in half precision are summed as on a GPU; the cosines that multiply them are rounded to half precision.
    """
    monkeypatch.setattr(layersums, "supports", lambda _q, _k: dtype is torch.bfloat16)
    rng, theta = np.random.default_rng(0), 1e6 ** (-np.array([0, 0.4, 0.6, 0.75, 0.9, 0.99]))
    documents, length, t, group = 8, 300, np.arange(300), np.arange(8)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)

    still = 200 * np.exp(1j * np.arange(6)) + 0.3 * normal(documents, 1, 6) + normal(documents, length, 6)
    z = still * np.exp(1j * t[:, None] * theta)
    x = torch.from_numpy(np.concatenate([z.real, z.imag], -1)).to(dtype)
    angle = torch.from_numpy(t[:, None] * theta).float()
    plan = Plan(length, 4, 4)
    sums = LayerSums(plan, LayerRope(theta.tolist(), 1.0, "half", 0, 1, False, False, None))  # type: ignore[arg-type]
    for i in range(0, documents, 2):
        call = SimpleNamespace(q=x[i : i + 2, None], k=x[i : i + 2, None], layer=0, rotary=None)
        tokens = BatchTokens(0, np.full(2, length), group[i : i + 2], [np.arange(0)] * 2)
        sums.add(call, tokens, (angle.cos(), angle.sin()))  # type: ignore[arg-type]
    moments, rope = layer_moments(sums), Rope(theta)
    found = locked_split(LockedSums.of_moments(moments.k[0], moments.rotary(0, 0, rope).k), rope).by_plane[:6]
    plain = rope.planes_of(x[:, 4:].double().numpy())
    turned_back = plain * np.exp(-1j * t[4:, None] * theta)
    content, total = (
        sum(np.sum(abs(v[g] - np.delete(v, g, 0).mean((0, 1))) ** 2, 0) for g in group) for v in (turned_back, plain)
    )
    np.testing.assert_allclose(found, 1 - content / total, atol=tolerance)
