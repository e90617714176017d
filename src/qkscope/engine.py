"""Where work runs: in this process, or in local worker processes; the results do not depend on which."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from threadpoolctl import threadpool_limits

from qkscope.errors import QkscopeError

Item = TypeVar("Item")
Result = TypeVar("Result")

ITEMS_PER_WORKER = 8
"""With fewer items than this per worker, starting it costs more than it saves; unless they are large ones."""


def resolve_workers(workers: int | None, n_items: int, per_worker: int = ITEMS_PER_WORKER) -> int:
    """How many workers to use: as asked, or as many as there are cores and enough work for.

    >>> resolve_workers(4, 2), resolve_workers(None, 3)
    (2, 1)
    """
    if workers is None:
        workers = min(_cores(), math.ceil(n_items / per_worker))
    return max(1, min(workers, n_items))


def for_each(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int | None = None,
    per_worker: int = ITEMS_PER_WORKER,
) -> Iterator[tuple[int, Result]]:
    """Yield (index, result) of each item as it is done. Linear algebra uses one thread per process throughout,
    so that neither speed nor rounding depends on how many processes there are.
    """  # noqa: D205
    count = resolve_workers(workers, len(items), per_worker)
    if count == 1:
        for index, item in enumerate(items):
            with threadpool_limits(1):
                result = work(item)
            yield index, result
        return
    # Spawned, not forked: Arrow and BLAS keep threads that do not survive a fork.
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_single_threaded)
    try:
        futures = {pool.submit(work, item): index for index, item in enumerate(items)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise QkscopeError(
            "a worker process died: for lack of memory, or, in a script, because it lacks the guard "
            "if __name__ == '__main__'; try one worker"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _single_threaded() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers for all
    import scipy.linalg  # noqa: F401  a limit holds only for what is loaded when it is set

    global _limits  # kept alive: the limit ends with the object
    _limits = threadpool_limits(1)


_limits: object = None
