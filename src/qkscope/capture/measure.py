"""Measurement by one replica of the model: a description of its layers, and the sums of each shard of documents."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from qkscope._version import __version__
from qkscope.capture import gate as parity
from qkscope.capture import model as models
from qkscope.capture.call import LayerCalls, batch_tokens, padded, span_tokens
from qkscope.capture.images import ImageInputs, placeholders
from qkscope.capture.layers import ChosenLayers, Layer
from qkscope.capture.loss import GATE_TOKENS, LossSums, OutputHead, output_head
from qkscope.capture.options import CaptureOptions
from qkscope.capture.repeats import RepeatedTokens
from qkscope.capture.rope import LayerRope, check_angles, embeddings
from qkscope.capture.shards import OutOfMemoryIn, Shard, does_not_fit, in_passes, raise_out_of_memory
from qkscope.capture.shardsums import ModelReport, ShardSums, finished, kept_vectors, sampled_keys, send_kept
from qkscope.capture.sums.gramsums import trusted
from qkscope.capture.sums.layersums import LayerSums
from qkscope.capture.sums.reachsums import ReachSums
from qkscope.capture.sums.tokens import Plan, on_device
from qkscope.capture.sums.undone import UndoneQueries
from qkscope.capture.watch import Attention, OnAttention, OnOutput, backbone, head_size, self_attentions, watching
from qkscope.core.headmoments import N_GROUPS
from qkscope.core.layermoments import UNDONE_COV
from qkscope.core.reach import REPEAT_COUNTS
from qkscope.errors import CaptureError
from qkscope.files.runfolder import Vectors

LONG = 8192
"""Beyond this length, a model that would build a T × T mask is prefilled in chunks instead."""


@dataclass
class WindowSums:
    """The sums of a shard over one window, while it is measured."""

    shard: Shard
    plan: Plan
    layers: dict[int, LayerSums]
    losses: LossSums
    labels: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Documents and positions of the kept vectors, in order."""

    def adding(self, calls: LayerCalls, rows: list[int], first: int, end: int) -> OnAttention:
        """Return a callback that adds these documents at positions from ``first`` up to ``end``."""
        tokens = batch_tokens(self.shard, rows, first, end - first, calls.options)
        examples = [self.shard.examples[row] for row in rows]
        self.labels += [(np.full(len(k), n), k + first) for n, k in zip(examples, tokens.kept, strict=True)]
        return calls.adding(self.layers, [calls.part(tokens, end)])


class Measurement:
    """A model and the description of its layers."""

    def __init__(
        self, model: PreTrainedModel, gate: np.ndarray, options: CaptureOptions, repeated: RepeatedTokens | None = None
    ) -> None:
        self.model, self.decoder, self.options = model, backbone(model), options
        self.repeated = repeated or RepeatedTokens()
        self.attentions = self_attentions(model)
        # Documents must not depend on earlier ones, not even through the state of a rotary embedding.
        self.restores = [embedding.state_restorer() for embedding in embeddings(model)]
        embedding: Any = self.decoder.get_input_embeddings()
        self.vocabulary = int(embedding.weight.shape[0])
        self.longest = self._longest()
        self.chosen = self._look(gate if options.window is not None else gate[: self.longest])
        self.layers = self.chosen.layers
        self.calls = LayerCalls(self.layers, options)
        self.head = None if self.chosen.encoder else self._output_head(gate)
        self.report = self._report()

    def shard(
        self, shard: Shard, *, keep_going: bool = False, on_documents: Callable[[list[int]], None] | None = None
    ) -> ShardSums:
        """Measure one shard.

        If a batch runs out of memory, the shard is measured again with single documents; if a single document runs out
        of memory, that is an error or, if ``keep_going``, all documents that do not fit are left out.
        """
        left_out = dict[int, str]()
        try:
            return self._attempt(shard, self._batch, left_out, on_documents)
        except OutOfMemoryIn as error:
            is_single = len(error.rows) == 1
            if is_single and not keep_going:
                raise CaptureError(does_not_fit(shard, error)) from None
        _empty_cache()
        if keep_going:
            left_out = self._misfits(shard)
        try:
            sums = self._attempt(shard, 1, left_out, on_documents)
            return sums.with_nested(one_by_one=self._batch != 1)
        except OutOfMemoryIn as error:
            raise CaptureError(does_not_fit(shard, error)) from None

    def _misfits(self, shard: Shard) -> dict[int, str]:
        """Return the documents that do not fit into memory even alone, each with the reason."""
        reasons = {}
        for example in shard.examples:
            left_out = {number: "" for number in shard.examples if number != example}
            try:
                self._attempt(shard, 1, left_out, None)
            except OutOfMemoryIn as error:
                reasons[example] = f"out of memory ({error.reason})"
                _empty_cache()
        return reasons

    def _attempt(
        self,
        shard: Shard,
        batch: int | None,
        left_out: dict[int, str],
        on_documents: Callable[[list[int]], None] | None,
    ) -> ShardSums:
        rows = [row for row, example in enumerate(shard.examples) if example not in left_out]
        windows = [self._empty_sums(of_window) for of_window in (shard, *shard.nested)]
        lengths = [len(shard.ids[row]) for row in rows]
        measured: list[int] = []
        for together in in_passes(lengths, 1 if shard.images else batch, _input_device(self.decoder).type):
            batch_rows = [rows[index] for index in together]
            with raise_out_of_memory(batch_rows):
                if shard.examples[batch_rows[0]] in shard.images:
                    self._forward_images(batch_rows[0], windows[0])
                else:
                    self._forward(batch_rows, windows)
            measured += batch_rows
            if on_documents is not None:
                on_documents(measured)
        with raise_out_of_memory([]):
            self._add_repeats(shard, windows)
            whole, *nested = (self._finished(sums, left_out) for sums in windows)
        return replace(whole, nested=tuple(nested))

    def _finished(self, sums: WindowSums, left_out: dict[int, str]) -> ShardSums:
        kept = kept_vectors(sums.labels, sums.layers)
        complete = replace(sums.shard, sampled=None) if left_out else sums.shard
        sampled = sampled_keys(kept, complete, self.layers, self.chosen.q_per_kv, sums.plan.buckets)
        moments = finished(sums.layers, sums.shard, sampled) if len(left_out) < len(sums.shard.examples) else {}
        return ShardSums(moments, kept, left_out, self.report.digest, sums.losses.of)

    def passage(self, ids: np.ndarray) -> dict[int, Vectors]:
        """Return queries and keys of the chosen heads at every token of a short text, by layer."""
        for restore in self.restores:
            restore()
        vectors: dict[int, Vectors] = {}

        def keep(attention: Attention) -> None:
            layer = self.layers.get(attention.layer)
            if layer is not None:
                chosen = self.calls.chosen(attention, layer)
                q, k = (x[0].transpose(0, 1).float().cpu().numpy() for x in (chosen.q, chosen.k))
                vectors[attention.layer] = (q, k)

        tokens = torch.from_numpy(np.clip(ids[: self.longest], 0, self.vocabulary - 1))[None]
        with torch.no_grad(), self._watching(keep):
            self._decode(tokens, None, None, 0)
        return vectors

    def _add_repeats(self, shard: Shard, windows: list[WindowSums]) -> None:
        """Read repeated tokens with the first shard; the sums of the others are zero, so that shards add up."""
        by_layer = self._repeats() if shard.number == 0 else {}
        for number, layer in self.layers.items() if self._reads_repeats else ():
            for sums in (window.layers[number] for window in windows):
                empty = torch.zeros(
                    len(layer.query_heads), N_GROUPS, len(REPEAT_COUNTS), dtype=torch.float64, device=sums.device
                )
                sums.repeats = by_layer[number].to(empty.device) if number in by_layer else empty

    @property
    def _reads_repeats(self) -> bool:
        return bool(self.options.reach_queries) and not self.chosen.encoder

    def _repeats(self) -> dict[int, torch.Tensor]:
        """Return draws and attention on their repeated tokens (H, 8, columns) by layer."""
        draws = self.repeated.draws(self.vocabulary, self.longest) if self._reads_repeats else None
        of_draws: dict[int, list[torch.Tensor]] = {}

        def add(attention: Attention) -> None:
            layer = self.layers.get(attention.layer)
            if layer is not None:
                of_heads = self.repeated.attention(attention)[list(layer.query_heads)]
                of_draws.setdefault(attention.layer, []).append(torch.nn.functional.pad(of_heads, (1, 0), value=1.0))

        for ids in () if draws is None else draws:
            for restore in self.restores:
                restore()
            with torch.no_grad(), self._watching(add):
                self._decode(torch.from_numpy(ids)[None], None, None, 0)
        return {number: torch.stack(weights, 1) for number, weights in of_draws.items()}

    def check_images(self, document: ImageInputs) -> None:
        """Check a document with images: parity through the whole model, and the rotation of its text tokens."""
        for restore in self.restores:
            restore()
        for attention in parity.check(self.model, lambda: document.call(self.model)):
            layer = self.layers.get(attention.layer)
            if layer is not None and layer.rope is not None:
                check_angles(attention, layer.rope, *document.columns_and_positions)

    def _empty_sums(self, shard: Shard) -> WindowSums:
        plan = Plan(shard.window, self.options.buckets, self.options.skip_first)

        def of_layer(layer: Layer) -> LayerSums:
            reach = ReachSums(plan, layer.query_heads, both=layer.both) if self.options.reach_queries else None
            rope = self._rope(layer)
            undone = UndoneQueries(rope) if rope is not None and self.options.keep == UNDONE_COV else None
            return LayerSums(plan, rope, reach=reach, undone=undone)

        return WindowSums(
            shard, plan, {number: of_layer(layer) for number, layer in self.layers.items()}, LossSums(self.head)
        )

    # ---- description of the model ---------------------------------------------------------------

    @property
    def _batch(self) -> int | None:
        """Documents per pass; None: by their lengths. Unless asked for, no pass has padding that changes numbers."""
        return 1 if self.options.batch is None and self.chosen.one_pass else self.options.batch

    def _longest(self) -> int:
        """Return the largest length of a document, in tokens."""
        return int(getattr(self.decoder.config, "max_position_embeddings", None) or 2**31)

    def _report(self) -> ModelReport:
        device = _input_device(self.decoder)
        packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
        return ModelReport(
            models.describe_model(self.model),
            [_plain(layer.as_dict()) for layer in self.layers.values()],
            self.chosen.q_per_kv,
            self.longest,
            self.vocabulary,
            torch.get_num_threads() if device.type == "cpu" else None,
            _device_name(device, self.model),
            {"qkscope": __version__} | packages,
            placeholders=placeholders(self.model),
        )

    def _look(self, gate: np.ndarray) -> ChosenLayers:
        """Check parity on these tokens, and describe every layer that is to be measured."""
        ids = torch.from_numpy(np.clip(gate, 0, self.vocabulary - 1))[None]  # too large token ids are an error later

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return self._decode(ids, None, None, 0).last_hidden_state

        try:
            with raise_out_of_memory([]):
                attentions = parity.check(self.model, forward, self._watching)
        except OutOfMemoryIn as error:
            advice = "try --dtype bfloat16, --device balanced or fewer --workers"
            raise CaptureError(f"out of memory after the model was loaded ({error.reason}); {advice}") from None
        return ChosenLayers.of(attentions, self.decoder, embeddings(self.model), self.options)

    def _output_head(self, gate: np.ndarray) -> OutputHead | None:
        """Return the model's map to logits; None if it is unknown, and then no loss is recorded."""
        ids = torch.from_numpy(np.clip(gate[:GATE_TOKENS], 0, self.vocabulary - 1))[None]
        for restore in self.restores:
            restore()
        with torch.no_grad():
            hidden = self._decode(ids, None, None, 0).last_hidden_state
        return output_head(self.model, ids, hidden)

    def _rope(self, layer: Layer) -> LayerRope | None:
        return None if self.options.pre_rope else layer.rope

    # ---- forward passes -------------------------------------------------------------------------

    def _watching(self, on_attention: OnAttention, on_output: OnOutput | None = None) -> AbstractContextManager[None]:
        """Watch the attention calls of forward passes."""
        return watching(self.model, on_attention, on_output, self.attentions)

    def _forward(self, rows: list[int], windows: list[WindowSums]) -> None:
        """Run one batch of documents through the model, in one pass or in steps through a cache."""
        for restore in self.restores:
            restore()
        whole = windows[0]
        ids, mask = padded([whole.shard.ids[row] for row in rows])
        mask = mask if self.chosen.encoder else None  # no token sees the padding, which is at the end
        length = ids.shape[1]
        step = self._step(length, [sums.plan for sums in windows])
        cache = DynamicCache(config=self.decoder.config) if step < length else None
        for first in range(0, length, step):
            part = ids[:, first : first + step]
            end = first + part.shape[1]
            reached = [sums for sums in windows if first < sums.shard.window]
            add = [sums.adding(self.calls, rows, first, min(end, sums.shard.window)) for sums in reached]

            def add_all(attention: Attention, add: list[OnAttention] = add) -> None:
                for of_window in add:
                    of_window(attention)

            with torch.no_grad(), watching(self.model, add_all, modules=self.attentions):
                output = self._decode(part, None if mask is None else mask[:, : first + step], cache, first)
                for sums in reached:
                    documents = {sums.shard.examples[row]: sums.shard.ids[row] for row in rows}
                    sums.losses.add(documents, output.last_hidden_state, first)
        for sums in windows:
            send_kept(sums.layers)

    def _forward_images(self, row: int, sums: WindowSums) -> None:
        """Run one document with images through the whole model; its text is added span by span, without a loss."""
        for restore in self.restores:
            restore()
        shard = sums.shard
        example, parts = shard.examples[row], []
        for span in shard.images[example].text_spans:
            tokens = span_tokens(span, example, shard.kept[row], sums.plan.width)
            parts.append(self.calls.part(tokens, span.positions[1], span))
            sums.labels.append((np.full(len(tokens.kept[0]), example), tokens.kept[0] + tokens.first))
        with watching(self.model, self.calls.adding(sums.layers, parts), modules=self.attentions):
            shard.images[example].call(self.model)
        send_kept(sums.layers)

    def _decode(self, ids: torch.Tensor, mask: torch.Tensor | None, cache: DynamicCache | None, first: int) -> Any:
        device = _input_device(self.decoder)
        positions = torch.arange(first, first + ids.shape[1], device=device).expand(ids.shape)
        return self.decoder(
            input_ids=on_device(ids.numpy(), device),
            attention_mask=None if mask is None else on_device(mask.numpy(), device),
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )

    def _step(self, length: int, plans: list[Plan]) -> int:
        """Return the tokens per forward pass: all, or whole buckets of every window that it does not cover."""
        if self.options.prefill is not None:
            requested = self.options.prefill or length
        else:
            masked = self.chosen.any_local or self.decoder.config._attn_implementation == "eager"
            requested = 2048 if masked and length > LONG and not self.chosen.one_pass else length
        if requested >= length:
            return length
        own, covered = plans[0].width, length
        while True:
            width = math.lcm(own, *(plan.width for plan in plans[1:] if plan.window > covered))
            step = max(width, requested // width * width)
            if step >= covered:
                return step
            covered = step


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _device_name(device: torch.device, model: PreTrainedModel) -> str:
    """Return ``cpu``, or the name of the GPU and whether the reduction kernel computes its sums."""
    if device.type != "cuda":
        return device.type
    d, half = head_size(backbone(model).config), model.dtype in (torch.bfloat16, torch.float16)
    in_place = half and d is not None and trusted(device, model.dtype, d)
    return f"{torch.cuda.get_device_name(device)}, {'kernel' if in_place else 'plain'}"


def _input_device(decoder: PreTrainedModel) -> torch.device:
    weight: Any = decoder.get_input_embeddings().weight
    return torch.device("cpu") if weight.device.type == "meta" else weight.device
