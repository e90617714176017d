"""The capture on one GPU beside the plain forward pass: Llama-3.2-3B shape, random bf16 weights, all heads, all tokens.

    python -m benchmarks.gpu                       # 8,192, 32,768 and 131,072 tokens
    python -m benchmarks.gpu --tokens 8192 --profile
    python -m benchmarks.gpu --tokens 8192 --one-stream

Plain and captured passes take turns in one process; the ratio of medians is what counts. Beside each stands the largest
relative error of moments of one layer against float64 on the very vectors, and the extra memory. Then whole captures
of long and short documents (benchmarks/whole.py).
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks import whole
from benchmarks.capture import Bench, build, measure
from qkscope.capture.sums import halfsums, layersums


def profile(bench: Bench) -> None:
    """Time of our own kernels in one pass, by kernel."""
    bench.start()
    bench.captured()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as plain:
        bench.plain()
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as captured:
        bench.captured()
        torch.cuda.synchronize()
    before = {event.key: event.device_time_total for event in plain.key_averages()}
    rows = [(e.device_time_total - before.get(e.key, 0.0), e.count, e.key) for e in captured.key_averages()]
    total = sum(row[0] for row in rows)
    alone = sum(before.values())
    print(f"kernel time beyond the plain pass: {total / 1e3:.2f} ms; of the plain pass: {alone / 1e3:.2f} ms")
    for extra, count, name in sorted(rows, reverse=True)[:14]:
        print(f"{extra / 1e3:9.3f} ms {count:6d}  {name[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--repeats", type=int, default=5, help="passes of each kind; five times as many of short ones")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one-stream", action="store_true", help="reduce on the stream of the forward pass")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.one_stream:
        layersums.beside = halfsums.beside = lambda _x: nullcontext()
    torch.manual_seed(0)
    model = build("3b", "cuda", torch.bfloat16, max(given.tokens))
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(where + (", one stream" if given.one_stream else ""), flush=True)
    print("| tokens | plain | captured | ratio | extra memory | error |\n|---|---|---|---|---|---|", flush=True)
    rows = []
    for tokens in given.tokens:
        # Short passes vary more, and cost less to repeat.
        row = measure(model, tokens, "cuda", given.repeats * (1 if tokens > 50_000 else 5))
        rows.append(row)
        print(
            f"| {tokens:,} | {row['plain_s']:.4f} s | {row['captured_s']:.4f} s | {row['ratio']:.4f} | "
            f"{row['extra_gib']:.2f} GiB | {row['error']:.1e} |",
            flush=True,
        )
        if given.profile:
            profile(Bench(model, tokens, "cuda"))
    del model
    torch.cuda.empty_cache()
    whole_runs = [] if given.profile or given.one_stream else whole.measure("cuda")
    if given.json:
        given.json.write_text(json.dumps({"machine": where, "rows": rows, "whole": whole_runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
