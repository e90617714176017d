"""A pool of Ray actors, on this machine or on a cluster.

Only this file imports Ray. Usage reports of Ray are off unless RAY_USAGE_STATS_ENABLED is set.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from qkscope.engine.target import TRIES, ExecutionTarget, cores, workers_died
from qkscope.engine.workers import single_threaded
from qkscope.errors import ConfigError, QkscopeError

_PATIENCE = 300.0
"""Seconds to wait for the first actor; a cluster may have to start machines for it."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@contextmanager
def ray_pool(
    work: Callable[[_Item], _Result], target: ExecutionTarget, max_items: int
) -> Iterator[RayPool[_Item, _Result]]:
    """Actors on the cluster at ``target.address``, or on a local cluster that is stopped at the end of the block."""
    ray = _ray()
    started_here = not ray.is_initialized()
    if started_here:
        _connect(ray, target)
    pool: RayPool[_Item, _Result] | None = None
    try:
        pool = RayPool(ray, work, _count(ray, target, max_items), target.gpus)
        yield pool
    finally:
        if pool is not None:
            pool.end()
        if started_here:
            ray.shutdown()


class RayPool(Generic[_Item, _Result]):
    """Actors that have received their work function."""

    def __init__(self, ray: Any, work: Callable[[_Item], _Result], count: int, gpus: int) -> None:
        self._ray, self._work = ray, ray.put(work)
        # Not restarted by Ray: we start a new actor, since the item must be sent again in any case.
        self._kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Actor)
        self._actors, self._free = list[Any](), list[Any]()
        self._starting = dict[Any, tuple[Any, int]]()  # and the number of actors in a row that died during start
        for _ in range(count):
            self._start()

    def map(self, items: Sequence[_Item]) -> Iterator[tuple[int, _Result]]:
        """Yield (index, result) as items are completed; started actors get items, dead ones are replaced."""
        waiting, deaths, running = deque(range(len(items))), Counter[int](), dict[Any, tuple[Any, int]]()
        while waiting or running:
            while waiting and self._free:
                actor, index = self._free.pop(), waiting.popleft()
                running[actor.do.remote(items[index])] = actor, index
            finished = self._next([*running, *(self._starting if waiting else ())], none_yet=not running)
            if finished in self._starting:
                self._use_started(finished)
                continue
            actor, index = running.pop(finished)
            answer = self._answer(finished)
            if answer is None:
                deaths[index] += 1
                if deaths[index] == TRIES:
                    raise workers_died(items[index])
                waiting.appendleft(index)
                self._replace(actor)
                continue
            self._free.append(actor)
            yield index, answer[0]

    def _start(self, failed: int = 0) -> None:
        actor = self._kind.remote(self._work)
        self._actors.append(actor)
        self._starting[actor.ready.remote()] = actor, failed

    def _replace(self, actor: Any) -> None:
        """Start another actor. A dead machine takes several with it, so all idle actors are asked again if ready."""
        self._drop(actor)
        idle = [*((actor, 0) for actor in self._free), *self._starting.values()]
        self._free.clear()
        self._starting = {actor.ready.remote(): (actor, failed) for actor, failed in idle}
        self._start()

    def _drop(self, actor: Any) -> None:
        """Remove an actor; killing it frees its CPU if it is alive but unreachable."""
        self._actors.remove(actor)
        self._ray.kill(actor)

    def _next(self, expected: list[Any], *, none_yet: bool) -> Any:
        ready, _ = self._ray.wait(expected, num_returns=1, timeout=_PATIENCE if none_yet else None)
        if not ready:
            raise QkscopeError(
                f"Ray started no actor within {_PATIENCE:.0f} s; use fewer --workers, or wait for free resources"
            )
        return ready[0]

    def _use_started(self, ready: Any) -> None:
        """Make a started actor available; replace one that died during start."""
        actor, failed = self._starting.pop(ready)
        try:
            self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            if failed + 1 == TRIES:
                reason = " ".join(str(error).split())[:300]
                raise QkscopeError(
                    f"Ray actors cannot start ({reason}); check that qkscope is installed on the cluster"
                ) from None
            self._drop(actor)
            self._start(failed + 1)
            return
        self._free.append(actor)

    def _answer(self, reference: Any) -> tuple[_Result] | None:
        """Return the result; None if the actor died."""
        errors = self._ray.exceptions
        try:
            return (self._ray.get(reference),)
        except errors.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, QkscopeError) else error) from None
        except (errors.RayActorError, errors.NodeDiedError, errors.ObjectLostError):
            return None
        except (errors.OutOfMemoryError, errors.WorkerCrashedError):
            return None

    def end(self) -> None:
        """Stop the actors, even while they work on an item."""
        for actor in self._actors:
            self._ray.kill(actor)


class _Actor:
    """One worker on the cluster."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        single_threaded()
        self._work = work

    def ready(self) -> None:
        """Return once the actor has started."""

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


def _connect(ray: Any, target: ExecutionTarget) -> None:
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        if target.address is None:
            ray.init("local", num_cpus=max(target.workers or 0, cores()), include_dashboard=False, **quiet)
        else:
            ray.init(address=target.address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        problem = "Ray could not start" if target.address is None else f"no Ray cluster found at {target.address}"
        raise ConfigError(f"{problem} ({reason})") from None
    finally:
        if is_main_thread:
            signal.signal(signal.SIGTERM, before)  # Ray installs its own handler, which ends the process silently


def _count(ray: Any, target: ExecutionTarget, max_items: int) -> int:
    """Number of actors: as requested, or as many as the cluster can run; at most one per item."""
    resources = ray.cluster_resources()
    available = min(int(resources.get("CPU", 0)), int(resources.get("GPU", 0)) // target.gpus if target.gpus else 10**9)
    if not available:
        raise ConfigError(f"the Ray cluster has no {'GPU' if target.gpus else 'CPU'} to run on")
    return max(1, min(target.workers or available, available, max_items))
