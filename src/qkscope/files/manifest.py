"""What run.json may say, checked before anything is made of it: types, ranges, and sizes that no capture has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST_TOKENS = 2**24
"""Longest window: a search over frequencies takes memory in proportion."""
_Index = Annotated[int, Field(ge=0, lt=10_000, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Said(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class RopeSaid(_Said):
    """The rotary encoding of a layer."""

    frequencies: Annotated[list[Finite], Field(min_length=1, max_length=4096)]
    layout: Literal["half", "interleaved"]
    start: Annotated[int, Field(ge=0, lt=100_000, strict=True)]
    sign: Literal[-1, 1]


class LayerSaid(_Said):
    """One layer."""

    layer: _Index
    query_heads: Annotated[list[_Index], Field(min_length=1, max_length=10_000)]
    key_heads: Annotated[list[_Index], Field(min_length=1, max_length=10_000)]
    scaling: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]
    sliding_window: Annotated[int, Field(gt=0, lt=2**31, strict=True)] | None
    rope: RopeSaid | None


class VectorsSaid(BaseModel):
    """How vectors were chosen for a dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rate: Annotated[float, Field(gt=0, le=1)]
    sampler: Literal["uniform", "log_uniform", "all"]
    seed: Annotated[int, Field(strict=True)]
    heads: Annotated[int, Field(ge=1, lt=2**31, strict=True)] | None


class OptionsSaid(_Said):
    """Choices of the capture that analyses depend on."""

    buckets: Annotated[int, Field(ge=1, le=4096, strict=True)]
    documents_per_shard: Annotated[int, Field(ge=1, lt=2**31, strict=True)] = 8
    sample: Annotated[int, Field(ge=1, lt=2**31, strict=True)] = 2048
    seed: Annotated[int, Field(strict=True)] = 0
    skip_first: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 4
    vectors: VectorsSaid | None = None


class DocumentSaid(_Said):
    """One document."""

    tokens: Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class LeftOutSaid(_Said):
    """A document that was not measured."""

    document: Annotated[int, Field(ge=0, strict=True)]


class RunSaid(_Said):
    """A whole manifest."""

    window: Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]
    q_per_kv: Annotated[int, Field(ge=1, lt=10_000, strict=True)]
    stage: Literal["post-rope", "pre-rope"]
    model: dict[str, Any]
    corpus: str
    options: OptionsSaid
    documents: list[DocumentSaid]
    left_out: list[LeftOutSaid] = []
    layers: Annotated[list[LayerSaid], Field(min_length=1, max_length=10_000)]


def problem(manifest: dict[str, Any]) -> str | None:
    """What is wrong with a manifest, with the place in it; None if nothing is."""
    try:
        said = RunSaid.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        found = "" if first["type"] == "missing" else f", got {_short(first['input'])}"
        return f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}{found}"
    numbers = [layer.layer for layer in said.layers]
    if len(set(numbers)) < len(numbers):
        return f"layers: layer {max(numbers, key=numbers.count)} is there twice"
    longest = max((document.tokens for document in said.documents), default=0)
    if longest > said.window:
        return f"documents: one has {longest} tokens, more than the window of {said.window}"
    for layer in said.layers:
        for name, heads in (("query", layer.query_heads), ("key", layer.key_heads)):
            if heads != sorted(set(heads)):
                return f"layers: the {name} heads of layer {layer.layer} are not in order, or there twice"
        missing = {head // said.q_per_kv for head in layer.query_heads} - set(layer.key_heads)
        unread = set(layer.key_heads) - {head // said.q_per_kv for head in layer.query_heads}
        if unread:
            return f"layers: layer {layer.layer} has key head {min(unread)}, which none of its query heads reads"
        if missing:
            return f"layers: layer {layer.layer} lacks key head {min(missing)}, which one of its query heads reads"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
