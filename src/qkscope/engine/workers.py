"""Local worker processes, each at the end of a pipe of its own.

One pipe per worker, so that a worker killed in the middle of an answer breaks no pipe but its own; its end of the pipe
closes with it, which is how its death is seen. Workers are spawned rather than forked: Arrow, BLAS and torch keep
threads that do not survive a fork.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pickle import UnpicklingError
from types import TracebackType
from typing import Any, Generic, TypeVar

from threadpoolctl import threadpool_limits

from qkscope.engine.place import TRIES, gave_up
from qkscope.errors import QkscopeError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

SECONDS_BETWEEN_LOOKS = 1.0
"""How often a worker looks whether its parent is still there."""
SECONDS_TO_END = 5.0
"""How long a worker that is free may take to end."""
_number: int | None = None
_limits: object = None  # kept alive: the limit ends with the object


def worker_number() -> int | None:
    """Which worker this process is, from 0; None where it is none. One that replaces another has its number."""
    return _number


class Workers(Generic[_Item, _Result]):
    """A pool of local processes; leaving the block ends them, whatever they are doing."""

    def __init__(self, work: Callable[[_Item], _Result], count: int) -> None:
        self._work, self._count = work, count
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers[_Item, _Result]:
        self._workers = [_Worker(self._work, number) for number in range(self._count)]
        atexit.register(self._end)  # for an iterator that nobody closes
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        atexit.unregister(self._end)
        self._end()

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()

    def map(self, items: Sequence[_Item]) -> Iterator[tuple[int, _Result]]:
        """Yield (index, result) as items are done; an item whose worker dies is given out again."""
        waiting, deaths = deque(range(len(items))), Counter[int]()
        while waiting or any(worker.item is not None for worker in self._workers):
            for worker in self._workers:
                if worker.item is None and waiting:
                    worker.give(waiting.popleft(), items)
            busy = {worker.pipe: worker for worker in self._workers if worker.item is not None}
            for worker in (busy[pipe] for pipe in wait(list(busy))):  # type: ignore[index]
                index, answer = worker.item, worker.receive()
                assert index is not None
                if isinstance(answer, _Died):
                    deaths[index] += 1
                    if deaths[index] == TRIES:
                        raise gave_up(items[index]) if answer.ready else _cannot_start()
                    waiting.appendleft(index)
                    self._workers[worker.number] = _Worker(self._work, worker.number)
                elif not isinstance(answer, _Ready):
                    yield index, _result(answer)


@dataclass(frozen=True)
class _Ready:
    """The first thing a worker says."""


@dataclass(frozen=True)
class _Died:
    """What a worker says by no longer being there."""

    ready: bool
    """Whether it ever was."""


@dataclass(frozen=True)
class _Answer:
    """What came of an item: a result, or an error and where it was raised."""

    value: Any
    error: BaseException | None = None
    place: str = ""


class _Worker:
    """One process, and the item it is at."""

    def __init__(self, work: Callable[[Any], Any], number: int) -> None:
        context = get_context("spawn")
        self.number, self._ready = number, False
        self.item: int | None = None
        self.pipe, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(far_end, work, number), daemon=True)
        with _no_interrupts():
            self._process.start()
        far_end.close()

    def give(self, index: int, items: Sequence[Any]) -> None:
        """Hand out an item; that the process died meanwhile is seen when its answer is waited for."""
        self.item = index
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(items[index])

    def receive(self) -> _Ready | _Died | _Answer:
        """What the worker has to say; with an answer it is free again."""
        try:
            said: _Ready | _Answer = self.pipe.recv()
        except (EOFError, OSError, UnpicklingError):
            self._process.kill()
            self.end()
            return _Died(self._ready)
        if isinstance(said, _Ready):
            self._ready = True
        else:
            self.item = None
        return said

    def end(self) -> None:
        """End the process: one that is free ends by itself when its pipe closes, any other is killed."""
        self.pipe.close()
        if self.item is None:
            self._process.join(SECONDS_TO_END)
        self._process.kill()
        self._process.join()


def _cannot_start() -> QkscopeError:
    return QkscopeError(
        "worker processes cannot start; in a script, what starts workers has to stand behind "
        "if __name__ == '__main__'; or use one worker"
    )


def _result(answer: _Answer) -> Any:
    if answer.error is None:
        return answer.value
    if not isinstance(answer.error, QkscopeError):
        answer.error.add_note(f"in a worker process:\n{answer.place}")
    raise answer.error


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """A process that starts now ignores Ctrl-C from its first moment on; the parent answers for all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- in the worker ------------------------------------------------------------------------------


def _serve(pipe: Connection, work: Callable[[Any], Any], number: int) -> None:
    global _number
    _number = number
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, signal.SIG_IGN)  # the parent answers for all, and ends its workers
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    single_threaded()
    with suppress(EOFError, OSError):  # the other end has gone
        pipe.send(_Ready())
        while True:
            pipe.send(_done(work, pipe.recv()))


def _done(work: Callable[[Any], Any], item: Any) -> _Answer:
    try:
        return _Answer(work(item))
    except Exception as error:
        place = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an error of a library that cannot travel goes as its text
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return _Answer(None, error, place)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of an item."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def single_threaded() -> None:
    """One thread of linear algebra in this process, from now on."""
    import scipy.linalg  # noqa: F401  a limit holds only for what is loaded when it is set

    global _limits
    _limits = threadpool_limits(1, user_api="blas")
