"""The angles of a forward pass, as a table for products and as sums over its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from qkscope.capture.sums.tokens import BatchTokens, Plan


@dataclass
class UndoneRotation:
    """Cosines and sines (T, planes) at the positions of a forward pass, shared by all layers with one embedding."""

    cos: torch.Tensor
    sin: torch.Tensor
    _table: torch.Tensor | None = None
    _sums: torch.Tensor | None = None

    def table(self, dtype: torch.dtype) -> torch.Tensor:
        """Cosines and then sines (T, 2·planes), in the precision of the vectors."""
        if self._table is None or self._table.dtype != dtype:
            self._table = torch.cat([self.cos, self.sin], -1).to(dtype)
        return self._table

    def sums(self, tokens: BatchTokens, plan: Plan, dtype: torch.dtype) -> torch.Tensor:
        """Sums over the tokens of each row that count, by bucket (B, buckets, planes, 4), in float64.

        The four are cosines, sines, and the rounding errors of the table for each.
        """
        if self._sums is None:
            exact = torch.stack([self.cos, self.sin], -1).double()
            coarse = torch.stack(self.table(dtype).double().chunk(2, -1), -1)
            values = torch.cat([exact, exact - coarse], -1)
            edges = [bucket * plan.width - tokens.first for bucket in range(plan.buckets + 1)]
            rows = [
                [values[max(a, begin) : max(min(b, end), 0)].sum(0) for a, b in pairwise(edges)]
                for begin, end in tokens.counted(plan)
            ]
            self._sums = torch.stack([torch.stack(row) for row in rows])
        return self._sums
