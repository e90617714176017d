"""The time of each step of one head, from its file to its rows, measured separately on one core.

python -m benchmarks.steps
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from threadpoolctl import threadpool_limits

import qkscope
from benchmarks.dataset import BOTH, Q_PER_KV, make_dataset
from qkscope.analyses.causal import causal_bias
from qkscope.analyses.complement import circles
from qkscope.analyses.components import components
from qkscope.analyses.heldout import lda_accuracy
from qkscope.analyses.nulls import null_r95
from qkscope.analyses.options import AnalysisOptions
from qkscope.analyses.rotationmodel import rotation_model
from qkscope.core.headmoments import HeadMoments, group_moments
from qkscope.core.rows import Coordinates, Pair
from qkscope.engine import IN_PROCESS
from qkscope.files.dataset import Dataset
from qkscope.results.analyze import analyze
from qkscope.results.job import Job
from qkscope.runs.source import LoadSpec

HEADS, ROWS, D = 48, 8000, 128


def milliseconds(work: Callable[[], object], repeats: int = 9) -> float:
    """Median time of some work, once unmeasured."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)


def measure(folder: Path) -> dict[str, float]:
    """Milliseconds per query head; what is done once per key head is shared by those that read it."""
    dataset, run = Dataset.open(folder), qkscope.open(folder, model="bench")
    head, shared = run.heads[0], 1 + 1 / Q_PER_KV
    (one,), _ = run.source.load([head], LoadSpec(sample=4096))
    rows = dataset.read(head)
    q, k = one.moments.total_q, one.moments.total_k
    assert one.vectors is not None
    vectors: Pair = one.vectors
    window, pooled = int(one.moments.window), HeadMoments.stack([one.moments]).pooled.cov_x[0]
    pcs, model = components(q, k, whole_basis=False), rotation_model(q, k, whole_basis=False)
    axes = np.vstack([pcs.axes[:2], model.a, model.b])
    on = Coordinates.of(vectors, axes)

    def of_group(work: Callable[[Pair], object]) -> float:
        """Per query head, of as many as read one key head; nothing is known from an earlier time."""

        def group() -> None:
            keys = replace(vectors.k)
            for _ in range(Q_PER_KV):
                work(Pair(replace(vectors.q), keys))

        return milliseconds(group) / Q_PER_KV

    found = {
        "reading": shared * milliseconds(lambda: dataset.read(head)),
        "moments by document group": shared * milliseconds(lambda: group_moments(rows)),
        "components": milliseconds(lambda: components(q, k, whole_basis=False)),
        "axes a and b": milliseconds(lambda: rotation_model(q, k, whole_basis=False)),
        "coordinates on two components, a and b": milliseconds(lambda: Coordinates.of(vectors, axes)),
        "`bias_causal`": of_group(causal_bias),
        "ω": milliseconds(lambda: circles([on.select(slice(2, 4))] * 2, vectors, window)) / 2,
        "`lda_accuracy`": of_group(
            lambda pair: lda_accuracy(one.moments.q, one.moments.k, pair, pcs.axes[:2], on.select(slice(2)))
        ),
        "`null_r95`": of_group(lambda pair: null_r95(pair, pooled)),
    }
    bare, full = (
        milliseconds(
            lambda on=on: analyze([Job(run, options=AnalysisOptions(intervals=on))], BOTH, target=IN_PROCESS), 5
        )
        / HEADS
        for on in (False, True)
    )
    found["everything else"] = bare - sum(found.values())
    return found | {"intervals": full - bare}


def main() -> None:
    with TemporaryDirectory() as scratch, threadpool_limits(1):
        make_dataset(Path(scratch) / "data", HEADS, ROWS, D)
        for step, taken in measure(Path(scratch) / "data").items():
            print(f"| {step} | {taken:.1f} |", flush=True)


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
