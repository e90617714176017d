"""Attention weights of some queries over all their keys, summed by distance, on the layer's own device."""

from __future__ import annotations

import numpy as np
import torch

from qkscope.capture.attention import Attention
from qkscope.capture.sums.tokens import BatchTokens, Plan
from qkscope.capture.weights import attention_weights, mask_of, own_mask
from qkscope.core.headmoments import N_GROUPS
from qkscope.core.reach import REACH_COUNTS, bin_starts


class ReachSums:
    """The sums of core/reach.py for the query heads of one layer."""

    def __init__(self, plan: Plan, heads: tuple[int, ...]) -> None:
        self.plan, self.heads = plan, list(heads)
        self.starts = bin_starts(plan.window)
        self.total: torch.Tensor | None = None
        """(H, 8, REACH_COUNTS and bins), float64."""

    def add(self, attention: Attention, tokens: BatchTokens) -> None:
        """Add the chosen queries of one attention call, which has all heads."""
        if self.total is None:
            shape = len(self.heads), N_GROUPS, len(REACH_COUNTS) + len(self.starts)
            self.total = torch.zeros(shape, dtype=torch.float64, device=attention.q.device)
        for row, columns in enumerate(tokens.queries):
            if len(columns):
                self._add_row(attention, tokens, row, columns)

    def host(self) -> np.ndarray | None:
        """The sums on the host; None before the first call."""
        return None if self.total is None else self.total.cpu().numpy()

    def _add_row(self, attention: Attention, tokens: BatchTokens, row: int, columns: np.ndarray) -> None:
        (_, query, key, *_), _ = attention.call
        device, keys = query.device, key.shape[2]
        assert self.total is not None
        index = tokens.once(("queries", row, device), lambda: torch.from_numpy(columns).to(device))
        # With a cache that forgets, the first key of the call is not the first of the document.
        sinks = max(0, self.plan.skip_first - (tokens.first + query.shape[2] - keys))
        own = own_mask(attention)
        if own is not None and own.is_cuda:
            own.record_stream(torch.cuda.current_stream(device))
        kind = (id(own), attention.sliding_window, row, keys, sinks, device)
        seen = tokens.once(("seen", *kind), lambda: _Seen(own, mask_of(attention, row, index), sinks))
        gather, bins = tokens.once(
            ("distances", row, keys, sinks, device),
            lambda: self._by_distance(columns + keys - query.shape[2], keys, sinks, device),
        )
        found = attention_weights(attention, row, index, seen.mask)
        scores, weights = found.scores, found.weights
        if len(self.heads) != scores.shape[0]:
            scores, weights = scores[self.heads], weights[self.heads]
        others = torch.nn.functional.pad(weights[..., sinks:], (0, 1))
        in_bins = (others.gather(-1, gather.expand(len(weights), -1, -1)) @ bins).sum(1)
        counts = seen.counted(len(weights), len(columns))
        sums = [counts[0], weights[..., :sinks].sum((1, 2), keepdim=True)[:, 0], seen.gap(scores), counts[1]]
        self.total[:, int(tokens.groups[row])] += torch.cat([*sums, in_bins], -1)

    def _by_distance(
        self, query_at: np.ndarray, keys: int, sinks: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each query and distance the place of the key behind the sinks (or one past the last), and its bin."""
        distance = np.arange(int(query_at.max()) + 1)
        place = query_at[:, None] - distance - sinks
        place = np.where(place >= 0, place, keys - sinks)
        in_bin = np.searchsorted(self.starts, distance, side="right") - 1
        bins = torch.zeros(len(distance), len(self.starts), device=device)
        bins[torch.arange(len(distance)), torch.from_numpy(in_bin)] = 1.0
        return torch.from_numpy(place).to(device), bins


class _Seen:
    """What the queries of a document see in a pass, the same in all layers with one mask."""

    def __init__(self, own: torch.Tensor | None, mask: torch.Tensor, sinks: int) -> None:
        self.own, self.mask, self.sinks = own, mask, sinks  # kept, so that no other mask gets the same id
        self.hidden = mask <= torch.finfo(mask.dtype).min / 2
        seen = ~self.hidden
        self.n_sink, self.n_other = seen[..., :sinks].sum(-1), seen[..., sinks:].sum(-1)
        self.counts = (self.n_sink > 0) & (self.n_other > 0)
        self.both = self.counts.sum(-1)
        self._counted: tuple[torch.Tensor, torch.Tensor] | None = None

    def gap(self, scores: torch.Tensor) -> torch.Tensor:
        """Σ over queries that see both of the mean score of the sinks minus that of the other keys (H,)."""
        plain = scores.masked_fill(self.hidden, 0.0)
        sink = plain[..., : self.sinks].sum(-1) / self.n_sink.clamp_min(1)
        other = plain[..., self.sinks :].sum(-1) / self.n_other.clamp_min(1)
        return torch.where(self.counts, sink - other, 0.0).sum(-1, keepdim=True)

    def counted(self, heads: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Number of queries, and of those that see sinks and other keys (H, 1) each."""
        if self._counted is None or len(self._counted[0]) != heads:
            both = self.both.float().reshape(-1, 1).expand(heads, 1)
            self._counted = torch.full((heads, 1), float(queries), device=both.device), both
        return self._counted
