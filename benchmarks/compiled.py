"""The cost of a capture compared with a compiled forward pass: watched models run uncompiled.

    python -m benchmarks.compiled                                # CPU, 135M shape, 2,048 tokens
    python -m benchmarks.compiled --device cuda --tokens 8192    # one GPU, Llama-3.2-3B shape, bf16

Compiled and eager passes take turns in one process, then captured and eager ones; what counts is the ratio of medians.
Compiling itself is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.capture import Bench, build


def measure(device: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Median seconds of each kind of pass."""
    torch.manual_seed(0)
    shape, dtype = ("135m", torch.float32) if device == "cpu" else ("3b", torch.bfloat16)
    bench = Bench(build(shape, device, dtype, tokens), tokens, device)
    compiled = torch.compile(bench.model)

    def compiled_pass() -> None:
        with torch.no_grad():
            compiled(bench.ids, use_cache=False)

    times: dict[str, list[float]] = {"eager": [], "compiled": [], "captured": []}
    for name, way in (("compiled", compiled_pass), ("captured", bench.captured)):
        bench.start()
        for turn in range(repeats + 2):  # the first turns compile, and begin the sums
            for kind, passed in (("eager", bench.plain), (name, way)):
                seconds = bench.timed(passed)
                if turn >= 2:
                    times[kind].append(seconds)
    medians = {f"{name}_s": statistics.median(values) for name, values in times.items()}
    ratios = {f"captured_to_{name}": medians["captured_s"] / medians[f"{name}_s"] for name in ("eager", "compiled")}
    return {"shape": shape, "tokens": tokens} | medians | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    row = measure(given.device, given.tokens, given.repeats)
    print(
        f"{row['shape']}, {row['tokens']:,} tokens: eager {row['eager_s']:.4f} s, compiled {row['compiled_s']:.4f} s, "
        f"captured {row['captured_s']:.4f} s: {row['captured_to_eager']:.3f} × eager, "
        f"{row['captured_to_compiled']:.3f} × compiled"
    )
    if given.json:
        given.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
