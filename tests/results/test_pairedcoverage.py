"""Coverage of paired differences on planted heads, through the pipeline: moments, results folders, comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from qkscope.analyses.components import components, head_variance
from qkscope.analyses.rotationmodel import rotation_model
from qkscope.core.headdata import HeadData
from qkscope.core.moments import Moments
from qkscope.core.planted import Law, Ring, Truth, plant
from qkscope.core.rows import Rows
from qkscope.engine import IN_PROCESS
from qkscope.errors import HeadError
from qkscope.headids import HeadId
from qkscope.results.analyze import analyze, write_results
from qkscope.results.compare import Comparison, compare_runs, side
from qkscope.results.job import Job
from qkscope.results.reader import read_folder
from qkscope.runs.run import Run
from qkscope.runs.source import Extent, LayerNotes, LoadSpec
from tests.helpers import one_head

HEADS, D, WINDOW, DOCUMENTS, TOKENS, EFFECT = 240, 8, 512, 32, 48, 0.5
DRIFTS = {"a": 2e-3, "b": 2.6e-3}
OF_VARIANCE = ("posvar_q", "posvar_k", "positional_overhead")
OF_ROTATION = ("r_q_a", "r_k_a", "bias_strength", "alpha_k")


@dataclass(frozen=True)
class PlantedSource:
    """A source of planted moments, on a corpus of its own name."""

    label: str
    heads: dict[HeadId, HeadData]
    corpus: str = "the same documents"
    q_per_kv: int = 1
    window: int = WINDOW
    buckets: int | None = None
    query_heads: list[HeadId] = field(default_factory=list)

    def key_head(self, head: HeadId) -> HeadId:
        return head.key_head(1)

    def file(self, _: HeadId) -> None:
        return None

    def layer_notes(self, _: HeadId) -> LayerNotes:
        return LayerNotes()

    def load(self, heads: Sequence[HeadId], _: LoadSpec) -> tuple[list[HeadData], list[HeadError]]:
        return [self.heads[head] for head in heads], []

    def extent(self, _: Sequence[HeadId]) -> Extent:
        return Extent(DOCUMENTS, DOCUMENTS * TOKENS)

    def identity(self) -> dict[str, str]:
        return {"corpus": self.corpus, "digest": self.label}


def drawn(law: Law, shared: np.random.Generator, own: np.random.Generator) -> Rows:
    """Rows of a law whose tokens, document effects and half of whose noise come from the shared generator."""
    position = np.concatenate([np.sort(shared.choice(WINDOW, TOKENS, replace=False)) for _ in range(DOCUMENTS)])
    document = np.repeat(np.arange(DOCUMENTS), TOKENS)
    effect = EFFECT * shared.standard_normal((DOCUMENTS, D))
    noise = shared.standard_normal((len(position), D)) + own.standard_normal((len(position), D))
    content = effect[document] + law.frame.sigma * noise / np.sqrt(2)
    return Rows(law.mean_at(position.astype(float)) + content, position, document)


def planted(label: str, corpus: int = 0) -> tuple[dict[HeadId, HeadData], list[Truth]]:
    """Heads of one run; two runs with one corpus read the same documents."""
    heads, truths = {}, []
    for number in range(HEADS):
        truth = plant(
            D, n=DOCUMENTS, documents=DOCUMENTS, window=WINDOW, rings=[Ring(0.02, 1.0, 1.0)],
            sigma=np.linspace(0.6, 1.4, D), sigma_document=EFFECT, alpha_q=DRIFTS[label], alpha_k=2 * DRIFTS[label],
            seed=number,
        ).truth  # fmt: skip
        shared, own = np.random.default_rng([number, corpus]), np.random.default_rng([number, corpus, ord(label)])
        q, k = (drawn(law, shared, own) for law in (truth.law_q, truth.law_k))
        head = HeadId(number // 8, number % 8, "q")
        heads[head] = HeadData(head, head.key_head(1), one_head(q, k, WINDOW))
        truths.append(truth)
    return heads, truths


def true_values(truths: list[Truth]) -> dict[str, np.ndarray]:
    q, k = (Moments.stack(getattr(truth, kind) for truth in truths) for kind in "qk")
    variance, model = head_variance(q, k, components(q, k)), rotation_model(q, k)
    values = {name: getattr(variance, name) for name in OF_VARIANCE}
    return values | {name: getattr(model, name) for name in OF_ROTATION}


def compared(folder: Path, corpora: tuple[int, int]) -> tuple[Comparison, dict[str, np.ndarray]]:
    """The comparison of two runs as their results folders give it, and the true differences by column."""
    sides, truths = [], []
    for label, corpus in zip("ab", corpora, strict=True):
        heads, truth = planted(label, corpus)
        run = Run(PlantedSource(label, heads, f"corpus {corpus}", query_heads=list(heads)), label)
        results = analyze([Job(run)], ["pca", "rotation"], target=IN_PROCESS, strict=True)
        write_results(folder / label, results, wall_seconds=0.0)
        sides.append(side(read_folder(folder / label)))
        truths.append(true_values(truth))
    return compare_runs(*sides), {name: truths[1][name] - truths[0][name] for name in truths[0]}


def covered(comparison: Comparison, truth: dict[str, np.ndarray]) -> dict[str, float]:
    """The share of heads whose interval holds the truth, by column."""
    return {
        name: float(((rows["low"] <= truth[name]) & (truth[name] <= rows["high"])).mean())
        for name in truth
        for rows in [comparison.of_column(name).sort_values(["layer", "head"])]
    }


@pytest.mark.slow
def test_paired_differences_of_two_results_folders_cover_the_planted_ones(tmp_path):
    paired, truth = compared(tmp_path / "paired", (0, 0))
    unpaired, _ = compared(tmp_path / "unpaired", (0, 1))
    assert (paired.paired, unpaired.paired) == (True, False)
    found = covered(paired, truth)
    assert {name: share for name, share in found.items() if not 0.92 <= share <= 0.98} == {}
    assert 0.92 < np.mean(list(covered(unpaired, truth).values())) < 0.985, "wider where documents differ"
    ratios = paired.summary.set_index("column").loc[list(truth), "se_ratio"]
    assert (ratios < 0.7).all(), "documents that both read do not enter the difference"
