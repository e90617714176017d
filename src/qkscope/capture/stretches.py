"""Stretches of text between images: the part of an attention call that is one, and which of its tokens count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from qkscope.capture.attention import Attention
from qkscope.capture.imageinputs import TextStretch
from qkscope.capture.rope import by_heads
from qkscope.capture.sums.tokens import BatchTokens
from qkscope.core.headmoments import N_GROUPS


def stretch_tokens(stretch: TextStretch, example: int, kept: np.ndarray, width: int) -> BatchTokens:
    """The tokens of a stretch of a document, with columns before them that do not count back to a bucket's beginning.

    Of images, the distance of a key is not one number, so no queries are followed through all their keys.
    """
    position, end = stretch.positions
    first = position // width * width
    return BatchTokens(
        first=first,
        lengths=np.array([end - first]),
        groups=np.array([example % N_GROUPS]),
        kept=[kept[(kept >= position) & (kept < end)] - first],
        begins=np.array([position - first]),
    )


def stretch_of(attention: Attention, stretch: TextStretch, tokens: BatchTokens, *, temperature: bool) -> Attention:
    """The call of these tokens alone, after columns of zeros; with what was rotated if that tells a temperature."""
    begin = stretch.position - tokens.first

    def part(x: torch.Tensor) -> torch.Tensor:
        of_stretch = x[:, :, stretch.column : stretch.column + stretch.length]
        return torch.nn.functional.pad(of_stretch, (0, 0, begin, 0))

    rotary = attention.rotary
    if temperature and rotary is not None:
        after = part(by_heads(rotary.q.after, attention.q))
        rotary = replace(rotary, q=replace(rotary.q, after=after))
    return replace(attention, q=part(attention.q), k=part(attention.k), rotary=rotary)
