"""The real huggingface_hub client against a server on loopback, in a process of its own each time.

The client reads its endpoint and cache from the environment when it is imported, so every test starts one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qkscope.core.rows import Rows
from qkscope.files.dataset import write_dataset
from qkscope.headids import HeadId
from tests.files.hub_server import FakeHub
from tests.helpers import small_dataset

REPO, REVISION = "someone/sniffed-qk", "tiny-longbench"


@pytest.fixture
def hub(tmp_path) -> Iterator[FakeHub]:
    folder = tmp_path / "served"
    small_dataset(folder / "deep" / "prefix", window=512)
    (folder / "README.md").write_text("a dataset card")
    with FakeHub(REPO, REVISION, folder).serving() as hub:
        yield hub


def client(hub_url: str, cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qkscope", *arguments],
        env={
            **os.environ,
            "HF_ENDPOINT": hub_url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


def analyze(hub: FakeHub, tmp_path: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    arguments = ("analyze", REPO, "--revision", REVISION, "-o", str(tmp_path / "out"), "--workers", "1", *more)
    return client(hub.url, tmp_path / "cache", *arguments, **environment)


@pytest.mark.slow
def test_a_hub_dataset_gives_the_same_tables_as_its_folder(hub, tmp_path):
    assert analyze(hub, tmp_path).returncode == 0
    local = tmp_path / "served" / "deep" / "prefix"
    client(hub.url, tmp_path, "analyze", str(local), "--model", REVISION, "-o", str(tmp_path / "local"))
    for name in ("qk.csv", "heads.csv", "rotated.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    said = json.loads((tmp_path / "out" / "summary.json").read_text())["models"][REVISION]["dataset"]
    assert said == {"kind": "hub", "repo": REPO, "revision": REVISION, "commit": hub.commit, "q_per_kv": 2}


def test_only_the_files_needed_are_fetched_and_only_once(hub, tmp_path):
    assert analyze(hub, tmp_path, "--layers", "1", "--heads", "0-1").returncode == 0
    wanted = {f"deep/prefix/{head}/data.parquet" for head in ("l01h00q", "l01h01q", "l01h00k")}
    assert set(hub.downloads) == wanted | {"deep/prefix/dataset.json"}
    first = len(hub.downloads)
    assert analyze(hub, tmp_path, "--layers", "1", "--heads", "0-1").returncode == 0
    assert len(hub.downloads) == first


def test_an_interrupted_download_is_resumed_where_it_broke_off(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "served"

    def rows(n: int) -> Rows:
        return Rows(rng.standard_normal((n, 256), dtype=np.float32), np.arange(n), np.arange(n) % 16)

    # The client keeps whole chunks of 10 MB, so the file has to be larger than two of them.
    write_dataset(folder, [(HeadId(0, 0, "q"), rows(26_000)), (HeadId(0, 0, "k"), rows(300))], q_per_kv=1)
    name = "l00h00q/data.parquet"
    with FakeHub(REPO, REVISION, folder, cut_next={name}).serving() as hub:
        done = analyze(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.downloads.count(name) == 2
    assert [asked for asked in hub.ranges if asked != "bytes=0-"], "the second download started from nothing"


def test_urls_name_revision_and_prefix(hub, tmp_path):
    url = f"hf://datasets/{REPO}@{REVISION}/deep/prefix"
    done = client(hub.url, tmp_path / "cache", "analyze", url, "-o", str(tmp_path / "out"), "--model", "x")
    assert done.returncode == 0, done.stderr
    wrong = client(hub.url, tmp_path / "cache", "analyze", "hf://models/x", "-o", str(tmp_path / "out"))
    assert wrong.returncode == 2
    assert wrong.stderr == "error: expected hf://datasets/owner/name[@revision][/prefix], got 'hf://models/x'\n"


def test_a_revision_that_does_not_exist_is_named_with_those_that_do(hub, tmp_path):
    done = client(hub.url, tmp_path / "cache", "analyze", REPO, "--revision", "tyni", "-o", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr == f"error: the Hub dataset {REPO} has no revision 'tyni'; it has {REVISION}\n"


def test_a_dataset_that_does_not_exist_is_neither_folder_nor_hub(hub, tmp_path):
    done = client(hub.url, tmp_path / "cache", "analyze", "no/such-thing", "-o", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: 'no/such-thing' is neither a local folder nor a Hub dataset;")
    assert done.stderr.count("\n") == 1


def test_no_network_is_one_line_that_says_what_to_do(tmp_path):
    done = client("http://127.0.0.1:9", tmp_path / "cache", "analyze", REPO, "-o", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot read the dataset {REPO} from the Hub (")
    assert done.stderr.rstrip().endswith("or give the path of a local folder")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_cache_serves_offline(hub, tmp_path):
    assert analyze(hub, tmp_path).returncode == 0
    online = (tmp_path / "out" / "qk.csv").read_bytes()
    (tmp_path / "out" / "qk.csv").unlink()
    done = analyze(FakeHub(REPO, REVISION, tmp_path, "http://127.0.0.1:9"), tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "qk.csv").read_bytes() == online
    empty = client("http://127.0.0.1:9", tmp_path / "none", "analyze", REPO, "-o", str(tmp_path), HF_HUB_OFFLINE="1")
    assert empty.returncode == 2
    assert "HF_HUB_OFFLINE is set" in empty.stderr


def test_a_file_that_does_not_come_fails_its_head_and_not_the_others(hub, tmp_path):
    hub.lost.add("deep/prefix/l01h01q/data.parquet")
    done = analyze(hub, tmp_path)
    assert done.returncode == 1
    failed = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 1
    assert failed[0].startswith(f"failed: {REVISION} l01h01q: cannot read {REPO}/deep/prefix/l01h01q")
    assert len((tmp_path / "out" / "rotated.csv").read_text().splitlines()) == 1 + 7
