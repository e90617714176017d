"""Check whether the code computes the same bytes as an earlier commit on this machine.

python -m tools.golden COMMIT
python -m tools.golden COMMIT --within 1e-9

At that commit and in the working tree: capture two bundled checkpoints on a few documents (one of them also in two
shares, merged), and tabulate both runs and a dataset of their vectors. Every file is compared byte by byte;
summary.json, whose time differs, by its values. With --within, the numbers of csv tables may differ by that part of the
largest value of their column, and parquet tables are left out: they contain the same numbers.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd

from tools.sidebyside import exported

ROOT = Path(__file__).parent.parent
CHECKPOINTS = ("pretrain-step-0100", "extend-4k-step-0500")
N_TEXTS = 6
WINDOW = 700
CONFIG = """\
model: dataset
data: {dataset: runs/pretrain-step-0100/vectors, max_samples: 900, sample_heads: 6, seed: 3}
rotation: {centering: within, pairing: token}
output: {results_dir: results/published}
workers: 1
"""


def main() -> int:
    """Compute twice, compare, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="commit to compare the working tree with")
    parser.add_argument("--within", type=float, help="tolerance for the numbers of tables, instead of bytes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        differing = compare(arguments.commit, Path(folder), arguments.within)
    for line in differing:
        print(line)
    print(f"{len(differing)} files differ" if differing else "identical")
    return 1 if differing else 0


def compare(commit: str, folder: Path, within: float | None = None) -> list[str]:
    """Return the differences between the files that the commit writes and those that the working tree writes."""
    earlier = exported(commit, folder / "source")
    before, now = (compute(tree, folder) for tree in (earlier, ROOT))
    print(f"{len(now)} files, {sum(map(len, now.values())) / 2**20:.1f} MiB")
    lines = [f"{name}: only {'then' if name in before else 'now'}" for name in sorted(before.keys() ^ now.keys())]
    for name in sorted(name for name in before.keys() & now.keys() if before[name] != now[name]):
        if within is None or not name.startswith("results/"):
            lines.append(f"{name}: differs")
        elif name.endswith(".csv"):
            lines += [f"{name}: {text}" for text in _differing_columns(before[name], now[name], within)]
    return lines


def _differing_columns(before: bytes, now: bytes, within: float) -> list[str]:
    """The columns of two csv tables that differ by more than the tolerance, and by how much."""
    a, b = (pd.read_csv(io.BytesIO(content)) for content in (before, now))
    if list(a.columns) != list(b.columns) or len(a) != len(b):
        return ["other columns or rows"]
    texts = []
    for column in a.columns:
        if not (pd.api.types.is_float_dtype(a[column]) and pd.api.types.is_float_dtype(b[column])):
            texts += [] if a[column].equals(b[column]) else [f"{column} differs"]
        elif (a[column].isna() != b[column].isna()).any():
            texts.append(f"{column} is missing in other rows")
        else:
            difference = (a[column] - b[column]).abs() / (a[column].abs().max() or 1.0)
            texts += [f"{column} differs by {difference.max():.1e}"] if difference.max() > within else []
    return texts


def compute(tree: Path, folder: Path) -> dict[str, bytes]:
    """Return every file that the code of a source tree writes; always in the same place, because some files name it."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    data = tree / "src" / "qkscope" / "data" / "tinyrope"
    for name in CHECKPOINTS:
        shutil.copytree(data / "checkpoints" / name, work / "models" / name)
    shutil.copytree(data / "tokenizer", work / "tokenizer")
    texts = sorted((data / "texts").iterdir())
    (work / "texts").mkdir()
    for text in texts[:: max(len(texts) // N_TEXTS, 1)][:N_TEXTS]:
        shutil.copy(text, work / "texts")
    (work / "config.yaml").write_text(CONFIG)
    for command in commands():
        print(f"{tree.name}: {' '.join(command)}", flush=True)
        _run(tree, work, command)
    written = [path for part in ("runs", "results") for path in (work / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(work)): _content(path) for path in written}


def commands() -> list[list[str]]:
    """The commands that are run, as they would be typed."""
    first, second = (f"runs/{name}" for name in CHECKPOINTS)
    capture = ["--tokenizer", "tokenizer", "--texts", "texts", "--device", "cpu", "--dtype", "float32"]
    capture += ["--window", str(WINDOW), "--sample", "600", "--documents-per-shard", "2"]
    made = [["qkscope", "capture", f"models/{CHECKPOINTS[0]}", *capture, "--save-vectors", "0.5", "-o", first]]
    made += [["qkscope", "capture", f"models/{CHECKPOINTS[1]}", *capture, "--batch", "2", "-o", second]]
    made += [
        ["qkscope", "capture", f"models/{CHECKPOINTS[0]}", *capture, "--shard", f"{i}/2", "-o", f"runs/share-{i}"]
        for i in (1, 2)
    ]
    made += [["qkscope", "merge", "runs/share-1", "runs/share-2", "-o", "runs/merged"]]
    analyze = ["qkscope", "analyze", "--workers", "1"]
    made += [[*analyze, first, second, "-o", "results/captured", "--points", "2", "--family", "tinyrope"]]
    made += [[*analyze, f"{first}/vectors", "-o", "results/dataset", "--buckets", "8"]]
    made += [[*analyze, f"{first}/vectors", "-o", "results/plain", "--no-intervals"]]
    made += [
        [*analyze, first, "-o", "results/pieces", "--only", only] for only in ("distance,plasticity", "pca,planes")
    ]
    made += [["pca-analyze", "--config", "config.yaml"], ["rotate-analyze", "--config", "config.yaml"]]
    return made


def _run(tree: Path, work: Path, command: list[str]) -> None:
    """Run a command of a source tree; its function is named in the tree's pyproject.toml."""
    scripts = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[command[0]].partition(":")
    code = f"import sys; from {module} import {function}; sys.argv[0] = {command[0]!r}; {function}()"
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = os.environ | threads | {"PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *command[1:], *(["--quiet"] if "--quiet" not in command else [])],
        cwd=work, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(command)} ended with {done.returncode}\n{done.stderr}")


def _content(path: Path) -> bytes:
    if path.name != "summary.json":
        return path.read_bytes()
    summary: dict[str, Any] = json.loads(path.read_text())
    return json.dumps(summary | {"wall_seconds": 0}, sort_keys=True).encode()


if __name__ == "__main__":
    sys.exit(main())
