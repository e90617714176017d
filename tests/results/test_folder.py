"""Tables that a results folder derives from its tables: links of plasticity, one row per run, axes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

import qkscope
from qkscope.analyses.options import AnalysisOptions
from qkscope.config import StudyRunConfig
from qkscope.engine import IN_PROCESS
from qkscope.errors import TableError
from qkscope.report.explorerdata import head_frame
from qkscope.report.report import runs_table
from qkscope.results.analyze import analyze, write_results
from qkscope.results.derived import plasticity_links
from qkscope.results.folder import check_results_folder
from qkscope.results.frames import read_table
from qkscope.results.job import Job
from qkscope.results.side import AXES
from qkscope.results.study import build
from tests.helpers import small_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("results")
    runs = [qkscope.open(small_dataset(base / name, n=800), model=name, family="f") for name in ("one", "two")]
    results = analyze([Job(run) for run in runs], target=IN_PROCESS)
    write_results(base / "tables", results, wall_seconds=1.0)
    return base / "tables"


def test_a_run_is_one_row_with_means_medians_and_the_intervals_of_the_summary(folder):
    runs, heads, rotated = (read_table(folder, name) for name in ("runs", "heads", "rotated"))
    assert runs["model"].tolist() == ["one", "two"]
    row, mine = runs.iloc[0], heads[heads["model"] == "one"]
    assert (row["n_heads"], row["n_documents"], row["n_tokens"], row["window"]) == (8, 16, 800, 512)
    assert row["ap_overall_mean"] == pytest.approx(mine["ap_overall"].mean())
    assert row["positional_overhead_median"] == pytest.approx(mine["positional_overhead"].median())
    assert row["ap_overall_low"] < row["ap_overall_high"]
    bias = rotated.loc[rotated["model"] == "one", "bias_causal_window"]
    assert row["bias_causal_window_mean"] == pytest.approx(bias.mean())
    assert row["bias_causal_window_low"] < row["bias_causal_window_high"]
    assert np.isnan(row["distance_r2_mean"])


def test_a_study_has_the_same_row_with_its_phase(folder):
    study = build([StudyRunConfig(path=folder, model="two", label="late", phase="second", step=5.0)])
    row, before = runs_table(study).iloc[0], read_table(folder, "runs").iloc[1]
    assert (row["model"], row["phase"], row["step"]) == ("late", "second", 5.0)
    for name in ("ap_overall_mean", "ap_overall_low", "bias_full_window_high", "n_tokens", "n_heads", "r_q_median"):
        assert row[name] == pytest.approx(before[name]), name


def test_links_are_means_by_class_and_ranks(folder):
    heads, rotated, links = (read_table(folder, name) for name in ("heads", "rotated", "plasticity_links"))
    mine = heads[heads["model"] == "one"]
    one = links[links["model"] == "one"].set_index("name")
    for kind, part in mine.groupby("taxonomy_published"):
        assert one.loc[kind, "value"] == pytest.approx(part["ap_overall"].mean())
        assert one.loc[kind, "n_heads"] == len(part)
    both = mine.merge(rotated, on=["model", "layer", "head"])
    expected = spearmanr(both["ap_overall"], both["bias_full_window"].abs()).statistic
    assert one.loc["abs_bias_full_window", "value"] == pytest.approx(expected)
    assert plasticity_links(heads.assign(ap_overall=np.nan), rotated).empty


def test_axes_are_those_of_the_heads_and_of_every_model(folder):
    axes = AXES.read(folder)
    assert set(axes["model"]) == {"one", "two"}
    run = qkscope.open(folder.parent / "one")
    axis = axes[(axes["model"] == "one") & (axes["layer"] == 1) & (axes["head"] == 2)].sort_values("pc")
    np.testing.assert_allclose(np.stack(axis["axis"].to_list()), run.head(1, 2).pca.axes, atol=1e-6)


def test_analysing_one_model_again_keeps_the_others(folder):
    run = qkscope.open(folder.parent / "one", model="one")
    before = {name: read_table(folder, name) for name in ("runs", "plasticity_links", "heads")}
    write_results(folder, analyze([Job(run)], ["plasticity"], target=IN_PROCESS), wall_seconds=1.0)
    for name, frame in before.items():
        other = read_table(folder, name)
        keep = frame["model"] == "two"
        pd.testing.assert_frame_equal(other[other["model"] == "two"], frame[keep])
    assert read_table(folder, "heads")["ap_overall"].notna().all()


def written(tmp_path, name: str, analyses=("pca", "rotation", "planes", "distance", "plasticity"), **options):
    run = qkscope.open(small_dataset(tmp_path / f"{name}-data", **options), model=name)
    return write_results(tmp_path / "out", analyze([Job(run)], list(analyses), target=IN_PROCESS), wall_seconds=1.0)


def test_columns_that_no_head_has_are_left_out_of_the_summary(tmp_path):
    """Five buckets have none with its middle in the first fifth but the first, which has no row."""
    run = qkscope.open(small_dataset(tmp_path / "data"), model="m")
    write_results(
        tmp_path / "out", analyze([Job(run, options=AnalysisOptions(buckets=5))], target=IN_PROCESS), wall_seconds=1.0
    )
    heads = read_table(tmp_path / "out", "heads")
    assert heads["ap_first20"].isna().all()
    assert heads["ap_overall"].notna().all()


def test_plasticity_alone_makes_a_row_of_the_run_and_heads_to_look_at(tmp_path):
    written(tmp_path, "m", ["plasticity"])
    row = read_table(tmp_path / "out", "runs").iloc[0]
    assert row["n_heads"] == 8
    assert row["ap_overall_mean"] > 0
    study = build([StudyRunConfig(path=tmp_path / "out")])
    assert runs_table(study).iloc[0]["n_heads"] == 8
    assert len(head_frame(study)) == 8


def test_what_a_new_analysis_no_longer_says_is_gone(tmp_path):
    written(tmp_path, "m", rope={"theta": 100.0})
    assert read_table(tmp_path / "out", "heads")["distance_r2"].notna().all()
    (tmp_path / "m-data").rename(tmp_path / "old")
    written(tmp_path, "m", ["distance"])
    assert read_table(tmp_path / "out", "heads")["distance_r2"].isna().all()


def test_a_table_of_another_version_is_found_before_the_work(tmp_path):
    (tmp_path / "out").mkdir()
    pd.DataFrame({"model": ["m"], "layer": [0]}).to_parquet(tmp_path / "out" / "heads.parquet")
    with pytest.raises(TableError, match="not written by this version"):
        check_results_folder(tmp_path / "out")
