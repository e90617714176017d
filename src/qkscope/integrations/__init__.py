"""Integrations with a training loop, transformers' Trainer and vLLM; each is imported when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkscope.integrations.trainer import QkScopeCallback, TrainingStudy
    from qkscope.integrations.vllm import capture_vllm

__all__ = ["QkScopeCallback", "TrainingStudy", "capture_vllm"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'qkscope.integrations' has no attribute {name!r}")
    return getattr(import_module(f"qkscope.integrations.{'vllm' if name == 'capture_vllm' else 'trainer'}"), name)
