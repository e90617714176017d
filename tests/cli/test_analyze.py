"""The commands as a user runs them: exit codes, messages, files."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

import qkscope
from qkscope.cli.main import app
from qkscope.cli.published import pca_app, rotate_app
from qkscope.core.rows import Rows
from qkscope.heads import HeadId
from qkscope.store.vectors import read_rows, write_rows
from tests.helpers import small_dataset

TABLES = ("qk.csv", "heads.csv", "rotated.csv", "qk.parquet", "heads.parquet", "rotated.parquet")


def run(*arguments: object, on=app):
    return CliRunner().invoke(on, [str(a) for a in arguments], catch_exceptions=False)


def rewrite(dataset: Path, head: str, change) -> Path:
    """Change the rows of one head in place."""
    path = dataset / head / "data.parquet"
    rows = read_rows(path, HeadId.parse(head))
    write_rows(path, change(rows))
    return path


def config(path: Path, dataset: Path, **changes: object) -> Path:
    content = {"model": "tiny", "family": "Tiny", "data": {"dataset": str(dataset)}}
    content |= {"output": {"results_dir": str(path.parent / "results")}} | changes
    path.write_text(yaml.safe_dump(content))
    return path


# ---- what it writes -----------------------------------------------------------------------------


def test_analyze_writes_all_tables_and_a_summary(tmp_path):
    dataset = small_dataset(tmp_path / "my-model", window=512)
    done = run("analyze", dataset, "-o", tmp_path / "out", "--family", "F")
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([*TABLES, "summary.json"])
    rotated = pd.read_csv(tmp_path / "out" / "rotated.csv")
    assert rotated[["model", "family", "window"]].drop_duplicates().to_numpy().tolist() == [["my-model", "F", 512]]
    assert len(rotated) == 8
    assert rotated["residual_pos_r"].max() < 1e-12
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    model = summary["models"]["my-model"]
    assert (model["heads"], model["heads_failed"], model["failures"]) == (8, 0, [])
    assert model["headline"]["r_k_a"]["mean"] == pytest.approx(rotated["r_k_a"].mean())
    assert model["headline"]["r_k_a"]["low"] < model["headline"]["r_k_a"]["high"]
    assert sum(model["taxonomy"].values()) == pytest.approx(1)
    assert summary["qkscope"] == qkscope.__version__
    assert summary["wall_seconds"] > 0


def test_row_order_and_workers_change_no_byte(tmp_path):
    dataset = small_dataset(tmp_path / "a" / "data", n=300)
    shuffled = small_dataset(tmp_path / "b" / "data", n=300)
    rng = np.random.default_rng(0)
    for path in shuffled.glob("*/data.parquet"):
        rewrite(shuffled, path.parent.name, lambda rows: rows.take(rng.permutation(len(rows))))
    assert run("analyze", dataset, "-o", tmp_path / "one", "--workers", 1).exit_code == 0
    assert run("analyze", dataset, "-o", tmp_path / "four", "--workers", 4).exit_code == 0
    assert run("analyze", shuffled, "-o", tmp_path / "mixed", "--workers", 2).exit_code == 0
    for name in TABLES:
        one = (tmp_path / "one" / name).read_bytes()
        assert one == (tmp_path / "four" / name).read_bytes(), name
        assert one == (tmp_path / "mixed" / name).read_bytes(), name


def test_a_head_has_the_same_row_alone_and_among_others(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    run("analyze", dataset, "-o", tmp_path / "all")
    run("analyze", dataset, "-o", tmp_path / "one", "--layers", "1", "--heads", "3")
    both = [pd.read_csv(tmp_path / name / "rotated.csv").query("layer == 1 and head == 3") for name in ("all", "one")]
    pd.testing.assert_frame_equal(both[0].reset_index(drop=True), both[1].reset_index(drop=True), rtol=1e-12)


def test_sample_heads_is_the_published_choice(tmp_path):
    import random

    dataset = small_dataset(tmp_path / "data", layers=3)
    run("analyze", dataset, "-o", tmp_path / "out", "--sample-heads", 4, "--seed", 42)
    targets = [(layer, head) for layer in range(3) for head in range(4)]
    got = pd.read_csv(tmp_path / "out" / "rotated.csv")[["layer", "head"]].to_records(index=False).tolist()
    assert got == sorted(random.Random(42).sample(targets, 4))


def test_max_samples_limits_the_rows_and_does_not_depend_on_their_order(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    run("analyze", dataset, "-o", tmp_path / "a", "--max-samples", 50)
    rewrite(dataset, "l00h00q", lambda rows: rows.take(np.arange(len(rows))[::-1]))
    run("analyze", dataset, "-o", tmp_path / "b", "--max-samples", 50)
    assert pd.read_csv(tmp_path / "a" / "rotated.csv")["n_q"].unique().tolist() == [50]
    assert (tmp_path / "a" / "qk.csv").read_bytes() == (tmp_path / "b" / "qk.csv").read_bytes()


def test_only_one_analysis_and_no_intervals(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    run("analyze", dataset, "-o", tmp_path / "out", "--only", "rotation", "--no-intervals")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["rotated.csv", "rotated.parquet", "summary.json"]
    assert pd.read_csv(tmp_path / "out" / "rotated.csv")["alpha_k_se"].isna().all()
    assert run("analyze", dataset, "-o", tmp_path / "out", "--only", "magic").exit_code == 2


def test_published_commands_write_their_tables_into_the_configs_folder(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    path = config(tmp_path / "tiny.yaml", dataset)
    assert run("--config", path, on=pca_app).exit_code == 0
    assert run("--config", path, on=rotate_app).exit_code == 0
    assert {p.name for p in (tmp_path / "results").iterdir()} == {*TABLES, "summary.json"}
    run("analyze", dataset, "-o", tmp_path / "both", "--model", "tiny", "--family", "Tiny")
    for name in TABLES:
        assert (tmp_path / "results" / name).read_bytes() == (tmp_path / "both" / name).read_bytes()
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())["models"]["tiny"]
    assert summary["config"]["data"]["dataset"] == str(dataset)
    assert {"r_q", "r_k_a"} <= set(summary["headline"])


def test_several_configs_make_one_table_and_a_model_can_be_done_again(tmp_path):
    configs = tmp_path / "configs"
    configs.mkdir()
    for name in ("one", "two"):
        dataset = small_dataset(tmp_path / name, d=6 if name == "one" else 10)
        config(configs / f"{name}.yaml", dataset, model=name)
    assert run("--config", configs, "--layers", "0", on=pca_app).exit_code == 0
    table = pd.read_csv(configs / "results" / "qk.csv")
    assert table.groupby("model").size().to_dict() == {"one": 4 * 6, "two": 4 * 10}
    again = run("--config", configs / "one.yaml", "--layers", "1", "--config", configs / "one.yaml", on=pca_app)
    assert again.exit_code == 2
    assert "several sources are labelled one" in again.output
    assert run("--config", configs / "one.yaml", "--layers", "1", on=pca_app).exit_code == 0
    table = pd.read_csv(configs / "results" / "qk.csv")
    assert table.groupby(["model", "layer"]).size().to_dict() == {("one", 1): 4 * 6, ("two", 0): 4 * 10}


def test_token_pairing_needs_shared_tokens(tmp_path):
    dataset = small_dataset(tmp_path / "data", n=400)
    path = config(tmp_path / "tiny.yaml", dataset, rotation={"pairing": "token", "centering": "within"})
    assert run("--config", path, on=rotate_app).exit_code == 0
    rewrite(dataset, "l00h01k", lambda rows: Rows(rows.x, rows.position + 1000, rows.example_id))
    done = run("--config", path, on=rotate_app)
    assert done.exit_code == 1
    assert (
        "l00h02q: pairing by token needs tokens that it shares with l00h01k; use pairing 'independent'" in done.output
    )


# ---- what goes wrong ----------------------------------------------------------------------------


def truncate(dataset: Path) -> None:
    path = dataset / "l00h01q" / "data.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def one_row(rows: Rows) -> Rows:
    return rows.take(np.array([0]))


def at_one_position(rows: Rows) -> Rows:
    return Rows(rows.x, np.full(len(rows), 7), rows.example_id)


def all_nan(rows: Rows) -> Rows:
    return Rows(np.full_like(rows.x, np.nan), rows.position, rows.example_id)


def empty_file(dataset: Path) -> None:
    path = dataset / "l00h01q" / "data.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)


BROKEN = {
    "truncated": (truncate, ["l00h01q"], "the file cannot be read as parquet ("),
    "no key head": (
        lambda d: (d / "l00h00k" / "data.parquet").unlink(),
        ["l00h00q", "l00h01q"],
        "its key head l00h00k is missing (with 2 query heads per key head;",
    ),
    "broken key head": (
        lambda d: (d / "l00h00k" / "data.parquet").write_bytes(b"x"),
        ["l00h00q", "l00h01q"],
        "its key head l00h00k cannot be used: the file cannot be read as parquet (",
    ),
    "wrong length": (
        lambda d: rewrite(d, "l00h01q", lambda rows: Rows(rows.x[:, :5], rows.position, rows.example_id)),
        ["l00h01q"],
        "its vectors have length 5, those of its key head l00h00k have 8",
    ),
    "constant positions": (
        lambda d: rewrite(d, "l00h01q", at_one_position),
        ["l00h01q"],
        "all 200 rows stand at position 7; nothing can correlate with it",
    ),
    "one row": (lambda d: rewrite(d, "l00h01q", one_row), ["l00h01q"], "expected at least 2 rows, got 1"),
    "empty": (empty_file, ["l00h01q"], "the file has no rows; capture this head again or leave it out"),
    "all nan": (
        lambda d: rewrite(d, "l00h01q", all_nan),
        ["l00h01q"],
        "expected at least 2 rows, got 0 after dropping 200 non-finite ones",
    ),
    "scalars": (
        lambda d: rewrite(d, "l00h01q", lambda rows: Rows(rows.x[:, :1], rows.position, rows.example_id)),
        ["l00h01q"],
        "expected vectors of length 2 or more, got 1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_head_is_named_in_one_line_and_the_others_are_written(tmp_path, case):
    breaks, heads, message = BROKEN[case]
    dataset = small_dataset(tmp_path / "data")
    assert run("analyze", dataset, "-o", tmp_path / "good").exit_code == 0
    breaks(dataset)
    done = run("analyze", dataset, "-o", tmp_path / "out")
    assert done.exit_code == 1
    failed = [line for line in done.output.splitlines() if line.startswith("failed: ")]
    assert len(failed) == len(heads)
    for head, line in zip(heads, failed, strict=True):
        assert line.startswith(f"failed: data {head}: {message}")
        assert "data.parquet]" in line
    good, got = (pd.read_csv(tmp_path / name / "rotated.csv") for name in ("good", "out"))
    lost = [good["layer"].eq(0) & good["head"].eq(HeadId.parse(h).head) for h in heads]
    kept = good[~np.logical_or.reduce(lost)].reset_index(drop=True)
    pd.testing.assert_frame_equal(got, kept)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["models"]["data"]
    assert (summary["heads"], summary["heads_failed"]) == (8, len(heads))
    strict = run("analyze", dataset, "-o", tmp_path / "strict", "--strict")
    assert strict.exit_code == 2
    assert not (tmp_path / "strict").exists()


def test_non_finite_rows_are_counted_dropped_and_flagged(tmp_path):
    dataset = small_dataset(tmp_path / "data")

    def spoil(rows: Rows) -> Rows:
        x = rows.x.copy()
        x[3, 0], x[5, 1], x[9, 2] = np.nan, np.inf, -np.inf
        return Rows(x, rows.position, rows.example_id)

    clean = small_dataset(tmp_path / "clean" / "data")
    rewrite(clean, "l00h01q", lambda rows: rows.take(np.setdiff1d(np.arange(200), [3, 5, 9])))
    rewrite(dataset, "l00h01q", spoil)
    rewrite(dataset, "l01h00k", spoil)
    assert run("analyze", dataset, "-o", tmp_path / "out").exit_code == 0
    run("analyze", clean, "-o", tmp_path / "expected")
    got, expected = (pd.read_csv(tmp_path / name / "rotated.csv") for name in ("out", "expected"))
    flags = got.set_index(["layer", "head"])["flags"]
    assert flags[0, 1] == "nonfinite_q=3"
    assert flags[1, 0] == flags[1, 1] == "nonfinite_k=3"
    assert flags.isna().sum() == 5
    numbers = got.columns.drop("flags")
    pd.testing.assert_series_equal(got.loc[1, numbers], expected.loc[1, numbers])


def test_a_head_without_drift_is_reported_and_keeps_its_pca(tmp_path):
    dataset = small_dataset(tmp_path / "data")

    def still(rows: Rows) -> Rows:
        n = len(rows) // 2 * 2
        x = np.repeat(rows.x[: n // 2], 2, axis=0)
        t = np.tile([0, 100], n // 2)
        return Rows(x, t, np.arange(n) // 2)

    for head in ("l00h00q", "l00h00k"):
        rewrite(dataset, head, still)
    done = run("analyze", dataset, "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert "l00h00q: no linear drift with position at all, so axis a is undefined" in done.output
    assert len(pd.read_csv(tmp_path / "out" / "heads.csv")) == 8
    assert len(pd.read_csv(tmp_path / "out" / "rotated.csv")) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze", "/no/such/folder"], "/no/such/folder does not exist; give a dataset folder"),
        (["analyze", "{file}"], "is not a folder; give a dataset folder"),
        (["analyze", "{empty}"], "holds no heads; expected files such as l05h13q/data.parquet"),
        (["analyze", "{data}", "--layers", "9"], "none of its 8 query heads is in the chosen layers and heads"),
        (["analyze", "{data}", "--layers", "x-2"], "expected numbers and ranges such as 0,4-7, got 'x-2'"),
        (["analyze", "{data}", "{data}"], "several sources are labelled data"),
        (["analyze", "{data}", "{data}", "--model", "m"], "--model labels one dataset, and several were given"),
        (["analyze", "{data}", "-o", "{file}"], "cannot write to"),
    ],
)
def test_what_cannot_be_done_at_all_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    places = {"data": small_dataset(tmp_path / "data"), "empty": tmp_path / "empty", "file": tmp_path / "file"}
    places["empty"].mkdir()
    places["file"].write_text("x")
    given = [argument.format(**places) for argument in arguments]
    if "-o" not in given:
        given += ["-o", str(tmp_path / "out")]
    done = run(*given)
    assert done.exit_code == 2
    line = done.output.splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line


def test_a_results_folder_of_another_version_is_not_overwritten(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    run("analyze", dataset, "-o", tmp_path / "out")
    table = pd.read_parquet(tmp_path / "out" / "heads.parquet").drop(columns="fisher")
    table.to_parquet(tmp_path / "out" / "heads.parquet")
    before = (tmp_path / "out" / "heads.parquet").read_bytes()
    done = run("analyze", dataset, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "move it away or write elsewhere" in done.output
    assert (tmp_path / "out" / "heads.parquet").read_bytes() == before
    (tmp_path / "out" / "heads.parquet").unlink()
    (tmp_path / "out" / "summary.json").write_text("{")
    assert "summary.json cannot be read" in run("analyze", dataset, "-o", tmp_path / "out").output


def test_a_kill_at_any_moment_leaves_the_old_tables_or_the_new_ones(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    run("analyze", dataset, "-o", tmp_path / "out")
    names = [*TABLES]
    old = {name: (tmp_path / "out" / name).read_bytes() for name in names}
    rewrite(dataset, "l00h01q", lambda rows: Rows(rows.x * 2, rows.position, rows.example_id))
    run("analyze", dataset, "-o", tmp_path / "new")
    new = {name: (tmp_path / "new" / name).read_bytes() for name in names}
    assert old["qk.csv"] != new["qk.csv"]
    command = [sys.executable, "-m", "qkscope", "analyze", str(dataset), "-o", str(tmp_path / "out"), "-q"]
    start = time.monotonic()
    subprocess.run(command, check=True)
    whole = time.monotonic() - start
    for name, content in old.items():
        (tmp_path / "out" / name).write_bytes(content)
    for share in np.linspace(0.7, 1.0, 7):
        process = subprocess.Popen(command)
        time.sleep(whole * share)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for name in names:
            assert (tmp_path / "out" / name).read_bytes() in (old[name], new[name])


# ---- what it says -------------------------------------------------------------------------------


def test_help_gives_an_example_for_every_command():
    for on, commands in ((app, [[], ["analyze"], ["demo"]]), (pca_app, [[]]), (rotate_app, [[]])):
        for command in commands:
            done = run(*command, "--help", on=on)
            assert done.exit_code == 0
            assert "Example: " in done.output


@pytest.mark.parametrize("on", [app, pca_app, rotate_app])
def test_version(on):
    assert run("--version", on=on).output == f"qkscope {qkscope.__version__}\n"


def test_columns_are_described():
    text = run("analyze", "--columns").output
    assert "bias_strength" in text
    assert "positive: later keys score higher" in text


def test_quiet_says_nothing_and_verbose_no_less_than_usual(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    assert run("analyze", dataset, "-o", tmp_path / "a", "--quiet").output == ""
    usual = run("analyze", dataset, "-o", tmp_path / "b").output
    verbose = run("analyze", dataset, "-o", tmp_path / "c", "--verbose").output
    assert "8 of 8 heads" in usual
    assert len(verbose.splitlines()) > len(usual.splitlines())


def test_completion_is_offered():
    assert "--install-completion" in run("--help").output


def test_demo_does_the_whole_job(tmp_path):
    done = run("demo", "-o", tmp_path / "demo")
    assert done.exit_code == 0
    assert "48 of 48 heads" in done.output
    assert str(tmp_path / "demo" / "results") in done.output.replace("\n", "")
    assert (tmp_path / "demo" / "results" / "qk.csv").exists()
    kinds = pd.read_csv(tmp_path / "demo" / "results" / "heads.csv")["taxonomy"]
    assert kinds.nunique() >= 4
