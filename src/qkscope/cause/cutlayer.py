"""A layer of a cache whose cut key heads store only the first keys of a text and their window.

After n tokens a cut key head stores the keys and values of min(n, sinks + w) tokens: those of the first ``sinks``, in
slots of their own, and those of the last w, in a ring whose oldest entry the next token replaces. Keys carry their
rotation, so their order does not matter; columns, the numbers of the tokens in the batch, tell the mask what a query
may see. A call with many queries is computed in blocks, each with the keys that its own window needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from qkscope.capture.watch import AttentionFunction
from qkscope.cause.terms import mask_as_read, mask_of_heads, of_query_heads
from qkscope.errors import CaptureError

_BLOCK = 1024
"""Smallest number of queries that are computed in one block."""


@dataclass
class TextState:
    """The state of the texts being read, which all layers share."""

    active: bool = False
    """True while the cache's own model runs."""
    pads: torch.Tensor | None = None
    """Number of padding tokens at the start of each row; None: there are none."""
    pending: dict[int, PendingCall] = field(default_factory=dict)
    """The calls whose keys were stored, and whose attention is computed next, by layer."""

    def starts(self, device: torch.device) -> torch.Tensor:
        """Return the column at which each row's text starts (B, 1), or (1, 1) if it is 0 in all."""
        return (_index((0,), device) if self.pads is None else self.pads.to(device))[:, None]

    @property
    def first(self) -> int:
        """The column at which the longest text starts."""
        return 0 if self.pads is None else int(self.pads.min())


@dataclass(frozen=True)
class SeenKeys:
    """The keys and values that one call of a group of heads reads: the first tokens', then the latest."""

    heads: list[int]
    """Numbers of the key heads."""
    keys: torch.Tensor
    """(B, h, S, d)."""
    values: torch.Tensor
    width: int
    n_sinks: int
    """How many of them are of first tokens."""
    columns: torch.Tensor
    """Columns of the others."""


@dataclass
class WindowStore:
    """The stored keys and values of the key heads of one layer that have the same window."""

    heads: list[int]
    width: int
    sinks: int
    keys: torch.Tensor | None = None
    """(B, h, S, d): the slots of first tokens, then the ring."""
    values: torch.Tensor | None = None
    n_sinks: int = 0
    oldest: int = 0
    """Where the oldest entry of the ring lies, counted from the ring's start."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, before: int, starts: torch.Tensor, first: int
    ) -> SeenKeys:
        """Store the keys and values of new tokens, and return those that their queries read."""
        new = [x.index_select(1, _index(tuple(self.heads), keys.device)) for x in (keys, values)]
        stored = [x[:, :, :0] for x in new] if self.keys is None or self.values is None else [self.keys, self.values]
        tokens, end = keys.shape[2], before + keys.shape[2]
        if tokens == 1 and stored[0].shape[2] == self.n_sinks + self.width and self.n_sinks == self.sinks:
            for x, one in zip(stored, new, strict=True):
                x[:, :, self.n_sinks + self.oldest] = one[:, :, 0]
            self.oldest = (self.oldest + 1) % self.width
            columns = torch.arange(end - self.width, end, device=keys.device).roll(self.oldest)
            return SeenKeys(self.heads, stored[0], stored[1], self.width, self.n_sinks, columns)
        rings = [x[:, :, self.n_sinks :].roll(-self.oldest, 2) for x in stored]
        slots = [self._sinks(x, y, before, starts, first) for x, y in zip(stored, new, strict=True)]
        self.n_sinks, self.oldest = slots[0].shape[2], 0
        beyond = max(first + self.sinks - before, 0)
        latest = [torch.cat([ring, x[:, :, beyond:]], 2) for ring, x in zip(rings, new, strict=True)]
        joined = [torch.cat([slot, x[:, :, -self.width :]], 2) for slot, x in zip(slots, latest, strict=True)]
        self.keys, self.values = joined
        seen = joined if tokens == 1 else [torch.cat([slot, x], 2) for slot, x in zip(slots, latest, strict=True)]
        columns = torch.arange(end - (seen[0].shape[2] - self.n_sinks), end, device=keys.device)
        return SeenKeys(self.heads, seen[0], seen[1], self.width, self.n_sinks, columns)

    def _sinks(
        self, stored: torch.Tensor, new: torch.Tensor, before: int, starts: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Return the slots of the first tokens of each row, filled from the new tokens; later ones may be unset."""
        tokens = new.shape[2]
        n = max(0, min(self.sinks, before + tokens - first))
        slots = nn.functional.pad(stored[:, :, : self.n_sinks], (0, 0, 0, n - self.n_sinks))
        index = starts + torch.arange(n, device=new.device) - before
        here = ((index >= 0) & (index < tokens))[:, None, :, None]
        index = index.clamp(0, tokens - 1)[:, None, :, None].expand(new.shape[0], new.shape[1], n, new.shape[3])
        return torch.where(here, new.gather(2, index), slots)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self.keys is not None and self.values is not None:
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys[rows], self.values[rows]


@dataclass(frozen=True)
class PendingCall:
    """One call of a layer: its new keys as the model got them back, and the stored keys of every group of heads."""

    layer: int
    key: torch.Tensor
    whole: tuple[list[int], torch.Tensor, torch.Tensor]
    """The heads that are not cut, and their keys and values."""
    seen: list[SeenKeys]
    before: int
    """Tokens that were read before."""
    starts: torch.Tensor
    sinks: int
    sliding: int | None

    def attend(
        self, original: AttentionFunction, module: nn.Module, query: torch.Tensor, args: Any, options: Any
    ) -> Any:
        """Return the layer's attention, each group of heads on its own keys; there are no weights to return."""
        mask = args[1] if len(args) > 1 else options.get("attention_mask")
        per_key = query.shape[1] // self.key.shape[1]
        outputs: list[torch.Tensor] = []
        order: list[int] = []
        heads, keys, values = self.whole
        if heads:
            numbers = _of_queries(heads, per_key)
            index = _index(numbers, query.device)
            proxy, of_heads = of_query_heads(module, options, index)
            own = mask_of_heads(mask, index)
            outputs.append(original(proxy, query[:, index], keys, values, own, *args[2:], **of_heads)[0])
            order += numbers
        for seen in self.seen:
            numbers = _of_queries(seen.heads, per_key)
            index = _index(numbers, query.device)
            proxy, of_heads = of_query_heads(module, options, index)
            own, q = mask_of_heads(mask, index), query[:, index]
            blocks = [
                original(proxy, q[:, :, at], k, v, mask_as_read(module, q, shown), *args[2:], **of_heads)[0]
                for at, k, v, shown in self._blocks(seen, q, own)
            ]
            outputs.append(blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1))
            order += numbers
        shape = (*query.shape[:1], query.shape[2], -1, values.shape[-1])
        joined = torch.cat([output.reshape(shape) for output in outputs], 2)
        return joined.index_select(2, _index(_places(tuple(order)), query.device)), None

    def _blocks(self, seen: SeenKeys, query: torch.Tensor, own: Any) -> Any:
        """Yield slices of the queries, each with the keys, values and mask that it needs."""
        tokens, n = query.shape[2], seen.n_sinks
        size = max(_BLOCK, seen.width)
        for first in range(0, tokens, size):
            at = slice(first, min(first + size, tokens))
            columns, keys, values = seen.columns, seen.keys, seen.values
            if tokens > size:
                end = len(columns) - (tokens - at.stop)
                start = max(0, end - (at.stop - at.start) - seen.width + 1)
                columns = columns[start:end]
                keys, values = (
                    torch.cat([x[:, :, :n], x[:, :, n + start : n + end]], 2) for x in (seen.keys, seen.values)
                )
            yield at, keys, values, self._mask(seen, query, columns, at, own)

    def _mask(
        self, seen: SeenKeys, query: torch.Tensor, columns: torch.Tensor, at: slice, own: Any
    ) -> torch.Tensor | None:
        """Return the mask to add to the scores of some queries; None where the only query sees all keys."""
        own = own if isinstance(own, torch.Tensor) and own.ndim == 4 else None
        padded, tokens = len(self.starts) > 1, query.shape[2]
        if tokens == 1 and own is None and not padded and self.sliding is None:
            return None
        query_at = torch.arange(self.before + at.start, self.before + at.stop, device=query.device)[:, None]
        sink_at = (self.starts + torch.arange(seen.n_sinks, device=query.device))[:, None]
        distance = query_at - columns
        near = ((distance >= 0) & (distance < seen.width))[None]
        if padded:
            near = near & (columns >= self.starts + self.sinks)[:, None]
        rows = len(self.starts)
        visible = torch.cat([sink_at <= query_at, near.expand(rows, -1, -1)], -1)[:, None]
        every = torch.cat([sink_at, columns.expand(rows, 1, -1)], -1)[:, None]
        if self.sliding is not None:
            visible = visible & (query_at - every < self.sliding)
        smallest = torch.finfo(query.dtype).min
        if own is None:
            return _shown(torch.zeros_like(visible, dtype=query.dtype), visible, smallest)
        offset = self.before + tokens - own.shape[-1]  # sliding caches drop the first columns
        own = own[:, :, at]
        index = (every - offset).clamp(0, own.shape[-1] - 1)
        rows = max(rows, own.shape[0])
        own = own.expand(rows, -1, -1, -1).gather(3, index.expand(rows, own.shape[1], own.shape[2], -1))
        if own.dtype == torch.bool:
            own = torch.zeros_like(own, dtype=query.dtype).masked_fill(~own, smallest)
        return _shown(own, visible & (every >= offset), smallest)


def _shown(mask: torch.Tensor, visible: torch.Tensor, smallest: float) -> torch.Tensor:
    """Return the mask where keys are visible; queries that see nothing, which are padding, see everything."""
    mask = torch.where(visible, mask, smallest)
    return mask.masked_fill((mask <= smallest / 2).all(-1, keepdim=True), 0.0)


def _of_queries(key_heads: list[int], per_key: int) -> tuple[int, ...]:
    """Return the numbers of the query heads that read these key heads."""
    return tuple(head * per_key + i for head in key_heads for i in range(per_key))


def _places(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return where each number stands in an order.

    >>> _places((2, 0, 1))
    (1, 2, 0)
    """
    return tuple(sorted(range(len(order)), key=order.__getitem__))


@lru_cache(maxsize=1024)
def _index(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor on a device, which every step needs again."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.long, device=device)


def stored_of(part: Any) -> list[torch.Tensor]:
    """Return the keys and values that a layer of a cache stores; of a layer that stores other things, nothing."""
    pair = getattr(part, "keys", None), getattr(part, "values", None)
    return [x for x in pair if x is not None]


class CutLayer(CacheLayerMixin):
    """The cache of one layer: ``whole`` stores the heads that are not cut, ``stores`` the others.

    Its own keys and values stay None, and so it stays uninitialized to those who ask for them.
    """

    def __init__(
        self,
        number: int,
        n_heads: int,
        windows: dict[int, int],
        sinks: int,
        whole: DynamicLayer,
        text: TextState,
    ) -> None:
        super().__init__()
        self.number, self.n_heads, self.sinks, self.whole, self.text = number, n_heads, sinks, whole, text
        self.windows = windows
        self.sliding = whole.sliding_window if isinstance(whole, DynamicSlidingWindowLayer) else None
        self.is_sliding = self.sliding is not None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        by_width: dict[int, list[int]] = {}
        for head, width in sorted(self.windows.items()):
            by_width.setdefault(width, []).append(head)
        self.stores = [WindowStore(heads, width, self.sinks) for width, heads in by_width.items()]
        self.length = 0
        self.whole.reset()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is allocated before it is needed."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, and return them as they are: the attention reads the stored ones by itself."""
        if not self.text.active:
            raise CaptureError(
                "this cut cache is closed, or of another model: make one with qkscope.cut_cache(model, ...) for the "
                "model that generates"
            )
        if key_states.shape[1] != self.n_heads:
            raise CaptureError(
                f"layer {self.number} attends with {self.n_heads} key heads but stores {key_states.shape[1]} "
                "(a compressed latent): its heads cannot be cut in the cache; use qkscope.intervene.windowed"
            )
        device = key_states.device
        heads = [head for head in range(self.n_heads) if head not in self.windows]
        index = _index(tuple(heads), device)
        whole = self.whole.update(key_states.index_select(1, index), value_states.index_select(1, index))
        starts, first = self.text.starts(device), self.text.first
        seen = [store.update(key_states, value_states, self.length, starts, first) for store in self.stores]
        self.text.pending[self.number] = PendingCall(
            self.number, key_states, (heads, *whole), seen, self.length, starts, self.sinks, self.sliding
        )
        self.length += key_states.shape[2]
        return key_states, value_states

    @property
    def stored(self) -> list[torch.Tensor]:
        """The stored keys and values."""
        return [x for part in (self.whole, *self.stores) for x in stored_of(part)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of the model's own mask and the column of the first."""
        if self.sliding is not None:
            sizes: tuple[int, int] = self.whole.get_mask_sizes(query_length)
            return sizes
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens that were read."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1 if self.sliding is None else self.sliding

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        if self.length:
            self.whole.batch_select_indices(rows)
            for store in self.stores:
                store.select(rows)

    def offload(self) -> None:
        """Refuse: keys of heads that are cut stay where they are."""
        raise CaptureError("a cut cache is not offloaded; leave out offloading")

    prefetch = offload
