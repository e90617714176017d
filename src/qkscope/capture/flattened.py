"""Attention calls of a serving engine, in which tokens of several requests follow each other: a call for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from qkscope.capture.attention import Attention
from qkscope.capture.rope import by_heads
from qkscope.capture.rotated import Rotary, Turned
from qkscope.errors import CaptureError


@dataclass(frozen=True)
class RequestSpan:
    """The tokens of one request in a call, as the engine's metadata say."""

    column: int
    """First column of the call."""
    position: int
    """Position of that token in its request."""
    length: int

    @property
    def columns(self) -> slice:
        """The columns of the call."""
        return slice(self.column, self.column + self.length)


def documents_of(
    spans: Sequence[RequestSpan], ids: np.ndarray, sent: Sequence[np.ndarray], read: Iterable[int] = ()
) -> list[int]:
    """Which of the documents sent each request is, by its tokens ``ids``, besides those that were read before.

    Which of several that are equal is theirs does not matter. An error if one is not read as a whole.
    """
    numbers, waiting = list[int](), [number for number in range(len(sent)) if number not in set(read)]
    for span in spans:
        tokens = ids[span.columns]
        same = [n for n in waiting if n not in numbers and np.array_equal(sent[n], tokens)]
        if span.position or not same:
            longest = max(map(len, sent))
            raise CaptureError(
                f"the engine read {span.length} tokens from position {span.position} on, not a whole document; create "
                f"it with enable_prefix_caching=False and max_num_batched_tokens of at least {longest}"
            )
        numbers.append(same[0])
    return numbers


def request_call(attention: Attention, span: RequestSpan) -> Attention:
    """The call of one request alone, as if it had been the only one."""
    (module, *tensors), options = attention.call
    query, key, value = (x[:, :, span.columns] for x in tensors[:3])
    of_request = {name: option for name, option in options.items() if name != "position_ids"}
    return replace(
        attention,
        q=attention.q[:, :, span.columns],
        k=attention.k[:, :, span.columns],
        rotary=None if attention.rotary is None else _rotary(attention, attention.rotary, span),
        call=((module, query, key, value, *tensors[3:]), of_request),
    )


def request_output(output: torch.Tensor, span: RequestSpan) -> torch.Tensor:
    """The output of one request (1, T, …), of that of all (T of all, …), with or without a batch of one."""
    flat = output.reshape(-1, output.shape[-1]) if output.ndim == 2 else output.reshape(-1, *output.shape[2:])
    return flat[None, span.columns]


def _rotary(attention: Attention, rotary: Rotary, span: RequestSpan) -> Rotary:
    q = _turned(attention.q, rotary.q, span)
    return Rotary(q, None if rotary.k is None else _turned(attention.k, rotary.k, span))


def _turned(x: torch.Tensor, turned: Turned, span: RequestSpan) -> Turned:
    length = x.shape[2]
    before, after = (by_heads(part, x)[:, :, span.columns] for part in (turned.before, turned.after))
    angles = (part.reshape(-1, length, part.shape[-1])[:1, span.columns] for part in turned.angles)
    return Turned(before, after, tuple(angles))
