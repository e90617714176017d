"""Where models are trained and served: a training loop, transformers' Trainer, vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkscope.integrations.trainingstudy import TrainingStudy

if TYPE_CHECKING:
    from qkscope.integrations.trainer import QkScopeCallback
    from qkscope.integrations.vllmengine import capture_vllm

__all__ = ["QkScopeCallback", "TrainingStudy", "capture_vllm"]


def __getattr__(name: str) -> Any:
    if name == "QkScopeCallback":
        from qkscope.integrations.trainer import QkScopeCallback  # needs transformers

        return QkScopeCallback
    if name == "capture_vllm":
        from qkscope.integrations.vllmengine import capture_vllm  # needs torch

        return capture_vllm
    raise AttributeError(f"module 'qkscope.integrations' has no attribute {name!r}")
