"""Growth of time and memory with heads, rows, d and documents: dataset → PCA and rotation tables with intervals.

    python -m benchmarks.growth --figure docs/images/growth.png

Every point is a process of its own with one worker; its time is without start-up, its memory the peak of the process.
Exponents are slopes of log–log fits: 1 is proportional, 0 is flat.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

BASE = {"heads": 24, "rows": 4000, "d": 64, "documents": 40}
AXES = {
    "heads": (12, 36, 120),
    "rows": (1000, 3000, 10_000),
    "d": (64, 128, 256),
    "documents": (10, 100, 1000),
}

PROBE = """
import re, sys, time
import qkscope
from qkscope.engine import IN_PROCESS
from qkscope.results.job import Job
from qkscope.results.analyze import analyze
run = qkscope.open(sys.argv[1], model="bench")
def peak():  # of this very process; getrusage counts its parent's
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024
before = peak()
start = time.perf_counter()
analyze([Job(run)], ("pca", "rotation"), target=IN_PROCESS)
print(time.perf_counter() - start, peak(), before)
"""


def point(heads: int, rows: int, d: int, documents: int, repeats: int) -> dict[str, float]:
    """Median seconds and peak MiB of one size."""
    from benchmarks.dataset import make_dataset

    with TemporaryDirectory() as scratch:
        make_dataset(Path(scratch) / "data", heads, rows, d, documents)
        found = []
        for _ in range(repeats):
            command = [sys.executable, "-W", "ignore", "-c", PROBE, str(Path(scratch) / "data")]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append([float(part) for part in done.stdout.split()])
    seconds, peak, before = np.median(found, axis=0)
    return {"seconds": seconds, "peak_mib": peak, "start_mib": before}


def measure(repeats: int = 3) -> dict[str, Any]:
    """Every axis in turn, the others at their base."""
    found: dict[str, Any] = {"base": BASE}
    for axis, sizes in AXES.items():
        points = []
        for size in sizes:
            points.append({"size": size, **point(**(BASE | {axis: size}), repeats=repeats)})
            print(f"{axis:>10} = {size:<7}{points[-1]['seconds']:8.2f} s{points[-1]['peak_mib']:8.0f} MiB", flush=True)
        x = np.log([one["size"] for one in points])
        found[axis] = {
            "points": points,
            "time_exponent": float(np.polyfit(x, np.log([one["seconds"] for one in points]), 1)[0]),
            "memory_exponent": float(np.polyfit(x, np.log([one["peak_mib"] for one in points]), 1)[0]),
        }
    return found


def markdown(found: dict[str, Any]) -> str:
    """One line per axis."""
    lines = ["| growing | sizes | seconds | exponent | peak MiB | exponent |", "|---|---|---|---|---|---|"]
    for axis in AXES:
        points = found[axis]["points"]
        sizes, seconds, peaks = (
            " / ".join(format(one[name], how) for one in points)
            for name, how in (("size", ","), ("seconds", ".2f"), ("peak_mib", ".0f"))
        )
        exponents = found[axis]["time_exponent"], found[axis]["memory_exponent"]
        lines.append(f"| {axis} | {sizes} | {seconds} | {exponents[0]:.2f} | {peaks} | {exponents[1]:.2f} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Time and memory against each axis, on logarithmic scales."""
    import matplotlib.pyplot as plt

    from qkscope.figures.style import Q, house_style

    with house_style():
        figure, panels = plt.subplots(2, len(AXES), figsize=(8, 3.6), sharey="row", layout="constrained")
        for column, axis in enumerate(AXES):
            points = found[axis]["points"]
            size = [one["size"] for one in points]
            for row, name in enumerate(("seconds", "peak_mib")):
                panel = panels[row, column]
                exponent = found[axis]["time_exponent" if row == 0 else "memory_exponent"]
                panel.loglog(size, [one[name] for one in points], "o-", color=Q)
                panel.set_title(f"exponent {exponent:.2f}")
                panel.set_xticks(size, [f"{one:,}" for one in size])
                panel.minorticks_off()
            panels[1, column].set_xlabel(axis)
        panels[0, 0].set_ylabel("seconds")
        panels[1, 0].set_ylabel("peak memory, MiB")
        for panel, limits, ticks in (
            (panels[0, 0], (0.2, 12), (0.3, 1, 3, 10)),
            (panels[1, 0], (80, 1300), (100, 300, 1000)),
        ):
            panel.set_ylim(*limits)
            panel.set_yticks(ticks, [f"{one:g}" for one in ticks])
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    found = measure(given.repeats)
    print(markdown(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.figure:
        draw(found, given.figure)


if __name__ == "__main__":
    main()
