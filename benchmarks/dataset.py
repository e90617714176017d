"""Heads per second from a dataset: reading only, reading with both analyses, and the plain way.

    python -m benchmarks.dataset --heads 300 --rows 8000 --d 128 --workers 2

All ways read the same parquet files, in the same number of processes, with one BLAS thread each. The plain way
is pandas, scikit-learn and scipy, head by head, without intervals; it runs on a part of the heads and is given
as a rate. Before anything is timed, both ways are checked to agree on these data.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import qkscope
from qkscope.analyses.options import AnalysisOptions
from qkscope.core.planted import Ring, plant
from qkscope.core.rows import Rows
from qkscope.engine import ExecutionTarget, for_each
from qkscope.files.dataset import Dataset, write_dataset
from qkscope.headids import HeadId
from qkscope.results.analyze import analyze
from qkscope.results.job import Job, Selection

Q_PER_KV = 4
PLAIN = AnalysisOptions(intervals=False)
BOTH: tuple[str, ...] = ("pca", "rotation")


def make_dataset(folder: Path, n_heads: int, n_rows: int, d: int, documents: int = 40) -> None:
    """Planted heads of a few shapes, so that spectra and drifts look like a model's; no two files are alike."""
    rng = np.random.default_rng(0)
    rings = [Ring(float(f), 1.5, 1.5) for f in np.geomspace(1e-3, 1.0, 8)]
    base = plant(d, n=n_rows, documents=documents, window=131_072, rings=rings, sigma=np.geomspace(2.0, 0.3, d))

    def heads() -> Any:
        for number in range(n_heads):
            layer, head = divmod(number, 20)
            yield HeadId(layer, head, "q"), _jittered(base.q, rng)
            if head % Q_PER_KV == 0:
                yield HeadId(layer, head // Q_PER_KV, "k"), _jittered(base.k, rng)

    write_dataset(folder, heads(), q_per_kv=Q_PER_KV, window=131_072)


def _jittered(rows: Rows, rng: np.random.Generator) -> Rows:
    noise = 0.3 * rng.standard_normal(rows.x.shape, dtype=np.float32)
    return Rows(rows.x.astype(np.float32) * np.float32(rng.uniform(0.5, 2)) + noise, rows.position, rows.example_id)


# ---- three ways ---------------------------------------------------------------------------------


def read_only(dataset: Dataset, group: Sequence[HeadId]) -> int:
    """Read a key head and its query heads, and do nothing."""
    keys = {dataset.key_head(head) for head in group}
    return sum(len(dataset.read(head)) for head in [*keys, *group])


def plain(dataset: Dataset, group: Sequence[HeadId]) -> list[dict[str, float]]:
    """The plain computation, as in a notebook."""
    return [_plain_head(dataset, head) for head in group]


def _plain_head(dataset: Dataset, head: HeadId) -> dict[str, float]:
    from scipy.stats import pearsonr
    from sklearn.decomposition import PCA

    frames = [pd.read_parquet(dataset.path(h)) for h in (head, dataset.key_head(head))]
    (q, t_q), (k, t_k) = (
        (np.stack(frame["vector"].to_numpy()).astype(np.float64), frame["position"].to_numpy()) for frame in frames
    )
    x, t = np.concatenate([q, k]), np.concatenate([t_q, t_k])
    pca = PCA(10, svd_solver="full").fit(x)
    on_q, on_k = pca.transform(q), pca.transform(k)
    r_q = [pearsonr(on_q[:, i], t_q)[0] for i in range(10)]
    [pearsonr(on_k[:, i], t_k)[0] for i in range(10)]
    c = (x - x.mean(0)).T @ (t - t.mean()) / len(t)
    a = c / np.linalg.norm(c)
    apart = q.mean(0) - k.mean(0)
    c_delta = np.cov(q.T, bias=True) + np.cov(k.T, bias=True) + np.outer(apart, apart)
    projector = np.eye(len(a)) - np.outer(a, a)
    values, _ = np.linalg.eigh(projector @ c_delta @ projector)
    alpha_k = np.polyfit(t_k, k @ a, 1)[0]
    return {
        "explained_variance": pca.explained_variance_ratio_[0],
        "r_q": abs(r_q[0]),
        "position_r": abs(pearsonr(x @ a, t)[0]),
        "separation_strength": values[-1] / np.trace(c_delta),
        "bias_strength": (q @ a).mean() * alpha_k,
    }


def by_groups(work: Callable[[Sequence[HeadId]], object], groups: list[list[HeadId]], workers: int) -> list[object]:
    return [result for _, result in sorted(for_each(work, groups, ExecutionTarget(workers)), key=lambda pair: pair[0])]


# ---- measuring ----------------------------------------------------------------------------------


def check(run: qkscope.Run, dataset: Dataset, head: HeadId) -> float:
    """Largest relative difference between the plain way and the tables on one head."""
    job = Job(run, Selection(layers=frozenset([head.layer]), heads=frozenset([head.head])))
    frames = analyze([job], BOTH)[0].tables.frames
    ours = {**frames["rotated"].iloc[0].to_dict(), **frames["qk"].iloc[0].to_dict()}
    theirs = _plain_head(dataset, head)
    return max(abs(ours[name] - value) / abs(value) for name, value in theirs.items())


def measure(folder: Path, workers: int = 2, repeats: int = 5, plain_groups: int = 6) -> dict[str, Any]:
    """Heads per second of each way, in turn."""
    run, dataset = qkscope.open(folder, model="bench"), Dataset.open(folder)
    key_of = partial(HeadId.key_head, q_per_kv=dataset.q_per_kv)
    groups = [[h for h in run.heads if key_of(h) == key] for key in sorted({key_of(h) for h in run.heads})]
    n_heads, few = len(run.heads), groups[:plain_groups]
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "read only": (lambda: by_groups(partial(read_only, dataset), groups, workers), n_heads),
        "read + both analyses": (
            lambda: analyze([Job(run, options=PLAIN)], BOTH, target=ExecutionTarget(workers)),
            n_heads,
        ),
        "read + both analyses + intervals": (
            lambda: analyze([Job(run)], BOTH, target=ExecutionTarget(workers)),
            n_heads,
        ),
        "plain": (lambda: by_groups(partial(plain, dataset), few, workers), sum(map(len, few))),
    }
    worst = check(run, dataset, run.heads[0])
    for way, _ in ways.values():  # once unmeasured: page cache, and each way has run before any is timed
        way()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (way, count) in ways.items():
            start = time.perf_counter()
            way()
            rates[name].append(count / (time.perf_counter() - start))
    return {"rates": {name: statistics.median(values) for name, values in rates.items()}, "worst_difference": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("heads", 300),
        ("rows", 8000),
        ("d", 128),
        ("workers", 2),
        ("repeats", 5),
        ("plain-groups", 6),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(f"writing {given.heads} query heads of {given.rows} rows, d = {given.d}", flush=True)
        make_dataset(Path(scratch) / "data", given.heads, given.rows, given.d)
        print("measuring", flush=True)
        result = measure(Path(scratch) / "data", given.workers, given.repeats, given.plain_groups)
    read, ways = result["rates"]["read only"], result["rates"]
    print(f"{'way':<36}{'heads/s':>10}{'time ÷ reading':>17}")
    for name, rate in ways.items():
        print(f"{name:<36}{rate:>10.1f}{read / rate:>17.2f}")
    print(f"largest relative difference to the plain way: {result['worst_difference']:.1e}")


if __name__ == "__main__":
    main()
