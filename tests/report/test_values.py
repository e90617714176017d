import math

import pandas as pd
import pytest

from qkscope.report.values import DOCUMENTS, KEY_HEADS, Value, figures, is_published, mean_of, pooled, published
from qkscope.results.study import Study, StudyRun


def one_run(**headline) -> Study:
    frame = pd.DataFrame(
        {"model": "m", "layer": 0, "head": range(4), "k_head": range(4), "bias_strength": [0.1, 0.2, 0.3, 0.4]}
    )
    frame["bias_window"] = frame["bias_strength"] * 100
    return Study((StudyRun("m", window=100, headline=headline),), {"rotated": frame})


def test_an_interval_over_documents_is_taken_where_the_summary_is_about_the_same_rows():
    study = one_run(
        bias_strength={"mean": 0.25, "low": 0.2, "high": 0.3}, bias_window={"mean": 25.0, "low": 20.0, "high": 30.0}
    )
    frame = study.tables["rotated"]
    assert mean_of(study, "m", frame, "bias_strength") == Value(0.25, 0.2, 0.3, DOCUMENTS)
    per_window = mean_of(study, "m", frame, "bias_window")
    assert (per_window.value, per_window.low, per_window.high) == pytest.approx((25, 20, 30))
    assert per_window.over == DOCUMENTS
    # A summary of other rows (say, of all heads where the table holds some) says nothing about these.
    assert mean_of(study, "m", frame.head(2), "bias_strength").over == KEY_HEADS


def test_without_a_summary_the_interval_is_over_key_heads():
    value = mean_of(one_run(), "m", one_run().tables["rotated"], "bias_strength")
    assert value.over == KEY_HEADS
    assert value.low < 0.25 < value.high


def test_what_is_not_there_has_no_mean():
    study = one_run()
    assert mean_of(study, "m", None, "x") is None
    assert mean_of(study, "m", study.tables["rotated"], "x") is None
    assert mean_of(study, "other", study.tables["rotated"], "bias_strength") is None


def test_values_read_well():
    assert Value(0.5, 0.5, 0.5).text() == "0.50"
    assert Value(math.nan).text() == "–"
    assert Value(1.5e-4, 1e-4, 2e-4).text() == "1.5e-04 [1.0e-04, 2.0e-04]"


def test_published_values_are_found_by_the_names_that_configs_use():
    assert published("llama3.2-3b", "r_k_a") == "0.898"
    assert published("Llama3.2-1B", "r_k_a") == "≈ 0.9"
    assert published("smollm3-3b-stage1-step-40000", "alpha_k") == "0.00319"
    assert published("stage1-step-40000", "position-dominated", percent=True) == "34.0%"
    assert published("llama3.2-3b", "nothing") is None
    assert not is_published("my-model")
    assert pooled("positive_bias_share") == 0.99
    assert len(figures()["models"]) == 11
