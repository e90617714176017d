"""Attention weights of some queries over all their keys, summed by distance, on the layer's own device.

The keys of a bin are neighbours, so each sum is one over ranges of keys, the same in all layers of a pass.
"""

from __future__ import annotations

import numpy as np
import torch

from qkscope.capture.gate import attention_weights, mask_of, own_mask
from qkscope.capture.sums.gramsums import trusted
from qkscope.capture.sums.halfsums import in_groups
from qkscope.capture.sums.tokens import BatchTokens, Plan, on_device
from qkscope.capture.watch import Attention
from qkscope.core.headmoments import N_GROUPS
from qkscope.core.reach import REACH_COUNTS, bin_starts


class ReachSums:
    """The sums of core/reach.py for the query heads of one layer."""

    def __init__(self, plan: Plan, heads: tuple[int, ...], *, both: bool = False) -> None:
        self.plan, self.heads, self.both = plan, list(heads), both
        self.starts = bin_starts(plan.window)
        self.total: torch.Tensor | None = None
        """Weight on sinks, in each bin, and sink gaps (H, 8, bins and 2), float64."""
        self.counts: list[tuple[int, int, torch.Tensor]] = []
        """Group, queries, and how many of these see a sink (1 or H), of each document."""

    def add(self, attention: Attention, tokens: BatchTokens) -> None:
        """Add the chosen queries of one attention call, which has all heads."""
        if self.total is None:
            shape = len(self.heads), N_GROUPS, len(self.starts) + 2
            self.total = torch.zeros(shape, dtype=torch.float64, device=attention.q.device)
        for row, columns in enumerate(tokens.queries):
            if len(columns):
                self._add_row(attention, tokens, row, columns)

    def exact(self) -> torch.Tensor | None:
        """REACH_COUNTS and bins (H, 8, columns); None before the first call."""
        if self.total is None:
            return None
        sums, n = self.total, self.total.new_zeros(2, *self.total.shape[:2])
        if self.counts:
            groups, queries, n_gap_parts = zip(*self.counts, strict=True)
            of_documents = [
                sums.new_tensor(queries).expand(len(sums), -1),
                torch.stack([counted.expand(len(sums)) for counted in n_gap_parts], -1).double(),
            ]
            n = torch.stack(of_documents) @ in_groups(list(groups), sums)
        by_name = {"n": n[0], "sink": sums[..., 0], "gap": sums[..., -1], "n_gap": n[1]}
        return torch.cat([torch.stack([by_name[name] for name in REACH_COUNTS], -1), sums[..., 1:-1]], -1)

    def _add_row(self, attention: Attention, tokens: BatchTokens, row: int, columns: np.ndarray) -> None:
        (_, query, key, *_), _ = attention.call
        device, keys = query.device, key.shape[2]
        assert self.total is not None
        index = tokens.once(("queries", row, device), lambda: on_device(columns, device))
        # With a cache that forgets, the first key of the call is not the first of the document.
        sinks = max(0, self.plan.skip_first - (tokens.first + query.shape[2] - keys))
        call_mask = own_mask(attention)
        if call_mask is not None and call_mask.is_cuda:
            call_mask.record_stream(torch.cuda.current_stream(device))
        kind = (id(call_mask), attention.sliding_window, self.both, row, keys, sinks, device)
        visible = tokens.once(("seen", *kind), lambda: _VisibleKeys(call_mask, mask_of(attention, row, index), sinks))
        ranges = tokens.once(
            ("ranges", row, keys, sinks, device),
            lambda: on_device(self._ranges(columns + keys - query.shape[2], sinks), device),
        )
        attended, group = attention_weights(attention, row, index, visible.mask), int(tokens.groups[row])
        scores, weights = attended.scores, attended.weights
        if len(self.heads) != len(scores):
            scores, weights = scores[self.heads], weights[self.heads]
        _add_ranges(self.total[:, group, :-1], weights, ranges, attention.q)
        if self.both:
            later = tokens.once(
                ("later", row, keys, device), lambda: on_device(self._later_ranges(columns, keys), device)
            )
            _add_ranges(self.total[:, group, :-1], weights, later, attention.q)
        self.total[:, group, -1] += visible.gaps(scores.flatten(1))
        self.counts.append((group, len(columns), visible.both))

    def _ranges(self, query_at: np.ndarray, sinks: int) -> np.ndarray:
        """First key and the one after the last, of sinks and of each bin, for each query (queries, 1 + bins, 2)."""
        nearest = query_at[:, None] - self.starts
        ends = np.maximum(nearest + 1, sinks)
        begins = np.concatenate([ends[:, 1:], np.full((len(ends), 1), sinks)], 1)
        of_sinks = np.stack([np.zeros(len(ends)), np.minimum(sinks, query_at + 1)], -1)[:, None]
        return np.concatenate([of_sinks, np.stack([begins, ends], -1)], 1).astype(np.int64)

    def _later_ranges(self, query_at: np.ndarray, keys: int) -> np.ndarray:
        """The same ranges for the keys after each query, by distance; none of them are sinks."""
        begins = np.minimum(query_at[:, None] + np.maximum(self.starts, 1), keys)
        ends = np.concatenate([begins[:, 1:], np.full((len(begins), 1), keys)], 1)
        none = np.zeros((len(begins), 1, 2))
        return np.concatenate([none, np.stack([begins, ends], -1)], 1).astype(np.int64)


def _add_ranges(total: torch.Tensor, weights: torch.Tensor, ranges: torch.Tensor, queries: torch.Tensor) -> None:
    """Add the sums of weights (H, n, S) over ranges (n, columns, 2) of keys to a total (H, columns)."""
    if weights.is_cuda and trusted(weights.device, queries.dtype, queries.shape[-1]):
        from qkscope.capture.sums import gramkernel

        gramkernel.add_ranges(total, weights, ranges)
        return
    running = torch.nn.functional.pad(weights.cumsum(-1, dtype=torch.float64), (1, 0))
    begin, end = (running.gather(-1, of_all.expand(len(weights), -1, -1)) for of_all in ranges.unbind(-1))
    total += (end - begin).sum(1)


class _VisibleKeys:
    """The keys that the queries of a document see in a pass, the same in all layers with one mask."""

    def __init__(self, own: torch.Tensor | None, mask: torch.Tensor, sinks: int) -> None:
        self.own = own  # kept alive, so that no other mask gets the same id
        lowest = torch.finfo(torch.float32).min / 2
        self.mask = mask.float().clamp_min(lowest)
        """Finite, so that a masked score multiplied by 0 is 0."""
        visible = (mask > lowest).reshape(-1, *mask.shape[-2:]).float()
        n_sink, n_other = (part.sum(-1, keepdim=True) for part in (visible[..., :sinks], visible[..., sinks:]))
        counts = ((n_sink > 0) & (n_other > 0)).float()
        self.both = counts.sum((-2, -1))
        """Queries that see sinks and other keys (1 or H)."""
        means = visible[..., :sinks] / n_sink.clamp_min(1), -visible[..., sinks:] / n_other.clamp_min(1)
        self._gap = (counts * torch.cat(means, -1)).flatten(1)

    def gaps(self, scores: torch.Tensor) -> torch.Tensor:
        """Σ over queries that see both of the mean score of the sinks minus that of the other keys (H,)."""
        return scores @ self._gap[0] if len(self._gap) == 1 else (scores * self._gap).sum(-1)
