"""The gate before every run: watching must not change the model, and what is watched must be what attends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from qkscope.capture.attention import Attention, OnAttention, OnOutput, watching
from qkscope.capture.weights import attention_weights, for_each_query_head
from qkscope.errors import CaptureError

Watch = Callable[[OnAttention, OnOutput], AbstractContextManager[None]]
"""How calls are watched, where it is not as those of any model."""

_log = logging.getLogger("qkscope")
_ATTEMPTS = 4
"""Pairs of passes, plain and watched, that may differ before watching is blamed."""
_ROWS = 128
"""Queries whose attention is recomputed."""

_GATE = 256, 1024
"""Tokens of the first document that the gate looks at: at least and at most so many."""
_SHARE = 128
"""One in so many of all tokens, in between: its passes shall cost little beside those of all documents."""


def gate_tokens(in_all: int, window: int | None) -> int:
    """Tokens of the first document that the gate looks at.

    >>> gate_tokens(1000, None), gate_tokens(64_000, None), gate_tokens(10**6, 512)
    (256, 500, 512)
    """
    least, most = _GATE
    return min(max(least, in_all // _SHARE), most, window or most)


def check(model: nn.Module, forward: Callable[[], torch.Tensor], watch: Watch | None = None) -> list[Attention]:
    """Run ``forward`` plainly and watched; returns what was seen, or raises if anything differs.

    Hidden states are compared bit for bit, and each layer's attention output is recomputed from q and k by hand. Matrix
    products need not repeat themselves to the last bit (it can depend on where in memory their operands lie), so a
    difference counts only if no watched pass equals any plain one in a few attempts.
    """
    watch = watch or partial(watching, model)
    plain: list[torch.Tensor] = []
    seen: list[Attention] = []
    errors: dict[int, float] = {}

    def compare(attention: Attention, output: torch.Tensor) -> None:
        errors[attention.layer] = _recomputed_error(attention, output)

    for _ in range(_ATTEMPTS):
        with torch.compiler.set_stance("force_eager"):  # as when it is watched
            plain.append(forward())
        _refuse_non_finite(model, plain[0])
        seen.clear()
        with watch(seen.append, compare):
            watched = forward()
        if any(torch.equal(one, watched) for one in plain):
            break
    else:
        raise CaptureError("parity: the model's hidden states change when its attention is watched")
    _refuse_several_calls(seen)
    worst = max(errors, key=lambda layer: errors[layer])
    limit = 1e-3 if seen[0].q.dtype == torch.float32 else 5e-2
    if not errors[worst] < limit:
        raise CaptureError(
            f"parity: attention recomputed from q and k of layer {worst} is off by {errors[worst]:.1e} of its size; "
            "its scores are not products of queries and keys alone"
        )
    _log.info(
        "checked on %d tokens: watching changes no bit, and attention recomputed from q and k is off by at most %.0e",
        seen[0].q.shape[2], errors[worst],
    )  # fmt: skip
    return seen


def _refuse_several_calls(seen: list[Attention]) -> None:
    """Tell layers that attend more than once in a pass, and models whose attention was not called at all."""
    if not seen:
        raise CaptureError("parity: the model's attention layers were not called")
    calls = Counter(attention.layer for attention in seen)
    layer, most = calls.most_common(1)[0]
    if most > 1:
        raise CaptureError(
            f"layer {layer} attends {most} times in one pass (two maps per layer, or layers that are used again); "
            "which of them is meant cannot be told"
        )


def _refuse_non_finite(model: nn.Module, hidden: torch.Tensor) -> None:
    """Tell weights that are not finite, and states that overflow, from a model that changes when it is watched."""
    if torch.isfinite(hidden).all():
        return
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CaptureError(
                f"the model's weights contain non-finite values, first in {name}; choose another checkpoint"
            )
    raise CaptureError("the model's hidden states contain non-finite values; try --dtype float32 or bfloat16")


def _recomputed_error(attention: Attention, output: torch.Tensor) -> float:
    """Relative error of softmax(scaling · qkᵀ + mask)v, for the last queries, against the model's own output."""
    _, query, _, value = attention.call[0][:4]
    length = query.shape[2]
    columns = torch.arange(max(0, length - _ROWS), length, device=query.device)
    values = for_each_query_head(value[0], query[0]).float()
    expected = (attention_weights(attention, 0, columns).weights @ values).transpose(0, 1)
    got = output.reshape(output.shape[0], length, query.shape[1], -1)[0, columns].float()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))
