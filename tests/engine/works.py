"""Work for workers to do in tests; importable, so that it can travel."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qkscope.engine.workers import worker_number
from qkscope.errors import HeadError
from qkscope.headids import HeadId


def square(item: int) -> int:
    return item**2


def number_of_worker(_: int) -> int | None:
    return worker_number()


def process_number(_: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def threads_of_blas(_: int) -> list[int]:
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))
    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]


class Untravelled(Exception):
    """An error that does not survive pickling."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fails(item: int) -> int:
    if item == 3:
        raise HeadError(HeadId(5, 13, "q"), "is broken", "file.parquet")
    if item == 4:
        raise Untravelled(1, 2)
    return item


@dataclass(frozen=True)
class Dies:
    """Work that is killed at an item the first ``times`` times, in the middle of a large answer if requested."""

    folder: Path
    item: int
    times: int
    answering: bool = False

    def __call__(self, item: int) -> np.ndarray:
        before = len(list(self.folder.glob("death-*")))
        if item == self.item and before < self.times:
            (self.folder / f"death-{before}").touch()
            if not self.answering:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return np.zeros(3 * 10**7)
        return np.full(3, item)


@dataclass(frozen=True)
class Waits:
    """Work that records its process in a file name and then takes its time."""

    folder: Path

    def __call__(self, item: int) -> int:
        (self.folder / f"process-{os.getpid()}").touch()
        time.sleep(60)
        return item


@dataclass(frozen=True)
class DiesOnArrival:
    """Work that kills the first worker that it comes to, before this worker can report that it is ready."""

    folder: Path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return _arrive, (self.folder,)

    def __call__(self, item: int) -> int:
        return item


def _arrive(folder: Path) -> DiesOnArrival:
    if not (folder / "arrived").exists():
        (folder / "arrived").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return DiesOnArrival(folder)
