"""Slices of an attention call: padded batches, text between images, requests of an engine; and adding them to sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from qkscope.capture.images import TextSpan
from qkscope.capture.layers import Layer
from qkscope.capture.options import CaptureOptions
from qkscope.capture.rope import Embedding, by_heads
from qkscope.capture.shards import Shard
from qkscope.capture.sums.layersums import LayerSums
from qkscope.capture.sums.tokens import BatchTokens
from qkscope.capture.watch import Attention, OnAttention, Rotary, RotatedTensor
from qkscope.core.headmoments import N_GROUPS
from qkscope.core.reach import query_positions
from qkscope.errors import CaptureError


def padded(documents: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return token ids of documents, padded to one length, and the attention mask; None if none is padded."""
    length = max(map(len, documents))
    ids = torch.zeros(len(documents), length, dtype=torch.int64)
    for number, document in enumerate(documents):
        ids[number, : len(document)] = torch.from_numpy(document)
    if all(len(document) == length for document in documents):
        return ids, None
    return ids, torch.tensor([[1] * len(document) + [0] * (length - len(document)) for document in documents])


def batch_tokens(shard: Shard, rows: list[int], first: int, columns: int, options: CaptureOptions) -> BatchTokens:
    """The tokens of these documents of a shard at ``columns`` positions from ``first`` on."""

    def within(chosen: list[np.ndarray]) -> list[np.ndarray]:
        return [part[(part >= first) & (part < first + columns)] - first for part in chosen]

    return BatchTokens(
        first=first,
        lengths=np.array([np.clip(len(shard.ids[row]) - first, 0, columns) for row in rows]),
        groups=np.array([shard.examples[row] for row in rows]) % N_GROUPS,
        kept=within([shard.kept[row] for row in rows]),
        queries=within(
            [query_positions(len(shard.ids[row]), options.reach_queries, options.skip_first) for row in rows]
        ),
    )


def span_tokens(span: TextSpan, example: int, kept: np.ndarray, width: int) -> BatchTokens:
    """The tokens of a text span, preceded by columns that do not count, back to the beginning of a bucket.

    With images, the distance to a key is not one number, so no attention is summed by distance.
    """
    position, end = span.positions
    first = position // width * width
    return BatchTokens(
        first=first,
        lengths=np.array([end - first]),
        groups=np.array([example % N_GROUPS]),
        kept=[kept[(kept >= position) & (kept < end)] - first],
        begins=np.array([position - first]),
    )


def span_call(attention: Attention, span: TextSpan, tokens: BatchTokens, *, temperature: bool) -> Attention:
    """The call of these tokens alone, after columns of zeros; with the rotated queries if ``temperature``."""
    begin = span.position - tokens.first

    def part(x: torch.Tensor) -> torch.Tensor:
        of_span = x[:, :, span.column : span.column + span.length]
        return torch.nn.functional.pad(of_span, (0, 0, begin, 0))

    rotary = attention.rotary
    if temperature and rotary is not None:
        after = part(by_heads(rotary.q.after, attention.q))
        rotary = replace(rotary, q=replace(rotary.q, after=after))
    return replace(attention, q=part(attention.q), k=part(attention.k), rotary=rotary)


def first_columns(attention: Attention, columns: int, *, temperature: bool) -> Attention:
    """The queries and keys of the first columns of a call, with the rotated queries if ``temperature``.

    Their attention is in the whole call: later keys, which none of them sees, make no difference.
    """

    def part(x: torch.Tensor) -> torch.Tensor:
        cut = x[:, :, :columns]
        return cut.contiguous() if cut.is_cuda else cut

    rotary = attention.rotary
    if temperature and rotary is not None:
        rotary = replace(rotary, q=replace(rotary.q, after=part(by_heads(rotary.q.after, attention.q))))
    return replace(attention, q=part(attention.q), k=part(attention.k), rotary=rotary)


@dataclass(frozen=True)
class RequestSpan:
    """The tokens of one request in a call, as the engine's metadata state."""

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
    """Return the number of the document that each request is, by its tokens ``ids``, among those not in ``read``.

    Of several equal documents, any may be returned. An error if a document is not read as a whole.
    """
    numbers, unread = list[int](), [number for number in range(len(sent)) if number not in set(read)]
    for span in spans:
        tokens = ids[span.columns]
        matches = [n for n in unread if n not in numbers and np.array_equal(sent[n], tokens)]
        if span.position or not matches:
            longest = max(map(len, sent))
            raise CaptureError(
                f"the engine read {span.length} tokens from position {span.position} on, not a whole document; create "
                f"it with enable_prefix_caching=False and max_num_batched_tokens of at least {longest}"
            )
        numbers.append(matches[0])
    return numbers


def request_call(attention: Attention, span: RequestSpan) -> Attention:
    """The call of one request alone, as if it were the only one."""
    (module, *tensors), options = attention.call
    query, key, value = (x[:, :, span.columns] for x in tensors[:3])
    of_request = {name: option for name, option in options.items() if name != "position_ids"}
    return replace(
        attention,
        q=attention.q[:, :, span.columns],
        k=attention.k[:, :, span.columns],
        rotary=None if attention.rotary is None else _request_rotary(attention, attention.rotary, span),
        call=((module, query, key, value, *tensors[3:]), of_request),
    )


def request_output(output: torch.Tensor, span: RequestSpan) -> torch.Tensor:
    """The output of one request (1, T, …), from that of all requests (T, …), with or without a batch axis of one."""
    flat = output.reshape(-1, output.shape[-1]) if output.ndim == 2 else output.reshape(-1, *output.shape[2:])
    return flat[None, span.columns]


def _request_rotary(attention: Attention, rotary: Rotary, span: RequestSpan) -> Rotary:
    q = _request_rotated(attention.q, rotary.q, span)
    return Rotary(q, None if rotary.k is None else _request_rotated(attention.k, rotary.k, span))


def _request_rotated(x: torch.Tensor, rotated: RotatedTensor, span: RequestSpan) -> RotatedTensor:
    length = x.shape[2]
    before, after = (by_heads(part, x)[:, :, span.columns] for part in (rotated.before, rotated.after))
    angles = (part.reshape(-1, length, part.shape[-1])[:1, span.columns] for part in rotated.angles)
    return RotatedTensor(before, after, tuple(angles))


_Angle = tuple[torch.Tensor, torch.Tensor]
_Angles = dict[Embedding, _Angle]


@dataclass(frozen=True)
class CallPart:
    """Tokens of a forward pass at consecutive positions."""

    tokens: BatchTokens
    end: int
    """The position after the last."""
    angles: _Angles
    """Cos and sin of each embedding in use, at these positions."""
    span: TextSpan | None = None
    """Their columns of the call, for documents with images; None: the first ones."""

    def of(self, attention: Attention, layer: Layer) -> Attention:
        """The call of these tokens alone."""
        scaled = layer.rope is not None and layer.rope.temperature
        if self.span is not None:
            return span_call(attention, self.span, self.tokens, temperature=scaled)
        columns = self.end - self.tokens.first
        return attention if columns >= attention.q.shape[2] else first_columns(attention, columns, temperature=scaled)

    def angles_of(self, layer: Layer, device: torch.device) -> _Angle | None:
        """The angles of a layer on its device, copied there once per forward pass; None without any."""
        if layer.rope is None or layer.rope.embedding not in self.angles:
            return None
        embedding = layer.rope.embedding
        cos, sin = self.angles[embedding]
        return self.tokens.once(("angles", embedding, device), lambda: (cos.to(device), sin.to(device)))


@dataclass(frozen=True)
class LayerCalls:
    """The measured layers, and the parts of their calls that are added to sums."""

    layers: Mapping[int, Layer]
    options: CaptureOptions

    def part(self, tokens: BatchTokens, end: int, span: TextSpan | None = None) -> CallPart:
        """The tokens at positions from the first up to ``end``, with the angles there."""
        ropes = [] if self.options.pre_rope else [layer.rope for layer in self.layers.values()]
        used = {rope.embedding for rope in ropes if rope is not None}
        first = tokens.first
        return CallPart(
            tokens,
            end,
            {rotary: rotary.angles(torch.arange(first, end, device=rotary.device)) for rotary in used},
            span,
        )

    def adding(self, sums: Mapping[int, LayerSums], parts: list[CallPart]) -> OnAttention:
        """Return a callback that adds the parts of a forward pass to the sums of each layer."""

        def add(attention: Attention) -> None:
            layer = self.layers.get(attention.layer)
            if layer is not None:
                chosen = self.chosen(attention, layer)
                for part in parts:
                    call = part.of(chosen, layer)
                    sums[attention.layer].add(call, part.tokens, part.angles_of(layer, attention.q.device))

        return add

    def chosen(self, attention: Attention, layer: Layer) -> Attention:
        """The call with the chosen heads only, before the rotation if ``pre_rope``."""
        q, k = attention.q, attention.k
        if self.options.pre_rope and attention.rotary is not None:
            turned_q, turned_k = attention.rotary.q.before, attention.rotary.k
            reason = "rotates only some coordinates of its vectors" if turned_q.shape[-1] != q.shape[-1] else ""
            reason = reason or ("reads the keys of an earlier layer" if turned_k is None else "")
            if turned_k is None or reason:
                advice = "leave out --pre-rope, or choose other --layers"
                raise CaptureError(f"layer {attention.layer} {reason}, which --pre-rope does not support; {advice}")
            q, k = by_heads(turned_q, q), by_heads(turned_k.before, k)
        if self.options.heads is None:
            return replace(attention, q=q, k=k)
        rotary, heads = attention.rotary, list(layer.query_heads)
        if rotary is not None and layer.rope is not None and layer.rope.temperature:
            after = by_heads(rotary.q.after, attention.q)[:, heads]
            rotary = replace(rotary, q=replace(rotary.q, after=after))
        return replace(attention, q=q[:, heads], k=k[:, list(layer.key_heads)], rotary=rotary)
