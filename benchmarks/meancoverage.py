"""Coverage of the 95% interval of a mean over heads: from 8 documents, for the mean from all 32.

python -m benchmarks.meancoverage
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tests.helpers import one_head

from qkscope.analyses.catalogue import analyses_named
from qkscope.analyses.options import AnalysisOptions
from qkscope.analyses.tabulate import batch_of, tabulate
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import undone_sums
from qkscope.core.rope import HeadRotary
from qkscope.core.rows import Rows
from qkscope.data.family import CHECKPOINTS, texts, tokenizer
from qkscope.engine import ExecutionTarget, for_each
from qkscope.files.dataset import Dataset
from qkscope.headids import HeadId
from qkscope.results.summary import headline

SUBSETS, DOCUMENTS = 300, 8
_Vectors = dict[HeadId, Rows]
_Means = dict[str, dict[str, float]]


_Hits = dict[str, list[tuple[bool, bool]]]


def coverage_of_means(subsets: int = SUBSETS, workers: int = 2) -> dict[str, tuple[float, float]]:
    """Coverage of the interval of each mean: as it is, and without the widening for few documents.

    The heads are those of the last bundled checkpoint, on all bundled texts at a window of 1,024.
    """
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        texts_of_all = [argument for path in sorted(texts().iterdir()) for argument in ("--texts", str(path))]
        command = ["capture", str(CHECKPOINTS[-1].folder), "--tokenizer", str(tokenizer()), *texts_of_all]
        command += ["--window", "1024", "--dtype", "float32", "--save-vectors", "0.5", "-o", str(run), "--quiet"]
        subprocess.run([sys.executable, "-m", "qkscope", *command], check=True)
        chunks = [range(first, min(first + 10, subsets)) for first in range(0, subsets, 10)]
        inside: _Hits = {}
        for _, found in for_each(_hits, [(str(run / "vectors"), chunk) for chunk in chunks], ExecutionTarget(workers)):
            for name, hits in found.items():
                inside.setdefault(name, []).extend(hits)
    rates = {name: np.mean(hits, axis=0) for name, hits in inside.items()}
    return {name: (float(rate[0]), float(rate[1])) for name, rate in rates.items()}


def _hits(task: tuple[str, range]) -> _Hits:
    dataset = Dataset.open(Path(task[0]))
    heads = {head: dataset.read(head).ordered().as_double() for head in dataset.heads}
    whole, _ = _means_of(dataset, heads, np.arange(32))
    inside: _Hits = {}
    for seed in task[1]:
        chosen = np.random.default_rng(seed).choice(32, DOCUMENTS, replace=False)
        wide, plain = _means_of(dataset, heads, chosen)
        for name in (name for name, mean in wide.items() if "low" in mean):
            held = [mean[name]["low"] <= whole[name]["mean"] <= mean[name]["high"] for mean in (wide, plain)]
            inside.setdefault(name, []).append((held[0], held[1]))
    return inside


def _means_of(dataset: Dataset, heads: _Vectors, chosen: np.ndarray) -> tuple[_Means, _Means]:
    """The means of summary.json from these documents, each a document group; and with intervals not widened."""
    number = np.full(32, -1)
    number[np.sort(chosen)] = np.arange(len(chosen))

    def part(head: HeadId) -> Rows:
        rows = heads[head]
        kept = np.flatnonzero(number[rows.example_id] >= 0)
        return Rows(rows.x[kept], rows.position[kept], number[rows.example_id[kept]])

    keys = {head: part(head) for head in heads if head.kind == "k"}
    data = []
    for head in dataset.query_heads:
        key = dataset.key_head(head)
        q, k, rope = part(head), keys[key], dataset.rotary.of(head.layer, heads[head].d)
        assert rope is not None
        rotary = HeadRotary(rope, undone_sums(q, rope), undone_sums(k, rope))
        data.append(HeadData(head, key, one_head(q, k, 1024), rotary=rotary))
    analyses = analyses_named(["pca", "rotation", "position"])
    tables = tabulate(batch_of("m", "f", data, analyses, AnalysisOptions()), analyses)[0]
    declared = [table for analysis in analyses for table in analysis.tables]
    return headline(tables, declared, len(chosen)), headline(tables, declared)


def main() -> None:
    """Print the coverage of every mean that summary.json gives with an interval."""
    print(f"| mean over heads | {SUBSETS} subsets of 8 of 32 documents | not widened |\n|---|---|---|")
    for column, (held, plain) in coverage_of_means().items():
        print(f"| `{column}` | {held:.1%} | {plain:.1%} |")


if __name__ == "__main__":
    main()
