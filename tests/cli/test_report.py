import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

import qkscope
from qkscope._version import __version__
from qkscope.cli.main import app
from qkscope.cli.visualize import pca_visualize_app, rotate_visualize_app
from qkscope.core.planted import Ring, plant
from qkscope.files.dataset import write_dataset
from qkscope.headids import HeadId
from tests.capture.families import build, families
from tests.capture.test_run import do
from tests.helpers import explorer_runs, small_dataset
from tests.report.test_truth import checked_changes, read

runner = CliRunner()


def run(*arguments: object, on=app):
    return runner.invoke(on, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return small_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def results(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert run("analyze", dataset, "-o", folder, "--model", "tiny", "--points", 4, "-q").exit_code == 0
    return folder


def config(folder, dataset, **more):
    path = folder / "tiny.yaml"
    said = {
        "model": "tiny",
        "data": {"dataset": str(dataset)},
        "output": {"results_dir": str(folder / "results")},
    } | more
    path.write_text(yaml.safe_dump(said))
    return path


# ---- report --------------------------------------------------------------------------------------


def test_a_report_of_a_dataset_holds_tables_figures_and_two_pages(dataset, tmp_path):
    done = run("report", dataset, "-o", tmp_path / "report")
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "report" / "report.html") in done.output
    assert "left out qk-pca/07_position_signal: the study has no ordered checkpoints" in done.output
    assert {p.name for p in (tmp_path / "report").iterdir()} == {
        "figures",
        "tables",
        "report.html",
        "explorer.html",
        "runs.csv",
    }
    assert run("report", dataset, "-o", tmp_path / "report").exit_code == 0, "a report can be written again"
    assert len(list((tmp_path / "report" / "figures").glob("*/*/figure.png"))) == 14
    points = pd.read_parquet(next((tmp_path / "report" / "tables").glob("*/points.parquet")))
    assert points.groupby(["layer", "head"]).ngroups == 8
    full = points.groupby(["layer", "head"])["svd_5"].count()
    assert (full > 0).all()


@pytest.fixture(scope="module")
def captured(tmp_path_factory) -> Path:
    """A run with its tables, as ``qkscope capture`` advises."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 96, 80) for _ in range(8)]
    folder = do(build(families()["llama"]), documents, tmp_path_factory.mktemp("captured") / "mine")
    assert run("analyze", folder, "-o", folder / "tables", "-q").exit_code == 0
    return folder


@pytest.mark.usefixtures("few_figures")
def test_tables_of_a_run_are_used_again(captured, tmp_path):
    again, twice, other = (tmp_path / name for name in ("again", "twice", "other"))
    done = run("report", captured, "-o", again)
    assert done.exit_code == 0, done.output
    assert f"mine is analysed already, in {captured / 'tables'}" in done.output
    shutil.copytree(captured, other / "mine")
    shutil.rmtree(other / "mine" / "tables")
    done = run("report", other / "mine", "-o", twice)
    assert "analysed already" not in done.output
    for path in sorted((twice / "tables").rglob("*.parquet")):
        found = pd.read_parquet(again / path.relative_to(twice))
        pd.testing.assert_frame_equal(found, pd.read_parquet(path))
    assert (again / "explorer.html").read_bytes() == (twice / "explorer.html").read_bytes()
    done = run("view", other / "mine", "-o", tmp_path / "page.html", "--no-open")
    assert f"mine is analysed already, in {other / 'mine' / 'tables'}" in done.output, "report left them there"
    assert not (other / "mine" / "tables" / "points.parquet").exists(), "texts stay in the report"
    shutil.rmtree(other / "mine" / "tables")
    done = run("report", other / "mine", "-o", twice)
    assert f"mine is analysed already, in {twice / 'tables' / '00-mine'}" in done.output


@pytest.mark.usefixtures("few_figures")
def test_a_report_can_be_given_instead_of_its_runs(captured, tmp_path):
    shutil.copytree(captured, tmp_path / "other")
    assert run("report", captured, tmp_path / "other", "-o", tmp_path / "both", "--no-points").exit_code == 0
    done = run("view", tmp_path / "both", "-o", tmp_path / "page.html", "--no-open")
    assert done.exit_code == 0, done.output
    assert explorer_runs((tmp_path / "page.html").read_text()) == ["mine", "other"]
    assert run("verify", captured, "--tables", tmp_path / "both").exit_code == 2, "two runs of the same weights"
    done = run("top", tmp_path / "both")
    assert "has tables of several runs; give one of" in done.output
    assert run("report", captured, "-o", tmp_path / "one", "--no-points").exit_code == 0
    assert "l0" in run("top", tmp_path / "one", "-n", 1).output
    done = run("verify", captured, "--tables", tmp_path / "one")
    assert "0 differences" in done.output


def test_tables_are_verified_with_the_options_they_were_made_with(captured, tmp_path):
    assert run("analyze", captured, "-o", tmp_path, "-q", "--decay-range", 16, "--no-intervals").exit_code == 0
    done = run("verify", captured, "--tables", tmp_path)
    assert "0 differences" in done.output, done.output


def test_a_card_has_the_numbers_of_the_tables(captured, tmp_path):
    place = Path(shutil.copytree(captured, tmp_path / "mine"))
    head = qkscope.open(place), (1, 2)
    heads = pd.read_parquet(place / "tables" / "scores.parquet")
    text = lambda figure: " ".join(text.get_text() for text in figure.texts)  # noqa: E731
    before = text(qkscope.plot.card(*head))
    for name in ("position", "query", "key", "content"):
        heads[f"part_{name}"] = 1.0 if name == "query" else 0.0
        heads[f"part_{name}_low"] = heads[f"part_{name}_high"] = heads[f"part_{name}"]
    heads.assign(head_class="query").to_parquet(place / "tables" / "scores.parquet")
    assert "Most of what varies in its scores is query (100%" in text(qkscope.plot.card(*head))
    shutil.rmtree(place / "tables")
    assert text(qkscope.plot.card(*head)) == before


@pytest.mark.parametrize("why", ["another run", "some heads", "no intervals", "another version", "another label"])
def test_tables_that_are_not_those_of_the_run_are_not_used(captured, tmp_path, why):
    place = Path(shutil.copytree(captured, tmp_path / "mine"))
    summary = place / "tables" / "summary.json"
    options = {"some heads": ["--heads", 0], "no intervals": ["--no-intervals"], "another label": ["--model", "x"]}
    if why in options:
        shutil.rmtree(place / "tables")
        assert run("analyze", place, "-o", place / "tables", "-q", *options[why]).exit_code == 0
    elif why == "another run":
        written = json.loads(summary.read_text())
        written["models"]["mine"]["dataset"]["digest"] = "0" * 64
        summary.write_text(json.dumps(written))
    else:
        summary.write_text(summary.read_text().replace(f'"qkscope": "{__version__}"', '"qkscope": "0.0.1"'))
    done = run("view", place, "-o", tmp_path / "page.html", "--no-open")
    assert done.exit_code == 0, done.output
    assert "analysed already" not in done.output


def test_a_study_file_orders_labels_and_phases(results, tmp_path):
    study = {
        "title": "Two of one",
        "runs": [
            {"path": str(results), "model": "tiny", "label": "early", "phase": "a", "step": 1},
            {"path": str(results), "model": "tiny", "label": "late", "phase": "b", "step": 2, "window": 1024},
        ],
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    done = run("report", tmp_path / "study.yaml", "-o", tmp_path / "report")
    assert done.exit_code == 0, done.output
    left_out = {line.split()[2] for line in done.output.splitlines() if line.startswith("left out qk-")}
    of_models = {"qk-pca/03_layer_heatmap_rq:", "qk-pca/04_layer_heatmap_rk:", "qk-rotation/07_bias_vs_separation:"}
    assert left_out == of_models, "there is one model; the figures of training show its checkpoints"
    page = (tmp_path / "report" / "report.html").read_text()
    assert '<p class="study">Two of one</p>' in page
    assert "From early to late" in page
    data = pd.read_csv(tmp_path / "report" / "figures" / "qk-pca" / "07_position_signal" / "data.csv")
    assert data["model"].tolist() == ["early", "late"]
    assert not (tmp_path / "report" / "tables").exists()


@pytest.mark.usefixtures("few_figures")
def test_paths_of_a_study_file_are_relative_to_it(results, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "tables").symlink_to(results)
    (tmp_path / "there" / "study.yaml").write_text("runs: [{path: tables}]")
    monkeypatch.chdir(tmp_path)
    assert run("report", "there/study.yaml", "-o", "out", "--no-points").exit_code == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("runs: []", "at least 1 item"),
        ("runs: [{path: x, fase: a}]", "did you mean 'phase'?"),
        ("title: x", "runs: Field required"),
        ("runs: [{path: nowhere/at/all}]", "nowhere/at/all"),
        ("[1", "not valid YAML"),
    ],
)
def test_a_study_file_that_cannot_be_used_says_why(tmp_path, content, says):
    (tmp_path / "s.yaml").write_text(content)
    done = run("report", tmp_path / "s.yaml", "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert says in done.output
    assert not (tmp_path / "out").exists()


def test_a_study_file_and_runs_are_not_mixed(results, tmp_path):
    (tmp_path / "s.yaml").write_text("runs: [{path: x}]")
    assert "not both" in run("report", tmp_path / "s.yaml", results).output


def test_somebody_elses_csv_makes_a_report(tmp_path):
    (tmp_path / "theirs").mkdir()
    frame = pd.DataFrame(
        {"model": "them", "layer": range(6), "head": 0, "r_k_a": 0.9, "r_q_a": 0.8, "bias_strength": 0.01}
    )
    frame.to_csv(tmp_path / "theirs" / "rotated.csv", index=False)
    done = run("report", tmp_path / "theirs", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "figures" / "qk-rotation" / "04_bias_strength" / "figure.svg").exists()
    assert "there is no table with bias_strength, separation_strength (rotated.csv)" in done.output


def test_two_runs_of_one_name_need_labels(dataset, tmp_path):
    done = run("report", dataset, dataset, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "the label tiny" in done.output


# ---- view ----------------------------------------------------------------------------------------


def test_view_writes_the_explorer_and_opens_it(dataset, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    done = run("view", dataset, "-o", tmp_path / "x.html", "-q")
    assert done.exit_code == 0, done.output
    assert opened == [(tmp_path / "x.html").as_uri()]
    page = (tmp_path / "x.html").read_text()
    assert page.count('type="application/octet-stream" id="points-') == 8
    run("view", dataset, "-o", tmp_path / "x.html", "-q", "--no-open")
    assert len(opened) == 1


# ---- points --------------------------------------------------------------------------------------


def test_analyze_writes_points_of_the_heads_asked_for(dataset, tmp_path):
    assert run("analyze", dataset, "-o", tmp_path, "--points", "l00h01,l01h03", "-q").exit_code == 0
    points = pd.read_parquet(tmp_path / "points.parquet")
    assert points[["layer", "head"]].drop_duplicates().to_numpy().tolist() == [[0, 1], [1, 3]]
    assert set(points["kind"]) == {"q", "k"}
    assert list(points)[:10] == ["model", "layer", "head", "kind", "example_id", "position", "pc0", "pc1", "a", "b"]
    done = run("analyze", dataset, "-o", tmp_path / "no", "--points", "l09h09")
    assert done.exit_code == 2
    assert "such as l05h13,l00h02, got 'l09h09'" in done.output


def test_points_lie_where_the_tables_say(results):
    points, rotated = pd.read_parquet(results / "points.parquet"), pd.read_parquet(results / "rotated.parquet")
    for (layer, head), part in points.groupby(["layer", "head"]):
        row = rotated.query(f"layer == {layer} and head == {head}").iloc[0]
        keys = part[part["kind"] == "k"]
        assert keys["a"].mean() == pytest.approx(row["mu_k_a"], abs=1e-4)
        assert np.polyfit(keys["position"], keys["a"], 1)[0] == pytest.approx(row["alpha_k"], rel=1e-3)


def test_planes_and_counts_of_active_ones_agree(results):
    planes, heads = pd.read_parquet(results / "planes.parquet"), pd.read_parquet(results / "heads.parquet")
    counted = planes.groupby(["layer", "head"])["active"].sum()
    assert heads.set_index(["layer", "head"])["active_planes"].astype(int).to_dict() == counted.to_dict()


def test_analysing_the_components_again_keeps_the_counts_of_active_planes(dataset, tmp_path):
    run("analyze", dataset, "-o", tmp_path, "-q")
    run("analyze", dataset, "-o", tmp_path, "--only", "pca", "-q")
    assert pd.read_parquet(tmp_path / "heads.parquet")["active_planes"].notna().all()


# ---- the published pictures ----------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_published_collage(dataset, tmp_path, suffix):
    path = config(tmp_path, dataset)
    target = tmp_path / f"x.{suffix}"
    done = run(
        "--config", path, "--random", "--collage", "--qk", "--seed", 42, "--output", target, on=pca_visualize_app
    )
    assert done.exit_code == 0, done.output
    assert target.stat().st_size > 5000
    import random

    heads = [(layer, head) for layer in range(2) for head in range(4)]
    shown = pd.read_parquet(tmp_path / "results" / "points.parquet")[["layer", "head"]].drop_duplicates()
    assert {tuple(row) for row in shown.to_numpy().tolist()} == set(random.Random(42).sample(heads, 4))


def test_other_components_and_queries_alone(dataset, tmp_path):
    path = config(tmp_path, dataset)
    done = run("--config", path, "--layer", 1, "--head", 2, "--pc-x", 3, "--pc-y", 5, on=pca_visualize_app)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "results" / "figures" / "tiny-pc3-pc5-l01h02.png").exists()
    assert {"pc3", "pc5"} <= set(pd.read_parquet(tmp_path / "results" / "points.parquet"))


@pytest.mark.parametrize(
    ("on", "options", "name"),
    [
        (pca_visualize_app, ("--qk",), "pc0-pc1-qk"),
        (rotate_visualize_app, (), "ab-plane"),
        (rotate_visualize_app, ("--complement",), "complement"),
    ],
)
def test_scaled_positions_are_another_picture(dataset, tmp_path, on, options, name):
    path = config(tmp_path, dataset)
    for more in ((), ("--scaled-positions",)):
        done = run("--config", path, "--layer", 0, "--head", 0, *options, *more, on=on)
        assert done.exit_code == 0, done.output
    figures = tmp_path / "results" / "figures"
    assert {p.name for p in figures.iterdir()} == {f"tiny-{name}-l00h00.png", f"tiny-{name}-scaled-l00h00.png"}
    assert len({p.read_bytes() for p in figures.iterdir()}) == 2


def test_the_plane_and_the_complement(tmp_path):
    head = plant(
        68, rings=[Ring(0.5, 4.0, 4.0)], mu_q=(2.0, 9.0), mu_k=(0.0, -9.0), n=600, documents=8, window=512, alpha_k=0.02
    )
    write_dataset(tmp_path / "d", [(HeadId(0, 0, "q"), head.q), (HeadId(0, 0, "k"), head.k)], q_per_kv=1)
    path = config(tmp_path, tmp_path / "d")
    assert run("--config", path, "--collage", "--random", on=rotate_visualize_app).exit_code == 0
    done = run(
        "--config", path, "--complement", "--random", "--seed", 42, "-o", tmp_path / "c.svg", on=rotate_visualize_app
    )
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "c.svg").read_text()
    assert drawn.count("angle_r") == 30
    assert drawn.count("<image") == 31, "30 panels and the colour bar of positions"


def test_another_picture_of_a_head_keeps_the_coordinates_it_had(dataset, tmp_path):
    path = config(tmp_path, dataset)
    run("--config", path, "--layer", 0, "--head", 0, "--complement", on=rotate_visualize_app)
    run("--config", path, "--layer", 0, "--head", 0, "--pc-x", 2, "--pc-y", 3, on=pca_visualize_app)
    points = pd.read_parquet(tmp_path / "results" / "points.parquet")
    assert {"pc0", "pc1", "pc2", "pc3", "a", "b", "svd_0", "svd_5"} <= set(points.dropna(axis=1, how="all"))
    done = run("--config", path, "--layer", 0, "--head", 0, "--pc-x", 200, on=pca_visualize_app)
    assert done.exit_code == 2
    assert "holds no pc200 and pc1" in done.output


@pytest.mark.usefixtures("few_figures")
def test_a_run_under_another_label_is_reported_under_that_label(dataset, tmp_path):
    for label in ("step 1", "step/1"):
        (tmp_path / "s.yaml").write_text(yaml.safe_dump({"runs": [{"path": str(dataset), "label": label}]}))
        assert run("report", tmp_path / "s.yaml", "-o", tmp_path / "out", "-q").exit_code == 0
    assert "step/1" in (tmp_path / "out" / "report.html").read_text()


def test_pictures_need_to_know_which_head(dataset, tmp_path):
    path = config(tmp_path, dataset)
    assert "choose a head with --random" in run("--config", path, on=pca_visualize_app).output
    assert (
        "has no query head with layer 7" in run("--config", path, "--layer", 7, "--random", on=pca_visualize_app).output
    )
    assert (
        "leave out --collage"
        in run("--config", path, "--complement", "--collage", "--random", on=rotate_visualize_app).output
    )
    done = run("--config", path, "--random", "-o", tmp_path / "x.gif", on=pca_visualize_app)
    assert done.exit_code == 2
    assert "ends in .png, .svg or .pdf" in done.output


@pytest.mark.parametrize("planted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_demo_ends_with_the_report(tmp_path, monkeypatch, planted):
    from dataclasses import replace

    from qkscope.data import family

    if not planted:
        pytest.importorskip("torch")
    monkeypatch.setattr("qkscope.data.planted.N_LAYERS", 1)
    chosen = zip((*family.CHECKPOINTS[:2], family.CHECKPOINTS[-1]), (64, 64, 128), strict=True)
    small = tuple(replace(one, window=window, documents=8) for one, window in chosen)
    monkeypatch.setattr(family, "CHECKPOINTS", small)
    done = run("demo", "-o", tmp_path / "demo", "--planted" if planted else "--all")
    assert done.exit_code == 0, done.output
    said = (
        "queries follow position with a correlation"
        if planted
        else "Within 64 tokens, extending the context from 64 to"
    )
    assert said in done.output
    assert ("more loss without position" in done.output) is not planted
    assert f"report: {tmp_path / 'demo' / 'report' / 'report.html'}" in done.output.replace("\n", "")
    page = (tmp_path / "demo" / "report" / "report.html").read_text()
    assert ("Demonstration" if planted else "pretrain-step-0001") in page
    assert ("pretrain-step-0020" in page) is not planted
    assert ("All numbers here are at 64" in read(page)) is not planted
    assert (checked_changes(read(page)) > 15) is not planted


@pytest.mark.parametrize("command", [["report", "x"], ["view", "x"], ["demo"]])
def test_a_place_that_cannot_be_written_is_named_before_the_work(tmp_path, command):
    (tmp_path / "file").write_text("")
    done = run(*command, "-o", tmp_path / "file" / "out" / "page.html")
    assert done.exit_code == 2
    assert "is not a writable directory" in done.output
