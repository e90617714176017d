"""Measurement inside a serving engine with a transformers model: the engine schedules the documents, we watch.

An engine reads several documents in one pass, one after the other without padding. Its metadata state where each
begins; each is then added as if it were alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from qkscope.capture.call import RequestSpan, batch_tokens, documents_of, request_call, request_output
from qkscope.capture.loss import OutputHead
from qkscope.capture.measure import Measurement, WindowSums
from qkscope.capture.options import CaptureOptions
from qkscope.capture.repeats import RepeatedTokens
from qkscope.capture.shardsums import ModelReport, send_kept
from qkscope.capture.watch import Attention, OnAttention, OnOutput, watching
from qkscope.errors import CaptureError


class ServingEngine(ABC):
    """The interface of an engine for a measurement."""

    decoder: PreTrainedModel
    """The model without its language-model head, on whose attention modules the engine's attention is called."""
    versions: dict[str, str]
    """Versions of the engine's packages, by name."""
    longest: int
    """Largest length of a document, in tokens."""

    @abstractmethod
    def prefill(self, documents: Sequence[np.ndarray]) -> None:
        """Read these documents, and predict one token after each."""

    @abstractmethod
    def spans(self) -> list[RequestSpan]:
        """Return the requests of the current pass."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of hidden states, as the engine computes them."""


class ServedMeasurement(Measurement):
    """A model in an engine and the description of its layers."""

    def __init__(
        self, engine: ServingEngine, gate: np.ndarray, options: CaptureOptions, repeated: RepeatedTokens | None = None
    ) -> None:
        self.engine = engine
        self._sent: Sequence[np.ndarray] = ()
        self._spans: dict[int, RequestSpan] = {}
        """Requests of the current pass, by the number of the document among those sent."""
        super().__init__(engine.decoder, gate, options, repeated)

    def _watching(self, on_attention: OnAttention, on_output: OnOutput | None = None) -> AbstractContextManager[None]:
        """Watch each request's call by itself."""

        def split(attention: Attention) -> None:
            for span in self._spans.values():
                on_attention(request_call(attention, span))

        def split_output(attention: Attention, output: torch.Tensor) -> None:
            assert on_output is not None
            for span in self._spans.values():
                on_output(request_call(attention, span), request_output(output, span))

        return watching(self.model, split, None if on_output is None else split_output, self.attentions)

    def _decode(self, ids: torch.Tensor, mask: torch.Tensor | None, cache: DynamicCache | None, first: int) -> Any:
        """Run one document; return its hidden states."""
        if cache is not None or mask is not None or first:
            raise CaptureError("an engine reads single documents as a whole")
        (hidden,) = self._read([ids[0].numpy()])
        return SimpleNamespace(last_hidden_state=hidden[None])

    def _read(self, documents: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Run documents; return the hidden states of each (T, size)."""
        with self._requests(documents) as hidden:
            self.engine.prefill(documents)
        return [hidden[number] for number in range(len(documents))]

    @contextmanager
    def _requests(self, documents: Sequence[np.ndarray]) -> Iterator[dict[int, torch.Tensor]]:
        """Record which documents each pass of the model reads, and its hidden states.

        This replaces ``forward``, since engines that compile call it directly, without hooks.
        """
        model: Any = self.model
        forward, replaced_forward = model.forward, vars(model).get("forward")
        hidden: dict[int, torch.Tensor] = {}

        def recording_forward(**inputs: Any) -> Any:
            spans, ids = self.engine.spans(), inputs.get("input_ids")
            if ids is None:
                raise CaptureError("the engine calls the model without token ids, so documents cannot be told apart")
            numbers = documents_of(spans, ids.reshape(-1).cpu().numpy(), self._sent, read=hidden)
            self._spans = dict(zip(numbers, spans, strict=True))
            output = forward(**inputs)
            for number, span in self._spans.items():
                hidden[number] = output[0].reshape(-1, output[0].shape[-1])[span.columns]
            return output

        self._sent, model.forward = documents, recording_forward
        try:
            yield hidden
        finally:
            del model.forward
            if replaced_forward is not None:
                model.forward = replaced_forward
            self._sent, self._spans = (), {}

    def _forward(self, rows: list[int], windows: list[WindowSums]) -> None:
        """Run these documents, in as few passes as the engine needs."""
        for restore in self.restores:
            restore()
        (sums,) = windows
        shard = sums.shard
        documents = [shard.ids[row] for row in rows]
        tokens = [batch_tokens(shard, [row], 0, len(shard.ids[row]), self.options) for row in rows]
        add = [self.calls.adding(sums.layers, [self.calls.part(of_row, int(of_row.lengths[0]))]) for of_row in tokens]
        in_order: list[int] = []

        def split(attention: Attention) -> None:
            for number, span in self._spans.items():
                add[number](request_call(attention, span))
                if attention.layer == min(self.layers):
                    in_order.append(number)

        with torch.no_grad(), watching(self.model, split, modules=self.attentions):
            hidden = self._read(documents)
        sums.labels += [(np.full(len(tokens[n].kept[0]), shard.examples[rows[n]]), tokens[n].kept[0]) for n in in_order]
        for row, of_row in zip(rows, hidden, strict=True):
            sums.losses.add({shard.examples[row]: shard.ids[row]}, of_row[None], 0)
        send_kept(sums.layers)

    @property
    def _batch(self) -> int | None:
        return self.options.batch or 1

    def _output_head(self, gate: np.ndarray) -> OutputHead:  # noqa: ARG002
        return OutputHead(self.engine.logits, 1.0, None)

    def _report(self) -> ModelReport:
        report = super()._report()
        return replace(report, versions=report.versions | self.engine.versions)

    def _longest(self) -> int:
        return min(super()._longest(), self.engine.longest)
