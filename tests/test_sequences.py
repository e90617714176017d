"""Commands, swapped files, renamed folders and edited tables in any order: answers fit what is there, or are refused.

Two runs of one model on different texts share a results folder and a label. After every step the tables of that label
must be those of one of the runs, recomputed from it, unless somebody edited them, which must then be found.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import qkscope
from qkscope.errors import QkscopeError
from qkscope.files.checksums import recorded_digests, run_digest
from qkscope.results.summary import read_summary
from qkscope.results.verify import check_tables
from tests.capture.families import build, families  # skips this file where there is no torch
from tests.forking import all_bytes

pytest.importorskip("torch")
LABEL, ANALYSES = "m", ["pca", "rotation", "plasticity"]
NAMES = st.sampled_from(["a", "b"])


class Stopped(BaseException):
    pass


@contextmanager
def stopping(at: int | None):
    """Stop right before the rename of this number; None: never."""
    left = iter(range(at if at is not None else 10**9))

    def counted(call):
        def rename(*arguments, **more):
            if next(left, None) is None:
                raise Stopped
            return call(*arguments, **more)

        return rename

    with mock.patch("os.rename", counted(os.rename)), mock.patch("os.replace", counted(os.replace)):
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs of one model, which nothing changes."""
    place = tmp_path_factory.mktemp("runs")
    model = build(families()["llama"])
    for number, name in enumerate(("x", "y")):
        rows = [np.random.default_rng(10 * number + i).integers(3, 93, 60) for i in range(4)]
        qkscope.capture_model(model, rows, window=64, folder=place / name, progress=False)
    return place


class Sequences(RuleBasedStateMachine):
    runs: Path

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="qkscope-sequences-"))
        for name, original in (("a", "x"), ("b", "y")):
            shutil.copytree(self.runs / original, self.place / name)
        self.out, self.edited = self.place / "out", False

    def teardown(self) -> None:
        shutil.rmtree(self.place)

    @rule(
        name=NAMES,
        only=st.sampled_from([None, ["pca"], ["rotation"], ["plasticity", "rotation"]]),
        intervals=st.booleans(),
        stop=st.sampled_from([None, None, 0, 1, 3, 8]),
    )
    def analyze(self, name, only, intervals, stop):
        before = all_bytes(self.out) if self.out.exists() else {}
        try:
            with stopping(stop):
                run = qkscope.open(self.place / name, model=LABEL)
                qkscope.analyze(run, self.out, only=only or ANALYSES, intervals=intervals)
        except QkscopeError:
            assert (all_bytes(self.out) if self.out.exists() else {}) == before, "refused, and yet changed"
        except Stopped:
            pass
        else:
            assert not self.is_damaged(name), "a run with the layer of another was analysed"
            self.edited = self.edited and only is not None

    @rule(layer=st.sampled_from(["layer-000.safetensors", "layer-003.safetensors"]))
    def swap_a_layer(self, layer):
        self.swap(*(self.place / name / "moments" / layer for name in ("a", "b")))

    @rule()
    def swap_the_folders(self):
        self.swap(self.place / "a", self.place / "b")

    @rule(column=st.sampled_from(["ap_overall", "amplification"]))
    def edit_a_table(self, column):
        path = self.out / "heads.parquet"
        if path.exists() and not list(self.out.glob(".*.tmp")):
            table = pd.read_parquet(path)
            if column in table and table[column].notna().any():
                table.assign(**{column: table[column] + 1}).to_parquet(path, index=False)
                self.edited = True

    @rule(name=NAMES)
    def ask_for_heads(self, name):
        """The answer is of this run, as its checksums identify it, even if it was computed before the swap."""
        try:
            table = qkscope.heads(self.place / name)
        except QkscopeError:
            assert self.is_damaged(name)
        else:
            expected = qkscope.heads(self.runs / self.original(self.place / name))
            pd.testing.assert_frame_equal(table.drop(columns="model"), expected.drop(columns="model"))

    @invariant()
    def tables_are_those_of_one_run(self):
        entry = read_summary(self.out)["models"].get(LABEL) if self.out.exists() else None
        if entry is not None and not list(self.out.glob(".renames.json")):
            (original,) = (x for x in ("x", "y") if digest(self.runs / x) == entry["dataset"]["digest"])
            lines = check_tables(self.runs / original, self.out, LABEL, workers=1)
            problems = [line for line in lines if not line.startswith("heads.flags")]  # those of all tables at once
            assert bool(problems) == self.edited, problems

    def is_damaged(self, name) -> bool:
        files = self.place / name / "moments", self.runs / self.original(self.place / name) / "moments"
        return all_bytes(files[0]) != all_bytes(files[1])

    def original(self, folder: Path) -> str:
        return next(x for x in ("x", "y") if digest(self.runs / x) == digest(folder))

    def swap(self, one: Path, other: Path) -> None:
        between = self.place / "between"
        for source, target in ((one, between), (other, one), (between, other)):
            source.rename(target)


def digest(run: Path) -> str:
    return run_digest(recorded_digests(run))


def tried(runs: Path, examples: int, steps: int) -> None:
    machine = type("Sequences", (Sequences,), {"runs": runs})
    given = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=given)


def test_any_order_of_commands_and_changes(runs):
    tried(runs, 5, 6)
