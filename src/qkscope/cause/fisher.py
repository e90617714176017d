"""Estimate the effect of every term of every head on the predictions, from a few backward passes.

Let m multiply one term of one head's scores (intervene.py); at m = 1 nothing is changed. For labels y drawn from the
model's own prediction p,

    F = E_{y∼p}[(∂ log p(y) / ∂m)²]

is the Fisher information of m, and ½γ²F is the divergence KL(p‖p') of scaling the term by 1 − γ, to second order. One
backward pass gives the derivative for all heads and terms at once; its square, over the number of tokens, is one draw
of F per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from qkscope.cause.ablation import NextTokens
from qkscope.cause.intervene import LayerHead, by_layer, rewriting
from qkscope.cause.lockedmodel import LockedModel
from qkscope.cause.terms import ScaledLayer
from qkscope.errors import CaptureError
from qkscope.headids import TERMS


def fisher_draws(
    locked: LockedModel, heads: list[LayerHead], documents: torch.Tensor, draws: int, seed: int
) -> np.ndarray:
    """Return draws of F per token (draws, B, heads, 4) on documents (B, T) of one length."""
    texts, length = documents.shape
    by_head = by_layer(dict.fromkeys(heads))
    leaves = {
        layer: torch.ones(texts, len(numbers), len(TERMS), requires_grad=True) for layer, numbers in by_head.items()
    }
    rewrites = {
        layer: ScaledLayer.of(locked, layer, numbers, leaves[layer]).rewrite for layer, numbers in by_head.items()
    }
    generator = torch.Generator(documents.device).manual_seed(seed)
    rank = {head: n for n, head in enumerate(sorted(heads))}
    order = [rank[head] for head in heads]
    next_tokens = NextTokens.of(locked.model, documents[0])
    samples: list[np.ndarray] = []
    with frozen_weights(locked.model), rewriting(locked.model, rewrites):
        states = next_tokens.states(documents)
        for slopes in _slopes(next_tokens, states.detach(), texts, length, draws, generator):
            gradients = torch.autograd.grad(
                states, list(leaves.values()), slopes, retain_graph=len(samples) + 1 < draws
            )
            squares = torch.cat([gradient.cpu().double() for gradient in gradients], 1).square() / length
            samples.append(squares[:, order].numpy())
    return np.stack(samples)


def _slopes(
    next_tokens: NextTokens, states: torch.Tensor, texts: int, length: int, draws: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return for each draw of labels, from the model's prediction, the slope of their loss in the states (B·T, d)."""
    chances = [torch.rand(texts * length, 1, generator=generator, device=states.device) for _ in range(draws)]
    slopes = [torch.empty_like(states) for _ in range(draws)]
    for rows in next_tokens.rows(len(states)):
        some = states[rows].requires_grad_()
        logits = next_tokens.logits(some)
        cumulated = logits.detach().softmax(-1).cumsum(-1)
        for draw, (chance, slope) in enumerate(zip(chances, slopes, strict=True)):
            labels = torch.searchsorted(cumulated, chance[rows] * cumulated[:, -1:])[:, 0].clamp_max(
                logits.shape[-1] - 1
            )
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (slope[rows],) = torch.autograd.grad(loss, some, retain_graph=draw + 1 < draws)
    return slopes


@contextmanager
def frozen_weights(model: PreTrainedModel) -> Iterator[None]:
    """Compute no gradient with respect to the weights, within the context, which saves memory."""
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def check_differentiable(model: PreTrainedModel) -> None:
    """Raise an error if no gradient passes through the model: its weights are quantised."""
    kinds = {parameter.dtype for parameter in model.parameters() if not parameter.dtype.is_floating_point}
    method = str(getattr(model, "quantization_method", None) or "").lower()  # of GGUF, weights are unpacked on loading
    if (getattr(model, "is_quantized", False) and "gguf" not in method) or kinds:
        how = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "quantised"
        raise CaptureError(
            f"no gradient passes through this model (its weights are {how}); load it unquantised, or give --passes 0"
        )
