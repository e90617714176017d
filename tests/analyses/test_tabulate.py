"""From values to tables: index columns, intervals, repeated scalars, notes, heads without drift, scalars of heads."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from qkscope.analyses.analysis import Analysis, AnalysisResult, Column, Scalars, Table, TableValues, single_table
from qkscope.analyses.catalogue import ANALYSES, DECLARED_TABLES, SCALARS, table_columns
from qkscope.analyses.options import AnalysisOptions
from qkscope.analyses.tables import Tables, concat_tables, merge_tables
from qkscope.analyses.tabulate import batch_of, heads_from, tabulate, with_empty_scalars, with_scalars
from qkscope.analyses.uncertainty import Scale, jackknife
from qkscope.core.planted import plant
from qkscope.core.rows import Rows
from tests.helpers import head_data, one_head, tables_of

X = Column("x", "share", "a number", "0", Scale.LINEAR)
X_WINDOW = Column("x_window", "score", "x × window", "0", Scale.LINEAR, per_token="x")


def planted(seed: int, documents: int = 16):
    head = plant(6, n=400, documents=documents, window=1024, seed=seed)
    return one_head(head.q, head.k, 1024)


def frames(analysis: Analysis, *heads, **options) -> dict[str, pd.DataFrame]:
    batch = batch_of("m", "f", heads, [analysis], AnalysisOptions(**options))
    return tabulate(batch, [analysis])[0].frames


def test_a_value_per_head_becomes_a_row_with_its_interval():
    again = np.arange(16.0).reshape(2, 8)
    analysis = single_table("t", "", (X, X_WINDOW), lambda _: TableValues({"x": np.array([1.0, 2.0])}, {"x": again}))
    heads = head_data(planted(0)), head_data(planted(1), 5)
    table = frames(analysis, *heads)["t"]
    assert table[["model", "family", "layer", "head", "k_head"]].to_numpy().tolist() == [
        ["m", "f", 0, 0, 0],
        ["m", "f", 0, 5, 5],
    ]
    expected = jackknife(np.array([1.0, 2.0]), again, np.ones((2, 8)))
    np.testing.assert_array_equal(table["x_low"], expected.low)
    np.testing.assert_array_equal(table["x_window_low"], expected.low * 1024)
    np.testing.assert_array_equal(table["x_window"], [1024.0, 2048.0])


def test_a_group_that_says_nothing_does_not_count():
    again = np.arange(8.0)[None]
    some = again.copy()
    some[0, 3] = np.nan
    tables = [
        frames(
            single_table("t", "", (X,), lambda _, a=a: TableValues({"x": np.array([3.0])}, {"x": a})),
            head_data(planted(0)),
        )
        for a in (again, some, np.full((1, 8), np.nan))
    ]
    seven = jackknife(np.array([3.0]), np.delete(again, 3, 1), np.ones((1, 7)))
    assert tables[1]["t"]["x_se"][0] == pytest.approx(seven.se[0])
    assert tables[1]["t"]["x_se"][0] != tables[0]["t"]["x_se"][0]
    assert np.isnan(tables[2]["t"]["x_se"][0])


def test_too_few_documents_or_no_wish_for_intervals_give_none():
    analysis = single_table("t", "", (X,), lambda _: TableValues({"x": np.array([3.0])}, {"x": np.arange(8.0)[None]}))
    few, plain = head_data(planted(0, documents=3)), head_data(planted(0))
    assert np.isnan(frames(analysis, few)["t"]["x_low"][0])
    assert np.isnan(frames(analysis, plain, intervals=False)["t"]["x_low"][0])
    assert np.isfinite(frames(analysis, plain)["t"]["x_low"][0])


def test_rows_of_any_number_per_head_repeat_what_is_said_of_the_head():
    table = Table("t", (Column("at", "tokens", "", "0"), X), keys=("at",), notes=True, flags=True)
    values = TableValues(
        {"at": np.array([7, 8, 9])},
        {"x": np.arange(16.0).reshape(2, 8)},
        {"x": np.array([1.0, 2.0])},
        head=np.array([0, 0, 1]),
    )
    analysis = Analysis("t", "", (table,), lambda _: AnalysisResult({"t": values}))
    heads = head_data(planted(0), nope=True), head_data(planted(1), 1, sliding_window=64)
    found = frames(analysis, *heads)["t"]
    assert found[["head", "at", "x"]].to_numpy().tolist() == [[0, 7, 1], [0, 8, 1], [1, 9, 2]]
    assert found["x_se"].nunique() == 1  # the same spread in both
    assert found["nope"].tolist()[:2] == [1.0, 1.0]
    assert found["sliding_window"].tolist()[2] == 64
    assert found["flags"].tolist() == ["", "", ""]


def test_heads_without_drift_have_no_part_in_what_needs_the_axis():
    t = np.arange(400) % 100 // 2 * 2  # each position twice, with vectors that cancel
    even = Rows(np.tile([[1.0, 0, 0, 0, 0, 0], [-1.0, 0, 0, 0, 0, 0]], (200, 1)), t, np.arange(400) // 50)
    heads = [head_data(planted(0)), head_data(one_head(even, even, 1024), 1), head_data(planted(2), 2)]
    wanted = [analysis for analysis in ANALYSES if analysis.name in ("pca", "rotation")]
    tables, undrifting = tabulate(batch_of("m", "f", heads, wanted, AnalysisOptions()), wanted)
    assert undrifting == [1]
    assert sorted(tables.frames["rotated"]["head"]) == [0, 2]
    assert sorted(tables.frames["heads"]["head"]) == [0, 1, 2]
    alone = tables_of([heads[0]], "pca", "rotation")
    first = tables.frames["rotated"].iloc[:1]
    numbers = first.select_dtypes("number").columns
    np.testing.assert_array_equal(first[numbers], alone["rotated"][numbers])


def test_every_declared_table_names_its_columns_once_and_has_its_keys():
    for name, table in DECLARED_TABLES.items():
        names = [column.name for column in table_columns(name)]
        assert len(set(names)) == len(names), name
        assert set(table.row_keys) <= set(names)
        assert set(table.in_runs) <= set(names)
        assert set(table.interval_order) <= set(names)
        assert set(table.required) <= set(names)


def test_scalars_of_every_analysis_end_up_in_heads():
    heads = with_empty_scalars(
        pd.DataFrame({"model": ["m", "m"], "layer": [0, 0], "head": [0, 1], "posvar_q": [1.0, 2.0]})
    )
    names = [column.name for scalars in SCALARS.values() for column in scalars.columns]
    assert heads[names].isna().all(axis=None)
    distance = pd.DataFrame({"model": "m", "layer": 0, "head": [1, 1], "distance_r2": 0.5, "distance_corr": 0.25})
    distance = distance.assign(
        position_share_of_score=0.125, **{f"position_share_of_score{end}": 0.1 for end in ("_se", "_low", "_high")}
    )
    filled = with_scalars(heads, {"distance": distance})
    assert filled["distance_r2"].tolist()[1] == 0.5
    assert np.isnan(filled["distance_r2"][0])
    assert list(filled.columns) == list(heads.columns)
    emptied = with_scalars(filled, {"distance": distance.iloc[:0]})
    assert emptied["distance_r2"].isna().all()
    made = heads_from({"distance": distance})
    assert made is not None
    assert made["distance_r2"].tolist() == [0.5]
    assert heads_from({}) is None


def test_scalars_that_are_no_columns_of_their_table_follow_from_it():
    scalars = SCALARS["planes"]
    assert isinstance(scalars, Scalars)
    planes = pd.DataFrame(
        {"model": "m", "layer": 0, "head": 0, "view": ["svd", "svd", "rope"], "active": [True, False, True]}
    ).assign(var_share=[0.5, 0.25, 0.25])
    assert scalars.of is not None
    assert scalars.of(planes)[["active_planes", "active_share"]].to_numpy().tolist() == [[1, 0.5]]


def test_tables_join_by_heads_and_by_name():
    a, b = (Tables({"t": {"x": np.array([value])}}, {"x": np.full((1, 8), value)}) for value in (1.0, 2.0))
    joined = concat_tables([a, b])
    assert joined.frames["t"]["x"].tolist() == [1.0, 2.0]
    assert joined.replicates["x"].shape == (2, 8)
    assert set(merge_tables([a, Tables({"u": pd.DataFrame({"y": [1]})})]).frames) == {"t", "u"}
