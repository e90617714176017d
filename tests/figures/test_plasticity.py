"""The data of figures of plasticity, of distance by depth and of followed components, against tables made by hand."""

import numpy as np
import pandas as pd
import pytest

from qkscope.figures import distance, plasticity, plasticityheads, training
from qkscope.figures.componenttracks import component_tracks
from qkscope.figures.figure import NotApplicable
from qkscope.results.study import Study, StudyRun


def study(runs: list[StudyRun] | None = None, **tables: list[dict]) -> Study:
    defaults = {"model": "m", "family": "", "layer": 0, "head": 0, "k_head": 0}
    frames = {}
    for name, rows in tables.items():
        frame = pd.DataFrame(rows)
        frames[name] = frame.assign(**{key: value for key, value in defaults.items() if key not in frame})
    labels = dict.fromkeys(label for frame in frames.values() for label in frame["model"])
    return Study(tuple(runs or [StudyRun(label) for label in labels]), frames)


def test_a_profile_is_the_mean_over_heads_at_each_place():
    rows = [
        {
            "head": head,
            "q_bucket": b,
            "q_position": 100.0 * b,
            "bucket_width": 100,
            "ap": 0.5 + 0.1 * head,
            "ap_published": 0.4,
        }
        for head in (0, 1)
        for b in (1, 2)
    ]
    data = plasticity.prepare_profile(study([StudyRun("m", window=400)], plasticity=rows))
    means = data[data["head"].isna()]
    assert means["place"].tolist() == [0.25, 0.5]
    assert means["ap"].tolist() == pytest.approx([0.55, 0.55])
    assert means["n_heads"].tolist() == [2, 2]
    assert sorted(data.loc[data["head"].notna(), "ap"]) == pytest.approx([0.5, 0.5, 0.6, 0.6])
    assert data["ap_fixed"].isna().all()
    course, means = plasticity.say_profile(data)
    assert course == "Plasticity hardly changes along the window: 0.55 → 0.55."
    assert "published model 0.40" in means
    assert "queries of a bucket turned" not in plasticity.PROFILE_FIGURE.caption(data), "there are none"
    falling = data.assign(ap=data["ap"] - 0.28 * data["place"])
    assert plasticity.say_profile(falling)[0] == "Plasticity falls along the window: 0.48 → 0.41."
    plasticity.draw_profile(data)


def test_pairs_are_weighted_by_their_number_and_few_are_left_out():
    cell = {"inter_key": 4, "key_to_query": 8}
    rows = [
        cell | {"layer": 0, "n_pairs": 30, "ap": 0.2, "ap_published": 0.1},
        cell | {"layer": 1, "n_pairs": 10, "ap": 0.6, "ap_published": 0.1},
        {"inter_key": 1, "key_to_query": 8, "layer": 0, "n_pairs": 5, "ap": 0.9, "ap_published": 0.9},
    ]
    data = plasticity.prepare_pairs(study(plasticity_pairs=rows))
    assert data[["inter_key", "n_pairs"]].to_numpy().tolist() == [[4, 40]]
    assert data["ap"].iloc[0] == pytest.approx(0.3)
    plasticity.draw_pairs(data)
    two = plasticity.prepare_pairs(study(plasticity_pairs=[row | {"model": m} for m in "ab" for row in rows]))
    assert two["model"].tolist() == ["a", "b"]
    assert plasticity.PAIRS.says(two) == ["In each run: All pairs are of one octave of distance: 40 pairs of keys."]
    plasticity.draw_pairs(two)
    with pytest.raises(NotApplicable, match="20 pairs"):
        plasticity.prepare_pairs(study(plasticity_pairs=rows[2:]))


def test_ranks_are_told_model_by_model():
    """Within each model plasticity falls with positional variance; over both it rises."""
    rows = [
        {
            "model": model,
            "head": i,
            "k_head": i,
            "head_class": "mixed",
            "ap_fixed_overall": base - 0.01 * i,
            "posvar_q": base + 0.02 * i,
        }
        for model, base in (("a", 0.2), ("b", 0.7))
        for i in range(10)
    ]
    data = plasticityheads.prepare_plasticity_classes(study(heads=rows))
    said = plasticityheads.say_plasticity_classes(data)
    assert sum("posvar_q -1.00" in line for line in said) == 2
    assert {line.split(":")[0] for line in said} == {"a", "b"}
    plasticityheads.draw_plasticity_classes(data)


def test_over_training_the_window_is_told_where_it_changes():
    runs = [StudyRun("one", phase="x", step=1, window=1024), StudyRun("two", phase="y", step=2, window=4096)]
    rows = [
        {"model": run.label, "head": i, "ap_first20": 0.8, "ap_overall": 0.7 - 0.1 * n, "ap_last20": 0.6}
        | {"ap_fixed_overall": 0.3}
        for n, run in enumerate(runs)
        for i in range(3)
    ]
    data = plasticity.prepare_training(study(runs, heads=rows))
    assert data["ap_overall"].tolist() == pytest.approx([0.7, 0.6])
    said = plasticity.say_training(data)
    assert "queries turned to one place 0.30 → 0.30; published, first fifth 0.80 → 0.80" in said[0]
    assert "from 1,024 to 4,096 tokens" in said[1]
    plasticity.draw_training(data)


def test_curves_of_heads_with_windows_of_their_own_meet_on_one_grid():
    rows = []
    for head, bins in ((0, [(1, 1), (2, 4), (5, 16), (17, 64)]), (1, [(1, 1), (2, 5), (6, 18)])):
        for low, high in bins:
            middle = float(np.log(low * high) / 2)
            rows.append(
                {"head": head, "distance_low": low, "distance_high": high, "measured": -middle, "predicted": -middle}
            )
    data = distance.prepare_depth_curves(study(distance=rows))
    assert data["distance_low"].tolist() == [1, 2, 5, 17]
    assert data["n_heads"].tolist() == [2, 2, 2, 1]
    expected = -np.log(data["distance_low"] * data["distance_high"]) / 2
    np.testing.assert_allclose(data["measured"], expected - expected[:3].mean(), atol=1e-12)
    claim, layers = distance.say_depth_curves(data)
    assert claim == "m: the mean score changes with distance by 3.50 logits in layer 0."
    assert "R² of the mean curve 1.000" in layers


def test_the_last_pc0_is_followed_back_by_direction():
    """Components swap places between the two checkpoints; the direction keeps its own r."""
    runs = [StudyRun("one", phase="x", step=1), StudyRun("two", phase="x", step=2)]
    axes, qk = [], []
    for label, order in (("one", [0, 1]), ("two", [1, 0])):
        for pc, direction in enumerate(order):
            axes.append({"model": label, "layer": 0, "head": 0, "pc": pc, "axis": np.eye(4)[direction]})
            r = 0.9 if direction == 1 else 0.1
            qk.append({"model": label, "pc": pc, "explained_variance": 0.5 - 0.3 * pc, "r_q": r, "r_k": -r})
    whole = study(runs, qk=qk, axes=axes)
    tracks = component_tracks(whole, runs)
    assert tracks is not None
    assert tracks.query("model == 'two'")["pc"].tolist() == [1, 0]
    data = training.prepare_signal(whole)
    assert data["r_q"].tolist() == pytest.approx([0.1, 0.9])
    assert data["followed_r_q"].tolist() == pytest.approx([0.9, 0.9])
    assert data["already_pc0"].tolist() == [0, 1]
    assert "was PC0 at the first one in 0% of heads" in training.say_signal(data)[-1]
    assert component_tracks(study(runs, qk=qk), runs) is None


def test_without_both_ends_of_the_window_there_is_no_map_of_the_drop():
    rows = [{"head": i, "ap_fixed_overall": 0.5, "ap_drop": np.nan} for i in range(3)]
    with pytest.raises(NotApplicable, match="more buckets"):
        plasticityheads.prepare_drop(study(heads=rows))
    data = plasticityheads.prepare_drop(study(heads=[row | {"ap_drop": 0.1} for row in rows]))
    assert data.query("n_heads > 0")["ap_drop"].tolist() == pytest.approx([0.1])
    plasticityheads.draw_drop(data)
