"""Workers of this machine: whatever happens to them, every item is done once and comes back under its number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from qkscope.engine import IN_PROCESS, ExecutionTarget, for_each, pool
from qkscope.errors import ConfigError, HeadError, QkscopeError
from tests.engine.works import Dies, DiesOnArrival, Untravelled, fails, number_of_worker, square, threads_of_blas


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_item_is_done_once(workers):
    assert sorted(for_each(square, range(9), ExecutionTarget(workers))) == [(i, i**2) for i in range(9)]


def test_workers_stay_for_another_round():
    with pool(number_of_worker, ExecutionTarget(2), 8) as workers:
        first = {number for _, number in workers.map(range(8))}
        assert first | {number for _, number in workers.map(range(8))} == {0, 1}
    assert list(for_each(number_of_worker, [1], IN_PROCESS)) == [(0, None)]


def test_linear_algebra_has_one_thread_everywhere():
    for place in (IN_PROCESS, ExecutionTarget(2)):
        assert all(threads == [1] * len(threads) for _, threads in for_each(threads_of_blas, range(3), place))


@pytest.mark.parametrize("answering", [False, True])
def test_a_worker_that_dies_is_replaced_and_its_item_done_again(tmp_path, answering):
    work = Dies(tmp_path, item=2, times=2, answering=answering)
    found = dict(for_each(work, range(6), ExecutionTarget(2)))
    assert len(list(tmp_path.iterdir())) == 2
    assert {index: value.tolist() for index, value in found.items()} == {i: [i] * 3 for i in range(6)}


def test_one_that_dies_before_it_is_there_is_replaced_too(tmp_path):
    assert sorted(for_each(DiesOnArrival(tmp_path), range(4), ExecutionTarget(2))) == [(i, i) for i in range(4)]
    assert (tmp_path / "arrived").exists()


def test_an_item_that_kills_every_worker_is_named(tmp_path):
    with pytest.raises(QkscopeError, match=r"^3 workers died on 2, one after another, most likely out of memory; "):
        list(for_each(Dies(tmp_path, item=2, times=9), range(6), ExecutionTarget(2)))


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_come_back_as_what_they_are(workers):
    with pytest.raises(HeadError, match=r"l05h13q: is broken \[file.parquet\]"):
        list(for_each(fails, [1, 3], ExecutionTarget(workers)))
    with pytest.raises((RuntimeError, Untravelled), match="1 and 2") as caught:
        list(for_each(fails, [1, 4], ExecutionTarget(workers)))
    assert workers == 1 or "in a worker process" in caught.value.__notes__[0]


SCRIPT = """
from pathlib import Path
from qkscope.engine import ExecutionTarget, for_each
from tests.engine.works import Waits
{guard}
    list(for_each(Waits(Path({folder!r})), range(4), ExecutionTarget(2)))
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = SCRIPT.format(guard='if __name__ == "__main__":', folder=str(tmp_path))
    (tmp_path / "script.py").write_text(script)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], env=os.environ | {"PYTHONPATH": str(Path.cwd())}
    )
    numbers: list[int] = []
    while len(numbers) < 2:
        time.sleep(0.1)
        assert parent.poll() is None
        numbers = [int(path.name.removeprefix("process-")) for path in tmp_path.glob("process-*")]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 10
    while any(_alive(number) for number in numbers):
        assert time.monotonic() < until, "workers outlive their parent"
        time.sleep(0.1)


def _alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_script_without_its_guard_is_told_of_it(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(guard="if True:", folder=str(tmp_path)))
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "worker processes cannot start; in a script, put the code that starts workers under" in done.stderr


def test_places_that_are_none():
    with pytest.raises(ConfigError, match="unknown engine 'slurm'; use local or ray"):
        ExecutionTarget(engine="slurm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected at least one worker, got 0"):
        ExecutionTarget(0)
    with pytest.raises(ConfigError, match="--ray-address needs --engine ray"):
        ExecutionTarget(address="auto")


def test_results_may_be_large():
    (found,) = (value for _, value in for_each(np.ones, [3_000_000], ExecutionTarget(2)))
    assert found.sum() == 3_000_000
