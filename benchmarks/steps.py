"""Where the time of one head goes, from its file to its rows: each step by itself, on one core.

python -m benchmarks.steps
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from threadpoolctl import threadpool_limits

import qkscope
from benchmarks.dataset import BOTH, Q_PER_KV, make_dataset
from qkscope.analyses.causal import bias_causal
from qkscope.analyses.heldout import lda_accuracy
from qkscope.analyses.nulls import null_r95
from qkscope.analyses.pca import components
from qkscope.analyses.planes import circle
from qkscope.analyses.rotation import rotation
from qkscope.core.headmoments import HeadMoments, group_moments
from qkscope.engine import HERE
from qkscope.jobs import Job
from qkscope.load import Reading
from qkscope.pipeline import analyze
from qkscope.store.datasets import Dataset

HEADS, ROWS, D = 16, 8000, 128


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
    (one,), _ = run.source.load([head], Reading(sample=4096))
    rows = dataset.read(head)
    vectors, q, k = one.vectors, one.moments.total_q, one.moments.total_k
    assert vectors is not None
    window, pooled = int(one.moments.window), HeadMoments.stack([one.moments]).pooled.cov_x[0]
    pcs, model = components(q, k), rotation(q, k)
    found = {
        "reading": shared * milliseconds(lambda: dataset.read(head)),
        "moments by document group": shared * milliseconds(lambda: group_moments(rows)),
        "components": milliseconds(lambda: components(q, k)),
        "axes a and b": milliseconds(lambda: rotation(q, k)),
        "`bias_causal`": milliseconds(lambda: bias_causal(vectors)),
        "ω": milliseconds(lambda: circle(vectors, model.a, model.b, window)),
        "`lda_accuracy`": milliseconds(lambda: lda_accuracy(one.moments.q, one.moments.k, vectors, pcs.axes[:2])),
        "`null_r95`": milliseconds(lambda: null_r95(vectors, pooled)),
    }
    bare, full = (
        milliseconds(lambda on=on: analyze([Job(run)], BOTH, place=HERE, intervals=on), 5) / HEADS
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
