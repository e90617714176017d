"""Local worker processes, each with its own pipe.

A worker that is killed while it sends an answer breaks only its own pipe; the closed pipe shows that the worker died.
Workers are spawned, not forked: Arrow, BLAS and torch have threads that do not survive a fork.
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
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pickle import UnpicklingError
from types import TracebackType
from typing import Any, Generic, TypeVar

from threadpoolctl import threadpool_limits

from qkscope.engine.target import TRIES, workers_died
from qkscope.errors import QkscopeError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

PARENT_CHECK_SECONDS = 1.0
"""Interval at which a worker checks that its parent is alive."""
EXIT_SECONDS = 5.0
"""Longest time that an idle worker may take to exit."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_number: int | None = None
_limits: object = None  # kept alive: the limit ends with the object


def worker_number() -> int | None:
    """Number of this worker process, from 0; None in any other process. A replacement worker has the same number."""
    return _number


class Workers(Generic[_Item, _Result]):
    """A pool of local processes; leaving the block stops them, even while they work on an item."""

    def __init__(self, work: Callable[[_Item], _Result], count: int) -> None:
        self._work, self._count = work, count
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers[_Item, _Result]:
        atexit.register(self._end)  # for an iterator that is never closed
        try:
            for number in range(self._count):
                self._start(number)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        atexit.unregister(self._end)  # not before: workers ignore signals, and an exit would wait for any that is left

    def _start(self, number: int) -> None:
        """Start a worker, in place of the one of this number if there is one."""
        with _signals_later():
            self._workers[number : number + 1] = [_Worker(self._work, number)]

    def _end(self) -> None:
        """Stop all workers; those that are left when a signal comes meanwhile are killed."""
        try:
            for worker in self._workers:
                worker.end()
        finally:
            for worker in self._workers:
                worker.kill()

    def map(self, items: Sequence[_Item]) -> Iterator[tuple[int, _Result]]:
        """Yield (index, result) as items are completed; an item whose worker dies is sent to a new worker."""
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
                        raise workers_died(items[index]) if answer.ready else _start_error()
                    waiting.appendleft(index)
                    self._start(worker.number)
                elif not isinstance(answer, _Ready):
                    yield index, _result(answer)


@dataclass(frozen=True)
class _Ready:
    """The first message of a worker."""


@dataclass(frozen=True)
class _Died:
    """Returned in place of a message if the worker died."""

    ready: bool
    """True if the worker had started."""


@dataclass(frozen=True)
class _Answer:
    """The answer for an item: a result, or an error and its traceback."""

    value: Any
    error: BaseException | None = None
    trace: str = ""


class _Worker:
    """One process, and the item it is working on."""

    def __init__(self, work: Callable[[Any], Any], number: int) -> None:
        context = get_context("spawn")
        self.number, self._ready = number, False
        self.item: int | None = None
        self.pipe, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(far_end, work, number), daemon=True)
        self._process.start()
        far_end.close()

    def give(self, index: int, items: Sequence[Any]) -> None:
        """Send an item; if the process has died, ``receive`` will notice."""
        self.item = index
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(items[index])

    def receive(self) -> _Ready | _Died | _Answer:
        """The next message of the worker; after an answer it is free again."""
        try:
            message: _Ready | _Answer = self.pipe.recv()
        except (EOFError, OSError, UnpicklingError):
            self._process.kill()
            self.end()
            return _Died(self._ready)
        if isinstance(message, _Ready):
            self._ready = True
        else:
            self.item = None
        return message

    def end(self) -> None:
        """Stop the process: an idle one exits when its pipe closes, a busy one is killed."""
        self.pipe.close()
        if self.item is None:
            self._process.join(EXIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the process, if it has not ended."""
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _start_error() -> QkscopeError:
    return QkscopeError(
        "worker processes cannot start; in a script, put the code that starts workers under if __name__ == '__main__', "
        "or use one worker"
    )


def _result(answer: _Answer) -> Any:
    if answer.error is None:
        return answer.value
    if not isinstance(answer.error, QkscopeError):
        answer.error.add_note(f"in a worker process:\n{answer.trace}")
    raise answer.error


@contextmanager
def _signals_later() -> Iterator[None]:
    """Keep signals until the block ends; a process that it starts ignores them from its first moment to its last.

    They are blocked in this thread, which a new process inherits, and noted where another thread receives them.
    """
    resource_tracker.ensure_running()  # at its start it ends the blocking
    is_main_thread = threading.current_thread() is threading.main_thread()
    came: list[int] = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    handlers = [(number, signal.getsignal(number)) for number in _SIGNALS if is_main_thread]
    before = {number: handler for number, handler in handlers if handler is not None}
    try:
        for number in before:
            signal.signal(number, lambda received, _: came.append(received))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if came:
            signal.raise_signal(came[0])


# ---- in the worker ------------------------------------------------------------------------------


def _serve(pipe: Connection, work: Callable[[Any], Any], number: int) -> None:
    global _number
    _number = number
    for interrupt in _SIGNALS:
        signal.signal(interrupt, signal.SIG_IGN)  # the parent handles signals, and stops its workers
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    single_threaded()
    with suppress(EOFError, OSError):  # the parent has closed the pipe
        pipe.send(_Ready())
        while True:
            pipe.send(_answer(work, pipe.recv()))


def _answer(work: Callable[[Any], Any], item: Any) -> _Answer:
    try:
        return _Answer(work(item))
    except Exception as error:
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an error that cannot be pickled is sent as text
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return _Answer(None, error, trace)


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process has died, even while working on an item."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def single_threaded() -> None:
    """Use one thread for linear algebra in this process, from now on."""
    import scipy.linalg  # noqa: F401  a limit applies only to libraries that are already loaded

    global _limits
    _limits = threadpool_limits(1, user_api="blas")
