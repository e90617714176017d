"""Commands, kills, swapped files, renamed folders and edited tables in any order: answers fit what is there.

Runs of one model on different texts share a results folder and a label. After every step the tables of that label must
be those of one of the runs, recomputed from it, unless somebody edited them, which must then be found. Commands run in
processes that are killed at any moment, or say what they did: it must be so, or they must refuse.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import qkscope
from qkscope.data.family import CHECKPOINTS, some_texts, tokenizer
from qkscope.errors import QkscopeError
from qkscope.files.atomic import settle
from qkscope.files.checksums import recorded_digests, run_digest
from qkscope.results import schema
from qkscope.results.summary import read_summary
from qkscope.results.verify import check_tables
from tests.forking import ForkServer, all_bytes

pytest.importorskip("torch")
LABEL, ANALYSES = "m", ["pca", "rotation", "plasticity"]
NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.sampled_from(["x", "y"])
ONLY = st.sampled_from([None, ["pca"], ["rotation"], ["plasticity", "rotation"]])
KILLS = st.one_of(st.none(), st.floats(0.01, 1.0))
"""The part of a command's usual time after which it is killed, if it is."""
KILLED = -9
EDITS = {"heads": "ap_overall", "rotated": "alpha_k", "plasticity": "ap_overall"}


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
def server():
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, server) -> Path:
    """Two runs of one model, and their texts, which nothing changes."""
    place = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(("x", "y")):
        (place / f"texts-{name}").mkdir()
        for text in some_texts(8)[number::2]:
            (place / f"texts-{name}" / text.name).write_text(text.read_text()[:1500])
        assert server.run(capture(place, name, place / name), place / "said") == 0, (place / "said").read_text()
    return place


def capture(place: Path, texts: str, folder: Path) -> list[str]:
    return [
        *[
            "capture",
            str(CHECKPOINTS[0].folder),
            "--tokenizer",
            str(tokenizer()),
            "--texts",
            str(place / f"texts-{texts}"),
        ],
        *["--window", "64", "--layers", "0,1", "--sample", "40", "--documents-per-shard", "1", "--threads", "1"],
        *["-q", "-o", str(folder)],
    ]


def comparable(heads: pd.DataFrame) -> pd.DataFrame:
    """Heads without the model's label; text is of one type, whether it was read from a file or computed."""
    texts = {name: heads[name].fillna("").astype(str) for name in heads if name in schema.TEXTS}
    return heads.assign(**texts).drop(columns="model")


class Sequences(RuleBasedStateMachine):
    runs: Path
    server: ForkServer

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="qkscope-sequences-"))
        for name, original in (("a", "x"), ("b", "y")):
            shutil.copytree(self.runs / original, self.place / name)
        self.out, self.checked, self.said = self.place / "out", dict[str, bytes](), ""
        self.edited, self.unsure = set[str](), False
        """The tables that were edited, and True if a kill may have come before or after they were written again."""

    def teardown(self) -> None:
        shutil.rmtree(self.place)

    # ---- commands ----------------------------------------------------------------------------------

    @rule(name=NAMES, only=ONLY, intervals=st.booleans(), stop=st.sampled_from([None, None, 0, 1, 3, 8]))
    def analyze(self, name, only, intervals, stop):
        before = contents(self.out)
        try:
            with stopping(stop):
                run = qkscope.open(self.place / name, model=LABEL)
                qkscope.analyze(run, self.out, only=only or ANALYSES, intervals=intervals)
        except QkscopeError:
            assert contents(self.out) == before, "refused, and yet changed"
        except Stopped:
            self.unsure |= bool(self.edited)
        else:
            assert self.is_sound(name), "a run with the layer of another was analysed"
            self.computed(only)

    @rule(name=NAMES, only=ONLY, intervals=st.booleans(), kill=KILLS)
    def analyze_in_a_process(self, name, only, intervals, kill):
        before = contents(self.out)
        command = [
            "analyze",
            str(self.place / name),
            "--model",
            LABEL,
            "--only",
            ",".join(only or ANALYSES),
            "--strict",
        ]
        command += ["--workers", "1", "-q", "-o", str(self.out)] + ([] if intervals else ["--no-intervals"])
        code = self.command(command, kill, 0.6)
        if code == KILLED:
            self.unsure |= bool(self.edited)
        elif code == 0:
            assert self.is_sound(name), "a run with the layer of another was analysed"
            self.computed(only)
        else:
            assert code == 2, self.said
            assert contents(self.out) == before, "refused, and yet changed"

    @rule(texts=TEXTS, kill=KILLS)
    def capture(self, texts, kill):
        """A new run, one that goes on, or one that is finished: it is as if it had been captured in one go."""
        before = self.recorded("c")
        code = self.command(capture(self.runs, texts, self.place / "c"), kill, 1.2)
        if code == 0:
            assert before in (None, texts), "a run of other texts was taken for this one"
            assert not self.is_sound("c") or captured_bytes(self.place / "c") == captured_bytes(self.runs / texts)
        elif code != KILLED:
            assert code == 2, self.said
            assert before not in (None, texts), self.said

    @rule(name=NAMES, kill=KILLS)
    def report(self, name, kill):
        folder = self.place / "report"
        code = self.command(["report", str(self.place / name), "--workers", "1", "-q", "-o", str(folder)], kill, 4.0)
        if code == 0:
            assert self.is_sound(name) or "failed: " in self.said, "a run with the layer of another was shown"
            assert (
                check_tables(self.runs / self.recorded(name), folder / "tables" / f"00-{name}", name, workers=1) == []
            )
        elif code != KILLED:
            assert code == 2, self.said
            assert not self.is_sound(name), self.said

    @rule(name=NAMES)
    def verify(self, name):
        """Files that are not of a run are found."""
        code = self.command(["verify", str(self.place / name), "-q"])
        assert (code == 0) == self.is_sound(name), self.said

    @rule(name=NAMES)
    def ask_for_heads(self, name):
        """The answer is of this run, as its checksums identify it, even if it was computed before a swap."""
        try:
            table = qkscope.heads(self.place / name)
        except QkscopeError:
            assert not self.is_sound(name)
        else:
            assert self.is_sound(name)
            expected = qkscope.heads(self.runs / self.recorded(name))
            pd.testing.assert_frame_equal(comparable(table), comparable(expected))

    # ---- what people do to files -------------------------------------------------------------------

    @rule(layer=st.sampled_from(["moments/layer-000.safetensors", "moments/layer-001.safetensors"]))
    def swap_a_layer(self, layer):
        self.swap(*(self.place / name / layer for name in ("a", "b")))

    @rule(one=NAMES, other=NAMES)
    def swap_or_rename_folders(self, one, other):
        self.swap(self.place / one, self.place / other)

    @rule(table=st.sampled_from(sorted(EDITS)))
    def edit_a_table(self, table):
        path, column = self.out / f"{table}.parquet", EDITS[table]
        if path.exists() and not list(self.out.glob(".*.tmp")):
            frame = pd.read_parquet(path)
            if len(frame) and frame[column].notna().any():
                frame.assign(**{column: frame[column] + 1}).to_parquet(path, index=False)
                self.edited.add(table)

    # ---- what must be so ---------------------------------------------------------------------------

    @invariant()
    def tables_are_those_of_one_run(self):
        found = contents(self.out)
        entry = read_summary(self.out)["models"].get(LABEL) if found else None
        if entry is not None and not self.unsure and found != self.checked:
            (original,) = (x for x in ("x", "y") if digest(self.runs / x) == entry["dataset"]["digest"])
            problems = check_tables(self.runs / original, self.out, LABEL, workers=1)
            assert bool(problems) == bool(self.edited), (problems, self.edited)
            self.checked = found

    def command(self, arguments: list[str], kill: float | None = None, usual: float = 0.0) -> int:
        path = self.place / "said"
        code = self.server.run(arguments, path, None if kill is None else kill * usual)
        self.said = path.read_text()
        event(f"{arguments[0]}: {code}")
        return code

    def computed(self, only: list[str] | None) -> None:
        """Tables that were computed are no longer as they were edited; ``heads`` takes its columns from them."""
        self.edited -= {"heads", *("rotated" if name == "rotation" else name for name in only or ANALYSES)}
        if not self.edited or only is None:
            self.unsure = False

    def recorded(self, name) -> str | None:
        """The texts of a run, finished or not, by its own record; None if there is none."""
        for file in ("run.json", "progress.json"):
            path = self.place / name / file
            if path.exists():
                content = json.loads(path.read_text())
                corpus = content.get("manifest", content)["corpus"]
                return next(x for x in ("x", "y") if corpus == corpus_of(self.runs / x))
        return None

    def is_sound(self, name) -> bool:
        """True for a finished run whose files are its own."""
        folder = self.place / name
        if not (folder / "run.json").exists() or (folder / "progress.json").exists():
            return False
        return captured_bytes(folder) == captured_bytes(self.runs / self.recorded(name))

    def swap(self, one: Path, other: Path) -> None:
        between = self.place / "between"
        for source, target in ((one, between), (other, one), (between, other)):
            if source.exists() and target.parent.exists():
                source.rename(target)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a results folder, after a kill as a reader finds them."""
    if not folder.exists():
        return {}
    settle(folder)
    return {name: content for name, content in all_bytes(folder).items() if not name.startswith(".")}


def captured_bytes(folder: Path) -> dict[str, bytes]:
    """The files of a run, without tables that are computed from it."""
    return {name: content for name, content in all_bytes(folder).items() if not name.startswith(("tables/", "."))}


def corpus_of(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["corpus"]


def digest(run: Path) -> str:
    return run_digest(recorded_digests(run))


def tried(runs: Path, server: ForkServer, examples: int, steps: int) -> None:
    machine = type("Sequences", (Sequences,), {"runs": runs, "server": server})
    given = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=given)


def test_any_order_of_commands_and_changes(runs, server):
    tried(runs, server, 3, 8)


@pytest.mark.slow
def test_any_order_of_more_commands_and_changes(runs, server):
    tried(runs, server, 10, 12)
