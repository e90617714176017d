"""Model and texts → a Run on disk: every chosen head at every token, one forward pass per document.

Documents are taken in order, in shards of fixed size. Each shard's sums start from nothing and are merged into the
total in order, which is then written; a run that is killed goes on after its last shard and ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from qkscope.capture import parity
from qkscope.capture.attention import Attention, backbone, self_attentions, watching
from qkscope.capture.choose import sample_tokens, vector_tokens
from qkscope.capture.kept import VECTORS, KeptVectors, write_datasets, write_kept
from qkscope.capture.layers import Layer, describe_layer
from qkscope.capture.manifest import manifest
from qkscope.capture.options import CaptureOptions
from qkscope.capture.reduce import LayerSums, Plan, Tokens, finish
from qkscope.capture.rope import Embedding, LayerRope, by_heads, embeddings
from qkscope.capture.texts import Document
from qkscope.core.headmoments import N_GROUPS
from qkscope.core.layermoments import LayerMoments
from qkscope.errors import CaptureError
from qkscope.store.atomic import held
from qkscope.store.checksums import CHECKSUMS, write_checksums
from qkscope.store.runs import MANIFEST, MOMENTS, PROGRESS, SAMPLE, Checkpoints

DOCUMENTS_PER_SHARD = 8
PARITY_TOKENS = 1024
LONG = 8192
"""Beyond this length a T × T mask is avoided by prefilling in chunks, where the model would build one."""


@dataclass(frozen=True)
class Progress:
    """How far a capture is."""

    documents: int
    documents_in_all: int
    tokens: int
    tokens_in_all: int


def tokenize(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Token ids of each document, whole; the window is cut from their beginning later."""
    return [np.asarray(tokenizer(document.text)["input_ids"], dtype=np.int64) for document in documents]


def capture(
    model: PreTrainedModel,
    documents: list[Document],
    ids: list[np.ndarray],
    folder: Path,
    options: CaptureOptions,
    about: dict[str, Any],
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Measure the model on these documents; ``about`` says where the model comes from, for the manifest.

    Documents without two tokens past ``skip_first`` are left out and counted in the manifest.
    """
    _check_folder(folder)
    usable = [number for number, one in enumerate(ids) if len(one) > options.skip_first + 1]
    if not usable:
        raise CaptureError(f"no document has two tokens past the first {options.skip_first}")
    window = options.window or min(max(map(len, ids)), _longest(model))
    run = CaptureRun(model, [ids[number][:window] for number in usable], replace(options, window=window))
    found = manifest(run, [documents[number] for number in usable], about)
    found["documents_too_short"] = len(ids) - len(usable)
    with held(folder) as alone:
        if not alone:
            raise CaptureError(f"another process is capturing into {folder}; wait for it or choose another folder")
        state = Checkpoints(folder, found)
        state.resume()
        if not state.finished:
            run.go(state, on_progress)
            _write_vectors(run, folder, found)
            state.finish()
        if not (folder / CHECKSUMS).exists():  # also after a kill between the two
            write_checksums(folder)
    return folder


def _check_folder(folder: Path) -> None:
    """A run has a folder of its own: new, empty, or with an earlier attempt at the same run."""
    if folder.exists() and not folder.is_dir():
        raise CaptureError(f"{folder} is not a folder")
    ours = (MANIFEST, PROGRESS, MOMENTS, SAMPLE, VECTORS, CHECKSUMS, "shards", "tables")
    strange = [p.name for p in folder.glob("*") if not p.name.startswith(("moments-", *ours))]
    if strange:
        raise CaptureError(f"{folder} holds other things ({', '.join(sorted(strange)[:3])}); choose another folder")


class CaptureRun:
    """One capture: the model, the tokens, and what is known of the layers."""

    def __init__(self, model: PreTrainedModel, ids: list[np.ndarray], options: CaptureOptions) -> None:
        assert options.window is not None
        self.model, self.decoder, self.ids, self.options = model, backbone(model), ids, options
        self.attentions = self_attentions(model)
        self.any_local = self.one_pass = False
        # Documents must not depend on those before them, not even through what an embedding remembers.
        self.forget = [embedding.remembered() for embedding in embeddings(model)]
        self.plan = Plan(options.window, options.buckets, options.skip_first)
        self.layers = self._look()
        lengths = [len(one) for one in ids]
        self.sampled = sample_tokens(lengths, options.sample, options.seed, options.skip_first)
        self.kept = [self._kept(example) for example in range(len(ids))]

    def go(self, state: Checkpoints, on_progress: Callable[[Progress], None] | None) -> None:
        """Do the shards that are not done yet."""
        shards = range(0, len(self.ids), DOCUMENTS_PER_SHARD)
        for number, start in list(enumerate(shards))[state.shards_done :]:
            examples = list(range(start, min(start + DOCUMENTS_PER_SHARD, len(self.ids))))
            sums = {layer: LayerSums(self.plan, self._rope(found)) for layer, found in self.layers.items()}
            for first in range(0, len(examples), self.options.batch):
                self._forward(examples[first : first + self.options.batch], sums)
                if on_progress is not None:
                    on_progress(self._progress(examples[min(first + self.options.batch, len(examples)) - 1] + 1))
            write_kept(state.folder / "shards", number, self._kept_vectors(examples, sums))
            state.save(_merged(state.moments, {layer: finish(part) for layer, part in sums.items()}, examples))

    # ---- looking at the model -------------------------------------------------------------------

    def _look(self) -> dict[int, Layer]:
        """Pass the parity gate on the first document, and describe every layer that is to be measured."""
        ids = torch.from_numpy(self.ids[0][:PARITY_TOKENS])[None]

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return self._decode(ids, None, None, 0).last_hidden_state

        seen = parity.check(self.model, forward)
        candidates = embeddings(self.model)
        found = {a.layer: describe_layer(a, self.decoder, candidates, self.options) for a in seen}
        self.any_local = any(layer.local for layer in found.values())
        self._check_lengths(found)
        wanted = set(found) if self.options.layers is None else set(self.options.layers)
        if not wanted <= set(found):
            raise CaptureError(f"not all of the layers asked for are there; the model has {sorted(found)}")
        if self.options.full_attention_only:
            wanted = {layer for layer in wanted if not found[layer].local}
        if not wanted:
            raise CaptureError("none of the layers asked for has full attention")
        return {layer: found[layer] for layer in sorted(wanted)}

    def _check_lengths(self, found: dict[int, Layer]) -> None:
        """Where frequencies follow the length of the sequence, padding or steps would change the numbers."""
        if any(layer.rope is not None and layer.rope.depends_on_length for layer in found.values()):
            self.one_pass = True
            if self.options.batch > 1 or self.options.prefill:
                raise CaptureError(
                    "the rotary encoding of this model depends on the length of the document (dynamic or longrope); "
                    "padding and steps would change it, so use a batch of 1 and no prefill"
                )

    def _rope(self, layer: Layer) -> LayerRope | None:
        return None if self.options.pre_rope else layer.rope

    # ---- forward passes -------------------------------------------------------------------------

    def _forward(self, examples: list[int], sums: dict[int, LayerSums]) -> None:
        """One batch of documents through the model, in one pass or in steps through a cache."""
        for restore in self.forget:
            restore()
        rows = [self.ids[example] for example in examples]
        length = max(map(len, rows))
        ids = torch.zeros(len(rows), length, dtype=torch.int64)
        for row, one in enumerate(rows):
            ids[row, : len(one)] = torch.from_numpy(one)
        padded = any(len(one) < length for one in rows)
        mask = torch.tensor([[1] * len(one) + [0] * (length - len(one)) for one in rows]) if padded else None
        step = self._step(length)
        cache = DynamicCache(config=self.decoder.config) if step < length else None
        for first in range(0, length, step):
            part = ids[:, first : first + step]
            tokens = self._tokens(examples, first, part.shape[1])
            angles = self._angles(torch.arange(first, first + part.shape[1]))

            def add(seen: Attention, tokens: Tokens = tokens, angles: _Angles = angles) -> None:
                layer = self.layers.get(seen.layer)
                if layer is not None:
                    turn = None if layer.rope is None else angles.get(layer.rope.embedding)
                    here = None if turn is None else (turn[0].to(seen.q.device), turn[1].to(seen.q.device))
                    sums[seen.layer].add(self._chosen(seen, layer), tokens, here)

            with torch.no_grad(), watching(self.model, add, modules=self.attentions):
                self._decode(part, None if mask is None else mask[:, : first + step], cache, first)
        for part_sums in sums.values():
            part_sums.kept = [(q.cpu(), k.cpu()) for q, k in part_sums.kept]

    def _decode(self, ids: torch.Tensor, mask: torch.Tensor | None, cache: DynamicCache | None, first: int) -> Any:
        device = _input_device(self.decoder)
        positions = torch.arange(first, first + ids.shape[1]).expand(ids.shape)
        return self.decoder(
            input_ids=ids.to(device),
            attention_mask=None if mask is None else mask.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=cache is not None,
        )

    def _step(self, length: int) -> int:
        """Tokens per forward pass: all, or a multiple of the bucket width."""
        width = self.plan.width
        if self.options.prefill is not None:
            asked = self.options.prefill or length
        else:
            masked = self.any_local or self.decoder.config._attn_implementation == "eager"
            asked = 2048 if masked and length > LONG and not self.one_pass else length
        return length if asked >= length else max(width, asked // width * width)

    def _tokens(self, examples: list[int], first: int, columns: int) -> Tokens:
        lengths = np.array([np.clip(len(self.ids[example]) - first, 0, columns) for example in examples])
        kept = [self.kept[example] for example in examples]
        return Tokens(
            first=first,
            lengths=lengths,
            groups=np.array(examples) % N_GROUPS,
            kept=[part[(part >= first) & (part < first + columns)] - first for part in kept],
        )

    def _angles(self, positions: torch.Tensor) -> _Angles:
        """Cos and sin of every embedding in use at these positions."""
        ropes = [] if self.options.pre_rope else [layer.rope for layer in self.layers.values()]
        used = {rope.embedding for rope in ropes if rope is not None}
        return {embedding: embedding.angles(positions.to(embedding.device)) for embedding in used}

    def _chosen(self, seen: Attention, layer: Layer) -> Attention:
        """The call with only the heads asked for, and before the rotation if that is asked for."""
        q, k = seen.q, seen.k
        if self.options.pre_rope and seen.rotary is not None:
            if seen.rotary.before[0].shape[-1] != q.shape[-1]:
                raise CaptureError(f"layer {seen.layer} rotates a part of its vectors only; --pre-rope cannot show it")
            q, k = (by_heads(part, now) for part, now in zip(seen.rotary.before, (q, k), strict=True))
        if self.options.heads is None:
            return replace(seen, q=q, k=k)
        return replace(seen, q=q[:, list(layer.query_heads)], k=k[:, list(layer.key_heads)])

    # ---- kept vectors ---------------------------------------------------------------------------

    def _kept(self, example: int) -> np.ndarray:
        if self.options.vectors is None:
            return self.sampled[example]
        length = len(self.ids[example])
        return np.union1d(
            self.sampled[example], vector_tokens(example, length, self.options.vectors, self.options.skip_first)
        )

    def _kept_vectors(self, examples: list[int], sums: dict[int, LayerSums]) -> KeptVectors:
        example = np.concatenate([np.full(len(self.kept[e]), e) for e in examples])
        position = np.concatenate([self.kept[e] for e in examples])
        vectors = {}
        for layer, part in sums.items():
            if part.kept:
                vectors[layer] = (
                    torch.cat([q for q, _ in part.kept]).float().numpy(),
                    torch.cat([k for _, k in part.kept]).float().numpy(),
                )
        return KeptVectors(example, position, vectors)

    def _progress(self, documents: int) -> Progress:
        lengths = [len(one) for one in self.ids]
        return Progress(documents, len(lengths), sum(lengths[:documents]), sum(lengths))


_Angles = dict[Embedding, tuple[torch.Tensor, torch.Tensor]]


def _merged(
    total: dict[int, LayerMoments], shard: dict[int, LayerMoments], examples: list[int]
) -> dict[int, LayerMoments]:
    for layer, part in shard.items():
        for name, moments in (("queries", part.q), ("keys", part.k)):
            if not np.isfinite(moments.scatter).all():
                raise CaptureError(
                    f"layer {layer} gave {name} that are not finite in documents {examples[0]} to {examples[-1]}; "
                    "try --dtype float32 or bfloat16"
                )
    return {layer: total[layer].merge(part) if layer in total else part for layer, part in shard.items()}


def _write_vectors(run: CaptureRun, folder: Path, found: dict[str, Any]) -> None:
    sampling = run.options.vectors
    chosen = (
        None
        if sampling is None
        else [vector_tokens(e, len(one), sampling, run.options.skip_first) for e, one in enumerate(run.ids)]
    )
    write_datasets(folder, found, run.sampled, chosen, sampling)


def _longest(model: PreTrainedModel) -> int:
    return int(getattr(backbone(model).config, "max_position_embeddings", None) or 2**31)


def _input_device(decoder: PreTrainedModel) -> torch.device:
    weight: Any = decoder.get_input_embeddings().weight
    return torch.device("cpu") if weight.device.type == "meta" else weight.device
