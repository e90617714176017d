"""Failure recovery of a capture: kills, full disks, too little memory, a second process, damage on disk."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qkscope
from qkscope.capture.measure import Measurement
from qkscope.capture.options import CaptureOptions, Share
from qkscope.capture.shards import in_passes, per_shard
from qkscope.cli.main import app
from qkscope.errors import CaptureError, DatasetError
from qkscope.files.dataset import Dataset
from qkscope.files.runfolder import RunFolder
from qkscope.headids import HeadId
from tests.capture.families import build, families
from tests.capture.test_run import ALL, Stop, do, same_moments
from tests.files.hub_server import FakeHub
from tests.forking import all_bytes
from tests.helpers import n_documents

EVERY_RENAME = {"capture": 1, "merge": 1, "analyze": 1, "report": 13}
"""Kill at each, or at every thirteenth of the many that are alike."""


@pytest.fixture(autouse=True)
def heard(monkeypatch) -> None:
    """Let log messages reach the test, whatever earlier commands set up."""
    monkeypatch.setattr(logging.getLogger("qkscope"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("qkscope"), "level", logging.INFO)


def alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A module of these tests in a process of its own."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    given = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(given, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["capture", "analyze"])
def test_twenty_kills_change_no_byte(model_folder, texts, tmp_path, what):
    given = [model_folder, texts]
    if what == "analyze":
        do(build(families()["llama"]), [np.arange(3, 90)] * 8, tmp_path / "run")
        given = [tmp_path / "run"]
    (tmp_path / "place").mkdir()
    done = alone("tests.killing", what, 20, *given, tmp_path / "place")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("20 of 20 as if nothing had happened\n")


@pytest.mark.parametrize(
    ("what", "step"),
    [
        *[("capture", 12), ("merge", 9), ("analyze", 7), ("report", 30)],
        *(pytest.param(what, step, marks=pytest.mark.slow) for what, step in EVERY_RENAME.items()),
    ],
)
def test_a_kill_at_a_rename_or_removal_leaves_the_old_or_the_new(model_folder, texts, tmp_path, what, step):
    run, shares, results = tmp_path / "run", [tmp_path / f"share-{i}" for i in range(2)], tmp_path / "results"
    given = {"capture": [model_folder, texts], "merge": shares, "analyze": [run], "report": [results]}[what]
    if what in ("analyze", "report"):
        do(build(families()["llama"]), [np.arange(3, 90)] * 8, run)
    if what == "merge":
        for number, share in enumerate(shares, 1):
            chosen = ["--shard", f"{number}/2", "--layers", "0,1", "--max-docs", "8", "--documents-per-shard", "2"]
            done = alone("qkscope", "capture", model_folder, "--texts", texts, *chosen, "-o", share)
            assert done.returncode == 0, done.stderr
    if what == "report":
        done = alone("qkscope", "analyze", run, "--layers", "0", "--only", "pca", "--workers", "1", "-o", results)
        assert done.returncode == 0, done.stderr
    (tmp_path / "place").mkdir()
    done = alone("tests.dying", what, step, *given, tmp_path / "place")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 wrong\n")


@pytest.mark.slow
def test_two_processes_in_one_folder_twenty_times(model_folder, texts, tmp_path):
    done = alone("tests.racing", 20, model_folder, texts, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def interrupted(model, ids, folder: Path, after: int, **options: object) -> None:
    def stop(_done, _total, note) -> None:
        if n_documents(note) == after:
            raise Stop

    with pytest.raises(Stop):
        do(model, ids, folder, stop, **options)


def test_damage_is_measured_again_and_told(model, ids, tmp_path, caplog):
    do(model, ids, tmp_path / "whole")
    interrupted(model, ids, tmp_path / "run", 19)
    (part,) = (tmp_path / "run" / "parts").iterdir()
    assert part.name == "000000-000002"
    file = part / "layer-001.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + b"12345678")
    notes = []
    do(model, ids, tmp_path / "run", lambda _done, _total, note: notes.append(note))
    assert n_documents(notes[0]) == 1
    assert (
        "000000-000002 is damaged (layer-001.safetensors differs from its checksum); its shards are measured again"
        in caplog.text
    )
    assert all_bytes(tmp_path / "run") == all_bytes(tmp_path / "whole")


def test_what_a_kill_leaves_goes_and_what_is_not_ours_stays(model, ids, tmp_path):
    do(model, ids, tmp_path / "whole")
    interrupted(model, ids, tmp_path / "run", 12)
    ours = [tmp_path / "run" / name for name in (".run.json.77.tmp", "kept/.shard-000001.safetensors.77.tmp")]
    theirs = tmp_path / "run" / ".notes.77.tmp"
    for path in (*ours, theirs):
        path.write_text("x")
    do(model, ids, tmp_path / "run")
    assert theirs.read_text() == "x"
    theirs.unlink()
    assert all_bytes(tmp_path / "run") == all_bytes(tmp_path / "whole")


def test_a_finished_run_that_was_not_tidied_is_tidied(model, ids, tmp_path):
    do(model, ids, tmp_path / "whole")
    interrupted(model, ids, tmp_path / "run", 12)
    shutil.copytree(tmp_path / "run" / "parts", tmp_path / "parts")
    do(model, ids, tmp_path / "run")
    (tmp_path / "parts").rename(tmp_path / "run" / "parts")
    (tmp_path / "run" / "checksums.json").unlink()
    do(model, ids, tmp_path / "run", lambda _: pytest.fail("nothing was left to do"))
    assert all_bytes(tmp_path / "run") == all_bytes(tmp_path / "whole")


def test_a_folder_that_is_renamed_meanwhile_is_told_and_can_be_resumed(model, ids, tmp_path):
    def rename(_done, _total, note) -> None:
        if n_documents(note) == 9:
            (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(DatasetError, match="run was renamed or removed while it was being written; rerun the same"):
        do(model, ids, tmp_path / "run", rename)
    assert not (tmp_path / "run").exists()
    do(model, ids, tmp_path / "moved")
    do(model, ids, tmp_path / "whole")
    assert all_bytes(tmp_path / "moved") == all_bytes(tmp_path / "whole")


@pytest.mark.parametrize("seed", range(2))
def test_a_copy_that_was_taken_meanwhile_resumes(model, ids, tmp_path, seed):
    """Copies like those to object storage: files one by one, in any order, during the capture, and never whole.

    What is copied before it is complete, or after what it belongs to is gone, is found by its digest.
    """
    rng, copy = random.Random(seed), tmp_path / "copy"

    def copy_some(*_) -> None:
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        for path in rng.sample(files, len(files) * 2 // 3):
            target = copy / path.relative_to(tmp_path / "run")
            target.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes()
            target.write_bytes(content if rng.random() < 0.8 else content[: len(content) // 2])

    do(model, ids, tmp_path / "run", copy_some, documents_per_shard=2)
    (copy / "progress.json").unlink(missing_ok=True)
    interrupted(model, ids, tmp_path / "begun", 3, documents_per_shard=2)
    shutil.copyfile(tmp_path / "begun" / "progress.json", copy / "progress.json")
    (copy / "holder.json").unlink(missing_ok=True)
    do(model, ids, copy, documents_per_shard=2)
    assert all_bytes(copy) == all_bytes(tmp_path / "run")


def test_begin_again_forgets_what_was_there_but_no_finished_run(model, ids, tmp_path):
    do(model, ids, tmp_path / "whole", skip_first=5)
    interrupted(model, ids, tmp_path / "run", 12)
    with pytest.raises(
        DatasetError, match=r"options.skip_first: expected 5, got 4\); choose another folder, or --no-resume"
    ):
        do(model, ids, tmp_path / "run", skip_first=5)
    do(model, ids, tmp_path / "run", doing={"resume": False}, skip_first=5)
    assert all_bytes(tmp_path / "run") == all_bytes(tmp_path / "whole")
    with pytest.raises(DatasetError, match="contains a finished run; choose another folder"):
        do(model, ids, tmp_path / "run", doing={"resume": False}, skip_first=6)


def test_parts_of_another_run_are_not_taken_for_this_one(model, ids, tmp_path, caplog):
    other = [one[::-1].copy() for one in ids]
    interrupted(model, ids, tmp_path / "first", 19)
    interrupted(model, other, tmp_path / "run", 3)
    shutil.rmtree(tmp_path / "run" / "parts", ignore_errors=True)
    shutil.copytree(tmp_path / "first" / "parts", tmp_path / "run" / "parts")
    do(model, other, tmp_path / "run")
    assert "000000-000002 is damaged (it belongs to another run); its shards are measured again" in caplog.text
    do(model, other, tmp_path / "whole")
    assert all_bytes(tmp_path / "run") == all_bytes(tmp_path / "whole")


def test_remains_of_a_run_that_lost_its_manifest_are_not_mixed_into_another(model, ids, tmp_path):
    do(model, ids, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    words = r"contains a run without its manifest \(moments, sample, checksums.json\); choose another folder"
    with pytest.raises(DatasetError, match=words):
        do(model, ids[:8], tmp_path / "run", layers=(0, 1))
    assert len(list((tmp_path / "run" / "moments").iterdir())) == 4
    do(model, ids[:8], tmp_path / "run", doing={"resume": False}, layers=(0, 1))
    do(model, ids[:8], tmp_path / "whole", layers=(0, 1))
    assert all_bytes(tmp_path / "run") == all_bytes(tmp_path / "whole")


def test_the_gate_stays_within_the_positions_a_model_has(ids, tmp_path):
    """Frequencies that follow the length would otherwise be those of the gate's length."""
    family = families()["dynamic scaling"]
    family.config.max_position_embeddings = 64
    whole = do(build(family), ids, tmp_path / "whole", window=None)
    cut = do(build(family), ids, tmp_path / "cut", window=64)
    (a, b) = (RunFolder.open(folder).raw["layers"][0]["rope"]["frequencies"] for folder in (whole, cut))
    assert a == b


def test_other_numbers_of_documents_per_shard_agree_but_for_rounding(model, ids, tmp_path):
    one, other = (qkscope.open(do(model, ids, tmp_path / str(n), documents_per_shard=n)) for n in (3, 20))
    for head in one.heads[::5]:
        same_moments(one.moments(head).q, other.moments(head).q, 1e-5)


def test_shards_are_large_on_a_gpu():
    plain = CaptureOptions()
    assert [per_shard(plain, 8192, device) for device in ("cpu", "cuda")] == [8, 512]
    assert per_shard(plain, 10**6, "cuda") == 8
    assert per_shard(CaptureOptions(documents_per_shard=3), 8192, "cuda") == 3
    assert [per_shard(plain, longest, "cpu") for longest in (64, 1024, 4096)] == [256, 16, 8]


def test_short_documents_share_passes_with_others_of_their_length():
    """A pass is no larger than that of a long document, and at most half of it is padding."""
    lengths = np.random.default_rng(0).permutation(np.repeat([64, 70, 500, 9000], [40, 40, 9, 2])).tolist()
    for device, most in (("cpu", 4096), ("cuda", 16_384)):
        passes = in_passes(lengths, None, device)
        assert sorted(row for rows in passes for row in rows) == list(range(len(lengths)))
        for rows in passes:
            of_pass = [lengths[row] for row in rows]
            assert len(rows) == 1 or len(rows) * max(of_pass) <= most
            assert max(of_pass) <= 2 * min(of_pass)
        assert len(passes) == {"cpu": 6, "cuda": 4}[device]
    assert in_passes([5, 6, 7, 8, 9], 2, "cuda") == [[0, 1], [2, 3], [4]]


def test_kept_vectors_have_their_own_labels_in_batches_that_go_in_steps(model, ids, tmp_path):
    """Steps of a batch pass document by document within each step; labels have to follow."""
    whole = Dataset.open(do(model, ids, tmp_path / "whole", vectors=ALL) / "vectors")
    steps = Dataset.open(do(model, ids, tmp_path / "steps", vectors=ALL, batch=3, prefill=40) / "vectors")
    for head in (HeadId(0, 1, "q"), HeadId(3, 1, "k")):
        a, b = whole.read(head), steps.read(head)
        np.testing.assert_array_equal(a.example_id, b.example_id)
        np.testing.assert_array_equal(a.position, b.position)
        np.testing.assert_allclose(a.x, b.x, atol=2e-5)


# ---- memory -------------------------------------------------------------------------------------


@pytest.fixture
def little_memory(monkeypatch) -> None:
    """Documents of more than 150 tokens do not fit, nor do batches of more than 300."""
    plain = Measurement._forward

    def forward(self, rows, windows):
        lengths = [len(windows[0].shard.ids[row]) for row in rows]
        plain(self, rows, windows)  # and only then: what it added has to go
        if max(lengths) > 150 or max(lengths) * len(rows) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(Measurement, "_forward", forward)


def short(ids: list[np.ndarray]) -> list[np.ndarray]:
    """Documents of which the second and the last two are long."""
    lengths = [100, 155, 90, 80, 100, 120, 155, 157]
    return [np.resize(one, n) for one, n in zip(ids, lengths, strict=False)]


@pytest.mark.usefixtures("little_memory")
def test_a_document_that_does_not_fit_stops_the_run_and_is_named(model, ids, tmp_path):
    words = (
        r"document 1 \(d1, 155 tokens\) does not fit into memory \(CUDA out of memory. Tried to allocate 9 GiB\); "
        "try --prefill 2048 or a smaller --window, or use --keep-going to leave out such documents"
    )
    with pytest.raises(CaptureError, match=words):
        do(model, short(ids), tmp_path / "run")


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("batch", [1, 4])
def test_or_is_left_out_and_recorded(model, ids, tmp_path, caplog, batch):
    going = {"keep_going": True}
    folder = do(model, short(ids), tmp_path / "run", doing=going, batch=batch, documents_per_shard=2, sample=300)
    manifest = RunFolder.open(folder).raw
    assert [(one["document"], one["name"]) for one in manifest["left_out"]] == [(1, "d1"), (6, "d6"), (7, "d7")]
    assert "left out document 6 (d6): out of memory (CUDA out of memory." in caplog.text
    run = qkscope.open(folder)
    assert run.moments(run.heads[0]).total_q.n == sum(
        len(one) - 4 for i, one in enumerate(short(ids)) if i not in (1, 6, 7)
    )
    assert set(run.sample(run.heads[0]).rows.example_id) == {0, 2, 3, 4, 5}
    extent = run.source.extent(run.heads)
    assert (extent.n_documents, extent.n_tokens) == (5, 490)
    # The same again finds a finished run, and what was left out is not held against it.
    do(
        model,
        short(ids),
        tmp_path / "run",
        lambda _: pytest.fail("done"),
        going,
        batch=batch,
        documents_per_shard=2,
        sample=300,
    )


@pytest.mark.usefixtures("little_memory")
def test_documents_that_do_not_fit_in_batches_are_measured_alone_and_that_is_recorded(model, ids, tmp_path, caplog):
    few = [np.resize(one, 120) for one in ids[:6]]
    folder = do(model, few, tmp_path / "run", batch=3, documents_per_shard=3)
    assert RunFolder.open(folder).raw["one_by_one"] == [0, 1]
    assert "documents 0 to 2 did not fit into memory in batches and were measured one by one" in caplog.text
    alone = qkscope.open(do(model, few, tmp_path / "alone", documents_per_shard=3))
    run = qkscope.open(folder)
    np.testing.assert_array_equal(run.moments(run.heads[3]).q.scatter, alone.moments(run.heads[3]).q.scatter)


def test_memory_that_runs_out_when_sums_are_brought_together_is_one_line(model, ids, tmp_path, monkeypatch):
    def finish(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("qkscope.capture.shardsums.layer_moments", finish)
    with pytest.raises(CaptureError, match="out of memory while merging the sums of documents 0 to 1"):
        do(model, ids[:2], tmp_path / "run")


@pytest.mark.usefixtures("little_memory")
def test_where_nothing_fits_there_is_no_run(model, ids, tmp_path):
    long = [np.resize(one, 155) for one in ids[:4]]
    with pytest.raises(CaptureError, match="none of the 4 documents could be measured"):
        do(model, long, tmp_path / "run", doing={"keep_going": True})
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_error_of_another_kind_is_not_taken_for_too_little_memory(model, ids, tmp_path, monkeypatch):
    def forward(*_):
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(Measurement, "_forward", forward)
    with pytest.raises(RuntimeError, match="device-side assert"):
        do(model, ids[:2], tmp_path / "run", doing={"keep_going": True})


def test_a_model_that_leaves_no_room_says_so(model, ids, tmp_path, monkeypatch):
    def decode(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Measurement, "_decode", decode)
    with pytest.raises(
        CaptureError, match=r"out of memory after the model was loaded \(CUDA out of memory.\); try --dtype"
    ):
        do(model, ids[:2], tmp_path / "run", doing={"keep_going": True})


# ---- the system ---------------------------------------------------------------------------------


def started(model_folder: Path, texts: Path, folder: Path) -> subprocess.Popen[str]:
    """A capture in a process of its own, once its first shard is done."""
    given = ["capture", model_folder, "--texts", texts, "--threads", 1, "--documents-per-shard", 1, "-o", folder]
    # Shells start what runs in the background with SIGINT ignored, and processes inherit that.
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = f"{listening}; from qkscope.__main__ import run; run()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, *map(str, given)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list(folder.glob("parts/0*")) and process.poll() is None:
        time.sleep(0.005)
    return process


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_capture_that_is_asked_to_stop_says_how_to_go_on(model_folder, tmp_path, how, code):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number:02d}.txt").write_text("w01 w02 w03 w04 w05 w06 w07 w08 " * 20)
    process = started(model_folder, texts, tmp_path / "run")
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert said.endswith("stopped; rerun the same command to resume\n")
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "holder.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_one_line_and_with_more_room_it_goes_on(model_folder, texts, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = "size=700k"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    given = ["capture", str(model_folder), "--texts", str(texts), "--documents-per-shard", "2", "--sample", "20", "-o"]
    try:
        full = CliRunner().invoke(app, [*given, str(disk / "run")])
        assert full.exit_code == 2
        assert full.output.splitlines()[-1].startswith("error: no space left on device [")
        assert full.output.splitlines()[-1].endswith("; free some space; rerun the same command to resume")
        assert not list(disk.rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        assert CliRunner().invoke(app, [*given, str(disk / "run")]).exit_code == 0
        assert CliRunner().invoke(app, [*given, str(tmp_path / "whole")]).exit_code == 0
        assert all_bytes(disk / "run") == all_bytes(tmp_path / "whole")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_connection_that_drops_in_the_middle_of_the_weights_is_taken_up_again(model_folder, texts, tmp_path):
    """The real client, in a process of its own, against a Hub on loopback that breaks off once."""
    given = ["capture", "someone/tiny", "--texts", texts, "--threads", 1, "--max-docs", 2, "-o", tmp_path / "run"]
    with FakeHub("someone/tiny", "main", model_folder, model=True, cut_next={"model.safetensors"}).serving() as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "qkscope", *map(str, given)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert hub.downloads.count("model.safetensors") == 2
    assert RunFolder.open(tmp_path / "run").raw["model"]["commit"] == hub.commit


# ---- shares -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shares(tmp_path_factory) -> Path:
    """Two jobs' shares of one capture, and one of another."""
    place = tmp_path_factory.mktemp("shares")
    ids = [np.arange(3, 80)] * 12
    model = build(families()["llama"])
    for job in (1, 2):
        do(model, ids, place / f"job-{job}", doing={"share": Share(job, 2)}, documents_per_shard=4)
    do(model, ids, place / "other", doing={"share": Share(2, 2)}, documents_per_shard=4, skip_first=6)
    do(model, ids, place / "whole", documents_per_shard=4)
    return place


def merged(place: Path, *folders: str, more: tuple[str, ...] = ()) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["merge", *(str(place / one) for one in folders), *more], catch_exceptions=False)
    return done.exit_code, done.output.splitlines()[-1]


def test_shares_make_the_run(shares, tmp_path):
    assert merged(shares, "job-2", "job-1", more=("-o", str(tmp_path / "run")))[0] == 0
    assert all_bytes(tmp_path / "run") == all_bytes(shares / "whole")
    assert merged(shares, "job-2", "job-1", more=("-o", str(tmp_path / "run")))[0] == 0, "merging again does nothing"
    code, said = merged(shares, "job-1", more=("--partial", "-o", str(tmp_path / "some")))
    assert (code, said) == (
        0,
        f"wrote a share to {tmp_path / 'some'}; when all are done: qkscope merge FOLDER … -o RUN",
    )
    assert merged(tmp_path, "some", str(shares / "job-2"), more=("-o", str(tmp_path / "later")))[0] == 0
    assert all_bytes(tmp_path / "later") == all_bytes(shares / "whole")


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (
            ["job-1"],
            "documents 4 to 7 and 1 more shards are in none of these folders; finish the jobs that measure them",
        ),
        (["job-1", "job-1"], "job-1 and {0}/job-1 both contain shard 0; leave one of them out"),
        (
            ["job-1", "other"],
            "other contains a capture with different settings (options.skip_first: expected 4, got 6)",
        ),
        (["job-1", "whole"], "whole is a finished run; merge needs folders written by capture --shard"),
        (
            ["job-1", "nowhere"],
            "nowhere contains no share of a capture; merge needs folders written by capture --shard",
        ),
    ],
)
def test_shares_that_make_none(shares, tmp_path, folders, message):
    code, said = merged(shares, *folders, more=("-o", str(tmp_path / "run")))
    assert code == 2
    assert message.format(shares) in said
    assert not (tmp_path / "run").exists()


def test_a_damaged_share_is_named(shares, tmp_path):
    shutil.copytree(shares / "job-1", tmp_path / "job-1")
    next((tmp_path / "job-1" / "parts").rglob("layer-002.safetensors")).write_bytes(b"x")
    code, said = merged(tmp_path, "job-1", str(shares / "job-2"), more=("-o", str(tmp_path / "run")))
    assert code == 2
    assert "layer-002.safetensors differs from its checksum); rerun its job" in said


def test_one_job_alone_leaves_a_share_too(model, ids, tmp_path):
    do(model, ids, tmp_path / "share", doing={"share": Share(1, 1)})
    assert not (tmp_path / "share" / "run.json").exists()
    assert merged(tmp_path, "share", more=("-o", str(tmp_path / "run")))[0] == 0
    do(model, ids, tmp_path / "whole")
    assert all_bytes(tmp_path / "run") == all_bytes(tmp_path / "whole")


@pytest.mark.usefixtures("little_memory")
def test_what_shares_left_out_is_said_when_they_are_merged(model, ids, tmp_path):
    going = {"keep_going": True, "share": Share(1, 1)}
    do(model, short(ids), tmp_path / "share", doing=going, sample=300)
    code, said = merged(tmp_path, "share", more=("-o", str(tmp_path / "run")))
    assert (code, said) == (1, "left out for lack of memory: 3 documents")


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/2"])
def test_shares_that_are_none(text):
    with pytest.raises(CaptureError, match="expected a share such as 2/8"):
        Share.parse(text)


def test_more_jobs_than_shards(model, ids, tmp_path):
    with pytest.raises(CaptureError, match="only 2 shards for 5 jobs; use at most 2 jobs"):
        do(model, ids[:4], tmp_path / "run", doing={"share": Share(2, 5)}, documents_per_shard=2)


def test_a_worker_that_sees_another_model_is_refused(model, ids, tmp_path, monkeypatch):
    from qkscope.capture import run as running

    plain = running.ShardSums
    monkeypatch.setattr("qkscope.capture.measure.ShardSums", lambda *parts: plain(*parts[:3], "another"))
    with pytest.raises(CaptureError, match="the worker that measured documents 0 to 1 has another model, GPU type"):
        do(model, ids[:2], tmp_path / "run")


def test_unfinished_captures_of_earlier_versions_are_named(model, ids, tmp_path):
    (tmp_path / "run" / "moments-00001").mkdir(parents=True)
    (tmp_path / "run" / "progress.json").write_text(json.dumps({"manifest": {}, "shards_done": 1, "moments": "x"}))
    with pytest.raises(DatasetError, match="was written by an earlier version of qkscope; choose another folder"):
        do(model, ids[:2], tmp_path / "run")


@pytest.mark.parametrize(
    ("asked", "number", "loaded", "current"),
    [("cuda", None, "cuda", []), ("cuda", 3, "cuda:1", ["cuda:1"]), ("cuda:1", None, "cuda:1", ["cuda:1"])],
)
def test_workers_of_one_machine_share_its_gpus(monkeypatch, asked, number, loaded, current):
    """No GPU is needed to see which one a worker takes; a plain 'cuda' cannot be made the current device."""
    from qkscope.capture import model as models
    from qkscope.capture import replica

    set_to: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", set_to.append)
    monkeypatch.setattr(replica, "worker_number", lambda: number)
    monkeypatch.setattr(models, "load_model", lambda options: options.device)
    one = replica.Replica(models.ModelOptions("m", device=asked), CaptureOptions(), np.arange(5))
    assert one._loaded(one.source) == loaded
    assert set_to == current
