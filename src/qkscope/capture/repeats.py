"""Random tokens, and the same tokens again: the input that shows which heads look for what came before.

Induction heads attend to the token after the earlier occurrence of the current one, and echo heads to that occurrence.
In random tokens nothing else points there: neither grammar nor nearness, since both are one copy away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from qkscope.capture.gate import attention_weights
from qkscope.capture.watch import Attention
from qkscope.core.headmoments import N_GROUPS

COPY = 64
"""Tokens of a copy, at most."""
_FEWEST = 4
_SEED = 0


@dataclass(frozen=True)
class RepeatedTokens:
    """The rule by which repeated tokens are drawn: eight times, from a fixed seed, no token twice in a copy."""

    bos: int | None = None
    """The token that documents begin with."""
    special: tuple[int, ...] = ()
    """Tokens that are never drawn."""
    n_tokens: int | None = None
    """Tokens of the tokenizer; those of the model beyond them are never drawn. None: no tokenizer is known."""

    def draws(self, vocabulary: int, longest: int) -> np.ndarray | None:
        """Return the ids of each draw (8, tokens); None if the vocabulary or the model's context is too small."""
        allowed = np.setdiff1d(np.arange(min(vocabulary, self.n_tokens or vocabulary)), self.special)
        copy = min(COPY, len(allowed), (longest - self.begin) // 2)
        if copy < _FEWEST:
            return None
        rng = np.random.default_rng(_SEED)
        first = [[] if self.bos is None else [self.bos]] * N_GROUPS
        copies = [rng.choice(allowed, copy, replace=False) for _ in range(N_GROUPS)]
        return np.array([[*bos, *ids, *ids] for bos, ids in zip(first, copies, strict=True)], dtype=np.int64)

    @property
    def begin(self) -> int:
        """Position of the first token that is repeated."""
        return 0 if self.bos is None else 1

    def attention(self, attention: Attention) -> torch.Tensor:
        """Return the mean weights on the earlier copy of each query's token and on the next one (H, 2), float64.

        The queries are those of the second copy but its last, whose next token is itself in the second copy.
        """
        copy = (attention.q.shape[2] - self.begin) // 2
        columns = torch.arange(self.begin + copy, self.begin + 2 * copy - 1, device=attention.q.device)
        weights = attention_weights(attention, columns[None]).weights[0]
        on = [weights[..., self.begin + shift :].diagonal(dim1=-2, dim2=-1) for shift in (0, 1)]
        return torch.stack([of_queries.double().mean(-1) for of_queries in on], -1)
