"""The window of a run is never longer than its longest document."""

from __future__ import annotations

import gc
import logging
import re

import numpy as np
import pandas as pd
import pytest

import qkscope
from qkscope.capture.assemble import merge
from qkscope.capture.options import Share
from qkscope.errors import CaptureError, ConfigError
from tests.capture.families import build, families, matrix
from tests.capture.test_encoders import modernbert, needs_modernbert
from tests.capture.test_run import all_bytes, do


@pytest.fixture(scope="module")
def short(ids) -> list[np.ndarray]:
    """Documents of different lengths; the longest is in the second share."""
    return [*(document[:90] for document in ids[:6]), ids[6][:60], ids[7][:110], *(one[:70] for one in ids[8:12])]


def test_a_window_that_no_document_fills_is_cut_to_the_longest_document(model, short, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="qkscope"):
        wide = do(model, short, tmp_path / "wide", window=100_000)
    assert "the window of 100000 is cut to 110, the length of the longest document" in caplog.text
    by_default, exact = (do(model, short, tmp_path / str(w), window=w) for w in (None, 110))
    assert all_bytes(wide) == all_bytes(by_default) == all_bytes(exact)
    run = qkscope.open(wide)
    assert run.source.window == 110
    assert run.source.run.manifest.options.window == 110
    rotated = qkscope.rotation(run, intervals=False)
    pd.testing.assert_series_equal(rotated["bias_window"], rotated["bias_strength"] * 110, check_names=False)
    do(model, short, wide, window=200_000)  # the same capture, already finished


def test_a_window_that_some_documents_exceed_is_as_given(model, short, tmp_path):
    assert qkscope.open(do(model, short, tmp_path / "run", window=64)).source.window == 64


def test_shares_that_do_not_see_the_longest_document_have_its_window(model, short, tmp_path):
    settings = {"window": 5000, "documents_per_shard": 3}
    shares = [do(model, short, tmp_path / f"{job}", doing={"share": Share(job, 4)}, **settings) for job in (1, 2, 3, 4)]
    merge(shares, tmp_path / "merged")
    whole = do(model, short, tmp_path / "whole", **settings)
    assert all_bytes(tmp_path / "merged") == all_bytes(whole)
    assert qkscope.open(whole).source.window == 110


def test_frequencies_that_follow_the_length_are_those_of_the_longest_document(short, tmp_path):
    model = build(families()["dynamic scaling"])
    wide, exact = (qkscope.open(do(model, short, tmp_path / str(w), window=w)) for w in (4000, 110))
    ropes = [run.source.run.manifest.layers[0].rope for run in (wide, exact)]
    assert ropes[0].frequencies == ropes[1].frequencies


def test_documents_shorter_than_the_shortest_window(model, short, tmp_path):
    tiny = [document[:12] for document in short]
    runs = [qkscope.open(do(model, tiny, tmp_path / str(w), window=w)) for w in (None, 100)]
    assert [run.source.window for run in runs] == [16, 16]


@needs_modernbert
def test_an_encoder(short, tmp_path):
    model = build(modernbert())
    wide, exact = (do(model, short, tmp_path / str(w), window=w) for w in (4000, 110))
    assert all_bytes(wide) == all_bytes(exact)
    assert qkscope.open(wide).source.window == 110


# ---- one pass, several windows -------------------------------------------------------------------------------


def tables_of(folder) -> dict[str, pd.DataFrame]:
    run = qkscope.open(folder, model="one name")
    return {name: table for name, table in qkscope.analyze(run).items() if name != "runs"}


NESTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "glm4": {},
    "mistral": {"batch": 3},
    "gemma3": {"prefill": 32},
    "qwen3": {"batch": None, "documents_per_shard": 20},
    "ministral3": {},
    "smollm3": {"keep": "undone-cov", "documents_per_shard": 5},
}


@pytest.mark.parametrize("family", matrix(NESTED, ["glm4", "gemma3"]))
def test_a_run_at_a_shorter_window_is_the_run_captured_at_it(family, short, tmp_path):
    settings = NESTED[family]
    model = build(families()[family]).double()  # so that the length of a pass changes no bit that counts
    both = do(model, short, tmp_path / "both", window=100, buckets=5, compare_at=(40, 80), **settings)
    whole = do(model, short, tmp_path / "whole", window=100, buckets=5, **settings)
    # Steps depend on all windows, batches on the length of documents, and float32 sums on both.
    in_steps = "prefill" in settings or "batch" in settings
    assert in_steps or all_bytes(both) == all_bytes(whole), "the run itself is the same"
    for window in (40, 80):
        nested, alone = tmp_path / f"both-at-{window}", tmp_path / f"{window}"
        do(model, short, alone, window=window, buckets=5, **settings)
        assert (nested / "run.json").read_text().replace("\n", "") == (alone / "run.json").read_text().replace("\n", "")
        found, expected = tables_of(nested), tables_of(alone)
        assert found.keys() == expected.keys()
        for name, table in expected.items():
            pd.testing.assert_frame_equal(found[name], table, rtol=1e-4 if in_steps else 1e-6, atol=1e-6)
    assert qkscope.open(both).at(40).source.window == 40
    with pytest.raises(ConfigError, match=r"not at 50: .*both-at-50 is not a run; capture it with --compare-at 50"):
        qkscope.open(both).at(50)


def test_a_shorter_window_can_be_added_to_a_finished_run(model, short, tmp_path):
    run = do(model, short, tmp_path / "run", window=96)
    before = all_bytes(run)
    do(model, short, run, window=96, compare_at=(48,))
    assert all_bytes(run) == before
    assert qkscope.open(run).at(48).source.window == 48
    assert all_bytes(tmp_path / "run-at-48") == all_bytes(
        [do(model, short, tmp_path / "both", window=96, compare_at=(48,)), tmp_path / "both-at-48"][1]
    )


def test_a_temporary_run_at_a_shorter_window_lasts_as_long_as_it_is_used(model, short):
    nested = qkscope.capture_model(model, short, window=96, compare_at=48, progress=False).at(48)
    gc.collect()
    assert len(qkscope.scores(nested)) == len(nested.heads)
    folder = nested.source.run.folder
    assert folder.is_dir()
    del nested
    gc.collect()
    assert not folder.is_dir()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("phi3 longrope", {"compare_at": (32,)}, "its rotary encoding depends on the length of the document"),
        ("llama", {"compare_at": (96,)}, "--compare-at 96 is not shorter than the window of 96; leave it out"),
        ("llama", {"compare_at": (8,)}, "expected --compare-at of 16 or more, got 8"),
        ("llama", {"compare_at": (16,), "skip_first": 15}, "--compare-at 16 leaves no two tokens after"),
    ],
)  # fmt: skip
def test_windows_that_cannot_be_had_in_one_pass(family, settings, message, short, tmp_path):
    with pytest.raises(CaptureError, match=re.escape(message)):
        do(build(families()[family]), short, tmp_path / "run", window=96, **settings)


@needs_modernbert
def test_encoders_are_not_measured_at_several_windows(short, tmp_path):
    with pytest.raises(CaptureError, match="but its queries also see later keys; leave it out"):
        do(build(modernbert()), short, tmp_path / "run", window=96, compare_at=(48,))
