"""Test whether slow RoPE planes of copying heads carry what they copy: without these, without others, in other heads.

    python -m benchmarks.slowplanes MODEL [--heads retrieval.json] [--share 0.25] [--draws 8]

Repeated random tokens are shown; the loss is that of the second copy. Planes are taken out of the scores of the heads
that copy most (the top tenth of ``benchmarks.retrieval``): the slowest, the fastest, and as many drawn ones; and the
slowest out of as many drawn heads.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.retrieval import LENGTH, TEXTS, scores
from qkscope.capture import model as models
from qkscope.capture.options import ModelOptions
from qkscope.cause.ablation import NextTokens
from qkscope.cause.intervene import LayerHead, random_planes, without_planes
from qkscope.cause.lockedmodel import describe
from qkscope.results.effects import mean_with_interval


def second_copy(model: PreTrainedModel, changed: Any) -> np.ndarray:
    """Mean loss of the second copy of each text (texts,)."""
    generator, n = torch.Generator().manual_seed(1), model.get_input_embeddings().weight.shape[0]
    losses = []
    with changed:
        for _ in range(TEXTS):
            half = torch.randint(10, n, (LENGTH,), generator=generator)
            text = torch.cat([half, half]).to(model.device)
            losses.append(float(NextTokens.of(model, text).losses(text)[LENGTH:].mean()))
    return np.array(losses)


def slowest(model: PreTrainedModel, heads: list[LayerHead], share: float, *, fast: bool = False) -> Any:
    """Return a share of the planes of these heads, those of the lowest frequencies (or the highest)."""
    layers, chosen = describe(model), {}
    for layer, head in heads:
        rope = layers[layer].rope
        if rope is not None:
            order = np.argsort(np.abs(rope.frequencies) * (-1 if fast else 1), kind="stable")
            chosen[layer, head] = order[: max(1, round(share * len(order)))].tolist()
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--draws", type=int, default=8)
    given = parser.parse_args()
    model = models.load_model(ModelOptions(given.model, dtype="float32"))
    copying = scores(model) if given.heads is None else json.loads(given.heads.read_text())
    names = sorted(copying, key=lambda name: -copying[name])
    every = [(int(layer), int(head)) for layer, head in (name.split("-") for name in names)]
    best, rng = every[: max(1, len(every) // 10)], np.random.default_rng(0)
    plain = second_copy(model, nullcontext())
    print(f"loss of the second copy: {plain.mean():.3f}; planes of {len(best)} of {len(every)} heads")
    slow = slowest(model, best, given.share)

    def rise(planes: Any) -> np.ndarray:
        return second_copy(model, without_planes(model, planes)) - plain

    for name, planes in (("slowest", slow), ("fastest", slowest(model, best, given.share, fast=True))):
        mean, low, high = mean_with_interval(rise(planes), np.ones(TEXTS))
        print(f"without the {name} {given.share:.0%}: {mean:+.3f} [{low:+.3f}, {high:+.3f}]")
    drawn = [rise(random_planes(model, slow, seed)).mean() for seed in range(given.draws)]
    print(f"as many planes, drawn: {np.mean(drawn):+.3f} ({min(drawn):+.3f} to {max(drawn):+.3f})")
    others = [
        rise(slowest(model, [every[i] for i in rng.choice(len(every), len(best), replace=False)], given.share)).mean()
        for _ in range(given.draws)
    ]
    print(f"the slowest, of as many drawn heads: {np.mean(others):+.3f} ({min(others):+.3f} to {max(others):+.3f})")


if __name__ == "__main__":
    main()
