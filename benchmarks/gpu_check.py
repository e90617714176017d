"""The capture on a GPU: bit-identical outputs, the parity gate, and moments against float64, family by family.

python -m benchmarks.gpu_check
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from tests.capture.families import build, families

from qkscope.capture import gate as parity
from qkscope.capture.rope import LayerRope, describe_rope, embeddings
from qkscope.capture.sums.finish import layer_moments
from qkscope.capture.sums.layersums import LayerSums
from qkscope.capture.sums.tokens import BatchTokens, Plan
from qkscope.capture.sums.undone import UndoneQueries
from qkscope.capture.watch import Attention, backbone, watching
from qkscope.core.moments import Moments

LENGTH = 512


BEGIN = 37
"""First token that counts: inside a bucket, as where text goes on after an image."""


def check(name: str, attention: str, dtype: torch.dtype) -> float:
    """Largest relative error of a layer's moments; raises if anything else is wrong."""
    model = build(families()[name], attention, dtype).cuda()
    ids = torch.randint(3, 96, (1, LENGTH), device="cuda")
    with torch.no_grad():
        seen = parity.check(model, lambda: backbone(model)(ids).last_hidden_state)
    at = torch.arange(LENGTH, device="cuda")
    found = embeddings(model)
    plan, begins = Plan(LENGTH, 16, 4), np.array([BEGIN])
    tokens = BatchTokens(0, np.array([LENGTH]), np.array([1]), [np.arange(40, 50)], begins=begins)
    ropes = {call.layer: describe_rope(call, at, found, LENGTH) for call in seen}
    sums = {
        layer: LayerSums(plan, rope, undone=None if rope is None else UndoneQueries(rope))
        for layer, rope in ropes.items()
    }
    kept: dict[int, Attention] = {}

    def add(call: Attention) -> None:
        rope = ropes[call.layer]
        sums[call.layer].add(call, tokens, None if rope is None else rope.embedding.angles(at))
        kept[call.layer] = call

    with torch.no_grad(), watching(model, add):
        model(ids)
    worst = 0.0
    for layer, call in kept.items():
        moments = layer_moments(sums[layer])
        for got, x in ((moments.q, call.q), (moments.k, call.k)):
            worst = max(worst, _error(got[0].merged(), x[0, 0, BEGIN:].double()))
        rope = ropes[layer]
        if moments.undone is not None and rope is not None and not rope.temperature:
            undone = _turned_back(call.q[0, 0].double(), rope, at)[BEGIN:]
            worst = max(worst, _error(moments.undone[0], undone))
    return worst


def _error(got: Moments, x: torch.Tensor) -> float:
    """Largest error of a scatter, relative to the spread of both coordinates."""
    exact = Moments.from_rows(x.cpu().numpy(), np.arange(BEGIN, LENGTH))
    spread = np.sqrt(np.maximum(np.diag(exact.scatter), 1e-30))
    return float(np.abs((got.scatter - exact.scatter) / np.outer(spread, spread)).max())


def _turned_back(x: torch.Tensor, rope: LayerRope, at: torch.Tensor) -> torch.Tensor:
    """Vectors (T, d) with their rotation undone, in float64."""
    first, second = rope.coordinates
    cos, sin = (part.double() / rope.attention_factor for part in rope.embedding.angles(at))
    u, v, sin = x[:, first].clone(), x[:, second].clone(), rope.sign * sin
    x[:, first], x[:, second] = u * cos + v * sin, v * cos - u * sin
    return x


def main() -> None:
    failed = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, family in families().items():
        for attention in ["eager"] if family.eager_only else ["eager", "sdpa"]:
            for dtype in (torch.float32, torch.bfloat16):
                label = f"{name}, {attention}, {str(dtype).removeprefix('torch.')}"
                try:
                    error = check(name, attention, dtype)
                    print(f"{label:<40} {error:.1e}", flush=True)
                    if error > (1e-5 if dtype == torch.float32 else 2e-3):
                        failed.append(label)
                except Exception as problem:
                    print(f"{label:<40} FAILED {type(problem).__name__}: {str(problem)[:160]}", flush=True)
                    failed.append(label)
    print(f"{len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
