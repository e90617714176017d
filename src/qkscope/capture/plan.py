"""Memory, disk and time of a capture, estimated before it runs.

Sizes follow from the model's config. Time is that of one layer of the same shape with random weights, timed on this
machine at two lengths, times the number of layers.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, PretrainedConfig

from qkscope.capture.gate import gate_tokens
from qkscope.capture.model import location, model_class, refuse_absurd, resolved_device, resolved_dtype
from qkscope.capture.options import CaptureOptions, ModelOptions
from qkscope.capture.repeats import COPY
from qkscope.capture.shards import documents_at_once
from qkscope.capture.watch import backbone, head_size, self_attentions
from qkscope.core.headmoments import N_GROUPS
from qkscope.core.keypairs import MOST_PAIRS
from qkscope.core.layermoments import UNDONE_COV
from qkscope.core.reach import REACH_COUNTS, REPEAT_COUNTS, bin_starts
from qkscope.errors import CaptureError

_log = logging.getLogger("qkscope")

GIB = 2**30
_STORED = {torch.bfloat16: 1.42, torch.float16: 1.74, torch.float32: 3.42}
"""Compressed bytes on disk per component of a vector."""
_TIMED = {"cpu": 2048, "cuda": 8192}
"""Tokens of the longer of the two timed passes, at most."""
_WATCHED = {"cpu": 1.07, "cuda": 1.05}
"""Time of a watched pass, relative to a plain one (benchmarks/whole.py)."""
_WRITTEN = 150e6
"""Bytes per second of a run that are merged, compressed, written and synced."""
_START = {"cpu": 1.0, "cuda": 2.0}
"""Seconds up to the end of the gate, without its passes."""


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes, and times of forward passes in seconds."""

    parameters: int
    weights: int
    statistics: int
    """Sums on the device while a shard is measured."""
    moments: int
    """Sums of the finished run."""
    per_token: float
    """Bytes of the sample or of saved vectors per token, for all heads."""
    options: CaptureOptions
    linear: float
    """Seconds of a pass per token; NaN if a layer could not be timed."""
    quadratic: float
    """Seconds of a pass per token squared."""
    device_type: str
    """``cpu`` or ``cuda``."""

    def disk(self, lengths: Sequence[int]) -> float:
        """Return the size of the finished run for documents of these lengths; without any, with a full sample."""
        tokens = sum(lengths)
        sample = min(self.options.sample, tokens) if lengths else self.options.sample
        saved = 0.0
        if self.options.vectors is not None:
            saved = tokens * (1.0 if self.options.vectors.sampler == "all" else self.options.vectors.rate)
        return self.moments + (sample + saved) * self.per_token

    def tokens_per_second(self, length: int) -> float:
        """Return the speed of forward passes over documents of this length."""
        return length / self._pass(length)

    def seconds(self, lengths: Sequence[int]) -> float:
        """Return the time from the loaded model to the run on disk."""
        passes = sum(self._pass(length) for length in lengths) * _WATCHED[self.device_type]
        gate = 2 * self._pass(min(gate_tokens(sum(lengths), None), max(lengths)))
        repeats = N_GROUPS * self._pass(2 * COPY) if self.options.reach_queries else 0.0
        return passes + gate + repeats + _START[self.device_type] + self.disk(lengths) / _WRITTEN

    def _pass(self, length: int) -> float:
        return self.linear * length + self.quadratic * length**2


def estimate(model_options: ModelOptions, options: CaptureOptions, window: int) -> Estimate:
    """Estimate from the model's config alone; no weights are loaded."""
    config = _config(model_options)
    try:
        with init_empty_weights():
            model = model_class(config).from_config(config, trust_remote_code=False)
        model.tie_weights()  # or embeddings that are also the output count twice
    except Exception as error:  # as in model.py
        raise _unreadable(model_options, error) from None
    text, layers = backbone(model).config, len(self_attentions(model))
    n_q = int(text.num_attention_heads)
    n_k = int(getattr(text, "num_key_value_heads", None) or n_q)
    d = head_size(text) or int(text.hidden_size) // n_q
    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = resolved_device(model_options.device)
    resolved = resolved_dtype(model_options.dtype, device)
    dtype = resolved if isinstance(resolved, torch.dtype) else torch.bfloat16
    n_layers = layers if options.layers is None else len(options.layers)
    q_heads = n_q if options.heads is None else len(options.heads)
    k_heads = n_k if options.heads is None else len({head // (n_q // n_k) for head in options.heads})
    undone = q_heads if options.keep == UNDONE_COV else 0
    on_device = q_heads * (options.buckets + N_GROUPS) + k_heads * N_GROUPS + undone
    seconds = _layer_times(config, window, options.batch, device, dtype)
    return Estimate(
        parameters=parameters,
        weights=parameters * (torch.finfo(dtype).bits // 8),
        statistics=n_layers * on_device * (d + 2) ** 2 * 8,
        moments=n_layers * (_layer_bytes(q_heads, k_heads, d, options.buckets, window) + undone * _moments_bytes(d)),
        per_token=n_layers * (q_heads + k_heads) * d * _STORED[dtype],
        options=options,
        linear=layers * seconds[0],
        quadratic=layers * seconds[1],
        device_type="cpu" if device == "cpu" else "cuda",
    )


def _layer_bytes(n_q: int, n_k: int, d: int, buckets: int, window: int) -> int:
    """Return the size of a layer's file, as layerfiles.py writes it."""
    heads, planes = n_q + n_k, d // 2
    groups = heads * N_GROUPS * _moments_bytes(d)
    cells = heads * N_GROUPS * buckets * (d * 4 + 16)
    spread = n_q * buckets * (MOST_PAIRS + d) * 4 + buckets * MOST_PAIRS * 12
    rotation = heads * N_GROUPS * planes * 3 * 8
    reach = n_q * (N_GROUPS * (len(REACH_COUNTS) + len(bin_starts(window)) + 1 + len(REPEAT_COUNTS)) + 1) * 8
    return groups + cells + spread + rotation + reach


def _moments_bytes(d: int) -> int:
    """Return the size of the moments of one head."""
    return (d + 1) * (d + 2) // 2 * 4 + (d + 2) * 8


def _config(options: ModelOptions) -> PretrainedConfig:
    path_or_id, arguments = location(options)
    try:
        config = AutoConfig.from_pretrained(path_or_id, **arguments)
        refuse_absurd(config)
    except CaptureError:
        raise
    except Exception as error:  # as in model.py
        raise _unreadable(options, error) from None
    return config


def _unreadable(options: ModelOptions, error: Exception) -> CaptureError:
    return CaptureError(f"{options.model} cannot be read ({' '.join(str(error).split())[:300]})")


def _layer_times(
    config: PretrainedConfig, window: int, batch: int | None, device: str, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the seconds of one layer per token, and per token squared, in passes like those of a capture."""
    device_type = "cpu" if device == "cpu" else "cuda"
    small = copy.deepcopy(config)
    text: Any = small.get_text_config()
    text.num_hidden_layers, text.vocab_size = 1, 256
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    try:
        with torch.device(device_type):
            decoder = backbone(model_class(small).from_config(small, dtype=dtype, trust_remote_code=False).eval())
        longer = min(window, _TIMED[device_type])
        shorter = max(longer // 2, 1)
        t_long, t_short = (
            _timed(decoder, batch or documents_at_once(length, device_type), length, device_type)
            for length in (longer, shorter)
        )
    except Exception as error:  # as in model.py
        _log.warning("one layer of this model could not be timed (%s)", " ".join(str(error).split())[:200])
        return math.nan, math.nan
    if longer == shorter:
        return t_long / longer, 0.0
    quadratic = max((t_long / longer - t_short / shorter) / (longer - shorter), 0.0)
    return max(t_long / longer - quadratic * longer, 0.0), quadratic


def _timed(decoder: Any, documents: int, length: int, device_type: str) -> float:
    """Return the seconds that one of several documents takes in a forward pass, the fastest of a few."""
    ids = torch.randint(0, 256, (documents, length), device=device_type)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        with torch.no_grad():
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
        float(hidden[0, -1, 0])
        best = min(best, time.perf_counter() - start)
    return best / documents
