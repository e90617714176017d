"""Where models are trained: measurements during a training loop, or as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkscope.integrations.trainingstudy import TrainingStudy

if TYPE_CHECKING:
    from qkscope.integrations.trainer import QkScopeCallback

__all__ = ["QkScopeCallback", "TrainingStudy"]


def __getattr__(name: str) -> Any:
    if name != "QkScopeCallback":
        raise AttributeError(f"module 'qkscope.integrations' has no attribute {name!r}")
    from qkscope.integrations.trainer import QkScopeCallback  # needs transformers

    return QkScopeCallback
