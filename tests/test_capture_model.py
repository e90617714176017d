"""A model in memory: captured, analysed and reported from Python."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import qkscope
from qkscope.capture.options import CaptureOptions
from qkscope.errors import CaptureError, ConfigError
from tests.capture.families import build, families, torch


@pytest.fixture(scope="module")
def ids() -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 93, (150,), generator=generator).numpy() for _ in range(9)]


@pytest.fixture(scope="module")
def model():
    return build(families()["llama"])


def test_a_run_in_memory_is_that_of_a_folder_and_goes_with_it(model, ids, tmp_path):
    run = qkscope.capture_model(model, ids, window=128, name="tiny", progress=False)
    assert repr(run) == "Run('tiny', 16 query heads in 4 layers)"
    kept = qkscope.capture_model(model, ids, window=128, name="tiny", folder=tmp_path / "run", progress=False)
    pd.testing.assert_frame_equal(qkscope.rotation(run), qkscope.rotation(kept))
    folder = Path(str(run.source))
    assert folder.exists()
    del run
    gc.collect()
    assert not folder.exists(), "what nobody can see any more is removed"
    assert (tmp_path / "run" / "run.json").exists()


def test_a_copy_of_a_run_keeps_it(model, ids):
    from dataclasses import replace

    run = qkscope.capture_model(model, ids, window=128, progress=False)
    other = replace(run, model="renamed")
    del run
    gc.collect()
    assert len(qkscope.scores(other)) == 16


def test_texts_need_a_tokenizer_and_have_a_passage():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qkscope.data.family import CHECKPOINTS, some_texts, tokenizer

    loaded = AutoModelForCausalLM.from_pretrained(CHECKPOINTS[0].folder).eval()
    texts = [path.read_text()[:4000] for path in some_texts(3)]
    with pytest.raises(ConfigError, match="texts as strings need a tokenizer"):
        qkscope.capture_model(loaded, texts, window=128)
    run = qkscope.capture_model(
        loaded, texts, AutoTokenizer.from_pretrained(tokenizer()), options=CaptureOptions(layers=(0, 1)), window=128
    )
    assert run.model == CHECKPOINTS[0].name
    assert len(run.heads) == 8
    assert (Path(str(run.source)) / "passage.safetensors").exists()
    words = AutoTokenizer.from_pretrained(tokenizer())
    points = run.head(0, 0).projections("q")
    for row in points.head(20).itertuples():
        ids = words(texts[row.example_id])["input_ids"]
        assert row.token == words.decode([ids[row.position]])
    options = CaptureOptions(layers=(0,), token_text=False)
    without = qkscope.capture_model(loaded, texts, words, options=options, window=128)
    assert "token" not in without.head(0, 0).projections("q")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("one text", "expected a list of texts"),
        ([], "expected a list of texts"),
        ([[1, 2], [[3, 4]]], r"expected token ids as one row of integers, got int64 of shape \(1, 2\)"),
        ([[0.5, 1.5]], "expected token ids as one row of integers, got float64"),
    ],
)
def test_bad_texts_are_told(model, texts, said):
    with pytest.raises(ConfigError, match=said):
        qkscope.capture_model(model, texts, progress=False)


def test_a_capture_that_fails_leaves_nothing_behind(model, ids, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(CaptureError, match="the model has no layers"):
        qkscope.capture_model(model, ids, options=CaptureOptions(layers=(9,)), window=128, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_figures")
def test_a_report_of_runs(model, ids, tmp_path):
    other = build(families()["qwen3"])
    first, second = (qkscope.capture_model(m, ids, window=128, progress=False) for m in (model, other))
    page = qkscope.write_report({"a llama": first, "a qwen": second}, tmp_path / "report", title="Two")
    assert page == tmp_path / "report" / "report.html"
    text = page.read_text()
    assert "a llama" in text
    assert "a qwen" in text
    assert (tmp_path / "report" / "explorer.html").exists()
    with pytest.raises(ConfigError, match="expected runs of different models"):
        qkscope.write_report([first, first], tmp_path / "twice")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "report.html").write_text("mine")
    with pytest.raises(qkscope.QkscopeError, match="was not written by qkscope"):
        qkscope.write_report(first, tmp_path / "foreign")


def test_tables_of_several_runs_with_the_options_of_the_command_line(model, ids, tmp_path):
    one, two = (
        qkscope.capture_model(model, some, window=128, name=name, progress=False)
        for name, some in (("a", ids), ("b", ids[1:]))
    )
    found = qkscope.analyze([one, two], tmp_path / "out", only=["pca"], layers=[1, 2], heads=[0], intervals=False)
    assert list(found) == ["qk", "heads"]
    assert found["heads"][["model", "layer", "head"]].to_numpy().tolist() == [
        [name, layer, 0] for name in "ab" for layer in (1, 2)
    ]
    written = pd.read_parquet(tmp_path / "out" / "heads.parquet")
    pd.testing.assert_frame_equal(written, found["heads"][list(written)], check_dtype=False)
    with pytest.raises(ConfigError, match="has no layer 9"):
        qkscope.analyze(one, layers=[9])
    with pytest.raises(ConfigError, match="several sources have the label a"):
        qkscope.analyze([one, one])


def test_heads_that_fail_raise_or_are_left_out(model, ids, tmp_path, caplog):
    run = qkscope.capture_model(model, ids, window=128, folder=tmp_path / "run", progress=False)
    (tmp_path / "run" / "moments" / "layer-001.safetensors").unlink()
    with pytest.raises(qkscope.QkscopeError, match=r"layer-001\.safetensors"):
        qkscope.analyze(run, only=["pca"])
    found = qkscope.analyze(run, only=["pca"], strict=False)
    assert sorted(found["heads"]["layer"].unique()) == [0, 2, 3]
    assert sum("left out: " in record.message for record in caplog.records) == 4


def test_key_heads_to_cut_are_those_of_the_command_line(model, ids, tmp_path):
    import json

    from typer.testing import CliRunner

    from qkscope.cli.main import app

    run = qkscope.capture_model(model, ids, window=128, folder=tmp_path / "run", name="run", progress=False)
    chosen = qkscope.cut(run, 64, keep=0.25, by="measured", folder=tmp_path / "here")
    arguments = [
        "reach",
        str(tmp_path / "run"),
        "--cut",
        "64",
        "--keep",
        "0.25",
        "--by",
        "measured",
        "-o",
        str(tmp_path / "there"),
        "-q",
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    here, there = (json.loads((tmp_path / place / "cut.json").read_text()) for place in ("here", "there"))
    assert here == there
    assert here["heads"] == [list(head) for head in chosen.heads]
    with pytest.raises(ConfigError, match="unknown order 'size'; choose from far"):
        qkscope.cut(run, 64, by="size")
    with qkscope.intervene.windowed(model, chosen.windows):
        pass
    others = [np.roll(some, 1) for some in ids[:2]]
    costs = qkscope.cut_costs(model, run, others, window=64, keep=[0.5], draws=2, length=150)
    assert {"none", "all", "far", "random", "reversed"} <= set(costs["order"])
    assert costs["nll"].notna().all()


def test_a_notebook_shows_the_map_of_heads(model, ids):
    run = qkscope.capture_model(model, ids, window=128, name="<tiny>", progress=False)
    text = run._repr_html_()
    assert text.count("<rect") == len(run.heads)
    assert "<title>layer 3, head 1: " in text
    assert "&lt;tiny&gt;" in text
    for kind, count in qkscope.scores(run)["head_class"].value_counts().items():
        assert f" {count} {kind}" in text
