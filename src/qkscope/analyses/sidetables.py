"""Side tables for pictures: points on the axes that figures show, and each score of a short text in four terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import Analysis, AnalysisResult
from qkscope.analyses.batch import Batch
from qkscope.analyses.complement import Complement, PlaneVectors, complement_axes
from qkscope.analyses.components import Components, components
from qkscope.analyses.fourterms import terms
from qkscope.analyses.scores import locked_means
from qkscope.core.headdata import HeadData
from qkscope.core.rows import Pair
from qkscope.core.sample import sample_pair
from qkscope.headids import TERMS


def compute_points(batch: Batch) -> AnalysisResult:
    """Compute ``points``: the vectors requested by the options."""
    options = batch.options.points
    assert options is not None
    frames = []
    for i, (head_data, head) in enumerate(zip(batch.heads, batch.plane_vectors, strict=True)):
        rows, axes = options.of(head_data.head.layer, head_data.head.head)
        if head is None or not head.enough or not rows:
            continue
        pcs = components(head_data.moments.total_q, head_data.moments.total_k, max(options.pcs) + 1)
        basis = complement_axes(head.measured().as_double(), head.a, head.b)
        vectors = sample_pair(head.pair, rows).as_double()
        labels = {name: batch.index[name][i] for name in ("model", "layer", "head")}
        frames += [_rows(labels, kind, vectors, head, pcs, basis, options.pcs, axes) for kind in "qk"]
    return AnalysisResult(complete={"points": pd.concat(frames, ignore_index=True)} if frames else {})


def _rows(
    labels: dict[str, Any],
    kind: str,
    vectors: Pair,
    head: PlaneVectors,
    pcs: Components,
    basis: Complement,
    components: tuple[int, ...],
    n_axes: int,
) -> pd.DataFrame:
    """One kind of vectors: on components, on a and b (not centred), and in the complement (centred)."""
    rows = vectors.q if kind == "q" else vectors.k
    axes = pcs.axes[0] if pcs.axes.ndim == 3 else pcs.axes
    columns = {f"pc{pc}": rows.x @ axes[pc] for pc in components if pc < len(axes)}
    columns |= {"a": rows.x @ head.a, "b": rows.x @ head.b}
    on = basis.project(rows)[:, :n_axes]
    columns |= {f"svd_{i}": on[:, i] for i in range(on.shape[1])}
    frame = pd.DataFrame({name: values.astype(np.float32) for name, values in columns.items()})
    frame = frame.assign(**labels, kind=kind, example_id=rows.example_id, position=rows.position)
    return frame[[*labels, "kind", "example_id", "position", *columns]]


POINTS_ANALYSIS = Analysis("points", "vectors of some heads, for pictures", (), compute_points, axes=True)


LEVELS = 127


def compute_passage(batch: Batch) -> AnalysisResult:
    """Compute ``passage``: the scores of each head that has a passage and whose rotation is known."""
    frames = []
    for i, head in enumerate(batch.heads):
        if head.passage is not None and (head.rotary or head.nope):
            labels = {name: batch.index[name][i] for name in ("model", "layer", "head")}
            frames.append(passage_scores(head).assign(**labels))
    return AnalysisResult(complete={"passage": pd.concat(frames, ignore_index=True)} if frames else {})


def passage_scores(head: HeadData) -> pd.DataFrame:
    """Columns q_token, k_token (their positions), text (the key's), unit (logits per level) and terms as levels."""
    passage = head.passage
    assert passage is not None
    positions = np.arange(len(passage.tokens))
    locked_q, locked_k = (mean.at(positions) for mean in locked_means(head))
    term_values = terms(passage.q, passage.k, locked_q, locked_k, float(head.moments.scaling))
    query, key = (
        np.indices((len(positions), len(positions))).reshape(2, -1) if head.both else np.tril_indices(len(positions))
    )
    visible = term_values[:, query, key]
    largest = np.zeros(len(positions))
    np.maximum.at(largest, query, np.abs(visible).max(0))
    unit = np.where(largest > 0, largest / LEVELS, 1.0)
    levels = {term: np.round(values / unit[query]).astype(np.int8) for term, values in zip(TERMS, visible, strict=True)}
    index = {"q_token": query.astype(np.int16), "k_token": key.astype(np.int16)}
    text = pd.Categorical([passage.tokens[i] for i in key.tolist()])
    return pd.DataFrame(index | {"text": text, "unit": unit[query].astype(np.float32)} | levels)


PASSAGE_ANALYSIS = Analysis("passage", "every score of a short text in four terms", (), compute_passage, rotary=True)
