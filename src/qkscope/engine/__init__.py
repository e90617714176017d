"""Pools of workers: this process, local processes or Ray actors; results do not depend on the choice.

A pool sends its work function to each worker once and then the items one by one. A worker that dies is replaced, and
its item is sent again. Results are yielded in order of completion, with the index of their item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from threadpoolctl import threadpool_limits

from qkscope.engine.target import IN_PROCESS, ExecutionTarget, cores

__all__ = ["IN_PROCESS", "ExecutionTarget", "Pool", "for_each", "pool", "resolve_workers"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Item_contra = TypeVar("Item_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)

ITEMS_PER_WORKER = 8
"""With fewer items per worker, starting it costs more time than it saves, unless items are large."""


class Pool(Protocol[Item_contra, Result_co]):
    """Workers that have received their work function."""

    def map(self, items: Sequence[Item_contra]) -> Iterator[tuple[int, Result_co]]:
        """Yield (index, result) of each item as it is completed."""


@contextmanager
def pool(
    work: Callable[[_Item], _Result], target: ExecutionTarget, max_items: int, per_worker: int = ITEMS_PER_WORKER
) -> Iterator[Pool[_Item, _Result]]:
    """Workers for at most ``max_items`` items at a time; they are stopped at the end of the block.

    Linear algebra uses one thread per process throughout, so that neither speed nor rounding depends on how many
    processes there are.
    """
    if target.engine == "ray":
        from qkscope.engine.rayactors import ray_pool

        with ray_pool(work, target, max_items) as actors:
            yield actors
        return
    count = resolve_workers(target.workers, max_items, per_worker)
    if count == 1:
        yield _ThisProcess(work)
        return
    from qkscope.engine.workers import Workers

    with Workers(work, count) as processes:
        yield processes


def for_each(
    work: Callable[[_Item], _Result],
    items: Sequence[_Item],
    target: ExecutionTarget,
    per_worker: int = ITEMS_PER_WORKER,
) -> Iterator[tuple[int, _Result]]:
    """Yield (index, result) of each item as it is completed, by workers that are started for this call."""
    with pool(work, target, len(items), per_worker) as workers:
        yield from workers.map(items)


def resolve_workers(workers: int | None, n_items: int, per_worker: int = ITEMS_PER_WORKER) -> int:
    """Number of workers to use: as requested, by default one per core if there is enough work.

    >>> resolve_workers(4, 2), resolve_workers(None, 3)
    (2, 1)
    """
    if workers is None:
        workers = min(cores(), math.ceil(n_items / per_worker))
    return max(1, min(workers, n_items))


@dataclass(frozen=True)
class _ThisProcess(Generic[_Item, _Result]):
    """A pool of one: this process."""

    work: Callable[[_Item], _Result]

    def map(self, items: Sequence[_Item]) -> Iterator[tuple[int, _Result]]:
        for index, item in enumerate(items):
            with threadpool_limits(1, user_api="blas"):
                result = self.work(item)
            yield index, result
