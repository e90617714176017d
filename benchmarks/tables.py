"""Heads per second and core from a captured run without vectors to its moment-based tables.

    python -m benchmarks.tables --heads 1024 --d 128

The run holds moments of planted heads, 32 query and 8 key heads to a layer. Tables of PCA and rotation are made in one
process, without and with intervals. Before anything is timed, standard errors of some heads are compared with those of
a jackknife that decomposes every replicate in full.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd

import qkscope
from qkscope.analyses.options import AnalysisOptions
from qkscope.core.headmoments import cell_means, group_moments
from qkscope.core.layermoments import LayerMoments
from qkscope.core.planted import Ring, plant
from qkscope.core.rows import Rows
from qkscope.engine import IN_PROCESS
from qkscope.files.layerfiles import layer_file, write_layer
from qkscope.files.runfolder import FORMAT, MANIFEST, MOMENTS
from qkscope.results.analyze import analyze
from qkscope.results.job import Job, Selection

BOTH: tuple[str, ...] = ("pca", "rotation")
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
    return {"rates": {name: statistics.median(values) for name, values in rates.items()}, "se_error": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=1024)
    parser.add_argument("--d", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    found = measure(given.heads, given.d, given.repeats)
    for name, rate in found["rates"].items():
        print(f"{name:<20}{rate:>8.1f} heads/s")
    print(f"largest relative error of a standard error: {found['se_error']:.1e}")


if __name__ == "__main__":
    main()
