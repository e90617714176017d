"""All benchmarks with an aim, one after the other, as one table; about twenty minutes on two quiet cores.

    python -m benchmarks            # or: make bench
    python -m benchmarks --quick    # smaller sizes, fewer repeats, nothing written
    python -m benchmarks --only tables whole    # some parts; the others keep their results

Results go to benchmarks/results.json with a description of the machine; ``python -m tools.readme`` takes them into the
README. The GPU's part runs on its own: ``python -m benchmarks.gpu --json benchmarks/results-gpu.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import dataset, growth, results, tables


def described() -> dict[str, Any]:
    """The machine and the versions."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": version("torch"),
    }


def start_up(repeats: int) -> dict[str, float]:
    """Seconds until the package is imported, and until the help is shown."""
    commands = {"import": ["-c", "import qkscope"], "help": ["-m", "qkscope", "--help"]}
    found = {}
    for name, command in commands.items():
        taken = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            taken.append(time.perf_counter() - start)
        found[name] = statistics.median(taken[1:])
    return found


def of_dataset(heads: int, repeats: int) -> dict[str, Any]:
    """Reading, both analyses, intervals, and the plain way."""
    with TemporaryDirectory() as scratch:
        dataset.make_dataset(Path(scratch) / "data", heads, 8000, 128)
        return dataset.measure(Path(scratch) / "data", repeats=repeats)


def of_capture(repeats: int) -> dict[str, float]:
    """A forward pass with and without capture, on the CPU."""
    import torch

    from benchmarks import capture

    torch.manual_seed(0)
    model = capture.build("135m", "cpu", torch.float32, 2048)
    return capture.measure(model, 2048, "cpu", repeats)


def of_whole(quick: bool) -> list[dict[str, Any]]:
    """A whole capture beside its forward passes, on the CPU."""
    from benchmarks import whole

    return whole.measure("cpu", ["2x2048"] if quick else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", help="some parts, such as tables; the others keep their results")
    given = parser.parse_args()
    quick = given.quick
    repeats = 2 if quick else 5
    found: dict[str, Any] = json.loads(results.CPU.read_text()) if given.only else {}
    found |= {"machine": described(), "repeats": repeats}
    parts = {
        "start": lambda: start_up(repeats),
        "tables": lambda: tables.measure(64 if quick else 1024, repeats=repeats),
        "capture": lambda: of_capture(2 * repeats - 1),
        "dataset": lambda: of_dataset(40 if quick else 300, repeats),
        "whole": lambda: of_whole(quick),
        "growth": lambda: growth.measure(1 if quick else 3),
    }
    for name, part in ((name, part) for name, part in parts.items() if not given.only or name in given.only):
        print(f"-- {name}", flush=True)
        found[name] = part()
    gpu = json.loads(results.GPU.read_text())
    print(f"\n{results.machine(found, gpu)}\n\n{results.markdown(found, gpu)}\n\n{growth.markdown(found['growth'])}")
    if not quick:
        results.CPU.write_text(json.dumps(found, indent=1) + "\n")
        growth.draw(found["growth"], Path("docs/images/growth.png"))


if __name__ == "__main__":
    main()
