"""The same pool made of Ray's actors: on this machine, or on a cluster where one machine is not enough.

Ray is imported here alone. Its usage reports are off unless RAY_USAGE_STATS_ENABLED says otherwise.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from qkscope.engine.place import TRIES, Place, cores, gave_up
from qkscope.engine.workers import single_threaded
from qkscope.errors import ConfigError, QkscopeError

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def ray_pool(work: Callable[[Item], Result], place: Place, most: int) -> Iterator[RayPool[Item, Result]]:
    """Actors on the cluster at ``place.address``, or on one of this machine that ends with the block."""
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, place)
    pool: RayPool[Item, Result] | None = None
    try:
        pool = RayPool(ray, work, _count(ray, place, most), place.gpus)
        yield pool
    finally:
        if pool is not None:
            pool.end()
        if ours:
            ray.shutdown()


class RayPool(Generic[Item, Result]):
    """Actors that have been given their work."""

    def __init__(self, ray: Any, work: Callable[[Item], Result], count: int, gpus: int) -> None:
        self._ray, self._work = ray, ray.put(work)
        # Not restarted by Ray: a new actor is as good, and the item has to be given out again in any case.
        self._kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Actor)
        self._actors = [self._kind.remote(self._work) for _ in range(count)]

    def map(self, items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
        """Yield (index, result) as items are done; an item whose actor dies is given out again."""
        ray = self._ray
        waiting, deaths = deque(range(len(items))), Counter[int]()
        free, running = deque(range(len(self._actors))), dict[Any, tuple[int, int]]()
        while waiting or running:
            while waiting and free:
                actor, index = free.popleft(), waiting.popleft()
                running[self._actors[actor].do.remote(items[index])] = actor, index
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            actor, index = running.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, QkscopeError) else error) from None
            except ray.exceptions.RayActorError:
                deaths[index] += 1
                if deaths[index] == TRIES:
                    raise gave_up(items[index]) from None
                waiting.appendleft(index)
                self._actors[actor] = self._kind.remote(self._work)
                free.append(actor)
                continue
            free.append(actor)
            yield index, result

    def end(self) -> None:
        """End the actors, whatever they are doing."""
        for actor in self._actors:
            self._ray.kill(actor)


class _Actor:
    """One worker on the cluster."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        single_threaded()
        self._work = work

    def do(self, item: Any) -> Any:
        return self._work(item)


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise ConfigError("--engine ray needs Ray; install it with: pip install 'qkscope[ray]'") from None
    return ray


def _connect(ray: Any, place: Place) -> None:
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if place.address is None:
        ray.init(num_cpus=max(place.workers or 0, cores()), include_dashboard=False, **quiet)
        return
    try:
        ray.init(address=place.address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"there is no Ray cluster at {place.address} ({reason})") from None


def _count(ray: Any, place: Place, most: int) -> int:
    """Actors: as asked, or as many as the cluster has room for; never more than there are items."""
    there = int(ray.cluster_resources().get("GPU" if place.gpus else "CPU", 0)) // max(1, place.gpus)
    if not there:
        raise ConfigError(f"the Ray cluster has no {'GPU' if place.gpus else 'CPU'} to run on")
    return max(1, min(place.workers or there, there, most))
