"""The GPUs that captures could run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qkscope.capture.sums.gramsums import trusted


@dataclass(frozen=True)
class Gpu:
    """One GPU and its free memory now."""

    name: str
    free_gib: float
    total_gib: float
    kernel: bool
    """Whether the reduction kernel runs on it and agrees with torch."""


def gpus() -> list[Gpu]:
    """Every GPU that torch sees."""
    devices = []
    for number in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(number))
        kernel = trusted(torch.device("cuda", number), torch.bfloat16, 128)
        devices.append(Gpu(torch.cuda.get_device_name(number), free, total, kernel))
    return devices
