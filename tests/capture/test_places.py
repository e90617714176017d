"""The same bytes of a run from every place of capture: this process, workers, Ray actors, jobs that share the work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qkscope.cli.main import app
from tests.capture.conftest import save
from tests.capture.families import families
from tests.forking import all_bytes

OPTIONS = ("--sample", "50", "--documents-per-shard", "2", "--save-vectors", "0.2")


def command(model: Path, texts: Path, *more: object) -> list[str]:
    given = ["capture", model, "--texts", texts, *OPTIONS, *more]
    return [sys.executable, "-m", "qkscope", *map(str, given)]


def run(model: Path, texts: Path, *more: object) -> None:
    done = subprocess.run(command(model, texts, *more), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run_here(model: Path, texts: Path, *more: object) -> None:
    """Capture in this process, with one thread as in workers."""
    threads = torch.get_num_threads()
    try:
        done = CliRunner().invoke(app, command(model, texts, "--threads", 1, *more)[3:], catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("places")


@pytest.fixture(scope="module")
def model(place) -> Path:
    return save(families()["llama"], place / "model")


@pytest.fixture(scope="module")
def alone(model, texts, place) -> dict[str, bytes]:
    run_here(model, texts, "-o", place / "alone")
    return all_bytes(place / "alone")


pytestmark = pytest.mark.xdist_group("places")


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_workers(alone, model, texts, tmp_path, workers):
    run(model, texts, "--workers", workers, "-o", tmp_path / "run")
    assert all_bytes(tmp_path / "run") == alone


@pytest.mark.slow
def test_a_worker_more_or_less_may_finish_what_another_number_began(alone, model, texts, tmp_path):
    run_here(model, texts, "--shard", "1/3", "-o", tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()
    run(model, texts, "--workers", 2, "-o", tmp_path / "run")
    assert all_bytes(tmp_path / "run") == alone


def test_jobs_that_share_the_work(alone, model, texts, tmp_path):
    from qkscope.capture.assemble import merge

    jobs = [tmp_path / f"job-{job}" for job in (1, 2, 3)]
    for number, folder in enumerate(jobs, start=1):
        run_here(model, texts, "--shard", f"{number}/3", "-o", folder)
    merge(jobs, tmp_path / "run")
    assert all_bytes(tmp_path / "run") == alone
    assert merge(jobs[::2], tmp_path / "some", partial=True) == [3, 4, 5]
    merge([tmp_path / "some", jobs[1]], tmp_path / "rounds")
    assert all_bytes(tmp_path / "rounds") == alone


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "named"), [("ray", b"ray::_Actor"), ("local", b"spawn_main")])
def test_a_worker_that_is_killed_by_its_number_is_replaced(alone, model, texts, tmp_path, engine, named):
    """Two actors or processes, one of them killed while shards are being done; it is as if nothing had happened."""
    process = started(model, texts, tmp_path / "run", engine)
    os.kill(_below(process.pid, named)[0], signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert all_bytes(tmp_path / "run") == alone


def started(model: Path, texts: Path, folder: Path, engine: str) -> subprocess.Popen[str]:
    """A capture with two workers, once its first shard is done."""
    if engine == "ray":
        pytest.importorskip("ray")
    given = command(model, texts, "--engine", engine, "--workers", 2, "-o", folder)
    process = subprocess.Popen(given, env=environment(), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any((folder / "parts").glob("0*")):
        time.sleep(0.005)
    return process


@pytest.mark.slow
def test_a_capture_on_ray_that_is_asked_to_stop_says_so_and_can_go_on(alone, model, texts, tmp_path):
    process = started(model, texts, tmp_path / "run", "ray")
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert said.endswith("stopped; rerun the same command to resume\n")
    run_here(model, texts, "-o", tmp_path / "run")
    assert all_bytes(tmp_path / "run") == alone


def _below(driver: int, named: bytes) -> list[int]:
    """Processes below another, by what stands in their command line."""
    found, parents = [], {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if named in entry.joinpath("cmdline").read_bytes():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [one for one in found if driver in _ancestors(one, parents)]


def _ancestors(process: int, parents: dict[int, int]) -> list[int]:
    above = []
    while process in parents and process > 1:
        process = parents[process]
        above.append(process)
    return above


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_tables_from_ray_are_those_of_this_machine(place, tmp_path):
    pytest.importorskip("ray")
    for name, more in (("here", ["--workers", "1"]), ("two", ["--workers", "2"]), ("ray", ["--engine", "ray"])):
        given = ["analyze", place / "alone", "-o", tmp_path / name, *more]
        done = subprocess.run(
            [sys.executable, "-m", "qkscope", *map(str, given)], env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    here = all_bytes(tmp_path / "here", but="summary.json")
    assert here == all_bytes(tmp_path / "two", but="summary.json") == all_bytes(tmp_path / "ray", but="summary.json")
