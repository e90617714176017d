"""The same pool made of Ray's actors: on this machine, or on a cluster where one machine is not enough.

Ray is imported here alone. Its usage reports are off unless RAY_USAGE_STATS_ENABLED says otherwise.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from qkscope.engine.place import TRIES, Place, cores, gave_up
from qkscope.engine.workers import single_threaded
from qkscope.errors import ConfigError, QkscopeError

_PATIENCE = 300.0
"""Seconds in which a first actor has to be there; a cluster may have to start machines for it."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@contextmanager
def ray_pool(work: Callable[[_Item], _Result], place: Place, most: int) -> Iterator[RayPool[_Item, _Result]]:
    """Actors on the cluster at ``place.address``, or on one of this machine that ends with the block."""
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, place)
    pool: RayPool[_Item, _Result] | None = None
    try:
        pool = RayPool(ray, work, _count(ray, place, most), place.gpus)
        yield pool
    finally:
        if pool is not None:
            pool.end()
        if ours:
            ray.shutdown()


class RayPool(Generic[_Item, _Result]):
    """Actors that have been given their work."""

    def __init__(self, ray: Any, work: Callable[[_Item], _Result], count: int, gpus: int) -> None:
        self._ray, self._work = ray, ray.put(work)
        # Not restarted by Ray: a new actor is as good, and the item has to be given out again in any case.
        self._kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Actor)
        self._actors, self._free, self._starting = list[Any](), list[Any](), dict[Any, Any]()
        self._failed = 0
        for _ in range(count):
            self._start()

    def map(self, items: Sequence[_Item]) -> Iterator[tuple[int, _Result]]:
        """Yield (index, result) as items are done; actors get items once they are there, one that dies is replaced."""
        waiting, deaths, running = deque(range(len(items))), Counter[int](), dict[Any, tuple[Any, int]]()
        while waiting or running:
            while waiting and self._free:
                actor, index = self._free.pop(), waiting.popleft()
                running[actor.do.remote(items[index])] = actor, index
            done = self._next([*running, *(self._starting if waiting else ())], none_yet=not running)
            if done in self._starting:
                self._arrived(done)
                continue
            actor, index = running.pop(done)
            answer = self._answer(done)
            if answer is None:
                deaths[index] += 1
                if deaths[index] == TRIES:
                    raise gave_up(items[index])
                waiting.appendleft(index)
                self._start()
                continue
            self._free.append(actor)
            yield index, answer[0]

    def _start(self) -> None:
        actor = self._kind.remote(self._work)
        self._actors.append(actor)
        self._starting[actor.ready.remote()] = actor

    def _next(self, expected: list[Any], *, none_yet: bool) -> Any:
        done, _ = self._ray.wait(expected, num_returns=1, timeout=_PATIENCE if none_yet else None)
        if not done:
            raise QkscopeError(f"Ray found no room for an actor in {_PATIENCE:.0f} s; use fewer --workers, or wait")
        return done[0]

    def _arrived(self, ready: Any) -> None:
        """Take an actor that is there; one that died before it could answer is replaced as any other."""
        actor, errors = self._starting.pop(ready), self._ray.exceptions
        try:
            self._ray.get(ready)
        except errors.RayError as error:
            self._failed += 1
            if self._failed == TRIES:
                reason = " ".join(str(error).split())[:300]
                raise QkscopeError(f"actors of Ray cannot start ({reason}); is qkscope installed there?") from None
            self._start()
            return
        self._free.append(actor)

    def _answer(self, done: Any) -> tuple[_Result] | None:
        """The result; None if its actor is gone."""
        errors = self._ray.exceptions
        try:
            return (self._ray.get(done),)
        except errors.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, QkscopeError) else error) from None
        except (errors.RayActorError, errors.OutOfMemoryError, errors.WorkerCrashedError, errors.ObjectLostError):
            return None

    def end(self) -> None:
        """End the actors, whatever they are doing."""
        for actor in self._actors:
            self._ray.kill(actor)


class _Actor:
    """One worker on the cluster."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        single_threaded()
        self._work = work

    def ready(self) -> None:
        """Answer, once it is there."""

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
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        if place.address is None:
            ray.init(num_cpus=max(place.workers or 0, cores()), include_dashboard=False, **quiet)
        else:
            ray.init(address=place.address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        what = "Ray could not start" if place.address is None else f"there is no Ray cluster at {place.address}"
        raise ConfigError(f"{what} ({reason})") from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)  # Ray puts its own in place, which ends the process without a word


def _count(ray: Any, place: Place, most: int) -> int:
    """Actors: as asked, or as many as the cluster has room for; never more than there are items."""
    has = ray.cluster_resources()
    there = min(int(has.get("CPU", 0)), int(has.get("GPU", 0)) // place.gpus if place.gpus else 10**9)
    if not there:
        raise ConfigError(f"the Ray cluster has no {'GPU' if place.gpus else 'CPU'} to run on")
    return max(1, min(place.workers or there, there, most))
