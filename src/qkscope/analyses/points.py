"""Vectors of selected heads on the axes that figures show: principal components, a and b, the complement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import Analysis, Found
from qkscope.analyses.batch import Batch
from qkscope.analyses.complement import Complement, complement_axes
from qkscope.analyses.components import Components, components
from qkscope.analyses.planevectors import PlaneVectors
from qkscope.core.rows import Pair
from qkscope.core.sample import sample_pair


def compute_points(batch: Batch) -> Found:
    """``points``: the vectors requested by the options."""
    options = batch.options.points
    assert options is not None
    frames = []
    for i, (head_data, head) in enumerate(zip(batch.heads, batch.plane_vectors, strict=True)):
        rows, axes = options.of(head_data.head.layer, head_data.head.head)
        if head is None or not head.enough or not rows:
            continue
        pcs = components(head_data.moments.total_q, head_data.moments.total_k, max(options.pcs) + 1)
        basis = complement_axes(head.measured().as_double(), head.a, head.b)
        shown = sample_pair(head.pair, rows).as_double()
        named = {name: batch.index[name][i] for name in ("model", "layer", "head")}
        frames += [_rows(named, kind, shown, head, pcs, basis, options.pcs, axes) for kind in "qk"]
    return Found(complete={"points": pd.concat(frames, ignore_index=True)} if frames else {})


def _rows(
    named: dict[str, Any],
    kind: str,
    shown: Pair,
    head: PlaneVectors,
    pcs: Components,
    basis: Complement,
    components: tuple[int, ...],
    n_axes: int,
) -> pd.DataFrame:
    """One kind of vectors: on components, on a and b (not centred), and in the complement (centred)."""
    rows = shown.q if kind == "q" else shown.k
    axes = pcs.axes[0] if pcs.axes.ndim == 3 else pcs.axes
    columns = {f"pc{pc}": rows.x @ axes[pc] for pc in components if pc < len(axes)}
    columns |= {"a": rows.x @ head.a, "b": rows.x @ head.b}
    on = basis.project(rows)[:, :n_axes]
    columns |= {f"svd_{i}": on[:, i] for i in range(on.shape[1])}
    frame = pd.DataFrame({name: values.astype(np.float32) for name, values in columns.items()})
    frame = frame.assign(**named, kind=kind, example_id=rows.example_id, position=rows.position)
    return frame[[*named, "kind", "example_id", "position", *columns]]


POINTS_ANALYSIS = Analysis("points", "vectors of some heads, for pictures", (), compute_points, axes=True)
