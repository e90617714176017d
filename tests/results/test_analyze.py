"""Jobs, tasks and results: what no command line reaches."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from qkscope.analyses.options import AnalysisOptions, RotationOptions
from qkscope.core.planted import plant
from qkscope.engine import IN_PROCESS
from qkscope.errors import ConfigError
from qkscope.files.dataset import write_dataset
from qkscope.headids import HeadId
from qkscope.results import analyze as task
from qkscope.results.analyze import analysis_names, analyze, write_results
from qkscope.results.job import Job
from qkscope.results.side import AXES
from qkscope.runs.dataset import DatasetSource
from qkscope.runs.run import open_run
from tests.helpers import small_dataset


def test_an_analysis_that_does_not_exist_is_named(tmp_path):
    run = open_run(small_dataset(tmp_path / "data", layers=1))
    with pytest.raises(ConfigError, match="unknown analysis 'nonsense'; choose from pca, rotation"):
        analyze([Job(run)], ["nonsense"], target=IN_PROCESS)
    assert analysis_names("planes, pca") == ["pca", "planes"]


def test_heads_of_different_dimensions_stand_in_one_table(tmp_path):
    heads = []
    for number, d in enumerate((6, 10)):
        planted = plant(d, n=300, documents=8, window=512, seed=number)
        heads += [(HeadId(0, number, "q"), planted.q), (HeadId(0, number, "k"), planted.k)]
    run = open_run(write_dataset(tmp_path / "data", heads, q_per_kv=1))
    results = analyze([Job(run)], target=IN_PROCESS)
    write_results(tmp_path / "out", results, wall_seconds=0.0)
    axes = AXES.read(tmp_path / "out")
    assert axes is not None
    assert axes.groupby("head")["axis"].first().map(len).tolist() == [6, 10]
    assert pd.read_csv(tmp_path / "out" / "rotated.csv")["head"].tolist() == [0, 1]


def test_planes_alone_can_be_paired_by_token(tmp_path):
    run = open_run(small_dataset(tmp_path / "data", layers=1))
    job = Job(run, options=AnalysisOptions(rotation=RotationOptions(pairing="token")))
    (result,) = analyze([job], ["planes"], target=IN_PROCESS)
    assert not result.failures
    assert np.isfinite(result.tables.frames["planes"]["var_share"]).all()


@pytest.mark.parametrize("where", ["load", "tabulate"])
def test_a_head_that_does_not_fit_into_memory_costs_no_other(tmp_path, monkeypatch, where):
    run = open_run(small_dataset(tmp_path / "data", layers=1))
    original = {"load": DatasetSource.load, "tabulate": task.tabulate}[where]

    def too_much(*given):
        heads = given[1] if where == "load" else [head.head for head in given[0].heads]
        if HeadId(0, 2, "q") in heads:
            raise MemoryError
        return original(*given)

    monkeypatch.setattr(*((DatasetSource, "load") if where == "load" else (task, "tabulate")), too_much)
    (result,) = analyze([Job(run)], ["rotation"], target=IN_PROCESS)
    lost = [2, 3] if where == "load" else [2]  # heads that read one key head are read together
    assert [failure.error.head.head for failure in result.failures] == lost
    assert all("out of memory" in str(failure) for failure in result.failures)
    assert set(result.tables.frames["rotated"]["head"]) == {0, 1, 2, 3} - set(lost)
