"""An analysis is one file and one line: the one of docs/architecture.md, written into a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import pearsonr

from qkscope.files.vectors import read_rows
from qkscope.headids import HeadId
from tests.helpers import explorer_core, small_dataset

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"
MOST_LINES = 60


@pytest.fixture(scope="module")
def source() -> str:
    """The file that the page shows."""
    part = PAGE.read_text().split("<!-- new analysis -->")[1].split("<!-- end of new analysis -->")[0]
    return re.search(r"```python\n(.*?)```", part, re.DOTALL)[1]


@pytest.fixture(scope="module")
def place(source, tmp_path_factory) -> Path:
    """A copy of the package with the new file and one more line in the catalogue, and a dataset."""
    folder = tmp_path_factory.mktemp("new")
    package = folder / "src" / "qkscope"
    shutil.copytree(ROOT / "src" / "qkscope", package, ignore=shutil.ignore_patterns("data", "__pycache__"))
    (package / "analyses" / "norms.py").write_text(source)
    catalogue = package / "analyses" / "catalogue.py"
    catalogue.write_text(catalogue.read_text().replace('    "plasticity",\n', '    "plasticity",\n    "norms",\n'))
    small_dataset(folder / "data", layers=1)
    return folder


def run(place: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(place / "src"), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "qkscope", *command], cwd=place, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tables(place) -> Path:
    run(place, "analyze", "data", "-o", "tables", "--workers", "1")
    return place / "tables"


@pytest.fixture(scope="module")
def alone(place) -> Path:
    run(place, "analyze", "data", "-o", "alone", "--only", "norms", "--workers", "1")
    return place / "alone"


def test_it_is_short(source):
    assert len(source.splitlines()) <= MOST_LINES


def test_its_table_is_written_with_intervals(place, tables):
    csv, parquet = pd.read_csv(tables / "norms.csv"), pd.read_parquet(tables / "norms.parquet")
    assert list(csv.columns) == list(parquet.columns)
    rows = read_rows(place / "data" / "l00h01q" / "data.parquet", HeadId(0, 1, "q"))
    row = csv[csv["head"] == 1].iloc[0]
    assert row["norm_r_q"] == pytest.approx(pearsonr(np.linalg.norm(rows.x, axis=1), rows.position)[0], rel=1e-5)
    for name in ("norm_r_q", "norm_r_k"):
        assert np.isfinite(csv[[f"{name}_se", f"{name}_low", f"{name}_high"]]).all(axis=None)
        assert (csv[f"{name}_low"] < csv[f"{name}_high"]).all()


def test_heads_and_the_summary_have_it(tables):
    heads, norms = (pd.read_parquet(tables / f"{name}.parquet") for name in ("heads", "norms"))
    pd.testing.assert_series_equal(heads["norm_r_k_low"], norms["norm_r_k_low"])
    headline = json.loads((tables / "summary.json").read_text())["models"]["data"]["norms"]["headline"]
    assert headline["norm_r_q"]["mean"] == pytest.approx(norms["norm_r_q"].mean())
    assert headline["norm_r_q"]["low"] < headline["norm_r_q"]["mean"] < headline["norm_r_q"]["high"]


def test_without_intervals_it_has_none(place):
    run(place, "analyze", "data", "-o", "plain", "--only", "norms", "--no-intervals", "--workers", "1")
    assert pd.read_csv(place / "plain" / "norms.csv")["norm_r_q_low"].isna().all()


def test_the_command_line_knows_it(place, alone):
    assert sorted(path.name for path in alone.glob("*.csv")) == ["norms.csv", "runs.csv"]
    assert "plasticity, norms" in " ".join(run(place, "analyze", "--help").split())
    assert "norm_r_q" in run(place, "analyze", "--columns")


def test_the_explorer_colours_heads_by_it(place, tables):
    run(place, "view", str(tables), "--no-open", "-o", "explorer.html")
    metrics = {one["column"]: one for one in explorer_core((place / "explorer.html").read_text())["metrics"]}
    assert (metrics["norm_r_q"]["unit"], metrics["norm_r_q"]["signed"]) == ("correlation", True)


def test_a_report_reads_a_folder_that_holds_nothing_else(place, alone):
    run(place, "report", str(alone), "-o", "report", "--workers", "1")
    core = explorer_core((place / "report" / "explorer.html").read_text())
    assert "norm_r_q" in [one["column"] for one in core["metrics"]]
