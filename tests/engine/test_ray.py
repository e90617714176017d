"""The same pool made of Ray's actors, on a cluster of this machine."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from qkscope.engine import ExecutionTarget, for_each, pool
from qkscope.errors import ConfigError, HeadError, QkscopeError
from tests.engine.works import Dies, DiesOnArrival, fails, process_number, square, threads_of_blas

RAY = ExecutionTarget(2, "ray")
pytestmark = [
    pytest.mark.xdist_group("ray"),  # one cluster at a time
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One for all tests here; without it each would start its own."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_every_item_is_done_once_and_actors_stay_for_another_round():
    with pool(square, RAY, 9) as actors:
        assert sorted(actors.map(range(9))) == [(i, i**2) for i in range(9)]
        assert sorted(actors.map([5])) == [(0, 25)]


def test_linear_algebra_has_one_thread():
    assert all(threads == [1] * len(threads) for _, threads in for_each(threads_of_blas, range(3), RAY))


def test_an_actor_that_dies_is_replaced_and_its_item_done_again(tmp_path):
    found = dict(for_each(Dies(tmp_path, item=2, times=2), range(6), RAY))
    assert {index: value.tolist() for index, value in found.items()} == {i: [i] * 3 for i in range(6)}
    assert len(list(tmp_path.iterdir())) == 2


def test_one_that_dies_before_it_is_there_is_replaced_too(tmp_path):
    assert sorted(for_each(DiesOnArrival(tmp_path), range(4), RAY)) == [(i, i) for i in range(4)]
    assert (tmp_path / "arrived").exists()


def test_idle_actors_that_died_together_are_not_held_against_the_next_item():
    with pool(process_number, ExecutionTarget(3, "ray"), 3) as actors:
        processes: set[int] = set()
        while len(processes) < 3:
            processes |= {process for _, process in actors.map(range(3))}
        for process in processes:
            os.kill(process, signal.SIGKILL)
        ((_, process),) = actors.map([0])
        assert process not in processes


def test_an_item_that_kills_every_actor_is_named(tmp_path):
    with pytest.raises(QkscopeError, match=r"^3 workers died on 2, one after another, most likely out of memory; "):
        list(for_each(Dies(tmp_path, item=2, times=9), range(6), RAY))


def test_errors_come_back_as_what_they_are():
    with pytest.raises(HeadError, match=r"^l05h13q: is broken \[file.parquet\]$"):
        list(for_each(fails, [1, 3], RAY))
    with pytest.raises(Exception, match="1 and 2"):
        list(for_each(fails, [1, 4], RAY))


def test_a_cluster_without_gpus_says_so():
    with pytest.raises(ConfigError, match="the Ray cluster has no GPU to run on"):
        list(for_each(square, [1], ExecutionTarget(2, "ray", gpus=1)))


def test_without_ray_the_way_to_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--engine ray needs Ray; install it with: pip install 'qkscope\[ray\]'"):
        list(for_each(square, [1], RAY))
