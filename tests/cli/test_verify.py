"""Damage to a run and tables that do not follow from it are found, and said with the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from qkscope.cli.main import app
from qkscope.cli.published import pca_analyze_app, rotate_analyze_app
from qkscope.files.runfolder import RunFolder
from tests.capture.families import build, families
from tests.capture.test_run import do


def invoke(*arguments: object) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    return done.exit_code, done.stdout.splitlines()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A small run with tables."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 96, 60) for _ in range(16)]
    folder = do(build(families()["llama"]), ids, tmp_path_factory.mktemp("verify") / "run")
    code, _ = invoke("analyze", folder, "-o", folder / "tables", "-q")
    assert code == 0
    return folder


@pytest.fixture
def run(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_a_run_as_it_was_captured_passes(run):
    assert invoke("verify", run) == (0, [f"{run}: 0 differences; tables in {run / 'tables'} compared"])


def test_one_flipped_byte_is_found(run):
    file = run / "moments" / "layer-001.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    code, lines = invoke("verify", run)
    assert code == 1
    assert lines[0] == f"{file} differs from its checksum; copy or capture the run again"


@pytest.mark.parametrize(("name", "failed"), [("moments/layer-001.safetensors", 4), ("run.json", 16)])
def test_what_verify_rejects_is_not_analysed(run, tmp_path, name, failed):
    """A value that is as good as any other, and was not measured: only the checksum tells."""
    file = run / name
    if name == "run.json":
        file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    else:
        tensors = load_file(file)
        largest = max(tensors, key=lambda each: tensors[each].nbytes)
        save_file(tensors | {largest: tensors[largest] * np.asarray(1.01, tensors[largest].dtype)}, file)
    done = CliRunner().invoke(app, ["analyze", str(run), "-o", str(tmp_path / "out"), "--only", "pca"])
    said = f"{file} differs from its checksum; copy or capture the run again"
    assert sum(line.startswith("failed: ") and line.endswith(said) for line in done.output.splitlines()) == failed
    assert done.exit_code == (1 if failed < 16 else 2)
    changed = [line for line in invoke("verify", run)[1] if "differs from its checksum" in line]
    assert changed[0] == said


def test_vectors_that_were_not_sampled_are_not_drawn(run, tmp_path):
    shutil.copyfile(run / "sample/l00h01q/data.parquet", run / "sample/l00h00q/data.parquet")
    done = CliRunner().invoke(app, ["analyze", str(run), "-o", str(tmp_path / "out"), "--only", "pca"])
    failures = [line for line in done.output.splitlines() if line.startswith("failed: ")]
    assert len(failures) == 1
    assert "l00h00q" in failures[0]
    assert "differs from its checksum" in failures[0]


def test_a_run_without_checksums_is_analysed(run, tmp_path):
    (run / "checksums.json").unlink()
    assert invoke("analyze", run, "-o", tmp_path / "out", "--only", "pca", "-q")[0] == 0


def test_missing_and_foreign_files_are_found(run):
    (run / "sample" / "l00h00q" / "data.parquet").unlink()
    (run / "moments" / "notes.txt").write_text("hello")
    code, lines = invoke("verify", run)
    assert code == 1
    assert f"{run / 'sample/l00h00q/data.parquet'} is missing; copy the run again" in lines
    assert f"{run / 'moments/notes.txt'} is not a file of this run; remove it" in lines


def test_moments_of_another_shape_are_found_and_stop_an_analysis(run):
    file = run / "moments" / "layer-000.safetensors"
    found = load_file(file)
    save_file({name: value[:1] if name.startswith("q") else value for name, value in found.items()}, file)
    code, lines = invoke("verify", run)
    assert code == 1
    assert any("layer-000.safetensors is not valid (q.n: expected shape" in line for line in lines)
    code, _ = invoke("analyze", run, "-o", run / "again", "-q", "--only", "pca")
    assert code == 1, "the heads of the other layers were analysed"


def test_a_changed_number_in_a_table_is_found(run):
    table = run / "tables" / "rotated.parquet"
    frame = pd.read_parquet(table)
    frame.loc[2, "alpha_k"] *= 1.001
    frame.to_parquet(table, index=False)
    code, lines = invoke("verify", run)
    assert code == 1
    where = f"layer {frame['layer'][2]}, head {frame['head'][2]}"
    assert lines[0].startswith(f"rotated.alpha_k: 1 of {len(frame)} rows differ, first at {where}: ")


def test_a_run_without_checksums_says_so(run):
    (run / "checksums.json").unlink()
    code, lines = invoke("verify", run)
    assert code == 1
    assert "checksums.json is missing" in lines[0]


def test_checksums_of_another_kind_are_refused(run):
    (run / "checksums.json").write_text(json.dumps([1, 2]))
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert done.exit_code == 2


def test_a_kill_before_the_checksums_is_made_up_for(made, tmp_path):
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 96, 60) for _ in range(16)]
    folder = do(build(families()["llama"]), ids, tmp_path / "run")
    whole = (folder / "checksums.json").read_bytes()
    (folder / "checksums.json").unlink()
    do(build(families()["llama"]), ids, folder)
    assert (folder / "checksums.json").read_bytes() == whole
    assert RunFolder.open(folder).raw == RunFolder.open(made).raw


def test_tables_of_some_heads_are_compared_for_those_heads(run):
    code, _ = invoke(
        "analyze", run, "-o", run / "few", "-q", "--layers", "1", "--only", "pca,rotation", "--no-intervals"
    )
    assert code == 0
    assert invoke("verify", run, "--tables", run / "few")[0] == 0


def test_analyses_of_one_folder_with_different_options_are_compared_with_their_own(run):
    """``heads`` has columns and flags of all of them."""
    few = run / "few"
    for options in (
        ("--only", "pca"),
        ("--only", "rotation,scores", "--no-intervals"),
        ("--only", "plasticity", "--layers", "1"),
        ("--only", "distance", "--decay-range", "20"),
    ):
        assert invoke("analyze", run, "-o", few, "-q", *options)[0] == 0
    assert pd.read_parquet(few / "heads.parquet")["flags"].str.contains("weak_axis").any(), "a flag of rotation"
    assert invoke("verify", run, "--tables", few) == (0, [f"{run}: 0 differences; tables in {few} compared"])
    table = pd.read_parquet(few / "plasticity.parquet")
    table[table["head"] > 0].to_parquet(few / "plasticity.parquet", index=False)
    problems = invoke("verify", run, "--tables", few)[1]
    assert problems[0].startswith("heads.ap_overall: 1 of 16 rows differ, first at layer 1, head 0")


def test_tables_of_the_published_commands_are_compared_with_the_options_of_their_config(run, tmp_path):
    config = {"model": "run", "data": {"dataset": str(run)}, "output": {"results_dir": str(tmp_path / "results")}}
    for path, app_, options in (("pca", pca_analyze_app, {"high": 0.9}), ("rotate", rotate_analyze_app, {})):
        (tmp_path / f"{path}.yaml").write_text(yaml.safe_dump(config | {"pca": options}))
        assert CliRunner().invoke(app_, ["--config", str(tmp_path / f"{path}.yaml"), "-q"]).exit_code == 0
    code, lines = invoke("verify", run, "--tables", tmp_path / "results")
    assert (code, lines[:-1]) == (0, [])


def test_tables_of_another_run_are_named_as_such(run, tmp_path):
    rng = np.random.default_rng(1)
    other = do(build(families()["llama"]), [rng.integers(3, 96, 60) for _ in range(16)], tmp_path / "other")
    code, lines = invoke("verify", other, "--tables", run / "tables")
    said = f"{run / 'tables'} has tables of run from another run than {other}; give the tables of this run"
    assert (code, lines[0], len(lines)) == (1, said, 2)


def test_a_run_whose_sample_is_gone_does_not_pass_without_checksums_either(run):
    shutil.rmtree(run / "sample")
    (run / "checksums.json").unlink()
    code, lines = invoke("verify", run)
    assert code == 1
    assert any("sample does not exist" in line for line in lines)


def test_what_is_no_run_is_told_from_one_that_is_not_finished(tmp_path):
    def said() -> str:
        return CliRunner().invoke(app, ["verify", str(tmp_path)]).stderr.strip()

    assert said() == f"error: {tmp_path} is not a captured run: it has no run.json; give the folder of a run"
    (tmp_path / "progress.json").write_text("{}")
    assert said() == f"error: capture unfinished in {tmp_path}; rerun the same capture command to resume"
