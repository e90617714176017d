"""The commands as a user runs them: exit codes, messages, files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

import qkscope
from qkscope.cli.main import app
from qkscope.cli.published import pca_analyze_app, rotate_analyze_app
from qkscope.core.rows import Rows
from qkscope.files.vectors import read_rows, write_rows
from qkscope.headids import HeadId
from qkscope.results import schema
from qkscope.results.reader import read_folder
from tests.helpers import small_dataset

TABLES = tuple(
    f"{name}.{suffix}" for name in schema.TABLES if name not in schema.MEASURED for suffix in ("csv", "parquet")
)


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
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*TABLES, "axes.parquet", "replicates.parquet", "summary.json"]
    )
    rotated = pd.read_csv(tmp_path / "out" / "rotated.csv")
    assert rotated[["model", "family", "window"]].drop_duplicates().to_numpy().tolist() == [["my-model", "F", 512]]
    assert len(rotated) == 8
    assert rotated["residual_pos_r"].max() < 1e-12
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    model = summary["models"]["my-model"]
    for analysis in ("pca", "rotation"):
        entry = model[analysis]
        assert (entry["heads"], entry["heads_failed"], entry["failures"]) == (8, 0, [])
    headline = model["rotation"]["headline"]
    assert headline["r_k_a"]["mean"] == pytest.approx(rotated["r_k_a"].mean())
    assert headline["r_k_a"]["low"] < headline["r_k_a"]["high"]
    assert model["pca"]["headline"]["posvar_q"]["low"] >= 0
    assert sum(model["pca"]["taxonomy"].values()) == pytest.approx(1)
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
    alone, among_others = (rows.reset_index(drop=True) for rows in both)
    pd.testing.assert_frame_equal(alone, among_others, rtol=1e-12, check_dtype=False)  # a csv has 0.0 as 0


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


def test_skip_first_leaves_the_first_positions_out_and_is_recorded(tmp_path):
    dataset = small_dataset(tmp_path / "a" / "data", window=512)
    rest = small_dataset(tmp_path / "b" / "data", window=512)
    for path in rest.glob("*/data.parquet"):
        rewrite(rest, path.parent.name, lambda rows: rows.take(np.flatnonzero(rows.position >= 40)))
    done = run("analyze", dataset, "-o", tmp_path / "skipped", "--skip-first", 40)
    assert done.exit_code == 0, done.output
    run("analyze", rest, "-o", tmp_path / "rest")
    for name in TABLES:
        if not name.startswith("runs"):
            assert (tmp_path / "skipped" / name).read_bytes() == (tmp_path / "rest" / name).read_bytes(), name
    summary = json.loads((tmp_path / "skipped" / "summary.json").read_text())
    assert summary["models"]["data"]["pca"]["config"]["skip_first"] == 40


def test_skip_first_in_a_config_is_that_of_the_command(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    path = config(tmp_path / "tiny.yaml", dataset, data={"dataset": str(dataset), "skip_first": 40})
    assert run("--config", path, on=rotate_analyze_app).exit_code == 0
    run("analyze", dataset, "-o", tmp_path / "out", "--model", "tiny", "--family", "Tiny", "--skip-first", 40)
    assert (tmp_path / "results" / "rotated.csv").read_bytes() == (tmp_path / "out" / "rotated.csv").read_bytes()


def test_only_one_analysis_and_no_intervals(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    run("analyze", dataset, "-o", tmp_path / "out", "--only", "rotation", "--no-intervals")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "rotated.csv",
        "rotated.parquet",
        "runs.csv",
        "runs.parquet",
        "summary.json",
    ]
    assert pd.read_csv(tmp_path / "out" / "rotated.csv")["alpha_k_se"].isna().all()
    assert run("analyze", dataset, "-o", tmp_path / "out", "--only", "magic").exit_code == 2


def test_published_commands_write_their_tables_into_the_configs_folder(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    path = config(tmp_path / "tiny.yaml", dataset)
    assert run("--config", path, on=pca_analyze_app).exit_code == 0
    assert run("--config", path, on=rotate_analyze_app).exit_code == 0
    others = ("planes", "position", "distance", "plasticity", "scores", "reach", "roles")
    published = {name for name in TABLES if not name.startswith(others)}
    side = {"axes.parquet", "replicates.parquet", "summary.json"}
    assert {p.name for p in (tmp_path / "results").iterdir()} == published | side
    run("analyze", dataset, "-o", tmp_path / "both", "--model", "tiny", "--family", "Tiny", "--only", "pca,rotation")
    for name in published - {"qk.csv"}:
        assert (tmp_path / "results" / name).read_bytes() == (tmp_path / "both" / name).read_bytes()
    published_qk, own_qk = ((tmp_path / name / "qk.csv").read_text() for name in ("results", "both"))
    assert published_qk == own_qk.replace(",taxonomy_published,", ",taxonomy,", 1) != own_qk
    assert "taxonomy" in pd.read_csv(tmp_path / "results" / "qk.csv")
    (tmp_path / "results" / "qk.parquet").unlink()
    assert read_folder(tmp_path / "results").tables["qk"]["taxonomy_published"].notna().all()
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())["models"]["tiny"]
    assert summary["pca"]["config"]["data"]["dataset"] == str(dataset)
    assert "r_q" in summary["pca"]["headline"]
    assert "r_k_a" in summary["rotation"]["headline"]


def test_rotate_analyze_names_heads_whose_omega_is_at_the_edge(tmp_path):
    path = config(tmp_path / "tiny.yaml", small_dataset(tmp_path / "data", n=2400))
    done = run("--config", path, on=rotate_analyze_app)
    rotated = pd.read_csv(tmp_path / "results" / "rotated.csv")
    at_edge = rotated[rotated["omega_at_edge"].eq(True)]
    line = f"omega is the lowest frequency searched in {len(at_edge)} of {len(rotated)} heads"
    named = ", ".join(f"l{row.layer:02d}h{row.head:02d}" for row in at_edge.itertuples())
    assert len(at_edge)
    assert f"{line}, a drift rather than a rotation (omega_at_edge): {named}\n" in done.output


def test_several_configs_make_one_table_and_a_model_can_be_done_again(tmp_path):
    configs = tmp_path / "configs"
    configs.mkdir()
    for name in ("one", "two"):
        dataset = small_dataset(tmp_path / name, d=6 if name == "one" else 10)
        config(configs / f"{name}.yaml", dataset, model=name)
    assert run("--config", configs, "--layers", "0", on=pca_analyze_app).exit_code == 0
    table = pd.read_csv(configs / "results" / "qk.csv")
    assert table.groupby("model").size().to_dict() == {"one": 4 * 6, "two": 4 * 10}
    again = run("--config", configs / "one.yaml", "--layers", "1", "--config", configs / "one.yaml", on=pca_analyze_app)
    assert again.exit_code == 2
    assert "several sources have the label one" in again.output
    assert run("--config", configs / "one.yaml", "--layers", "1", on=pca_analyze_app).exit_code == 0
    table = pd.read_csv(configs / "results" / "qk.csv")
    assert table.groupby(["model", "layer"]).size().to_dict() == {("one", 1): 4 * 6, ("two", 0): 4 * 10}


def test_token_pairing_needs_shared_tokens(tmp_path):
    dataset = small_dataset(tmp_path / "data", n=400)
    path = config(tmp_path / "tiny.yaml", dataset, rotation={"pairing": "token", "centering": "within"})
    assert run("--config", path, on=rotate_analyze_app).exit_code == 0
    rewrite(dataset, "l00h01k", lambda rows: Rows(rows.x, rows.position + 1000, rows.example_id))
    done = run("--config", path, on=rotate_analyze_app)
    assert done.exit_code == 1
    assert "l00h02q: pairing by token needs tokens in common with l00h01k; use pairing 'independent'" in done.output


# ---- what goes wrong: tests/badinputs.py has the table -------------------------------------------


def test_strict_stops_at_the_first_head_that_fails_and_writes_nothing(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    (dataset / "l00h01q" / "data.parquet").write_bytes(b"x")
    done = run("analyze", dataset, "-o", tmp_path / "out", "--strict")
    assert done.exit_code == 2
    assert "error: l00h01q: the file cannot be read as parquet (" in done.output
    assert not (tmp_path / "out").exists()


def test_the_summary_counts_the_heads_that_failed(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    (dataset / "l00h00k" / "data.parquet").write_bytes(b"x")
    assert run("analyze", dataset, "-o", tmp_path / "out").exit_code == 1
    entry = json.loads((tmp_path / "out" / "summary.json").read_text())["models"]["data"]["pca"]
    assert (entry["heads"], entry["heads_failed"]) == (8, 2)
    assert len(entry["failures"]) == 2


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
    assert "nonfinite_q=3" in flags[0, 1].split(";")
    assert all("nonfinite_k=3" in flags[1, head].split(";") for head in (0, 1))
    assert flags.fillna("").str.contains("nonfinite").sum() == 3
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
    for name in ("heads.parquet", "heads.csv"):
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / "summary.json").write_text("{")
    assert "summary.json cannot be read" in run("analyze", dataset, "-o", tmp_path / "out").output


def test_a_model_of_which_no_head_can_be_used_leaves_the_results_alone(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    run("analyze", dataset, "-o", tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    for path in dataset.glob("*/data.parquet"):
        path.write_bytes(b"junk")
    done = run("analyze", dataset, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "no head could be analysed" in done.output
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_tables_that_are_not_ours_are_not_replaced(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "qk.csv").write_text("my own table")
    done = run("analyze", dataset, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "not written by qkscope" in done.output
    assert (tmp_path / "out" / "qk.csv").read_text() == "my own table"


def test_processes_that_write_into_one_folder_take_turns(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    labels = ["a", "b", "c", "d"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "qkscope", "analyze", dataset, "-o", tmp_path / "out", "--model", label, "-q"]
        )
        for label in labels
    ]
    assert [process.wait() for process in processes] == [0] * 4
    for name in ("qk.csv", "heads.csv", "rotated.csv"):
        assert sorted(pd.read_csv(tmp_path / "out" / name)["model"].unique()) == labels
    assert sorted(json.loads((tmp_path / "out" / "summary.json").read_text())["models"]) == labels


def test_linked_head_folders_are_followed_and_loops_are_not(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    (dataset / "l00h00q").rename(tmp_path / "elsewhere" / "head")
    (dataset / "l00h00q").symlink_to(tmp_path / "elsewhere" / "head")
    (dataset / "loop").symlink_to(dataset)
    assert "8 of 8 heads" in run("analyze", dataset, "-o", tmp_path / "out").output


def test_queries_of_one_document_give_no_interval(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    rewrite(dataset, "l00h01q", lambda rows: Rows(rows.x, rows.position, np.zeros(len(rows), dtype=int)))
    assert run("analyze", dataset, "-o", tmp_path / "out").exit_code == 0
    row = pd.read_csv(tmp_path / "out" / "rotated.csv").query("layer == 0 and head == 1").iloc[0]
    assert "few_documents" in row["flags"].split(";")
    assert np.isnan(row["r_q_a_se"])


def test_one_analysis_does_not_speak_for_the_other_in_the_summary(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    run("analyze", dataset, "-o", tmp_path / "out")
    run("analyze", dataset, "-o", tmp_path / "out", "--only", "rotation", "--sample-heads", 2, "--seed", 5)
    model = json.loads((tmp_path / "out" / "summary.json").read_text())["models"]["data"]
    assert (model["pca"]["heads"], model["rotation"]["heads"]) == (8, 2)
    assert model["rotation"]["config"]["seed"] == 5


# ---- what it says -------------------------------------------------------------------------------


def test_help_gives_an_example_for_every_command():
    for on, commands in ((app, [[], ["analyze"], ["demo"]]), (pca_analyze_app, [[]]), (rotate_analyze_app, [[]])):
        for command in commands:
            done = run(*command, "--help", on=on)
            assert done.exit_code == 0
            assert "Example: " in done.output


@pytest.mark.parametrize("on", [app, pca_analyze_app, rotate_analyze_app])
def test_version(on):
    assert run("--version", on=on).output == f"qkscope {qkscope.__version__}\n"


def test_columns_are_described():
    text = run("analyze", "--columns").output
    assert "bias_strength" in text
    assert "positive: later keys score higher" in text
    assert "  bias_strength_low" not in text, "ends of intervals stand with their column"
    heads = text[text.index("heads.csv") :].split("\n\n")[0]
    assert re.findall(r"^ (\w+)$", heads, re.M) == [
        "Position",
        "Bias",
        "Cause",
        "Reach",
        "Plasticity",
        "Class",
        "Rotation",
    ]


def test_columns_are_found_by_a_word():
    lines = run("analyze", "--columns", "decay").output.splitlines()
    described = [line for line in lines if line.startswith("  ")]
    assert any(line.startswith("  decay ") and line.endswith("also _se, _low, _high)") for line in described)
    assert all("decay" in line for line in described)
    done = run("analyze", "--columns", "dekay")
    assert done.exit_code == 2
    assert done.output == "error: no column has 'dekay' in its name or meaning; did you mean decay or decay_r2?\n"


def test_the_columns_about_position_say_which_one_to_use():
    tables = run("analyze", "--columns", "position").output.split("\n\n")
    (heads,) = (text for text in tables if text.startswith("heads.csv"))
    described = {line.split()[0]: line for line in heads.splitlines() if line.startswith("  ")}
    assert "the column to use for how positional a head is" in described["part_position"]
    for name, instead in {
        "position_share": "vectors, not scores", "position_share_q": "vectors, not scores",
        "posvar_q": "vectors, not scores", "positional": "one query", "score_position": "without what it shares",
        "position_share_of_score": "part_position",
    }.items():  # fmt: skip
        assert instead in described[name], name
        assert "column to use" not in described[name]


def test_ap_overall_says_what_it_counts():
    text = run("analyze", "--columns", "ap_overall").output
    (line,) = (line for line in text.split("\n\n")[0].splitlines() if line.startswith("  ap_overall "))
    assert "counts RoPE's turning inside a bucket as freedom of the query" in line
    assert "ap_fixed_overall" in line


def test_the_list_of_commands_is_not_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = run("--help").output.split("Commands:")[1]
    assert "..." not in commands
    assert len(re.findall(r"^  \w+ +\S.*\.$", commands, re.M)) == 18


def test_quiet_says_nothing_and_verbose_no_less_than_usual(tmp_path):
    dataset = small_dataset(tmp_path / "data")
    assert run("analyze", dataset, "-o", tmp_path / "a", "--quiet").output == ""
    usual = run("analyze", dataset, "-o", tmp_path / "b").output
    verbose = run("analyze", dataset, "-o", tmp_path / "c", "--verbose").output
    assert "8 of 8 heads" in usual
    assert len(verbose.splitlines()) > len(usual.splitlines())


def test_completion_is_offered():
    assert "--install-completion" in run("--help").output
