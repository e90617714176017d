"""Where work runs, and what is said when it cannot go on there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from qkscope.errors import ConfigError, QkscopeError

TRIES = 3
"""How often an item is given out whose worker dies."""

EngineName = Literal["local", "ray"]


@dataclass(frozen=True)
class Place:
    """Where work runs."""

    workers: int | None = None
    """Workers; None: as many as there are cores and enough work for."""
    engine: EngineName = "local"
    """Processes of this machine, or actors of Ray."""
    address: str | None = None
    """Address of a Ray cluster; None: one that is started on this machine and ends with the work."""
    gpus: int = 0
    """GPUs of each worker, for Ray to know."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"expected one worker or more, got {self.workers}")
        if self.engine not in ("local", "ray"):
            raise ConfigError(f"unknown engine {self.engine!r}; there are local and ray")
        if self.address is not None and self.engine != "ray":
            raise ConfigError("--ray-address is for --engine ray, which was not given")


HERE = Place(workers=1)
"""In this process."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gave_up(item: object) -> QkscopeError:
    """The error of an item whose workers die one after the other."""
    return QkscopeError(
        f"{TRIES} workers died one after the other on {item}, most likely for lack of memory; "
        "use fewer of them (--workers), or one"
    )
