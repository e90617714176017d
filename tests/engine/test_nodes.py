"""Ray on three nodes of this machine, of which one dies, or the driver does: the same run as from one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load
from typer.testing import CliRunner

from qkscope.cli.main import app
from qkscope.files.checksums import CHECKSUMS
from qkscope.files.parts import Span
from tests.capture.conftest import WORDS, save
from tests.capture.families import BASE, Family, tf
from tests.forking import all_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),  # one cluster at a time
    pytest.mark.filterwarnings("ignore"),  # Ray's own, and transformers'
]
NODES, DOCUMENTS, PATIENCE = 3, 40, 300.0
MANY_HEADS = {"hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 6}
"""Six tasks for an analysis."""


class Nodes:
    """A head without CPUs, on which the driver is, and three nodes with one CPU, and so one actor, each."""

    def __init__(self) -> None:
        cluster_utils = pytest.importorskip("ray.cluster_utils")
        self._size = {"object_store_memory": 100 * 2**20}
        head = self._size | {"num_cpus": 0, "include_dashboard": False}
        self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.drivers = list[subprocess.Popen[str]]()

    def fill(self) -> None:
        """Start nodes until there are three."""
        while len(self.cluster.worker_nodes) < NODES:
            self.cluster.add_node(num_cpus=1, **self._size)

    def start(self, arguments: list[str]) -> subprocess.Popen[str]:
        """A command on the cluster, with an actor on each node."""
        where = ["--engine", "ray", "--ray-address", self.cluster.address, "--workers", str(NODES)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "qkscope", *arguments, *where]
        self.drivers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return self.drivers[-1]

    def busy(self) -> tuple[Any, int] | None:
        """A node whose actor is at work, and the actor's process."""
        for node in self.cluster.worker_nodes:
            for actor, title in actors(node):
                if title == b"ray::_Actor.do":
                    return node, actor
        return None

    def kill(self, node: Any, actor: int) -> None:
        """All processes of a node, the raylet first: nothing is left that could report the actor's death."""
        self.cluster.remove_node(node, allow_graceful=False)
        try:
            os.kill(actor, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has noticed that its raylet is gone


def actors(node: Any) -> list[tuple[int, bytes]]:
    """Processes of the actors of a node, and their titles, which say whether they are at work."""
    raylet = next(info.process.pid for name, infos in node.all_processes.items() for info in infos if name == "raylet")
    titles = [
        (int(child), title(int(child))) for child in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    ]
    return [(child, name) for child, name in titles if name.startswith(b"ray::_Actor")]


def title(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0 ")
    except (FileNotFoundError, ProcessLookupError):
        return b""


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Return the value of a condition as soon as it is true, while a process runs."""
    until = time.monotonic() + PATIENCE
    while not (given := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.005)
    return given


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_worker_niceness", "0")  # 15 otherwise: whatever else runs here goes first
        nodes = Nodes()
        yield nodes
        nodes.cluster.shutdown()


@pytest.fixture
def nodes(cluster) -> Iterator[Nodes]:
    cluster.fill()
    yield cluster
    for driver in cluster.drivers:
        driver.kill()
        driver.wait()
        driver.stderr.close()
    cluster.drivers.clear()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model with many heads, and texts."""
    folder, rng = tmp_path_factory.mktemp("nodes"), np.random.default_rng(0)
    save(Family(tf.LlamaConfig(**BASE | MANY_HEADS)), folder / "model")
    (folder / "texts").mkdir()
    for number in range(DOCUMENTS):
        (folder / "texts" / f"{number:02d}.txt").write_text(" ".join(rng.choice(WORDS, rng.integers(60, 200))))
    return folder


def capturing(place: Path, folder: Path, *more: object) -> list[str]:
    options = ("--sample", 50, "--documents-per-shard", 1, "--threads", 1)
    return list(map(str, ["capture", place / "model", "--texts", place / "texts", *options, "-o", folder, *more]))


def analyzing(run: Path, folder: Path, *more: object) -> list[str]:
    return list(map(str, ["analyze", run, "--model", "tiny", "-o", folder, *more]))


@pytest.fixture(scope="module")
def run(place) -> Path:
    """The result of one process."""
    command = [sys.executable, "-m", "qkscope", *capturing(place, place / "run")]
    done = subprocess.run(command, capture_output=True, text=True)  # this process may have run other kernels before
    assert done.returncode == 0, done.stderr
    return place / "run"


def finished(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said


def assert_same_run(folder: Path, expected: Path) -> None:
    """Assert that both have the same files, tokens and counts, and the same numbers up to a kernel's rounding.

    Products of matrices need not repeat to the last bit in another process; a lost document would show in every count.
    """
    by_name, expected_by_name = all_bytes(folder, but=CHECKSUMS), all_bytes(expected, but=CHECKSUMS)
    assert by_name.keys() == expected_by_name.keys()
    for name, content in expected_by_name.items():
        if name.endswith(".safetensors"):
            arrays, expected_arrays = load(by_name[name]), load(content)
            assert arrays.keys() == expected_arrays.keys()
            for key, array in expected_arrays.items():
                assert np.abs(arrays[key] - array).max(initial=0) <= 1e-6 * np.abs(array).max(initial=0), (name, key)
        elif name.endswith(".parquet"):
            rows, expected_rows = (pq.read_table(place / name, partitioning=None) for place in (folder, expected))
            assert rows.drop_columns("vector") == expected_rows.drop_columns("vector")
            x, expected_x = (np.stack(table["vector"].to_pylist()) for table in (rows, expected_rows))
            assert np.abs(x - expected_x).max() <= 1e-6 * np.abs(expected_x).max(), name
        else:
            assert by_name[name] == content, name


def shards_done(folder: Path) -> int:
    """Shards in the parts on disk."""
    spans = [Span.parse(path.name) for path in (folder / "parts").glob("0*")]
    return len({shard for span in spans if span for shard in range(span.first, span.first + span.count)})


def at_work(nodes: Nodes) -> tuple[Any, int] | None:
    """A node whose actor has been stopped in the middle of an item."""
    if (chosen := nodes.busy()) is None:
        return None
    node, actor = chosen
    os.kill(actor, signal.SIGSTOP)
    if title(actor) == b"ray::_Actor.do":
        return node, actor
    os.kill(actor, signal.SIGCONT)
    return None


def test_a_node_may_die_in_the_middle_of_a_shard(nodes, place, run, tmp_path):
    process = nodes.start(capturing(place, tmp_path / "run"))
    wait_for(lambda: shards_done(tmp_path / "run") >= 3, process)
    nodes.kill(*wait_for(lambda: at_work(nodes), process))
    assert not (tmp_path / "run" / "run.json").exists()
    finished(process)
    assert_same_run(tmp_path / "run", run)


def test_a_node_may_die_with_the_sums_of_a_shard_that_nobody_has_fetched(nodes, place, run, tmp_path):
    """The driver is stopped until an actor is done; what it measured is lost with the object store of its node."""
    process = nodes.start(capturing(place, tmp_path / "run"))
    wait_for(lambda: shards_done(tmp_path / "run") >= 3, process)
    node, actor = wait_for(nodes.busy, process)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: title(actor) == b"ray::_Actor", process)
    assert shards_done(tmp_path / "run") < DOCUMENTS - NODES
    nodes.kill(node, actor)
    process.send_signal(signal.SIGCONT)
    finished(process)
    assert_same_run(tmp_path / "run", run)


def test_a_node_may_die_in_the_middle_of_an_analysis(nodes, run, tmp_path):
    process = nodes.start(analyzing(run, tmp_path / "tables"))
    nodes.kill(*wait_for(lambda: at_work(nodes), process))
    assert not (tmp_path / "tables" / "summary.json").exists()
    finished(process)
    done = CliRunner().invoke(app, analyzing(run, tmp_path / "alone", "--workers", 1), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert all_bytes(tmp_path / "tables", but="summary.json") == all_bytes(tmp_path / "alone", but="summary.json")


def test_a_driver_that_was_killed_resumes(nodes, place, run, tmp_path):
    process = nodes.start(capturing(place, tmp_path / "run"))
    wait_for(lambda: shards_done(tmp_path / "run") >= 5, process)
    process.kill()
    process.communicate()
    assert 5 <= shards_done(tmp_path / "run") < DOCUMENTS
    finished(nodes.start(capturing(place, tmp_path / "run")))
    assert_same_run(tmp_path / "run", run)


OWN_CLUSTER = """
import ray
from qkscope.engine import ExecutionTarget, pool
from tests.engine.works import square
with pool(square, ExecutionTarget(2, "ray"), 2) as actors:
    assert sorted(actors.map([2, 3])) == [(0, 4), (1, 9)]
    print(len(ray.nodes()))
"""


@pytest.mark.usefixtures("nodes")
def test_without_an_address_a_cluster_that_runs_here_is_left_alone():
    """Run the driver in a separate process, like every driver here: this process has started the cluster."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", OWN_CLUSTER], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
