"""Local worker processes, beyond the contract of every pool: their numbers, large answers, a parent that dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from qkscope.engine import IN_PROCESS, ExecutionTarget, for_each, pool
from qkscope.engine import workers as workers_module
from qkscope.errors import ConfigError
from tests.engine.works import Dies, fails, number_of_worker


def test_workers_stay_for_another_round():
    with pool(number_of_worker, ExecutionTarget(2), 8) as workers:
        first = {number for _, number in workers.map(range(8))}
        assert first | {number for _, number in workers.map(range(8))} == {0, 1}
    assert list(for_each(number_of_worker, [1], IN_PROCESS)) == [(0, None)]


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


def test_a_signal_while_workers_are_stopped_leaves_none(monkeypatch):
    """They ignore SIGTERM, by which multiprocessing would end them when Python exits, and then wait for them."""
    end = workers_module._Worker.end

    def interrupted(worker):
        if worker.number == 0:
            raise KeyboardInterrupt
        end(worker)

    monkeypatch.setattr(workers_module._Worker, "end", interrupted)
    with pytest.raises(KeyboardInterrupt), pool(number_of_worker, ExecutionTarget(2), 8) as workers:
        assert {number for _, number in workers.map(range(8))} == {0, 1}
    assert not multiprocessing.active_children()


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


def test_a_worker_that_dies_while_it_answers_is_replaced(tmp_path):
    values = dict(for_each(Dies(tmp_path, item=2, times=2, answering=True), range(6), ExecutionTarget(2)))
    assert len(list(tmp_path.iterdir())) == 2
    assert {index: value.tolist() for index, value in values.items()} == {i: [i] * 3 for i in range(6)}


def test_an_error_that_cannot_travel_says_where_it_was_raised():
    with pytest.raises(RuntimeError, match="1 and 2") as caught:
        list(for_each(fails, [1, 4], ExecutionTarget(2)))
    assert "in a worker process" in caught.value.__notes__[0]


def test_results_may_be_large():
    (ones,) = (value for _, value in for_each(np.ones, [3_000_000], ExecutionTarget(2)))
    assert ones.sum() == 3_000_000


class Interrupted(BaseException):
    pass


@pytest.fixture
def sigint_raises():
    def stop(*_):
        raise Interrupted

    before = signal.signal(signal.SIGINT, stop)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_raises")
def test_an_interrupt_while_a_worker_starts_waits_and_leaves_no_process(monkeypatch):
    started = []

    class Worker(workers_module._Worker):
        def __init__(self, *arguments):
            os.kill(os.getpid(), signal.SIGINT)
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(workers_module, "_Worker", Worker)
    with pytest.raises(Interrupted), pool(number_of_worker, ExecutionTarget(2), 8):
        pass
    assert len(started) == 1, "the interrupt came after the first worker had started"
    assert not multiprocessing.active_children()


def test_a_worker_is_born_deaf_to_signals():
    asks = [sys.executable, "-c", "print(open('/proc/self/status').read())"]
    with workers_module._signals_later():
        status = subprocess.run(asks, capture_output=True, text=True, check=True).stdout
    blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
    assert [blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM)] == [1, 1]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}
