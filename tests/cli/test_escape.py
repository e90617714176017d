"""Labels, names and links that would lead out of the output folder, or into the page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qkscope.cli.main import app
from tests.forking import all_bytes
from tests.helpers import small_dataset

LABELS = [
    "../../escaped",
    "/tmp/escaped",
    "..",
    "a/b/../../..",
    "\x00null",
    "~root",
    "con\ntrol",
    "<script>alert(1)</script>",
]


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """Tables of one small dataset, to be relabelled."""
    place = tmp_path_factory.mktemp("escape")
    small_dataset(place / "data", layers=1)
    assert run("analyze", place / "data", "-o", place / "tables", "--only", "pca,rotation").exit_code == 0
    return place


@pytest.mark.parametrize("label", LABELS)
def test_a_label_is_text_and_no_path(tables, tmp_path, label):
    sandbox = tmp_path / "deep" / "down" / "here"
    sandbox.mkdir(parents=True)
    given = ["analyze", tables / "data", "-o", sandbox / "out", "--model", label, "--only", "pca,rotation"]
    assert run(*given).exit_code == 0
    assert label in json.loads((sandbox / "out" / "summary.json").read_text())["models"]
    assert names(tmp_path) - {f"deep/down/here/{name}" for name in names(sandbox)} == {
        "deep",
        "deep/down",
        "deep/down/here",
    }


def test_labels_in_a_report_stay_in_its_folder_and_out_of_its_code(tables, tmp_path):
    study = tmp_path / "deep" / "down" / "study.yaml"
    study.parent.mkdir(parents=True)
    data = [shutil.copytree(tables / "data", tmp_path / "data" / str(number)) for number in range(3)]
    labels = ["../../../escaped", "<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>"]
    runs = [{"path": str(place), "label": label, "family": label} for place, label in zip(data, labels, strict=True)]
    study.write_text(json.dumps({"title": "<b>bold</b>", "runs": runs}))
    before = all_bytes(tmp_path / "data")
    done = run("report", study, "-o", study.parent / "report", "--no-points", "--workers", 1)
    assert done.exit_code == 0, done.output
    assert {path.name for path in study.parent.iterdir()} == {"study.yaml", "report"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"down"}
    assert all_bytes(tmp_path / "data") == before
    for page in ("report.html", "explorer.html"):
        text = (study.parent / "report" / page).read_text()
        assert "<img src=x" not in text
        assert "<script>alert" not in text
        assert "<b>bold" not in text


@pytest.mark.parametrize(
    "name", ["..", "../l00h00q", "l00h00q\n", "l00h00q/../../x", "L00h00q", "l٠٠h٠٠q", "l00000h00q"]
)
def test_what_is_no_head_is_not_read_as_one(name):
    from qkscope.headids import HeadId

    assert HeadId.match(name) is None


def test_tables_are_not_written_through_a_link(tables, tmp_path):
    """A link in the output folder is replaced, and what it leads to is left alone."""
    (tmp_path / "precious.csv").write_text("precious")
    shutil.copytree(tables / "tables", tmp_path / "out")
    (tmp_path / "out" / "rotated.csv").unlink()
    (tmp_path / "out" / "rotated.csv").symlink_to(tmp_path / "precious.csv")
    assert run("analyze", tables / "data", "-o", tmp_path / "out", "--only", "pca,rotation").exit_code == 0
    assert (tmp_path / "precious.csv").read_text() == "precious"
    assert not (tmp_path / "out" / "rotated.csv").is_symlink()
