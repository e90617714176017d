"""Heads per second of ``qkscope analyze RUN`` with all tables, and of PCA and rotation alone.

    python -m benchmarks.tables --heads 1024 --d 128
    python -m benchmarks.tables --by-analysis

The command is timed as a user types it, with its start and its files, on captured runs of two shapes with random
weights: 270 heads of d = 64 as in SmolLM2-135M, 336 of d = 128 as in Qwen2.5-1.5B, 16 documents of 1,024 tokens.

For PCA and rotation alone, the run holds moments of planted heads, 32 query and 8 key heads to a layer. Tables are made
in one process, without and with intervals. Before anything is timed, standard errors of some heads are compared with
those of a jackknife that decomposes every replicate in full.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd

import qkscope
from qkscope.analyses import catalogue
from qkscope.analyses.analysis import Analysis
from qkscope.analyses.options import AnalysisOptions
from qkscope.core.headmoments import cell_means, group_moments
from qkscope.core.layermoments import LayerMoments
from qkscope.core.planted import Ring, plant
from qkscope.core.rows import Rows
from qkscope.engine import IN_PROCESS
from qkscope.files.layerfiles import layer_file, write_layer
from qkscope.files.runfolder import FORMAT, MANIFEST, MOMENTS
from qkscope.results.analyze import analyze, write_results
from qkscope.results.job import Job, Selection

BOTH: tuple[str, ...] = ("pca", "rotation")
SHAPES = {64: (30, 9, 3), 128: (28, 12, 2)}
"""Layers, query heads and key heads of runs whose every table is made, by d."""
TOKENS = 1024
WINDOW, BUCKETS, QUERIES, KEYS = 131_072, 16, 32, 8


def make_run(folder: Path, n_heads: int, d: int) -> None:
    """Layers of planted heads; within a layer they differ by scale and noise."""
    rng = np.random.default_rng(0)
    rings = [Ring(float(f), 1.5, 1.5) for f in np.geomspace(1e-3, 1.0, 8)]
    base = plant(d, n=4000, documents=40, window=WINDOW, rings=rings, sigma=np.geomspace(4.0, 0.2, d))
    layers = max(1, n_heads // QUERIES)
    (folder / MOMENTS).mkdir(parents=True)
    for layer in range(layers):
        q = [_varied(base.q, rng) for _ in range(QUERIES)]
        k = [_varied(base.k, rng) for _ in range(KEYS)]
        write_layer(folder / MOMENTS / layer_file(layer), _layer(q, k))
    described = {"rope": None, "scaling": d**-0.5, "sliding_window": None}
    heads = {"query_heads": list(range(QUERIES)), "key_heads": list(range(KEYS))}
    manifest = {
        "format": FORMAT,
        "window": WINDOW,
        "q_per_kv": QUERIES // KEYS,
        "stage": "post-rope",
        "model": {"id": "planted"},
        "corpus": "planted",
        "options": {"buckets": BUCKETS},
        "documents": [],
        "layers": [{"layer": layer, **heads, **described} for layer in range(layers)],
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


def capture_run(folder: Path, d: int) -> int:
    """Capture a model of random weights whose heads have the numbers and the size of a real one; returns the heads."""
    import torch
    import transformers

    torch.manual_seed(0)
    layers, heads, key_heads = SHAPES[d]
    config = transformers.LlamaConfig(
        hidden_size=2 * heads * key_heads, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=d, vocab_size=512, initializer_range=0.2,
    )  # fmt: skip
    texts = np.random.default_rng(0).integers(0, 512, (16, TOKENS))
    model = transformers.LlamaForCausalLM(config).eval()
    return len(qkscope.capture_model(model, texts, window=TOKENS, folder=folder, progress=False).heads)


def all_tables(d: int, repeats: int) -> dict[str, float]:
    """Median wall-clock and processor seconds of the command, and its number of heads."""
    with TemporaryDirectory() as scratch:
        run, taken = Path(scratch) / "run", []
        heads = capture_run(run, d)
        command = [sys.executable, "-m", "qkscope", "analyze", str(run), "-o"]
        for number in range(repeats):
            used, start = _processor(), time.perf_counter()
            subprocess.run([*command, str(Path(scratch) / str(number))], check=True, capture_output=True)
            taken.append((time.perf_counter() - start, _processor() - used))
    wall, processor = np.median(taken, axis=0)
    return {"heads": heads, "wall_s": float(wall), "processor_s": float(processor)}


def by_analysis(d: int) -> dict[str, float]:
    """Milliseconds of processor time per head, in one process: reading, each analysis, and everything until files."""
    from qkscope.results import analyze as analyze_module

    taken: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return function(*given, **named)
            finally:
                taken[name] = taken.get(name, 0.0) + time.process_time() - start

        return call

    def analyses_named(names: Iterable[str]) -> list[Analysis]:
        return [replace(one, compute=timed(one.name, one.compute)) for one in catalogue.analyses_named(names)]

    with TemporaryDirectory() as scratch:
        heads = capture_run(Path(scratch) / "run", d)
        run = qkscope.open(Path(scratch) / "run")
        reading, chance = (timed(name, getattr(analyze_module, f"_{name}")) for name in ("load", "chance"))
        with patch.multiple(analyze_module, analyses_named=analyses_named, _load=reading, _chance=chance):
            whole = timed("all", analyze)([Job.from_options(run, "analyze")], target=IN_PROCESS)
        timed("writing", write_results)(Path(scratch) / "tables", whole, wall_seconds=0.0)
    everything = taken.pop("all")
    taken["joining"] = everything - sum(seconds for name, seconds in taken.items() if name != "writing")
    return {name: 1e3 * seconds / heads for name, seconds in taken.items()}


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _varied(rows: Rows, rng: np.random.Generator) -> Rows:
    return Rows(rows.x * rng.uniform(0.5, 2) + 0.3 * rng.standard_normal(rows.x.shape), rows.position, rows.example_id)


def _layer(q: list[Rows], k: list[Rows]) -> LayerMoments:
    none = [np.zeros((len(kind), 8, 0, 2)) for kind in (q, k)]
    groups = [type(group_moments(q[0])).stack(group_moments(rows) for rows in kind) for kind in (q, k)]
    cells = [[cell_means(rows, WINDOW, BUCKETS) for rows in kind] for kind in (q, k)]
    q_cells, k_cells = (type(part[0]).stack(part) for part in cells)
    return LayerMoments(*groups, None, q_cells, k_cells, *none, np.zeros((2, 0)))


def _tables(run: qkscope.Run, *, intervals: bool, heads: frozenset[int] | None = None) -> dict[str, pd.DataFrame]:
    job = Job(run, Selection(heads=heads), AnalysisOptions(intervals=intervals))
    frames = analyze([job], BOTH, target=IN_PROCESS)[0].tables.frames  # told that there is no sample
    assert len(frames["rotated"]) == len(job.selection.of(run))
    assert frames["rotated"]["alpha_k_se"].notna().all() == intervals
    return frames


def check(run: qkscope.Run) -> float:
    """Largest relative error of a standard error, against a full decomposition of every replicate."""
    some = frozenset([0, 5])
    fast = _tables(run, intervals=True, heads=some)
    with patch("qkscope.core.eigenupdate.NEAR_LIMIT", -1.0):
        full = _tables(run, intervals=True, heads=some)
    worst = 0.0
    for name in ("qk", "heads", "rotated"):
        for column in (c for c in fast[name].columns if c.endswith("_se")):
            ratio = (fast[name][column] / full[name][column]).dropna()
            worst = max(worst, float(np.abs(ratio - 1).max()) if len(ratio) else 0.0)
    return worst


def measure(n_heads: int = 1024, d: int = 128, repeats: int = 5) -> dict[str, Any]:
    """Heads per second in one process, without and with intervals."""
    with TemporaryDirectory() as scratch:
        make_run(Path(scratch), n_heads, d)
        run = qkscope.open(Path(scratch), model="planted")
        worst = check(run)
        rates: dict[str, list[float]] = {"without intervals": [], "with intervals": []}
        for _ in range(repeats):
            for name, values in rates.items():
                start = time.perf_counter()
                _tables(run, intervals=name.startswith("with "))
                values.append(len(run.heads) / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {"rates": medians, "se_error": worst, "all": {str(d): all_tables(d, min(repeats, 3)) for d in SHAPES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=1024)
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--by-analysis", action="store_true", help="milliseconds of each analysis instead")
    given = parser.parse_args()
    if given.by_analysis:
        for d in SHAPES:
            parts = by_analysis(d)
            print(f"d = {d}: {sum(parts.values()):.1f} ms of processor time per head")
            print("  " + ", ".join(f"{name} {ms:.1f}" for name, ms in sorted(parts.items(), key=lambda part: -part[1])))
        return
    found = measure(given.heads, given.d, given.repeats)
    for name, rate in found["rates"].items():
        print(f"{name:<20}{rate:>8.1f} heads/s")
    print(f"largest relative error of a standard error: {found['se_error']:.1e}")
    for d, taken in found["all"].items():
        rate, of_core = (taken["heads"] / taken[name] for name in ("wall_s", "processor_s"))
        print(
            f"all tables, {taken['heads']} heads of d = {d}: {rate:.1f} heads/s, {of_core:.1f} per second of processor"
        )


if __name__ == "__main__":
    main()
