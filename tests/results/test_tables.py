import numpy as np
import pandas as pd
import pytest

import qkscope
from qkscope.analyses.catalogue import DECLARED_TABLES
from qkscope.engine import IN_PROCESS
from qkscope.errors import TableError
from qkscope.results.analyze import analyze, write_results
from qkscope.results.frames import read_table, write_tables
from qkscope.results.job import Job
from qkscope.results.schema import MEASURED, TABLES, column_names
from tests.helpers import small_dataset, with_intervals


@pytest.fixture(scope="module")
def frames(tmp_path_factory) -> dict[str, pd.DataFrame]:
    """Every table of analyze, as a dataset that states the rotary encoding of one of its layers gives them."""
    folder = tmp_path_factory.mktemp("tables")
    rope = {"layers": {"0": {"theta": 100.0}, "1": None}}
    run = qkscope.open(small_dataset(folder / "data", n=800, rope=rope), model="m")
    write_results(folder / "out", analyze([Job(run)], target=IN_PROCESS), wall_seconds=1.0)
    return {name: read_table(folder / "out", name) for name in TABLES if name not in MEASURED}


def test_every_column_is_described_and_every_description_is_a_column(frames):
    for name, frame in frames.items():
        assert set(frame.columns) == set(column_names(name))
        assert len(column_names(name)) == len(set(column_names(name)))
    assert set(frames) == set(TABLES) - set(MEASURED)


def test_the_specified_columns_come_first_and_in_order():
    assert column_names("qk")[:23] == [
        "model",
        "family",
        "layer",
        "head",
        "k_head",
        "pc",
        "n_q",
        "n_k",
        "explained_variance",
        "r_q",
        "r_k",
        "mu_q",
        "mu_k",
        "slope_q",
        "slope_k",
        "var_q",
        "var_k",
        "fisher",
        "separation",
        "concordant",
        "eigengap",
        "degenerate",
        "taxonomy_published",
    ]
    assert column_names("heads")[:18] == [
        "model",
        "family",
        "layer",
        "head",
        "k_head",
        "taxonomy_published",
        "posvar_q_published",
        "posvar_k_published",
        "posvar_q_pc0_share",
        "posvar_k_pc0_share",
        "posvar_q",
        "posvar_k",
        "positional_overhead",
        "amplification",
        "amplification_window",
        "fisher",
        "separation",
        "lda_accuracy_gaussian",
    ]
    assert column_names("rotated")[:8] == ["model", "family", "layer", "head", "k_head", "n_q", "n_k", "window"]
    assert column_names("qk")[-1] == column_names("rotated")[-1] == "flags"
    for table in ("qk", "heads", "rotated"):
        intervals = with_intervals(DECLARED_TABLES[table])
        for name in intervals:
            assert {f"{name}_se", f"{name}_low", f"{name}_high"} <= set(column_names(table))


def test_tables_round_trip_through_parquet_and_csv(frames, tmp_path):
    write_tables(tmp_path, frames, {"note.txt": b"x"})
    for name in frames:
        parquet = read_table(tmp_path, name)
        csv = pd.read_csv(
            tmp_path / f"{name}.csv", dtype=str
        )  # floats of the text itself: pandas 2 reads them to 1e-12
        assert list(csv.columns) == column_names(name) == list(parquet.columns)
        for column in parquet.select_dtypes("float"):
            np.testing.assert_array_equal(csv[column].astype(float), parquet[column])
    assert not list(tmp_path.glob(".*"))


def test_rows_are_sorted_whatever_order_they_come_in(frames, tmp_path):
    write_tables(tmp_path / "a", frames, {})
    write_tables(tmp_path / "b", {name: frame.iloc[::-1] for name, frame in frames.items()}, {})
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_table_of_another_layout_is_refused_and_left_alone(frames, tmp_path):
    frames["qk"].drop(columns=["eigengap"]).to_parquet(tmp_path / "qk.parquet")
    with pytest.raises(TableError, match=r"qk.parquet was not written by this version .*eigengap"):
        read_table(tmp_path, "qk")
    (tmp_path / "qk.parquet").write_bytes(b"no table")
    with pytest.raises(TableError, match="move it away or write elsewhere"):
        read_table(tmp_path, "qk")
    assert read_table(tmp_path, "rotated") is None


def test_a_write_that_fails_leaves_what_was_there(frames, tmp_path, monkeypatch):
    write_tables(tmp_path, frames, {"summary.json": b"old"})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    from qkscope.files import atomic

    calls = 0

    def full(_path):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "sync", full)
    with pytest.raises(TableError, match="No space left on device"):
        write_tables(
            tmp_path, {name: frame.assign(family="other") for name, frame in frames.items()}, {"summary.json": b"new"}
        )
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
