"""Compare the time of the benchmarks with that of an earlier commit, the two run in turn on this machine.

    python -m tools.sidebyside BEFORE [AFTER] [--rounds 5] [--only "all tables"]

BEFORE and AFTER are commits; without AFTER it is the working tree. Every benchmark is run at one, then at the other,
then at the other and the one, and so on: what changes slowly on a machine falls on both. Printed is the median of the
ratios after : before, of the processor's seconds and of the clock's, with the lowest and highest ratio.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from benchmarks.tables import SHAPES, capture_run

ROOT = Path(__file__).parent.parent
TREE = "TREE"
"""Stands for the name of the source tree in the arguments of a command."""
BENCHMARKS = {
    "tables of a run": ("benchmarks.tables", "--heads", "512", "--repeats", "3"),
    "tables of a dataset": ("benchmarks.dataset", "--heads", "40", "--repeats", "3"),
    "capture": ("benchmarks.capture", "--shape", "135m", "--tokens", "2048", "--repeats", "3"),
}


def main() -> None:
    """Run, in turn, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="commit to compare with")
    parser.add_argument("after", nargs="?", help="commit that is compared (the working tree)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="benchmarks whose name begins like this")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = exported(given.before, Path(folder) / "before")
        after = exported(given.after, Path(folder) / "after") if given.after else ROOT
        for name, command in (_all_tables(Path(folder)) | BENCHMARKS).items():
            if not name.startswith(given.only):
                continue
            clock, processor = ratios(before, after, command, given.rounds)
            print(f"{name:<22} processor {_middle(processor)}   clock {_middle(clock)}", flush=True)


def _all_tables(folder: Path) -> dict[str, tuple[str, ...]]:
    """The command that makes all tables of a run, by the runs' head dimension."""
    commands = {}
    for d in SHAPES:
        run = folder / f"run-{d}"
        capture_run(run, d)
        commands[f"all tables, d = {d}"] = "qkscope", "analyze", str(run), "-o", f"{folder}/tables-{d}-{TREE}"
    return commands


def exported(commit: str, folder: Path) -> Path:
    """The source tree of a commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def ratios(before: Path, after: Path, command: tuple[str, ...], rounds: int) -> tuple[list[float], list[float]]:
    """Ratios of after to before in each round, of wall-clock time and of processor time."""
    clock, processor = [], []
    for number in range(rounds):
        order = (before, after) if number % 2 == 0 else (after, before)
        taken = {tree: seconds(tree, command) for tree in order}
        clock.append(taken[after][0] / taken[before][0])
        processor.append(taken[after][1] / taken[before][1])
    return clock, processor


def seconds(tree: Path, command: tuple[str, ...]) -> tuple[float, float]:
    """Wall-clock and processor seconds that a benchmark of a source tree takes."""
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    used, start = _processor(), time.perf_counter()
    command = tuple(part.replace(TREE, tree.name) for part in command)
    subprocess.run([sys.executable, "-m", *command], cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start, _processor() - used


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _middle(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.2f}–{max(values):.2f})"


if __name__ == "__main__":
    main()
