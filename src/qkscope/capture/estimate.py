"""Memory, disk and time of a capture, estimated before it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from qkscope.capture.attention import backbone, self_attentions
from qkscope.capture.models import refuse_absurd, resolved_device, resolved_dtype
from qkscope.capture.options import ModelOptions
from qkscope.core.headmoments import N_GROUPS
from qkscope.errors import CaptureError

GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes and speeds; only the time depends on the number of documents."""

    parameters: int
    weights: int
    statistics: int
    """Sums on the device while a shard is measured."""
    disk: int
    """Moments and sample of the finished run; the moments take twice as much during the capture."""
    flop_per_token: float
    flop_per_second: float

    def seconds(self, tokens: int) -> float:
        """Time of the forward passes over this many tokens."""
        return tokens * self.flop_per_token / self.flop_per_second


def estimate(options: ModelOptions, *, buckets: int, sample: int, window: int) -> Estimate:
    """Estimate from the model's config alone; no weights are loaded."""
    location, file_option = options.model, {}
    if location.endswith(".gguf"):
        location, file_option = str(Path(location).parent), {"gguf_file": Path(location).name}
    try:
        config = AutoConfig.from_pretrained(location, revision=options.revision, trust_remote_code=False, **file_option)
        refuse_absurd(config)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except CaptureError:
        raise
    except Exception as error:  # as in models.py
        raise CaptureError(f"{options.model} cannot be read ({' '.join(str(error).split())[:300]})") from None
    text, layers = backbone(model).config, len(self_attentions(model))
    n_q = int(text.num_attention_heads)
    n_k = int(getattr(text, "num_key_value_heads", None) or n_q)
    d = int(getattr(text, "head_dim", None) or text.hidden_size // n_q)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = resolved_device(options.device)
    dtype = resolved_dtype(options.dtype, device)
    size = torch.finfo(dtype if isinstance(dtype, torch.dtype) else torch.bfloat16).bits // 8
    cells = layers * (n_q * (buckets + N_GROUPS) + n_k * N_GROUPS)
    attention = 2 * layers * n_q * d * window  # causal scores and their sum over values, on average
    return Estimate(
        parameters=parameters,
        weights=parameters * size,
        statistics=cells * (d + 2) ** 2 * 8,
        disk=cells * (d + 1) * (d + 2) // 2 * 8 + layers * (n_q + n_k) * sample * (d * 4 + 12),
        flop_per_token=2.0 * parameters + attention + 2 * layers * (n_q + n_k) * d * d,
        flop_per_second=_measured_rate(device, dtype if isinstance(dtype, torch.dtype) else torch.bfloat16),
    )


def _measured_rate(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a matrix product here and now."""
    place = "cuda" if device == "balanced" else device
    n = 1024 if place == "cpu" else 8192
    x = torch.randn(n, n, device=place, dtype=dtype)
    x @ x
    best = 0.0
    for _ in range(3):
        if place != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        y = x @ x
        float(y[0, 0])
        best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best
