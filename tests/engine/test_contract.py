"""The contract of every pool, local or Ray's: each item is done once and comes back under its number, whatever dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qkscope.engine import IN_PROCESS, ExecutionTarget, for_each, pool
from qkscope.errors import HeadError, QkscopeError
from tests.engine.works import Dies, DiesOnArrival, Untravelled, fails, square, threads_of_blas

RAY = pytest.param(
    ExecutionTarget(2, "ray"), id="ray",
    marks=[pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("ignore")],  # one cluster at a time; Ray's own
)  # fmt: skip
PROCESSES = [pytest.param(ExecutionTarget(2), id="two"), RAY]
"""Pools whose workers can die."""
EVERY = [pytest.param(IN_PROCESS, id="here"), pytest.param(ExecutionTarget(5), id="five"), *PROCESSES]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster for all tests of this module; without it each would start its own."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def target(request) -> ExecutionTarget:
    if request.param.engine == "ray":
        request.getfixturevalue("cluster")
    return request.param


@pytest.mark.parametrize("target", EVERY, indirect=True)
def test_every_item_is_done_once_and_workers_stay_for_another_round(target):
    with pool(square, target, 9) as workers:
        assert sorted(workers.map(range(9))) == [(i, i**2) for i in range(9)]
        assert sorted(workers.map([5])) == [(0, 25)]


@pytest.mark.parametrize("target", EVERY, indirect=True)
def test_linear_algebra_has_one_thread(target):
    for _, threads in for_each(threads_of_blas, range(3), target):
        assert set(threads) == {1}


@pytest.mark.parametrize("target", EVERY, indirect=True)
def test_errors_come_back_as_what_they_are(target):
    with pytest.raises(HeadError, match=r"^l05h13q: is broken \[file.parquet\]$"):
        list(for_each(fails, [1, 3], target))
    with pytest.raises(Exception, match="1 and 2") as caught:
        list(for_each(fails, [1, 4], target))
    assert target is not IN_PROCESS or isinstance(caught.value, Untravelled)


@pytest.mark.parametrize("target", PROCESSES, indirect=True)
def test_a_worker_that_dies_is_replaced_and_its_item_done_again(target, tmp_path):
    values = dict(for_each(Dies(tmp_path, item=2, times=2), range(6), target))
    assert {index: value.tolist() for index, value in values.items()} == {i: [i] * 3 for i in range(6)}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("target", PROCESSES, indirect=True)
def test_a_worker_that_dies_on_arrival_is_replaced(target, tmp_path):
    assert sorted(for_each(DiesOnArrival(tmp_path), range(4), target)) == [(i, i) for i in range(4)]
    assert (tmp_path / "arrived").exists()


@pytest.mark.parametrize("target", PROCESSES, indirect=True)
def test_an_item_that_kills_every_worker_is_named(target, tmp_path):
    with pytest.raises(QkscopeError, match=r"^3 workers died on 2, one after another, most likely out of memory; "):
        list(for_each(Dies(tmp_path, item=2, times=9), range(6), target))
