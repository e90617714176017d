import json

import numpy as np
import pandas as pd
import pytest

from qkscope.config import StudyRunConfig
from qkscope.errors import TableError
from qkscope.results.reader import is_results, read_folder
from qkscope.results.study import build
from tests.studies import write_model


def foreign(folder, **columns):
    """A qk.csv as somebody else may have made it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"layer": [0, 0, 1], "head": [0, 1, 0], "pc": [0, 0, 0], "r_q": [0.9, 0.1, 0.5], "r_k": [-0.8, 0.1, 0.9]}
    pd.DataFrame(rows | columns).to_csv(folder / "qk.csv", index=False)
    return folder


def test_somebody_elses_table_is_enough(tmp_path):
    study = build([StudyRunConfig(path=foreign(tmp_path / "theirs"), family="F")])
    assert study.labels == ["theirs"]
    assert study.pc0["taxonomy_published"].tolist() == ["position-dominated", "content-focused", "mixed"]
    assert study.pc0["family"].unique().tolist() == ["F"]
    assert study.table("rotated") is None
    assert study.table("qk", "explained_variance") is None


def test_a_folder_stands_for_all_its_models_in_order_or_for_the_one_that_is_named(tmp_path):
    folder = foreign(tmp_path, model=["b", "b", "a"])
    assert build([StudyRunConfig(path=folder)]).labels == ["b", "a"]
    named = build([StudyRunConfig(path=folder, model="a", label="A", phase="p", step=3.0, window=99)])
    assert [(run.label, run.phase, run.step, run.window) for run in named.runs] == [("A", "p", 3.0, 99)]
    assert named.pc0["model"].tolist() == ["A"]


def test_the_family_of_the_tables_is_kept_unless_the_study_says_otherwise(tmp_path):
    write_model(tmp_path / "m", "m", family="theirs", heads=4, layers=2)
    assert build([StudyRunConfig(path=tmp_path / "m")]).families == ["theirs"]
    assert build([StudyRunConfig(path=tmp_path / "m", family="ours")]).families == ["ours"]
    assert build([StudyRunConfig(path=tmp_path / "m", family="ours")]).pc0["family"].unique().tolist() == ["ours"]


def test_layers_without_rotary_encoding_come_from_the_tables_or_from_the_study(tmp_path):
    write_model(tmp_path / "m", "m", heads=16, layers=8, nope=True)
    assert build([StudyRunConfig(path=tmp_path / "m")]).nope == {"m": frozenset({3, 7})}
    assert build([StudyRunConfig(path=tmp_path / "m", nope_layers=frozenset({1}))]).nope == {"m": frozenset({1})}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_truth_values_read_alike_from_csv_and_parquet(tmp_path, suffix):
    frame = pd.DataFrame(
        {"model": "m", "layer": [0, 1, 2], "head": 0, "nope": pd.array([True, False, None], "boolean")}
    )
    frame.to_csv(tmp_path / "rotated.csv", index=False) if suffix == "csv" else frame.to_parquet(
        tmp_path / "rotated.parquet"
    )
    nope = read_folder(tmp_path).tables["rotated"]["nope"]
    np.testing.assert_array_equal(nope, [1.0, 0.0, np.nan])
    assert build([StudyRunConfig(path=tmp_path)]).nope == {"m": frozenset({0})}


def test_headlines_come_from_the_summary_and_odd_summaries_are_ignored(tmp_path):
    folder = foreign(tmp_path, model="m")
    said = {
        "models": {"m": {"pca": {"headline": {"r_q": {"mean": 0.5, "low": 0.4, "high": 0.6}, "odd": 3}}, "family": "x"}}
    }
    (folder / "summary.json").write_text(json.dumps(said))
    assert build([StudyRunConfig(path=folder)]).runs[0].headline == {"r_q": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    for broken in (
        "[]",
        "{",
        '{"models": 7}',
        '{"models": {"m": [1]}}',
        '{"models": {"m": {"pca": {"headline": {"r_q": {"mean": "x"}}}}}}',
    ):
        (folder / "summary.json").write_text(broken)
        assert build([StudyRunConfig(path=folder)]).runs[0].headline == {}


def test_what_is_wrong_is_said_with_the_file(tmp_path):
    with pytest.raises(TableError, match=r"contains none of qk.csv"):
        read_folder(tmp_path)
    foreign(tmp_path / "a", model="m")
    pd.read_csv(tmp_path / "a" / "qk.csv").drop(columns="r_k").to_csv(tmp_path / "a" / "qk.csv", index=False)
    with pytest.raises(TableError, match=r"qk.csv has no column r_k"):
        read_folder(tmp_path / "a")
    foreign(tmp_path / "b", layer=["first", "second", "third"])
    with pytest.raises(TableError, match=r"qk.csv: column layer must contain integers"):
        read_folder(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "qk.parquet").write_bytes(b"no table")
    with pytest.raises(TableError, match=r"qk.parquet cannot be read as a table"):
        read_folder(tmp_path / "c")
    with pytest.raises(TableError, match=r"has no model 'z'; it has b"):
        build([StudyRunConfig(path=foreign(tmp_path / "d", model="b"), model="z")])
    with pytest.raises(TableError, match=r"two runs of the study have the label 'b'"):
        build([StudyRunConfig(path=tmp_path / "d"), StudyRunConfig(path=foreign(tmp_path / "e", model="b"))])
    assert not is_results(tmp_path)
    assert is_results(tmp_path / "d")


def test_text_in_a_column_of_numbers_drops_the_column_and_nothing_else(tmp_path):
    folder = foreign(tmp_path, explained_variance=["x", "y", "z"], note=["a", "b", "c"])
    table = read_folder(folder).tables["qk"]
    assert "explained_variance" not in table
    assert "note" not in table
    assert table["r_q"].tolist() == [0.9, 0.1, 0.5]


def test_a_head_that_is_there_twice_and_numbers_that_no_head_has_are_refused(tmp_path):
    foreign(tmp_path / "twice", layer=[0, 0, 0], head=[0, 0, 1], model="m")
    with pytest.raises(TableError, match=r"has model m, layer 0, head 0 more than once"):
        read_folder(tmp_path / "twice")
    foreign(tmp_path / "half", head=[0, 0.5, 1])
    with pytest.raises(TableError, match=r"column head must contain integers \(got 0.5\)"):
        read_folder(tmp_path / "half")
    foreign(tmp_path / "minus", layer=[-1, 0, 1])
    with pytest.raises(TableError, match=r"column layer contains -1; layers and heads are counted from 0"):
        read_folder(tmp_path / "minus")


def test_a_table_without_rows_is_no_table(tmp_path):
    pd.read_csv(foreign(tmp_path) / "qk.csv").head(0).to_csv(tmp_path / "qk.csv", index=False)
    with pytest.raises(TableError, match="contains none of"):
        read_folder(tmp_path)


def test_infinities_are_not_known_and_signs_follow_the_rule(tmp_path):
    foreign(tmp_path, r_q=[-0.9, -0.02, 0.5], r_k=[0.8, 0.1, -0.3], explained_variance=[np.inf, 0.1, 0.2])
    table = read_folder(tmp_path).tables["qk"]
    assert table["r_q"].tolist() == [0.9, -0.02, 0.5]
    assert table["r_k"].tolist() == [-0.8, 0.1, -0.3]
    assert np.isnan(table["explained_variance"].iloc[0])
