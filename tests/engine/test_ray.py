"""Ray's actors, beyond the contract of every pool: idle ones that die, GPUs, and Ray that is not installed."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from qkscope.engine import ExecutionTarget, for_each, pool
from qkscope.errors import ConfigError
from tests.engine.works import process_number, square

RAY = ExecutionTarget(2, "ray")
pytestmark = [
    pytest.mark.xdist_group("ray"),  # one cluster at a time
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster for all tests of this module; without it each would start its own."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.slow
def test_idle_actors_that_died_together_are_not_held_against_the_next_item():
    with pool(process_number, ExecutionTarget(3, "ray"), 3) as actors:
        processes: set[int] = set()
        while len(processes) < 3:
            processes |= {process for _, process in actors.map(range(3))}
        for process in processes:
            os.kill(process, signal.SIGKILL)
        ((_, process),) = actors.map([0])
        assert process not in processes


def test_a_cluster_without_gpus_says_so():
    with pytest.raises(ConfigError, match="the Ray cluster has no GPU to run on"):
        list(for_each(square, [1], ExecutionTarget(2, "ray", gpus=1)))


def test_without_ray_the_way_to_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--engine ray needs Ray; install it with: pip install 'qkscope\[ray\]'"):
        list(for_each(square, [1], RAY))
