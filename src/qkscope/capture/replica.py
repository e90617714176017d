"""A replica of the model in a worker: it travels as a description, and loads the model where it arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from qkscope.capture import models
from qkscope.capture.measure import Measurement
from qkscope.capture.modelreport import ModelReport, ShardSums
from qkscope.capture.options import CaptureOptions, ModelOptions
from qkscope.capture.shards import Shard
from qkscope.engine.workers import worker_number


@dataclass
class Replica:
    """Measures shards; asked for None, it says what it sees of the model."""

    source: PreTrainedModel | ModelOptions
    """A model that is here, or where every worker finds it."""
    options: CaptureOptions
    gate: np.ndarray
    """Tokens of the first document, for the parity gate."""
    keep_going: bool = False
    on_documents: Callable[[Shard, int], None] | None = None
    """Told of every document, in this process."""
    _measurement: Measurement | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """What travels to a worker: neither a loaded model nor what listens in this process."""
        return vars(self) | {"on_documents": None, "_measurement": None}

    def __call__(self, shard: Shard | None) -> ModelReport | ShardSums:
        """Look at the model, or measure one shard."""
        if self._measurement is None:
            self._measurement = Measurement(self._model(), self.gate, self.options)
        if shard is None:
            return self._measurement.seen
        told = self.on_documents
        return self._measurement.shard(
            shard,
            keep_going=self.keep_going,
            on_documents=None if told is None else lambda done: told(shard, done),
        )

    def _model(self) -> PreTrainedModel:
        if isinstance(self.source, PreTrainedModel):
            return self.source
        number, options = worker_number(), self.source
        if number is not None:
            models.load_quietly()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        # Workers of one machine share its GPUs; one that replaces another has its number, and so its GPU.
        device = models.resolved_device(options.device)
        if number is not None and device == "cuda":
            device = f"cuda:{number % torch.cuda.device_count()}"
        if device.startswith("cuda:"):  # without a number it is the current one already
            torch.cuda.set_device(device)  # kernels of our own run on the current one
        return models.load_model(replace(options, device=device))
