"""A dataset of vectors as a source: reduced to moments as it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.core.headdata import HeadData
from qkscope.core.rows import Rows
from qkscope.errors import DatasetError, HeadError
from qkscope.files.dataset import Dataset
from qkscope.files.vectors import read_sliding_window
from qkscope.headids import HeadId
from qkscope.runs.loading import load_key_group, read_head
from qkscope.runs.source import Extent, LayerNotes, LoadSpec


@dataclass(frozen=True)
class DatasetSource:
    """A dataset of vectors, reduced as it is read."""

    dataset: Dataset

    @property
    def query_heads(self) -> list[HeadId]:
        """All query heads of the dataset."""
        return self.dataset.query_heads

    @property
    def q_per_kv(self) -> int:
        """Query heads per key head, from dataset.json or derived from the heads."""
        return self.dataset.q_per_kv

    @property
    def window(self) -> int | None:
        """Context length, if dataset.json states it."""
        return self.dataset.window

    @property
    def buckets(self) -> int | None:
        """None, since the analysis chooses the number of buckets."""
        return None

    def key_head(self, head: HeadId) -> HeadId:
        """The key head that a query head reads, if its file exists."""
        return self.dataset.key_head(head)

    def file(self, head: HeadId) -> str | None:
        """The head's parquet file."""
        return self.dataset.heads.get(head)

    def layer_notes(self, head: HeadId) -> LayerNotes:
        """Properties of the layer, as far as dataset.json and the file of this head contain them."""
        try:
            window = _sliding_window(str(self.dataset.path(head)))
        except (DatasetError, HeadError):
            window = None  # the error is reported when the head is read
        return LayerNotes(self.dataset.rotary.nope(head.layer), window)

    def load(self, heads: Sequence[HeadId], spec: LoadSpec) -> tuple[list[HeadData], list[HeadError]]:
        """Read each file once and compute its moments."""
        loaded, failed = load_key_group(self.dataset, heads, spec)
        return [head_data._replace(**vars(self.layer_notes(head_data.head))) for head_data in loaded], failed

    def rows(self, head: HeadId, spec: LoadSpec) -> Rows:
        """The finite rows of the head."""
        return read_head(self.dataset, head, spec).rows

    def token_texts(self) -> pd.DataFrame:
        """Tokens as text, from the file of the first head."""
        return self.dataset.token_texts()

    def extent(self, heads: Sequence[HeadId]) -> Extent:
        """Numbers of documents and rows of the first readable head of these; other heads may differ."""
        for head in heads[:3]:
            try:
                rows = self.dataset.read(head)
            except (DatasetError, HeadError):
                continue
            return Extent(len(np.unique(rows.example_id)), len(rows))
        return Extent(None, None)

    def identity(self) -> dict[str, str]:
        """The folder, or the Hub repository and commit."""
        return self.dataset.files.identity()

    def __str__(self) -> str:
        return str(self.dataset.files)


@lru_cache(maxsize=512)
def _sliding_window(path: str) -> int | None:
    return read_sliding_window(Path(path))
