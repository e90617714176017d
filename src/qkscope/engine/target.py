"""The execution target: this process, local workers or Ray; and the error if workers keep dying."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from qkscope.errors import ConfigError, QkscopeError
from qkscope.options import is_whole

TRIES = 3
"""Number of attempts for an item whose worker dies."""

EngineName = Literal["local", "ray"]


@dataclass(frozen=True)
class ExecutionTarget:
    """Number of workers, engine and resources for running work."""

    workers: int | None = None
    """Number of workers; None: one per core if there is enough work."""
    engine: EngineName = "local"
    """Local processes, or Ray actors."""
    address: str | None = None
    """Address of a Ray cluster; None: start one on this machine and stop it afterwards."""
    gpus: int = 0
    """GPUs that Ray reserves for each worker."""

    def __post_init__(self) -> None:
        if self.workers is not None and (not is_whole(self.workers) or self.workers < 1):
            raise ConfigError(f"expected at least one worker, got {self.workers!r}")
        if self.engine not in ("local", "ray"):
            raise ConfigError(f"unknown engine {self.engine!r}; use local or ray")
        if self.address is not None and self.engine != "ray":
            raise ConfigError("--ray-address needs --engine ray")


IN_PROCESS = ExecutionTarget(workers=1)
"""Run in this process."""


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers_died(item: object) -> QkscopeError:
    """The error for an item on which every worker died."""
    return QkscopeError(
        f"{TRIES} workers died on {item}, one after another, most likely out of memory; use fewer --workers"
    )
