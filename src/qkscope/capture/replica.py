"""A replica of the model in a worker: the worker receives a description and loads the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from qkscope.capture import model as models
from qkscope.capture.images import ImageInputs
from qkscope.capture.measure import Measurement
from qkscope.capture.options import CaptureOptions, ModelOptions
from qkscope.capture.repeats import RepeatedTokens
from qkscope.capture.serve import ServedMeasurement, ServingEngine
from qkscope.capture.shards import Shard
from qkscope.capture.shardsums import ModelReport, ShardSums
from qkscope.engine.workers import worker_number


@dataclass
class Replica:
    """A callable that measures a shard; for None instead of a shard, it returns the report on the model."""

    source: PreTrainedModel | ModelOptions | ServingEngine
    """A loaded model, an engine that has one, or the options by which every worker loads it."""
    options: CaptureOptions
    gate: np.ndarray
    """Tokens of the first document, for the parity check."""
    passage: np.ndarray | None = None
    """Tokens whose vectors the report contains."""
    keep_going: bool = False
    repeated: RepeatedTokens | None = None
    """How repeated tokens are drawn; None: from the whole vocabulary."""
    images: ImageInputs | None = None
    """The first document with images, for their check."""
    on_documents: Callable[[Shard, list[int]], None] | None = None
    """A callback after every batch of documents, in this process only."""
    _measurement: Measurement | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that is sent to a worker, without the measurement and the callback of this process."""
        return vars(self) | {"on_documents": None, "_measurement": None}

    def __call__(self, shard: Shard | None) -> ModelReport | ShardSums:
        """Report on the model, or measure one shard."""
        if self._measurement is None:
            self._measurement = self._measuring()
        if shard is None:
            if self.images is not None:
                self._measurement.check_images(self.images)
            passage = {} if self.passage is None else self._measurement.passage(self.passage)
            return replace(self._measurement.report, passage=passage)
        listener = self.on_documents
        return self._measurement.shard(
            shard,
            keep_going=self.keep_going,
            on_documents=None if listener is None else lambda rows: listener(shard, rows),
        )

    def _measuring(self) -> Measurement:
        if isinstance(self.source, ModelOptions):
            return Measurement(self._loaded(self.source), self.gate, self.options, self.repeated)
        if isinstance(self.source, PreTrainedModel):
            return Measurement(self.source, self.gate, self.options, self.repeated)
        return ServedMeasurement(self.source, self.gate, self.options, self.repeated)

    def _loaded(self, options: ModelOptions) -> PreTrainedModel:
        number = worker_number()
        if number is not None:
            models.load_quietly()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        # Workers of one machine share its GPUs; a replacement worker has the same number, and so the same GPU.
        device = models.resolved_device(options.device)
        if number is not None and device == "cuda":
            device = f"cuda:{number % torch.cuda.device_count()}"
        if device.startswith("cuda:"):  # plain cuda is already the current device
            torch.cuda.set_device(device)  # the reduction kernel runs on the current device
        return models.load_model(replace(options, device=device))
