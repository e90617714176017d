"""Tables of a small planted dataset against stored values: what no change of the code may move by more than rounding.

``python -m tests.test_golden`` stores them again, which a commit has to give a reason for. Bytes are compared with an
earlier commit, on one machine, by ``python -m tools.golden COMMIT``.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qkscope.core.planted import Ring, plant
from qkscope.core.rows import Rows
from qkscope.engine import IN_PROCESS
from qkscope.files.dataset import write_dataset
from qkscope.headids import HeadId
from qkscope.results.analyze import analyze, write_results
from qkscope.results.job import Job
from qkscope.runs.run import open_run

STORED = Path(__file__).parent / "golden"
TOLERANCE = 1e-9
"""Of the largest value of a column, or of the value itself."""
ROUNDING = 1e-12
"""What is zero but for rounding, as residual_pos_r is, stays below this."""
WINDOW, D = 512, 8


def compute(folder: Path) -> Path:
    """All tables of four heads in one layer, two per key head."""
    heads = []
    for number in range(4):
        planted = plant(
            D, n=240, documents=8, window=WINDOW, sigma=np.linspace(0.5, 1.5, D), sigma_document=0.3,
            rings=[Ring(0.05, 1.0, 1.0)], mu_q=(1.0 + number, 2.0), mu_k=(-1.0, -2.0), alpha_q=2e-3, alpha_k=4e-3,
            seed=number,
        )  # fmt: skip
        heads.append((HeadId(0, number, "q"), planted.q))
        heads += [(HeadId(0, number // 2, "k"), planted.k)] if number % 2 == 0 else []
    dataset = write_dataset(folder / "data", heads, q_per_kv=2, window=WINDOW, rope={"theta": 100.0})
    for head, rows in heads:
        widen(dataset / str(head) / "data.parquet", rows)
    results = analyze([Job(open_run(dataset, model="golden", family="planted"))], target=IN_PROCESS)
    write_results(folder / "tables", results, wall_seconds=0.0)
    return folder / "tables"


def widen(path: Path, rows: Rows) -> None:
    """Store vectors in double precision: sums in single precision depend on the processor."""
    table = pq.read_table(path, partitioning=None)
    values = pa.FixedSizeListArray.from_arrays(pa.array(rows.x.reshape(-1)), rows.d)
    pq.write_table(table.set_column(table.column_names.index("vector"), "vector", values), path)


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    return compute(tmp_path_factory.mktemp("golden"))


def test_no_table_is_missing_or_new(tables):
    assert {path.name for path in tables.glob("*.csv")} == {path.name for path in STORED.glob("*.csv")}


@pytest.mark.parametrize("name", sorted(path.name for path in STORED.glob("*.csv")))
def test_values_are_those_that_were_stored(tables, name):
    computed, stored = pd.read_csv(tables / name), pd.read_csv(STORED / name)
    assert list(computed.columns) == list(stored.columns)
    assert len(computed) == len(stored)
    for column in stored.columns:
        a, b = computed[column], stored[column]
        if not pd.api.types.is_float_dtype(b):
            pd.testing.assert_series_equal(a, b)
            continue
        largest = b.abs().max() if b.notna().any() else 0.0
        atol = max(TOLERANCE * largest, ROUNDING)
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=atol, err_msg=f"{name}: {column}")


if __name__ == "__main__":
    STORED.mkdir(exist_ok=True)
    with TemporaryDirectory() as place:
        for path in compute(Path(place)).glob("*.csv"):
            (STORED / path.name).write_bytes(path.read_bytes())
