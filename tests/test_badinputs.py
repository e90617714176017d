"""Every bad input of the table gets its lines and its exit code, and costs no other head."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from qkscope.cli.main import app
from qkscope.cli.published import pca_analyze_app
from qkscope.headids import HeadId
from tests.badinputs import ANALYZE, RUN, SECTIONS, page
from tests.forking import all_bytes
from tests.helpers import small_dataset

HAS_TORCH = find_spec("torch") is not None
CASES = {case.what: case for cases in SECTIONS.values() for case in cases}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A dataset, a run, a model, texts, and the tables of the dataset."""
    place = tmp_path_factory.mktemp("good")
    small_dataset(place / "data", layers=1)
    if HAS_TORCH:
        _capture(place)
    (place / "texts").mkdir()
    (place / "texts" / "a.txt").write_text("w01 w02 w03 w04 w05 w06 w07 w08 w09 w10 " * 5)
    for command in (ANALYZE, RUN) if HAS_TORCH else (ANALYZE,):
        assert invoke(place, command).exit_code == 0
        (place / "out").rename(place / f"tables-{Path(command[1]).name}")
    return place


def _capture(place: Path) -> None:
    from qkscope.capture.options import Share
    from tests.capture.conftest import save
    from tests.capture.families import build, families
    from tests.capture.test_run import do

    ids = [np.arange(3, 90) % 90 + 3] * 8
    do(build(families()["llama"]), ids, place / "run", layers=(0, 1))
    do(build(families()["llama"]), ids, place / "share", doing={"share": Share(1, 1)})
    save(families()["llama"], place / "model")


def invoke(place: Path, command: tuple[str, ...]):
    name, *given = (word.format(place=place) for word in command)
    on, given = (pca_analyze_app, given) if name == "pca-analyze" else (app, [name, *given])
    return CliRunner().invoke(on, given, catch_exceptions=False)


@pytest.fixture
def place(good, tmp_path) -> Path:
    shutil.copytree(good, tmp_path / "place", symlinks=True)
    return tmp_path / "place"


@pytest.mark.parametrize("what", CASES)
def test_a_bad_input(good, place, what):
    case = CASES[what]
    if not HAS_TORCH and case.command != ANALYZE:
        pytest.skip("may need a model or a run of it")
    case.breaks(place)
    before = all_bytes(place / "out") if (place / "out").exists() else None
    done = invoke(place, case.command)
    assert done.exit_code == case.code, done.output
    lines = [line for line in done.output.splitlines() if re.match(r"failed: |error: |\d+ of \d+ heads failed", line)]
    assert len(lines) == len(case.says), done.output
    for line, expected in zip(lines, case.says, strict=True):
        words = re.escape(expected).replace("…", ".+").replace(re.escape("{place}"), re.escape(str(place)))
        assert re.fullmatch(words, line), line
    assert not (place / "executed").exists(), "code of a model was run"
    if case.code == 2:
        assert before == (all_bytes(place / "out") if (place / "out").exists() else None), "something was written"
    if case.code == 1:
        name = Path(case.command[1]).name
        whole, found = (
            pd.read_parquet(folder / "rotated.parquet") for folder in (good / f"tables-{name}", place / "out")
        )
        pd.testing.assert_frame_equal(without(found, case.changed), without(whole, case.lost + case.changed))
        assert len(found) == len(whole) - len(case.lost)


def without(frame: pd.DataFrame, heads: tuple[str, ...]) -> pd.DataFrame:
    names = [str(HeadId(a, b, "q")) for a, b in zip(frame["layer"], frame["head"], strict=True)]
    return frame[[name not in heads for name in names]].reset_index(drop=True)


def test_the_page_of_errors_is_this_table():
    assert Path("docs/errors.md").read_text() == page(), "write it again with: python -m tests.badinputs"


def test_no_two_have_the_same_description():
    assert len(CASES) == sum(map(len, SECTIONS.values()))
