"""run.json as a typed object: read and checked once, types, ranges and largest sizes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qkscope.options import MOST_TOKENS

WIDE_WINDOW = 2**20
"""Up to this window, the frequency search takes seconds, so the window may exceed the documents by any factor."""
_Index = Annotated[int, Field(ge=0, lt=10_000, strict=True)]
_Count = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class RopeEntry(_Entry):
    """The rotary encoding of a layer."""

    frequencies: Annotated[list[Finite], Field(min_length=1, max_length=4096)]
    layout: Literal["half", "interleaved"]
    start: Annotated[int, Field(ge=0, lt=100_000, strict=True)]
    sign: Literal[-1, 1]
    attention_factor: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)] = 1.0
    theta: Any = None
    """The base whose powers the frequencies are; None if there is none, as in scaled encodings."""


class LayerEntry(_Entry):
    """One layer."""

    layer: _Index
    query_heads: Annotated[list[_Index], Field(min_length=1, max_length=10_000)]
    key_heads: Annotated[list[_Index], Field(min_length=1, max_length=10_000)]
    scaling: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]
    sliding_window: Annotated[int, Field(gt=0, lt=2**31, strict=True)] | None
    rope: RopeEntry | None
    both: Annotated[bool, Field(strict=True)] = False
    d: int | None = None
    """Length of its vectors."""


class VectorsEntry(BaseModel):
    """The choice of vectors for a dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rate: Annotated[float, Field(gt=0, le=1)]
    sampler: Literal["uniform", "log_uniform", "all"]
    seed: Annotated[int, Field(strict=True)]
    heads: Annotated[int, Field(ge=1, lt=2**31, strict=True)] | None


class OptionsEntry(_Entry):
    """Options of the capture that analyses depend on."""

    buckets: Annotated[int, Field(ge=1, le=4096, strict=True)]
    documents_per_shard: Annotated[int, Field(ge=1, lt=2**31, strict=True)] = 8
    heads: Any = None
    """Query heads that were chosen; None: all."""
    keep: Literal["undone-cov"] | None = None
    reach_queries: Annotated[int, Field(ge=0, le=4096, strict=True)] = 0
    sample: Annotated[int, Field(ge=1, lt=2**31, strict=True)] = 2048
    seed: Annotated[int, Field(strict=True)] = 0
    skip_first: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 4
    vectors: VectorsEntry | None = None


class DocumentEntry(_Entry):
    """One document."""

    name: Any = None
    digest: Any = None
    tokens: _Count
    image_tokens: _Count = 0
    positions: list[tuple[_Count, _Count]] | None = None
    """Positions of its text tokens, if it has images: first and last + 1 of each text span."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Position ranges of its text tokens: a single range from 0, unless there are images in between."""
        return ((0, self.tokens),) if self.positions is None else tuple(self.positions)

    @property
    def extent(self) -> int:
        """The position after the last token."""
        return max((end for _, end in self.spans), default=0)

    @property
    def positions_agree(self) -> bool:
        """True if the spans are in order, and have as many positions as there are tokens."""
        edges = [edge for span in self.spans for edge in span]
        return edges == sorted(edges) and sum(edges[1::2]) - sum(edges[::2]) == self.tokens


class LeftOutEntry(_Entry):
    """A document that was not measured."""

    document: Annotated[int, Field(ge=0, strict=True)]


class PassageEntry(_Entry):
    """The tokens of the passage."""

    tokens: Annotated[list[Annotated[str, Field(max_length=200)]], Field(min_length=1, max_length=4096)]


class ModelEntry(_Entry):
    """The model, as recorded in run.json."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)
    id: Any = None
    revision: Any = None
    commit: Any = None
    type: Any = Field(default=None, alias="class")
    dtype: Any = None
    attention: Any = None
    layers: Any = None
    parameters: Any = None
    weights: Any = None


class LossEntry(_Entry):
    """The mean loss of the documents, in nats per token."""

    mean: Finite | None = None
    tokens: _Count | None = None


class PushedEntry(_Entry):
    """The items that were removed when the run was pushed."""

    left_out: list[Any] = []


class RunManifest(_Entry):
    """The whole manifest."""

    window: Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]
    q_per_kv: Annotated[int, Field(ge=1, lt=10_000, strict=True)]
    stage: Literal["post-rope", "pre-rope"]
    model: ModelEntry
    corpus: str
    tokens: Any = None
    """Digest of all token ids."""
    options: OptionsEntry
    documents: list[DocumentEntry]
    left_out: list[LeftOutEntry] = []
    passage: PassageEntry | None = None
    loss: LossEntry | None = None
    pushed: PushedEntry | None = None
    layers: Annotated[list[LayerEntry], Field(min_length=1, max_length=10_000)]

    @property
    def rotated(self) -> bool:
        """True if vectors were captured after the rotation."""
        return self.stage == "post-rope"

    @property
    def encoder(self) -> bool:
        """True if queries of any layer also see later keys."""
        return any(layer.both for layer in self.layers)

    @property
    def measured(self) -> list[int]:
        """Numbers of the documents that were not left out."""
        left_out = {entry.document for entry in self.left_out}
        return [number for number in range(len(self.documents)) if number not in left_out]


def problem(manifest: dict[str, Any]) -> str | None:
    """The first error in a manifest, with its location; None if the manifest is valid."""
    try:
        run = RunManifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        got = "" if first["type"] == "missing" else f", got {_short(first['input'])}"
        message = re.sub(r" or instance of \w+", "", first["msg"])
        return f"{location}: {message[0].lower()}{message[1:]}{got}"
    numbers = [layer.layer for layer in run.layers]
    if len(set(numbers)) < len(numbers):
        return f"layers: layer {max(numbers, key=numbers.count)} appears twice"
    for number, document in enumerate(run.documents):
        if not document.positions_agree:
            return f"documents: document {number} has positions that are not those of {document.tokens} tokens in order"
    longest = max((document.extent for document in run.documents), default=0)
    if run.window > max(WIDE_WINDOW, 4 * longest):
        return f"window: {run.window} tokens, while the longest document has {longest}"
    if longest > run.window:
        return f"documents: the longest has {longest} tokens, more than the window of {run.window}"
    for layer in run.layers:
        for name, heads in (("query", layer.query_heads), ("key", layer.key_heads)):
            if heads != sorted(set(heads)):
                return (
                    f"layers: expected the {name} heads of layer {layer.layer} in order, each once, got {_short(heads)}"
                )
        missing = {head // run.q_per_kv for head in layer.query_heads} - set(layer.key_heads)
        unread = set(layer.key_heads) - {head // run.q_per_kv for head in layer.query_heads}
        if unread:
            return f"layers: layer {layer.layer} has key head {min(unread)}, which none of its query heads reads"
        if missing:
            return f"layers: layer {layer.layer} is missing key head {min(missing)}, which one of its query heads reads"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
