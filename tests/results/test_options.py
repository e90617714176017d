"""An option of analyze is one field: command line, YAML, Python, docs, the record and old tables follow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import small_dataset

ROOT = Path(__file__).parent.parent.parent
FIELD = '    threshold: int = option(5, "A number that a test declares.", least=1)\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A copy of the package whose analyses have one more option, and a captured run of planted heads."""
    folder = tmp_path_factory.mktemp("option")
    package = folder / "src" / "qkscope"
    shutil.copytree(ROOT / "src" / "qkscope", package, ignore=shutil.ignore_patterns("tinyrope", "__pycache__"))
    options = package / "analyses" / "options.py"
    text = options.read_text()
    before = "    intervals: bool = option("
    assert text.count(before) == 1
    options.write_text(text.replace(before, FIELD + before))
    small_dataset(folder / "data", layers=1)
    return folder


def python(place: Path, *arguments: str, code: int = 0) -> str:
    environment = os.environ | {"PYTHONPATH": f"{place / 'src'}{os.pathsep}{ROOT}", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_the_command_line_and_the_record_have_it(place):
    assert "--threshold" in python(place, "-m", "qkscope", "analyze", "--help")
    common = ("-m", "qkscope", "analyze", "data", "--only", "pca", "--workers", "1", "-q")
    python(place, *common, "-o", "plain")
    python(place, *common, "-o", "other", "--threshold", "7")
    assert "Invalid value for '--threshold'" in python(place, *common, "-o", "bad", "--threshold", "0", code=2)
    records = [json.loads((place / name / "summary.json").read_text()) for name in ("plain", "other")]
    plain, other = (record["models"]["data"]["pca"]["config"] for record in records)
    assert "threshold" not in plain
    assert other == plain | {"threshold": 7}


def test_yaml_files_have_it(place):
    text = "model: m\ndata: {dataset: data, threshold: %s}\noutput: {results_dir: yaml}\n"
    (place / "good.yaml").write_text(text % 7)
    (place / "bad.yaml").write_text(text % 0)
    run = "from qkscope.cli.published import run_pca_analyze; run_pca_analyze()"
    python(place, "-c", run, "--config", "good.yaml", "--workers", "1", "-q")
    config = json.loads((place / "yaml" / "summary.json").read_text())["models"]["m"]["pca"]["config"]
    assert config["data"]["threshold"] == 7
    assert "data.threshold" in python(place, "-c", run, "--config", "bad.yaml", code=2)


def test_python_has_it(place):
    code = (
        "import inspect, qkscope\n"
        "assert inspect.signature(qkscope.analyze).parameters['threshold'].default == 5\n"
        "run = qkscope.open('data')\n"
        "qkscope.analyze(run, 'python', only=['pca'], threshold=9)\n"
        "try:\n    qkscope.analyze(run, treshold=9)\n"
        "except TypeError as error:\n    assert 'did you mean threshold' in str(error)\n"
    )
    python(place, "-c", code)
    config = json.loads((place / "python" / "summary.json").read_text())["models"]["data"]["pca"]["config"]
    assert config["threshold"] == 9


def test_the_docs_have_it(place):
    code = "from tools.readme import updated; print(updated(open('formats.md').read()))"
    (place / "formats.md").write_text((ROOT / "docs" / "formats.md").read_text())
    assert "| `--threshold` | `5` | A number that a test declares. |" in python(place, "-c", code)


def test_tables_made_with_another_value_are_not_used_again(place):
    code = (
        "from dataclasses import dataclass\n"
        "from qkscope.results.job import Job\n"
        "import qkscope\n"
        "job = Job.from_options(qkscope.open('data'), 'report')\n"
        "plain = Job.from_options(job.run, 'analyze').config\n"
        "assert job.would_write(plain)\n"
        "assert not job.would_write(dict(plain) | {'threshold': 7})\n"
        "assert not job.would_write(dict(plain) | {'decay_range': 7})\n"
        "assert not job.would_write(dict(plain) | {'intervals': False})\n"
        "assert not job.would_write(dict(plain) | {'buckets': 4})\n"
    )
    python(place, "-c", code)
