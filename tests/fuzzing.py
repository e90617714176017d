"""Bytes for every reader: whatever they are, a reader gives what it reads or raises an error of ours, in one line.

    python -m tests.fuzzing parquet --seconds 90        # guided by coverage; needs atheris (pip install atheris)
    python -m tests.fuzzing all --seconds 60

tests/test_fuzzing.py feeds the same readers with hypothesis, and with what was found before.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from qkscope.capture.options import load_capture_config
from qkscope.capture.texts import read_documents
from qkscope.config import load_study_config
from qkscope.core.rows import Rows
from qkscope.errors import QkscopeError
from qkscope.files.checksums import compare
from qkscope.files.dataset import Dataset
from qkscope.files.inprogress import read_manifest
from qkscope.files.layerfiles import layer_file, read_layer_of, write_layer
from qkscope.files.parts import PartMetadata, Parts
from qkscope.files.runfolder import RunFolder
from qkscope.files.vectors import read_rows, write_rows
from qkscope.headids import HeadId
from qkscope.results.config import load_config
from qkscope.results.folder import check_results_folder
from qkscope.results.reader import read_folder
from qkscope.results.side import AXES, POINTS
from tests.files.test_manifests import GOOD
from tests.files.test_parts import MANIFEST, finished_layer

HEAD = HeadId(0, 0, "q")


@cache
def scratch() -> Path:
    """A folder for the file that is read; one for all."""
    return Path(tempfile.mkdtemp(prefix="qkscope-fuzzing-"))


def placed(name: str, data: bytes) -> Path:
    """The bytes as a file of this name, in a folder that holds nothing else."""
    folder = scratch() / "place"
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


def dataset_card(data: bytes) -> None:
    folder = placed("dataset.json", data).parent
    for name in ("l00h00q", "l00h00k"):
        (folder / name).mkdir()
        (folder / name / "data.parquet").touch()
    Dataset.open(folder).rotary.of(0, 8)


def part_note(data: bytes) -> None:
    folder = placed("parts/000000-000002/part.json", data).parents[2]
    Parts(folder, MANIFEST).open(folder / "kept")


def layer(data: bytes) -> None:
    read_layer_of(MANIFEST, placed(layer_file(0), data).parent, 0)


TARGETS: dict[str, Callable[[bytes], object]] = {
    "parquet": lambda data: read_rows(placed("l00h00q/data.parquet", data), HEAD),
    "card": dataset_card,
    "manifest": lambda data: RunFolder.open(placed("run.json", data).parent),
    "progress": lambda data: read_manifest(placed("progress.json", data)),
    "part": part_note,
    "layer": layer,
    "checksums": lambda data: compare(placed("checksums.json", data).parent),
    "config": lambda data: load_config(placed("c.yaml", data)),
    "capture": lambda data: load_capture_config(placed("c.yaml", data)),
    "study": lambda data: load_study_config(placed("c.yaml", data)),
    "table": lambda data: read_folder(placed("rotated.csv", data).parent),
    "table parquet": lambda data: read_folder(placed("rotated.parquet", data).parent),
    "own table": lambda data: check_results_folder(placed("heads.parquet", data).parent),
    "summary": lambda data: check_results_folder(placed("summary.json", data).parent),
    "points": lambda data: POINTS.read(placed("points.parquet", data).parent),
    "axes": lambda data: AXES.read(placed("axes.parquet", data).parent),
    "json array": lambda data: read_documents([str(placed("t.json", data))]),
    "json lines": lambda data: read_documents([str(placed("t.jsonl", data))]),
    "texts parquet": lambda data: read_documents([str(placed("t.parquet", data))]),
}


def check(target: str, data: bytes) -> None:
    """Read; any error but one of ours in one line is a finding."""
    try:
        TARGETS[target](data)
    except QkscopeError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than one line: {error}") from error


@cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Good inputs, from which bad ones are made."""
    import pandas as pd

    place = scratch() / "seeds"
    place.mkdir(exist_ok=True)
    if target == "layer":
        write_layer(place / "layer", finished_layer(1))
        return ((place / "layer").read_bytes(),)
    if target in ("parquet",):
        write_rows(place / "rows", Rows(np.ones((5, 3), np.float32), np.arange(5), np.zeros(5, int)), sliding_window=4)
        return ((place / "rows").read_bytes(),)
    if "parquet" in target or target in ("own table", "points", "axes"):
        frame = pd.DataFrame({"model": "m", "layer": [0, 1], "head": [0, 0], "r_q_a": [0.1, 0.2], "text": ["a", "b"]})
        frame.to_parquet(place / "frame")
        return ((place / "frame").read_bytes(),)
    config = b"model: m\nfamily: f\ndata: {dataset: x, layers: [1], rope: {theta: 1e4}}\npca: {high: 0.7}\n"
    note = PartMetadata(kept={"shard-000000.safetensors": "0" * 64}).model_dump_json().encode()
    texts: dict[str, bytes] = {
        "card": b'{"q_per_kv": 1, "window": 9, "scaling": 0.5, "rope": {"layers": {"0": {"theta": 1e4, "dims": 4}}}}',
        "manifest": json.dumps(GOOD).encode(),
        "progress": json.dumps({"manifest": GOOD}).encode(),
        "part": note,
        "checksums": b'{"run.json": "00"}',
        "config": config,
        "capture": b"model: m\ntexts: [a]\nwindow: 64\nconfig_overrides: {rope_theta: 5}\n",
        "study": b"title: t\nruns: [{path: a, label: b, step: 3, nope_layers: [1]}]\n",
        "table": b"model,layer,head,r_q_a,concordant\nm,0,1,0.5,True\nm,1,1,inf,\n",
        "summary": b'{"models": {"m": {"family": "f", "pca": {"headline": {"r_q": {"mean": 1}}}}}}',
        "json array": b'["one", {"text": "two"}, {"messages": [{"role": "user", "content": "three"}]}]',
        "json lines": b'{"text": "one"}\n\n{"text": "two"}\n',
    }
    return (texts[target],)


INSTRUMENTED = """
import sys, atheris
with atheris.instrument_imports(include=["qkscope", "yaml"]):
    from tests.fuzzing import guided
guided({target!r}, {seconds})
"""


def guided(target: str, seconds: int) -> None:
    """Let atheris look for findings; it ends the process."""
    import atheris

    place = scratch() / "corpus"
    place.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (place / str(number)).write_bytes(seed)
    atheris.Setup(
        [sys.argv[0], str(place), f"-max_total_time={seconds}", "-max_len=20000", "-rss_limit_mb=8000", "-timeout=20"],
        lambda data: check(target, data),
    )
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["all", *TARGETS])
    parser.add_argument("--seconds", type=int, default=60)
    given = parser.parse_args()
    found = False
    for target in TARGETS if given.target == "all" else [given.target]:
        script = INSTRUMENTED.format(target=target, seconds=given.seconds)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        runs = re.findall(r"Done (\d+) runs", done.stdout + done.stderr)
        found |= done.returncode != 0
        print(
            f"{target}: {f'{runs[0]} inputs, nothing found' if runs and not done.returncode else done.stderr[-3000:]}"
        )
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
