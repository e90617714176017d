"""Sentences of figures about several runs tell each number by run; heads of several runs are never taken together."""

from __future__ import annotations

import pandas as pd
import pytest

from qkscope.config import StudyRunConfig
from qkscope.figures import bias, components, depth, distance, drift, formulas, plasticityheads, scatter
from qkscope.figures.eachrun import of_each_run, together
from qkscope.results.study import Study, StudyRun, build
from tests.studies import write_model


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Study:
    folder = tmp_path_factory.mktemp("two")
    paths = [write_model(folder / name, name, layers=2, heads=32, seed=i) for i, name in enumerate("AB")]
    return build([StudyRunConfig(path=path) for path in paths])


FIGURES = (
    components.ROLES, components.SHARES, scatter.SCATTER, bias.HISTOGRAMS, drift.BARS, drift.VARIANCE, drift.SLOPES,
    depth.ROTATION_BY_DEPTH, formulas.AUDIT, plasticityheads.BY_CLASS, plasticityheads.DROP,
)  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_no_figure_takes_the_heads_of_two_runs_together(two, figure):
    data = figure.prepare(two)
    said = " ".join(figure.says(data))
    assert "64" not in said, "32 heads each"
    assert "all heads" not in said
    assert "(A)" in said or "A:" in said or "In each run:" in said
    figure.draw(data)


def test_each_run_has_the_number_that_it_has_alone(two):
    means = two.pc0.groupby("model")["r_q"].mean()
    said = " ".join(components.ROLES.says(components.ROLES.prepare(two)))
    assert f"the mean r_q is {means['A']:.2f} (A), {means['B']:.2f} (B)" in said
    kinds = two.pc0.groupby("model")["taxonomy_published"].value_counts(normalize=True)
    said = " ".join(scatter.SCATTER.says(scatter.SCATTER.prepare(two)))
    for run in "AB":
        assert f"{kinds[run].max():.1%}" in said


def test_of_one_family_the_correlation_within_each_run_stands_beside_the_pooled_one(two):
    said = bias.SEPARATION.says(bias.SEPARATION.prepare(two))
    assert said[1].startswith("Over all 64 heads r = ")
    assert "; within runs: A r = " in said[1]


def test_distance_curves_are_told_by_run():
    rows = [
        {"model": model, "family": "", "layer": 0, "head": h, "distance_low": d, "distance_high": 2 * d,
         "measured": 1.0, "measured_se": 0.1, "predicted": 0.9, "distance_r2": r2}
        for model, r2 in (("A", 0.9), ("B", 0.3)) for h in range(3) for d in (1, 2)
    ]  # fmt: skip
    study = Study((StudyRun("A"), StudyRun("B")), {"distance": pd.DataFrame(rows)})
    data = distance.CURVES.prepare(study)
    assert "the median R² is 0.900 (A), 0.300 (B)" in distance.CURVES.says(data)[0]
    distance.CURVES.draw(data)


def test_words_that_differ_stand_behind_their_runs():
    assert together({"A": "sure", "B": "the interval is 5"}) == "A: sure; B: the interval is 5"
    many = {name: f"It {verb} by 1." for name, verb in zip("ABCDE", ("falls", "rises") * 3, strict=False)}
    assert together(many) == "A, C, E: In each run: It falls by 1. B, D: In each run: It rises by 1."
    different = {name: f"Head {name} by 1." for name in "ABCDE"}
    assert together(different) == "A: Head A by 1. E: Head E by 1. The other 3 runs are in the tables."
    assert together({"A": "By l05h13 (1,234), of PC0.", "B": "By l05h13 (5,678), of PC0."}) == (
        "By l05h13 (1,234 (A), 5,678 (B)), of PC0."
    )


def test_intervals_wholes_and_changes_stay_with_their_numbers():
    assert together({"A": "the interval is [0.76, 0.80]", "B": "the interval is [0.82, 0.85]"}) == (
        "the interval is [0.76, 0.80] (A), [0.82, 0.85] (B)"
    )
    assert (
        together({"A": "In 92% of 270 heads.", "B": "In 89% of 336 heads."})
        == "In 92% of 270 (A), 89% of 336 (B) heads."
    )
    assert together({"A": "It falls: 0.64 → 0.57.", "B": "It falls: 0.57 → 0.56."}) == (
        "It falls: 0.64 → 0.57 (A), 0.57 → 0.56 (B)."
    )
    low, high = (f"{n} of {n + 1} heads, −{n} [−{n + 1}, 0]." for n in (3, 9))
    assert together({"A": low, "B": high, "C": low}, brief=True) == (
        "3 of 4 (A) to 9 of 10 (B) heads, −9 [−10, 0] (B) to −3 [−4, 0] (C)."
    )


def test_a_run_that_says_more_is_told_apart():
    data = pd.DataFrame({"model": ["A", "B", "B"]})
    assert of_each_run(lambda rows: ["Yes."] * len(rows))(data) == ["A: Yes. B: Yes. Yes."]
