"""Attention of some queries over all their keys: weights summed by distance, entropy, and the largest score.

All sums are on the layer's own device. The keys of a bin are neighbours, so each sum is one over ranges of keys, the
same in all layers of a pass.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from qkscope.capture.gate import attention_weights, mask_of, own_mask
from qkscope.capture.sums.gramsums import trusted
from qkscope.capture.sums.halfsums import in_groups
from qkscope.capture.sums.tokens import BatchTokens, Plan, on_device
from qkscope.capture.watch import Attention
from qkscope.core.headmoments import N_GROUPS
from qkscope.core.reach import LOWEST, REACH_COUNTS, bin_starts


class ReachSums:
    """The sums of core/reach.py for the query heads of one layer."""

    def __init__(self, plan: Plan, heads: tuple[int, ...], *, both: bool = False) -> None:
        self.plan, self.heads, self.both = plan, list(heads), both
        self.starts = bin_starts(plan.window)
        self.total: torch.Tensor | None = None
        """Weight on sinks, in each bin, sink gaps and entropies (H, 8, bins and 3), float64."""
        self.largest: torch.Tensor | None = None
        """Largest score of any query before the softmax (H), float64."""
        self.counts: list[tuple[np.ndarray, np.ndarray, torch.Tensor]] = []
        """Groups of documents, their queries, and how many of these see a sink (B, 1 or H)."""

    def add(self, attention: Attention, tokens: BatchTokens) -> None:
        """Add the chosen queries of one attention call, which has all heads."""
        (_, query, key, *_), _ = attention.call
        device, keys = query.device, key.shape[2]
        if self.total is None:
            shape = len(self.heads), N_GROUPS, len(self.starts) + 3
            self.total = torch.zeros(shape, dtype=torch.float64, device=device)
            self.largest = torch.full(shape[:1], LOWEST, dtype=torch.float64, device=device)
        if not any(map(len, tokens.queries)):
            return
        # With a cache that forgets, the first key of the call is not the first of the document.
        sinks = max(0, self.plan.skip_first - (tokens.first + query.shape[2] - keys))
        index, chosen = tokens.once(("queries", device), lambda: _padded(tokens.queries, device))
        call_mask = own_mask(attention)
        if call_mask is not None and call_mask.is_cuda:
            call_mask.record_stream(torch.cuda.current_stream(device))
        kind = (id(call_mask), attention.sliding_window, self.both, keys, sinks, device, *self.heads)

        def visible_keys() -> _VisibleKeys:
            return _VisibleKeys(call_mask, mask_of(attention, index), chosen, sinks, self.heads)

        visible = tokens.once(("seen", *kind), visible_keys)
        attended = attention_weights(attention, index, visible.mask)
        scores, weights = attended.scores, attended.weights
        if len(self.heads) != scores.shape[1]:
            scores, weights = scores[:, self.heads], weights[:, self.heads]
        sides = [self._ranges, self._later_ranges] if self.both else [self._ranges]
        for side, ranges_of in enumerate(sides):

            def ranges(ranges_of: Callable[..., np.ndarray] = ranges_of) -> torch.Tensor:
                return on_device(self._by_row(tokens.queries, ranges_of, query.shape[2], keys, sinks), device)

            of_side = tokens.once(("ranges", side, keys, sinks, device), ranges)
            self._add_ranges(weights, of_side, tokens, attention.q)
        exists = chosen[:, None]
        entropy = (torch.special.entr(weights).sum(-1) * exists).sum(-1)
        tokens.add_by_group(self.total[..., -2:], torch.stack([visible.gaps(scores), entropy], -1))
        assert self.largest is not None
        largest = torch.where(exists > 0, scores.amax(-1), LOWEST).amax((0, 2))
        self.largest = torch.maximum(self.largest, largest.double())
        self.counts.append((tokens.groups, np.array([len(columns) for columns in tokens.queries]), visible.both))

    def exact(self) -> torch.Tensor | None:
        """REACH_COUNTS and bins (H, 8, columns); None before the first call."""
        if self.total is None:
            return None
        sums, n = self.total, self.total.new_zeros(2, *self.total.shape[:2])
        if self.counts:
            groups, queries, n_gap_parts = (list(parts) for parts in zip(*self.counts, strict=True))
            of_documents = [
                sums.new_tensor(np.concatenate(queries)).expand(len(sums), -1),
                torch.cat([counted.expand(-1, len(sums)) for counted in n_gap_parts]).T.double(),
            ]
            n = torch.stack(of_documents) @ in_groups(np.concatenate(groups), sums)
        by_name = {"n": n[0], "sink": sums[..., 0], "gap": sums[..., -2], "n_gap": n[1]}
        return torch.cat([torch.stack([by_name[name] for name in REACH_COUNTS], -1), sums[..., 1:-2]], -1)

    @property
    def entropy(self) -> torch.Tensor | None:
        """Sums of entropies, in nats (H, 8); None before the first call."""
        return None if self.total is None else self.total[..., -1].contiguous()

    def _add_ranges(
        self, weights: torch.Tensor, ranges: torch.Tensor, tokens: BatchTokens, queries: torch.Tensor
    ) -> None:
        """Add the sums of weights (B, H, n, S) over ranges (B, n, columns, 2) of keys to the totals of their groups."""
        assert self.total is not None
        if weights.is_cuda and trusted(weights.device, queries.dtype, queries.shape[-1]):
            from qkscope.capture.sums import gramkernel

            gramkernel.add_ranges(self.total[..., :-2], weights, ranges, tokens.documents(self.plan, weights.device))
            return
        running = torch.nn.functional.pad(weights.cumsum(-1, dtype=torch.float64), (1, 0))
        of_all = ranges[:, None].expand(-1, weights.shape[1], -1, -1, -1)
        begin, end = (running.gather(-1, edge) for edge in of_all.unbind(-1))
        tokens.add_by_group(self.total[..., :-2], (end - begin).sum(2))

    def _by_row(
        self, queries: list[np.ndarray], ranges_of: Callable[..., np.ndarray], columns: int, keys: int, sinks: int
    ) -> np.ndarray:
        """The ranges of the queries of each row (B, n, 1 + bins, 2); empty where a row has fewer queries."""
        ranges = np.zeros((len(queries), max(map(len, queries)), 1 + len(self.starts), 2), dtype=np.int64)
        for of_row, chosen in zip(ranges, queries, strict=True):
            of_row[: len(chosen)] = ranges_of(chosen + keys - columns, keys, sinks)
        return ranges

    def _ranges(self, query_at: np.ndarray, _keys: int, sinks: int) -> np.ndarray:
        """First key and the one after the last, of sinks and of each bin, for each query (queries, 1 + bins, 2)."""
        nearest = query_at[:, None] - self.starts
        ends = np.maximum(nearest + 1, sinks)
        begins = np.concatenate([ends[:, 1:], np.full((len(ends), 1), sinks)], 1)
        of_sinks = np.stack([np.zeros(len(ends)), np.minimum(sinks, query_at + 1)], -1)[:, None]
        return np.concatenate([of_sinks, np.stack([begins, ends], -1)], 1)

    def _later_ranges(self, query_at: np.ndarray, keys: int, _sinks: int) -> np.ndarray:
        """The same ranges for the keys after each query, by distance; none of them are sinks."""
        begins = np.minimum(query_at[:, None] + np.maximum(self.starts, 1), keys)
        ends = np.concatenate([begins[:, 1:], np.full((len(begins), 1), keys)], 1)
        none = np.zeros((len(begins), 1, 2))
        return np.concatenate([none, np.stack([begins, ends], -1)], 1)


def _padded(queries: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of the queries of each row (B, n), and 1 where there is one, 0 where a row has fewer."""
    columns = np.zeros((2, len(queries), max(map(len, queries))), dtype=np.int64)
    for row, chosen in enumerate(queries):
        columns[:, row, : len(chosen)] = chosen, np.ones(len(chosen))
    index, exists = on_device(columns, device)
    return index, exists.float()


class _VisibleKeys:
    """The keys that the queries of a pass see, the same in all layers with one mask."""

    def __init__(
        self, own: torch.Tensor | None, mask: torch.Tensor, chosen: torch.Tensor, sinks: int, heads: list[int]
    ) -> None:
        self.own = own  # kept alive, so that no other mask gets the same id
        lowest = torch.finfo(torch.float32).min / 2
        self.mask = mask.float().clamp_min(lowest)
        """Finite, so that a masked score multiplied by 0 is 0."""
        visible = ((mask if mask.shape[1] == 1 else mask[:, heads]) > lowest).float()
        n_sink, n_other = (part.sum(-1, keepdim=True) for part in (visible[..., :sinks], visible[..., sinks:]))
        counts = ((n_sink > 0) & (n_other > 0)).float() * chosen[:, None, :, None]
        self.both = counts.sum((-2, -1))
        """Queries of each document that see sinks and other keys (B, 1 or H)."""
        means = visible[..., :sinks] / n_sink.clamp_min(1), -visible[..., sinks:] / n_other.clamp_min(1)
        self._gap = (counts * torch.cat(means, -1)).flatten(2)

    def gaps(self, scores: torch.Tensor) -> torch.Tensor:
        """Σ over queries that see both of the mean score of the sinks minus that of the other keys (B, H)."""
        flat = scores.flatten(2)
        return (flat @ self._gap.transpose(1, 2))[..., 0] if self._gap.shape[1] == 1 else (flat * self._gap).sum(-1)
