"""Small datasets and heads for tests."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import Table
from qkscope.analyses.catalogue import analyses_named
from qkscope.analyses.options import AnalysisOptions
from qkscope.analyses.tabulate import batch_of, tabulate
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import HeadMoments, cell_means, group_moments
from qkscope.core.planted import PlantedHead, plant
from qkscope.core.rows import Rows
from qkscope.files.dataset import write_dataset
from qkscope.headids import HeadId


def heads_of(*heads: PlantedHead, window: int = 4096) -> list[HeadMoments]:
    return [one_head(head.q, head.k, window) for head in heads]


def moments_of(*heads: PlantedHead, window: int = 4096) -> HeadMoments:
    return HeadMoments.stack(heads_of(*heads, window=window))


def moments_of_rows(q: Rows, k: Rows, window: int = 4096) -> HeadMoments:
    """A batch of one head."""
    return HeadMoments.stack([one_head(q, k, window)])


def one_head(q: Rows, k: Rows, window: int = 4096) -> HeadMoments:
    return HeadMoments(
        q=group_moments(q),
        k=group_moments(k),
        k_cells=cell_means(k, window),
        q_cells=cell_means(q, window),
        window=np.asarray(window),
        scaling=np.asarray(q.d**-0.5),
        dropped_q=np.asarray(0),
        dropped_k=np.asarray(0),
        repeated_q=np.asarray(0),
        repeated_k=np.asarray(0),
    )


def head_data(moments: HeadMoments, number: int = 0, **known: Any) -> HeadData:
    """Head ``number`` of layer 0, which reads a key head of its own; ``known`` are vectors, rotary and so on."""
    return HeadData(HeadId(0, number, "q"), HeadId(0, number, "k"), moments, **known)


def tables_of(
    heads: HeadMoments | HeadData | Sequence[HeadMoments | HeadData], *names: str, **options: Any
) -> dict[str, pd.DataFrame]:
    """The tables of these analyses, of one head or of several."""
    several = [heads] if isinstance(heads, HeadMoments | HeadData) else heads
    data = [one if isinstance(one, HeadData) else head_data(one, i) for i, one in enumerate(several)]
    analyses = analyses_named(names)
    return tabulate(batch_of("m", "f", data, analyses, AnalysisOptions(**options)), analyses)[0].frames


def with_intervals(table: Table, *but: str) -> list[str]:
    """Columns that have intervals of their own."""
    return [column.name for column in table.columns if column.scale is not None and column.name not in but]


def small_dataset(
    folder: Path, *, layers: int = 2, q_heads: int = 4, q_per_kv: int = 2, d: int = 8, n: int = 200, **options: object
) -> Path:
    """A dataset of planted heads, with its card."""

    def heads() -> list[tuple[HeadId, Rows]]:
        found = []
        for layer in range(layers):
            for head in range(q_heads):
                planted = plant(
                    d, n=n, documents=16, window=512, sigma=np.linspace(0.5, 1.5, d), seed=layer * 100 + head
                )
                found.append((HeadId(layer, head, "q"), planted.q))
                if head % q_per_kv == 0:
                    found.append((HeadId(layer, head // q_per_kv, "k"), planted.k))
        return found

    return write_dataset(folder, heads(), q_per_kv=q_per_kv, **options)  # type: ignore[arg-type]


def n_documents(note: str) -> int:
    """The number of documents that a capture reports as done, from a note such as ``3 of 10 documents``."""
    return int(note.partition(" ")[0])


def explorer_core(page: str) -> dict[str, Any]:
    """The data with which an explorer opens."""
    (core,) = re.findall(r'id="core">([^<]+)<', page)
    return json.loads(zlib.decompress(base64.b64decode(core)))


def explorer_runs(page: str) -> list[str]:
    """The labels of the runs in an explorer."""
    return [run["label"] for run in explorer_core(page)["runs"]]
