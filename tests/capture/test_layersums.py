"""Data that the layers of a pass share, and data that they must not share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qkscope.capture.rope import LayerRope
from qkscope.capture.sums.layersums import LayerSums, waves
from qkscope.capture.sums.tokens import BatchTokens, Plan


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
    cos, _ = waves(angles, torch.ones(1, 8), rope, 8)  # type: ignore[arg-type]
    unturned = torch.ones(8, dtype=torch.bool)
    unturned[first] = unturned[second] = False
    assert not cos[..., unturned].any()
