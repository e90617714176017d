"""The numbers that figures draw, against tables made by hand."""

import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from qkscope.figures import (
    bias,
    collagedata,
    collages,
    components,
    depth,
    distance,
    drift,
    formulas,
    headmap,
    hero,
    ropeplanes,
    scatter,
    training,
    trajectory,
)
from qkscope.figures.figure import NotApplicable, models
from qkscope.figures.style import house_style
from qkscope.figures.write import rendered
from qkscope.headids import choose_heads
from qkscope.results.study import Study, StudyRun
from tests.studies import CHECKPOINTS, MODELS, published_shape


def study(rows: list[dict], table: str = "qk", runs: list[StudyRun] | None = None, **more: pd.DataFrame) -> Study:
    frame = pd.DataFrame(rows)
    defaults = {"model": "m", "family": "", "layer": 0, "head": 0, "k_head": 0, "pc": 0}
    frame = frame.assign(**{name: value for name, value in defaults.items() if name not in frame}).fillna({"pc": 0})
    labels = list(dict.fromkeys(frame["model"]))
    families = frame.drop_duplicates("model").set_index("model")["family"]
    return Study(tuple(runs or [StudyRun(label, families[label]) for label in labels]), {table: frame} | more)


# ---- components ----------------------------------------------------------------------------------


def test_roles_are_means_over_heads_and_signed_means_have_their_absolute_beside_them():
    rows = [{"head": h, "k_head": h, "pc": pc, "r_q": 0.8 - 0.5 * pc, "r_k": (-1) ** h * 0.6, "explained_variance": 0.3}
            for h in range(4) for pc in (0, 1)]  # fmt: skip
    data = components.prepare_roles(study(rows))
    assert data["pc"].tolist() == [0, 1]
    assert data["n_heads"].tolist() == [4, 4]
    np.testing.assert_allclose(data["r_q"], [0.8, 0.3])
    np.testing.assert_allclose(data["r_k"], 0, atol=1e-12)
    np.testing.assert_allclose(data["abs_r_k"], 0.6)
    first, numbers = components.say_roles(data)
    assert first == (
        "Queries follow position on PC0 more closely than on any other component: r_q 0.80 on PC0, 0.30 on component 1."
    )
    assert "r_q is 0.80, the mean r_k +0.00 and the mean |r_k| 0.60, over 4 heads" in numbers


def test_a_component_that_follows_position_more_than_pc0_is_named_and_intervals_are_respected():
    rows = [{"head": h, "k_head": h, "pc": pc, "r_q": 0.2 + 0.5 * (pc == 2) + 0.01 * h, "r_k": 0.1}
            for h in range(6) for pc in range(3)]  # fmt: skip
    data = components.prepare_roles(study(rows))
    assert (
        "on another component more closely than on PC0: r_q 0.23 on PC0, 0.72 on component 2"
        in components.say_roles(data)[0]
    )
    wide = data.assign(r_q_low=data["r_q"] - 0.6, r_q_high=data["r_q"] + 0.6)
    assert "on PC0 or on another component the intervals do not tell" in components.say_roles(wide)[0]


def test_shares_add_up_along_the_line():
    rows = [{"pc": pc, "explained_variance": share, "r_q": 0, "r_k": 0} for pc, share in enumerate((0.4, 0.15, 0.1))]
    data = components.prepare_shares(study(rows))
    assert data["cumulative"].tolist() == pytest.approx([0.4, 0.55, 0.65])
    assert components.say_shares(data)[0].startswith("PC0 alone holds 40.0%")
    assert components.say_shares(data)[0].endswith("; 2 components hold half of it.")
    few = components.prepare_shares(study(rows[1:]))
    assert components.say_shares(few)[0].endswith("; the 2 components shown hold 25.0%.")


def test_components_beyond_the_tenth_are_not_drawn():
    rows = [{"pc": pc, "explained_variance": 0.05, "r_q": 0, "r_k": 0} for pc in range(15)]
    assert components.prepare_shares(study(rows))["pc"].tolist() == list(range(10))


# ---- depth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "expected"),
    [(9, list(range(10))), (3, [0, 3, 6, 9]), (0, [0]), (19, [x * 10 // 19 for x in range(19)] + [9])],
)
def test_depth_bins_are_equal_and_the_last_is_closed(last, expected):
    assert depth.depth_bins(pd.Series(range(last + 1)), last).tolist() == expected


def test_a_shallow_model_has_a_bin_for_each_layer():
    rows = [{"layer": layer, "head": h, "r_q": 0.1 * layer, "r_k": -0.5} for layer in range(4) for h in range(2)]
    data = depth.R_Q.prepare(study(rows))
    assert data["bin"].tolist() == ["0", "1", "2", "3"]
    assert data["n_heads"].tolist() == [2, 2, 2, 2]
    np.testing.assert_allclose(data["r_q"], [0, 0.1, 0.2, 0.3])
    assert "most closely in m, layer 3 (mean r_q 0.30), and least in m, layer 0 (0.00)" in depth.R_Q.says(data)[0]


def test_chosen_layers_have_a_column_each_under_their_own_numbers():
    chosen = (0, 5, 11, 17, 23)
    rows = [{"layer": layer, "head": h, "r_q": 0.01 * layer, "r_k": 0} for layer in chosen for h in range(2)]
    data = depth.R_Q.prepare(study(rows))
    assert data["bin"].tolist() == ["0", "5", "11", "17", "23"]
    assert (data["n_heads"] == 2).all(), "no column without heads"
    with house_style():
        drawn = depth.R_Q.draw(data)
    assert [tick.get_text() for tick in drawn.axes[0].get_xticklabels()] == ["0", "5", "11", "17", "23"]
    many = depth.R_Q.prepare(study([{"layer": layer, "r_q": 0.01 * layer, "r_k": 0} for layer in range(24)]))
    with house_style():
        drawn = depth.R_Q.draw(many)
    assert drawn.axes[0].get_xticklabels()[0].get_text() == "0–2"
    assert "most closely in m, layers 21 to 23 (mean r_q 0.22)" in depth.R_Q.says(many)[0]


def test_a_shallow_model_beside_a_deep_one_leaves_bins_empty_and_they_stay_in_the_table():
    rows = [{"model": "m", "layer": layer, "head": h, "r_q": 0, "r_k": -0.5} for layer in range(4) for h in range(2)]
    deep = [{"model": "deep", "layer": layer, "head": 0, "r_q": 0, "r_k": 0} for layer in range(12)]
    both = depth.R_K.prepare(study(rows + deep, runs=[StudyRun("m"), StudyRun("deep")]))
    data = both[both["model"] == "m"]
    assert data["bin"].tolist() == [str(i) for i in range(10)]
    assert data["n_heads"].tolist() == [2, 0, 0, 2, 0, 0, 2, 0, 0, 2]
    filled = data[data["n_heads"] > 0]
    np.testing.assert_allclose(filled["r_k"], -0.5)
    np.testing.assert_allclose(filled["abs_r_k"], 0.5)
    assert data.loc[data["n_heads"] == 0, "r_k"].isna().all()


def test_layers_without_rotary_encoding_are_split_out_and_only_where_there_are_any():
    rows = [{"layer": layer, "r_q": 1.0 if layer == 3 else 0.2, "r_k": 0} for layer in range(10)]
    plain = depth.R_Q.prepare(study(rows))
    assert "NoPE" not in set(plain["bin"])
    split = depth.R_Q.prepare(study(rows, runs=[StudyRun("m", nope_layers=frozenset({3}))]))
    by_bin = split.set_index("bin")
    assert by_bin.loc["NoPE", "r_q"] == 1.0
    assert by_bin.loc["3", "n_heads"] == 0
    assert "without rotary encoding have a mean r_q of 1.00, the others 0.20" in " ".join(depth.R_Q.says(split))


def test_a_depth_means_the_same_in_every_table_of_a_run():
    heads = pd.DataFrame({"model": "m", "family": "", "layer": [0, 19], "head": 0})
    rows = [{"layer": layer, "r_q": 0.5, "r_k": 0} for layer in range(11)]
    data = depth.R_Q.prepare(study(rows, heads=heads))
    assert data.loc[data["n_heads"] > 0, "bin"].tolist() == ["0", "1", "2", "3", "4", "5"]


def test_bias_by_depth_uses_the_window_of_the_head_or_of_the_study():
    rows = [{"layer": 0, "r_k_a": -0.9, "bias_strength": 0.01}]
    of_study = depth.prepare_rotation(study(rows, "rotated", [StudyRun("m", window=1000)]))
    of_head = depth.prepare_rotation(study([rows[0] | {"window": 500.0}], "rotated", [StudyRun("m", window=1000)]))
    assert of_study.loc[0, "bias_window"] == pytest.approx(10)
    assert of_head.loc[0, "bias_window"] == pytest.approx(5)
    assert of_head.loc[0, "abs_r_k_a"] == pytest.approx(0.9)


# ---- scatter and training ------------------------------------------------------------------------


def test_the_scatter_holds_every_head_of_the_models_and_classes_are_recomputed_where_missing():
    rows = [
        {"head": 0, "r_q": 0.9, "r_k": -0.8},
        {"head": 1, "r_q": 0.9, "r_k": 0.1},
        {"head": 2, "r_q": 0.9, "r_k": 0.1, "pc": 1},
    ]
    data = scatter.prepare_scatter(study(rows))
    assert data["taxonomy_published"].tolist() == ["position-dominated", "q-positional"]
    assert "In 50.0% of the heads whose r_q is strong enough" in " ".join(scatter.say_scatter(data))


def checkpoints_of(*phases: str) -> list[StudyRun]:
    return [
        StudyRun(f"c{i}", phase=phase, step=float(i), window=1000 * (1 + (phase == "long")))
        for i, phase in enumerate(phases)
    ]


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ("AABBCC", [0, 1, 2, 3, 4, 5]),
        ("AAAABCDDEE", [0, 1, 4, 5, 7, 9]),  # the published ten: first, early, ends of the later phases, last
        ("AAAAAAAA", [0, 1, 2, 3, 4, 7]),
        ("AB", [0, 1]),
    ],
)
def test_six_checkpoints(phases, expected):
    runs = checkpoints_of(*phases)
    assert [runs.index(run) for run in scatter.six_checkpoints(runs)] == expected


def test_signal_over_training_is_mean_and_spread_per_checkpoint_in_the_studys_order():
    runs = checkpoints_of("A", "A", "long")[::-1]
    rows = [
        {"model": f"c{c}", "head": h, "r_q": 0.3 * c + 0.1 * h, "r_k": -0.5 if h else 0.5}
        for c in range(3)
        for h in range(2)
    ]
    data = training.prepare_signal(study(rows, runs=runs))
    assert data["model"].tolist() == ["c2", "c1", "c0"]
    np.testing.assert_allclose(data["r_q"], [0.65, 0.35, 0.05])
    np.testing.assert_allclose(data["r_q_sd"], 0.05)
    np.testing.assert_allclose(data["r_k"], 0, atol=1e-12)
    np.testing.assert_allclose(data["abs_r_k"], 0.5)
    # The first head of c0 has r_q = 0: which way its keys drift is not defined, and it is not counted.
    np.testing.assert_allclose(data["discordant"], [0.5, 0.5, 1.0])


def test_classes_over_training_add_up_to_one_and_absent_ones_are_zero():
    runs = checkpoints_of("A", "B")
    rows = [
        {"model": "c0", "head": 0, "r_q": 0.9, "r_k": 0.9},
        {"model": "c0", "head": 1, "r_q": 0.1, "r_k": 0.1},
        {"model": "c1", "head": 0, "r_q": 0.5, "r_k": 0.5},
    ]
    data = training.prepare_classes(study(rows, runs=runs))
    kinds = ["position-dominated", "q-positional", "k-positional", "content-focused", "mixed"]
    assert data[kinds].to_numpy().tolist() == [[0.5, 0, 0, 0.5, 0], [0, 0, 0, 0, 1]]
    assert data["n_heads"].tolist() == [2, 1]


def test_the_trajectory_has_the_bias_per_token_and_per_window():
    runs = checkpoints_of("A", "long")
    rows = [
        {"model": f"c{c}", "head": h, "alpha_k": 0.02 / (1 + c), "bias_strength": (1.0 + h) / (1 + c), "mu_q_a": 3.0}
        for c in range(2)
        for h in range(5)
    ]
    data = trajectory.prepare_decomposition(study(rows, "rotated", runs))
    assert data["bias_strength"].tolist() == [3.0, 1.5]
    assert data["bias_window"].tolist() == [3000.0, 3000.0]
    assert data["alpha_k_window"].tolist() == pytest.approx([20, 20])
    assert data["bias_strength_q1"].tolist() == [2.0, 1.0]
    said = " ".join(trajectory.say_decomposition(data))
    assert said.startswith("From c0 to c1 the median bias per token changes by -50%; of its factors the mean query")
    assert "(mu_q_a) changes by +0%, the keys' drift (alpha_k) by -50%" in said
    assert "The window goes from 1,000 to 2,000 tokens" in said
    at_one = trajectory.prepare_decomposition(study(rows, "rotated", checkpoints_of("A", "B")))
    assert "The window" not in " ".join(trajectory.say_decomposition(at_one))
    with house_style():
        panels = [cell.get_title("left") for cell in trajectory.draw_decomposition(at_one).axes if cell.axison]
        assert panels == ["mu_q_a (vector units)", "alpha_k per token", "bias per token (q·k)"], "none of them twice"
        assert len([cell for cell in trajectory.draw_decomposition(data).axes if cell.axison]) == 5
    # A column that the tables lack is empty, and does not stop the others.
    assert trajectory.prepare_trajectory(study(rows, "rotated", runs))["separation_strength"].isna().all()


def test_figures_over_training_need_checkpoints():
    for figure in (training.SIGNAL, trajectory.TRAJECTORY_FIGURE, depth.R_K_TRAINING, scatter.PORTRAITS_FIGURE):
        with pytest.raises(NotApplicable, match="no ordered checkpoints"):
            figure.prepare(study([{"r_q": 0, "r_k": 0}]))


# ---- models --------------------------------------------------------------------------------------


def test_of_checkpoints_alone_the_last_one_stands_for_the_model():
    runs = checkpoints_of("A", "B")
    assert [run.label for run in models(study([{"r_q": 0, "r_k": 0}], runs=runs))] == ["c1"]
    mixed = [StudyRun("m"), *runs]
    assert [run.label for run in models(study([{"r_q": 0, "r_k": 0}], runs=mixed))] == ["m"]


def test_shares_of_variance_add_up():
    rows = [{"head": h, "var_frac_a": 0.1, "var_frac_b": 0.3 * h} for h in range(2)]
    other = {"model": "other", "var_frac_a": 0.4, "var_frac_b": 0.3}
    with pytest.raises(NotApplicable, match="nothing to put beside it"):
        drift.prepare_variance(study(rows, "rotated"))
    data = drift.prepare_variance(study([{"model": "m"} | row for row in rows] + [other], "rotated"))
    assert data.loc[0, ["var_frac_a", "var_frac_b", "complement"]].tolist() == pytest.approx([0.1, 0.15, 0.75])
    assert data.loc[0, "b_over_a"] == 0.5


def test_slope_ratios_are_medians_of_absolute_values_and_leave_out_what_does_not_drift():
    rows = [{"head": h, "alpha_q": q, "alpha_k": k} for h, (q, k) in enumerate([(1, -2), (-1, 3), (1, 10), (0, 1)])]
    other = {"model": "other", "head": 0, "alpha_q": 1, "alpha_k": 1}
    data = drift.prepare_slopes(study([{"model": "m"} | row for row in rows] + [other], "rotated"))
    assert data.loc[0, "slope_ratio"] == 3
    assert data.loc[0, "n_heads"] == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [(0.3, "more closely (median r_k_a 0.5 → 0.8)"), (-0.3, "less closely (median r_k_a 0.5 → 0.2)"),
     (0.02, "about as closely (median r_k_a 0.5 → 0.52)")],
)  # fmt: skip
def test_the_takeaway_of_the_trajectory_turns_round_with_the_data(change, said):
    rows = [
        {"model": f"c{c}", "head": h, "alpha_k": 0.01, "bias_strength": 1.0, "r_k_a": 0.46 + 0.02 * h + change * c,
         "plane_var_fraction": 0.2 + 0.01 * h}
        for c in range(2)
        for h in range(5)
    ]  # fmt: skip
    data = trajectory.prepare_trajectory(study(rows, "rotated", checkpoints_of("A", "B")))
    takeaway = trajectory.say_trajectory(data)[0]
    assert f"keys follow position on the drift axis {said}" in takeaway
    assert "the plane of a and b holds about as much variance (median plane_var_fraction 0.22 → 0.22)." in takeaway


def test_of_one_model_its_checkpoints_stand_side_by_side():
    rows = [
        {
            "model": f"c{i}",
            "head": h,
            "k_head": h,
            "r_q_a": 0.2 + 0.1 * i,
            "r_k_a": 0.9,
            "bias_strength": 1.0,
            "window": 10.0,
        }
        for i in range(3)
        for h in range(4)
    ]
    trained = study(rows, "rotated", runs=[StudyRun(f"c{i}", phase="p", step=float(i)) for i in range(3)])
    data = drift.prepare_bars(trained)
    assert data["model"].tolist() == ["c0", "c1", "c2"]
    assert (
        "beyond the intervals over key heads, in 3 of 3 checkpoints; queries more closely than keys in 0."
        in drift.say_bars(data)[0]
    )
    assert drift.say_bars(data)[1] == "The means are in the last one: r_q_a 0.40, r_k_a 0.90."
    unsure = data.assign(r_q_a_high=0.95)
    assert (
        "about equally, as far as the intervals over key heads tell, in all 3 checkpoints" in drift.say_bars(unsure)[0]
    )
    turned = data.rename(columns=lambda name: name.translate(str.maketrans("qk", "kq")) if "_a" in name else name)
    assert "in 0 of 3 checkpoints; queries more closely than keys in 3." in drift.say_bars(turned)[0]
    assert depth.ROTATION_BY_DEPTH.prepare(trained)["model"].unique().tolist() == ["c0", "c1", "c2"]
    components = study([{"r_q": 0.5, "r_k": 0.5, "model": f"c{i}"} for i in range(3)], runs=list(trained.runs))
    with pytest.raises(NotApplicable, match="the figures of training show its checkpoints"):
        depth.R_Q.prepare(components)


def test_simpsons_paradox_is_visible_and_said():
    falling = [(0.02 * i, 0.1 - 0.02 * i) for i in range(6)]
    rows = [
        {"model": f, "family": f, "head": i, "k_head": i, "separation_strength": x + shift, "bias_strength": y + shift}
        for f, shift in (("low", 0.0), ("high", 0.5))
        for i, (x, y) in enumerate(falling)
    ]
    data = bias.prepare_separation(study(rows, "rotated"))
    said = " ".join(bias.say_separation(data))
    assert "low r = -1.00, high r = -1.00" in said
    assert "bias (per token) and separation go together, within low, high the other way" in said
    assert data["bias_window"].isna().all()
    alike = data.assign(bias_strength=data["separation_strength"])
    assert "go together, within each of the runs as over all heads" in bias.say_separation(alike)[0]
    few = data.groupby("family").head(2)
    assert "not clear" in bias.say_separation(few)[0]


def test_a_family_of_one_head_is_drawn_without_a_line_and_one_model_not_at_all():
    rows = [{"model": m, "family": m, "separation_strength": 0.1, "bias_strength": 1.0} for m in "ab"]
    data = bias.prepare_separation(study(rows, "rotated"))
    said = bias.say_separation(data)
    assert "within runs: a too few heads (1) for r, b too few heads (1) for r" in said[1]
    assert "nan" not in " ".join(said)
    bias.draw_separation(data)
    with pytest.raises(NotApplicable, match="one model"):
        bias.prepare_separation(study(rows[:1], "rotated"))


def test_negative_and_positive_biases_are_counted():
    rows = [{"head": h, "bias_strength": b, "window": 100.0} for h, b in enumerate([-1, 1, 2, 3])]
    data = bias.prepare_histograms(study(rows, "rotated"))
    assert data["bias_window"].tolist() == [-100, 100, 200, 300]
    assert bias.say_histograms(data)[0].startswith("In 75.0% of 4 heads the average query favours later keys")
    assert bias.say_histograms(data.tail(1))[0].startswith("In 1 of 1 head the average")
    assert bias.say_histograms(data.head(1))[0].startswith("In none of 1 head does the average query favour later")
    with house_style():
        assert len(bias.draw_histograms(data).axes) == 1, "per token and over one window are the same picture"
        assert len(bias.draw_histograms(data.assign(bias_window=[-1, 1, 5, 9])).axes) == 2


# ---- collages ------------------------------------------------------------------------------------


def test_the_published_choice_of_heads():
    heads = [(layer, head) for layer in range(28) for head in range(24)]
    import random

    assert choose_heads(heads[::-1]) == random.Random(42).sample(sorted(heads), 4)
    assert choose_heads(heads[:3]) == heads[:3]


def points(n: int = 50, **columns) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"model": "m", "layer": 0, "head": 0, "kind": ["q", "k"] * n, "example_id": 0, "position": range(2 * n)}
    )
    for name in ("pc0", "pc1", "a", "b", "svd_0", "svd_1", "svd_2", "svd_3"):
        frame[name] = rng.normal(size=2 * n)
    return frame.assign(**columns)


def test_collages_show_the_points_with_the_numbers_of_their_head():
    rows = [{"pc": pc, "r_q": 0.9 - pc, "r_k": 0.5, "explained_variance": 0.4} for pc in range(2)]
    data = collagedata.prepare_components(study(rows, points=points()))
    assert len(data) == 100
    assert data.loc[0, ["r_q_x", "r_q_y", "explained_variance_x"]].tolist() == pytest.approx([0.9, -0.1, 0.4])
    with pytest.raises(NotApplicable, match="holds no pc0 and pc7"):
        collagedata.prepare_components(study(rows, points=points()), pcs=(0, 7))


def test_the_lines_in_the_plane_are_least_squares():
    frame = points()
    frame["b"] = 2 * frame["a"] + 1
    data = collagedata.prepare_plane(study([{"position_r": 0.5}], "rotated", points=frame))
    line = data[data["kind"] == "line q"]
    np.testing.assert_allclose(line["y"], 2 * line["x"] + 1)
    assert np.isnan(data["omega"].iloc[0])


def test_the_complement_is_drawn_plane_by_plane_as_far_as_there_are_coordinates():
    planes = pd.DataFrame(
        {
            "model": "m",
            "layer": 0,
            "head": 0,
            "plane": [0, 1],
            "var_share": [0.6, 0.3],
            "angle_r": [0.9, -0.2],
            "active": [1.0, 0.0],
        }
    )
    data = collagedata.prepare_complement(study([{"r_q": 0, "r_k": 0}], points=points(), planes=planes))
    assert data["plane"].unique().tolist() == [0, 1]
    assert "1 of 2 planes turns beyond chance, 1 of them closely" in collages.say_complement(data)[0]
    assert collagedata.by_strength(data) == [0, 1]
    swapped = data.assign(angle_r=data["plane"].map({0: 0.1, 1: 0.9}))
    assert collagedata.by_strength(swapped) == [1, 0]
    with pytest.raises(NotApplicable, match="no coordinates of the complement"):
        collagedata.prepare_complement(
            study([{"r_q": 0, "r_k": 0}], points=points().drop(columns=[f"svd_{i}" for i in range(4)]))
        )


def test_scaled_positions_are_shares_of_the_window_or_of_the_largest_position_shown():
    rows = [{"r_q": 0, "r_k": 0}]
    known = study(rows, points=points(), runs=[StudyRun("m", window=199)])
    data = collagedata.scale_positions(known, collagedata.prepare_plane(known))
    vectors = data[data["kind"].isin(["q", "k"])]
    np.testing.assert_allclose(vectors["scaled_position"], vectors["position"] / 198)
    assert data.loc[data["kind"].str.startswith("line"), "scaled_position"].isna().all()
    unknown = study(rows, points=points())
    queries = collagedata.prepare_components(unknown).query("kind == 'q'")
    scaled = collagedata.scale_positions(unknown, queries)["scaled_position"]
    np.testing.assert_allclose(scaled, queries["position"] / 98)
    assert (scaled.min(), scaled.max()) == (0, 1)


def test_positions_are_scaled_by_the_window_of_their_own_run():
    frame = pd.concat([points(), points(model="n"), points(model="o")])
    runs = [StudyRun("m", window=100), StudyRun("n", window=991), StudyRun("o")]
    several = study([{"r_q": 0, "r_k": 0}], points=frame, runs=runs)
    data = collagedata.prepare_plane(several, [("m", 0, 0), ("n", 0, 0), ("o", 0, 0)])
    largest = collagedata.scale_positions(several, data).groupby("model")["scaled_position"].max()
    assert largest.to_dict() == pytest.approx({"m": 1.0, "n": 0.1, "o": 1.0})


@pytest.mark.parametrize("window", [None, 1])
def test_a_single_position_is_scaled_to_zero(window):
    alone = study([{"r_q": 0, "r_k": 0}], points=points(position=0), runs=[StudyRun("m", window=window)])
    data = collagedata.scale_positions(alone, collagedata.prepare_components(alone))
    assert data["scaled_position"].eq(0).all()
    collages.draw_components(data)


def test_without_points_collages_say_what_to_do():
    with pytest.raises(NotApplicable, match=r"analyze --points"):
        collagedata.prepare_plane(study([{"r_q": 0, "r_k": 0}]))


# ---- the published shape -------------------------------------------------------------------------


def test_the_published_shape_fills_every_figure(tmp_path):
    whole = published_shape(tmp_path, heads=40)
    assert depth.R_Q.prepare(whole)["model"].unique().tolist() == list(MODELS)
    assert "NoPE" not in set(depth.R_Q.prepare(whole)["bin"])
    over = depth.R_K_TRAINING.prepare(whole)
    assert over["model"].unique().tolist() == [name for name, _, _ in CHECKPOINTS]
    assert "NoPE" in set(over["bin"])
    assert scatter.prepare_portraits(whole)["model"].nunique() == 6
    assert training.prepare_signal(whole)["phase"].tolist() == [phase for _, phase, _ in CHECKPOINTS]


def test_a_model_without_any_rotary_encoding_is_drawn_and_described():
    rows = [{"layer": layer, "r_q": 0.2, "r_k": 0.1} for layer in range(4)]
    data = depth.R_K.prepare(study(rows, runs=[StudyRun("m", nope_layers=frozenset(range(4)))]))
    assert "nothing to compare" in depth.R_K.says(data)[0]
    depth.R_K.draw(data)


def test_ticks_of_maps_are_heads_and_layers_and_those_of_colours_have_no_common_factor():
    index = [{"layer": layer, "head": h, "decay": 1e-5 * h} for layer in (3, 11) for h in range(4)]
    with house_style():
        drawn = headmap.draw_map(headmap.prepare_map(study(index, "heads"), "decay"))
        drawn.draw_without_rendering()
    cell, bar = drawn.axes
    assert [tick.get_text() for tick in cell.get_yticklabels()] == ["3", "11"]
    assert [tick.get_text() for tick in cell.get_xticklabels()] == ["0", "1", "2", "3"]
    assert bar.xaxis.get_offset_text().get_text() == ""
    assert "1.6e-05" in [tick.get_text() for tick in bar.get_xticklabels()]


def curve(model: str, head: int, fall: float, offset: float) -> pd.DataFrame:
    """A head's curve that falls by so much per doubling, and lies above its prediction by a constant."""
    low = 2.0 ** np.arange(6)
    score = 3 - fall * np.arange(6)
    return pd.DataFrame({"model": model, "family": "", "layer": 0, "head": head, "distance_low": low,
                         "distance_high": 2 * low, "measured": score + offset, "predicted": score})  # fmt: skip


def test_the_curve_of_the_first_screen_is_the_mean_over_heads_apart_from_constants():
    curves = pd.concat([curve(m, h, fall + h, 5 * h) for m, fall in (("a", 0.5), ("b", -1.5)) for h in (0, 1)])
    drawn = hero.HERO.prepare(Study((StudyRun("a"), StudyRun("b")), {"distance": curves}))
    for name, fall in (("a", 1.0), ("b", -1.0)):
        of_run = drawn[drawn["series"] == name]
        np.testing.assert_allclose(np.diff(of_run["measured"]), -fall)
        np.testing.assert_allclose(of_run["measured"], of_run["predicted"], atol=1e-12)
        assert of_run["measured"].mean() == pytest.approx(0)
        assert (of_run["low"] <= of_run["measured"] + 1e-12).all()
    said = hero.HERO.says(drawn)
    assert [" falls " in said[0], " rises " in said[1]] == [True, True]
    hero.HERO.draw(drawn)


def test_a_single_run_shows_the_heads_with_most_position_and_most_content():
    parts = {"part_key": 0.1, "part_query": 0.1}
    rows = [
        {"head": h, "part_position": p, "part_content": 0.8 - p, "head_class": kind} | parts
        for h, (p, kind) in enumerate([(0.2, "content"), (0.6, "position"), (0.8, "flat"), (0.3, "mixed")])
    ]
    curves = pd.concat([curve("m", h, 1.0, 0.0) for h in range(4)])  # fmt: skip
    one = study(rows, "heads", distance=curves)
    assert hero.heads_of_interest(one) == {"position": (0, 1), "content": (0, 0)}
    drawn = hero.HERO.prepare(one)
    assert list(drawn["series"].unique()) == ["layer 0, head 1 (most position)", "layer 0, head 0 (most content)"]
    hero.HERO.draw(drawn)


def reaching(model: str, layer: int, reach: int, fall: float) -> pd.DataFrame:
    """The curve of a head that sees so far, in eight bins of its own."""
    edges = np.geomspace(1, reach + 1, 9).round()
    middle = np.log2(edges[:-1] * (edges[1:] - 1)) / 2
    return pd.DataFrame({"model": model, "family": "", "layer": layer, "head": 0, "distance_low": edges[:-1],
                         "distance_high": edges[1:] - 1, "measured": -fall * middle, "predicted": -fall * middle,
                         "distance_r2": 1.0})  # fmt: skip


def two_reaches() -> Study:
    """One model whose layers all see everything, and one with sliding layers between others; gaps between layers."""
    layers = {"far": dict.fromkeys((0, 4, 9), 8191), "slides": {0: 511, 5: 8191, 6: 511, 17: 8191}}
    curves = [reaching(m, layer, reach, 1.0) for m, of_model in layers.items() for layer, reach in of_model.items()]
    runs = (StudyRun("far"), StudyRun("slides", sliding_layers=frozenset({0, 6})))
    return Study(runs, {"distance": pd.concat(curves, ignore_index=True)})


def test_the_first_curve_of_a_model_with_sliding_layers_goes_as_far_as_all_its_heads_see():
    """Bins of sliding heads and of others differ; both fall by one per doubling, so do their means, on one height."""
    drawn = hero.HERO.prepare(two_reaches())
    ends = drawn.groupby("series")["distance_high"].max()
    assert ends["far"] == 8191
    assert 400 < ends["slides"] <= 511
    for _, of_run in drawn.groupby("series"):
        middle = np.log2(of_run["distance_low"] * of_run["distance_high"]) / 2
        slope, _ = np.polyfit(middle, of_run["measured"], 1)
        assert slope == pytest.approx(-1, abs=0.02)
        np.testing.assert_allclose(of_run["high"], of_run["low"], atol=0.5)
    said = hero.HERO.says(drawn)
    assert said[0].startswith("far: the mean over 3 heads falls by")
    assert "from a distance of 1" in said[0]
    assert "band holds" in hero.HERO.caption(drawn)
    assert "band" not in hero.HERO.caption(drawn.assign(n_heads=1)), "a caption promises what is drawn"


def test_curves_by_depth_keep_layers_that_see_everything_apart_and_show_each_run():
    data = distance.prepare_depth_curves(two_reaches())
    assert data.groupby("model")["part"].unique().map(list).to_dict() == {"far": [0, 1, 2], "slides": [0, 1, 3]}
    slides = data[data["model"] == "slides"].groupby("part")
    assert slides["distance_high"].max().to_dict() == {0: 511, 1: 511, 3: 8191}
    assert slides["layers"].first().to_dict() == {0: "0", 1: "6", 3: "5 17"}
    far, near = distance.say_depth_curves(data)
    assert far.startswith("far: the mean score changes with distance by 11.69 logits in")
    assert "in layers 5, 17, which see everything; that is the most, and" in near
    assert near.endswith(", with a sliding window, the least.")
    distance.draw_depth_curves(data)


def test_a_slope_over_the_window_is_over_the_reach_where_the_window_slides():
    rows = [{"layer": layer, "head": h, "r_k_a": 0.9, "bias_strength": 0.1, "bias_window": 0.1 * reach}
            for layer, reach in ((0, 64), (1, 1000)) for h in range(3)]  # fmt: skip
    for sliding in ({0}, set()):
        one = study(rows, "rotated", [StudyRun("m", window=1000, sliding_layers=frozenset(sliding))])
        said = " ".join([*bias.HISTOGRAMS.says(bias.HISTOGRAMS.prepare(one)),
                         *depth.say_rotation(depth.prepare_rotation(one))])  # fmt: skip
        assert ("their reach" in said) is bool(sliding)
        assert "+100 over the window, in favour of later keys" in said, "the layer with the strongest does not slide"
        depth.draw_rotation(depth.prepare_rotation(one))
        bias.draw_histograms(bias.prepare_histograms(one))


# ---- beyond the published set --------------------------------------------------------------------


def test_the_spectrum_says_which_planes_carry_half_of_the_bias():
    rows = [
        {"view": "rope", "plane": p, "theta": 10.0**-p, "cycles": 100 * 10.0**-p, "var_share": 0.25, "lock_q": 0.5,
         "lock_k": 0.7, "bias_part": b, "bias_share": b}
        for p, b in enumerate([0.0, 0.1, 0.6, 0.3])
    ]  # fmt: skip
    rows += [{"view": "svd", "plane": 0, "var_share": 1.0}]
    data = ropeplanes.prepare_spectrum(study(rows, "planes"))
    assert len(data) == 4
    assert "1 of 4 planes carries half of the bias, at 1 turns over the window" in ropeplanes.say_spectrum(data)[0]
    ropeplanes.draw_spectrum(data)
    assert "Below, each head's share" in ropeplanes.SPECTRUM.caption(data)
    two = ropeplanes.prepare_spectrum(study([row | {"model": m} for m in "ab" for row in rows], "planes"))
    assert ropeplanes.SPECTRUM.says(two)[0] == f"In each run: {ropeplanes.say_spectrum(data)[0]}"
    assert "Below" not in ropeplanes.SPECTRUM.caption(two)
    ropeplanes.draw_spectrum(two)


def test_distance_curves_show_heads_from_the_worst_to_the_best_and_all_of_them_in_the_histogram():
    rows = [
        {"head": h, "distance_low": d, "distance_high": 2 * d, "measured": 1.0, "measured_se": 0.1, "predicted": 0.9,
         "distance_r2": h / 10}
        for h in range(10) for d in (1, 2, 4)
    ]  # fmt: skip
    data = distance.prepare_curves(study(rows, "distance"))
    curves = data[data["measured"].notna()]
    assert curves["head"].unique().tolist() == [0, 1, 3, 5, 7, 9]
    assert data["measured"].isna().sum() == 10
    assert "the median R² is 0.450" in distance.say_curves(data)[0]
    distance.draw_curves(data)


def test_the_audit_compares_formulas_head_by_head():
    heads = pd.DataFrame({"model": "m", "family": "", "layer": 0, "head": [0, 1], "posvar_q": [0.1, 0.2]})
    heads = heads.assign(posvar_q_published=heads["posvar_q"] * 3, posvar_k=0.1, posvar_k_published=0.1)
    data = formulas.prepare_audit(study([{"head": 0, "r_q": 0, "r_k": 0}], heads=heads))
    assert data["posvar_q_published"].tolist() == pytest.approx([0.3, 0.6])
    said = formulas.AUDIT.says(data)
    assert "For queries the published formula gives 3 times the exact linear share in the median head" in said[0]
    assert said[0].endswith("is the larger in 0 of 2 heads.")
    other = data.assign(posvar_q_published=data["posvar_q"] / 2)
    assert formulas.AUDIT.says(other)[0].endswith("is the larger in 2 of 2 heads.")
    formulas.draw_audit(data)


def test_queries_and_keys_are_told_apart_in_greyscale():
    """Relative luminance of the two fills of the picture itself."""
    rows = [{"head": h, "k_head": h, "pc": pc, "r_q": 0.8, "r_k": 0.7, "explained_variance": 0.3}
            for h in range(2) for pc in range(4)]  # fmt: skip
    with house_style():
        picture = rendered(components.draw_roles(components.prepare_roles(study(rows))), "png")
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    coloured = np.ptp(colours.astype(int), axis=1) > 40
    two = colours[coloured][np.argsort(counts[coloured])[-2:]] / 255
    linear = np.where(two <= 0.04045, two / 12.92, ((two + 0.055) / 1.055) ** 2.4)
    dark, light = sorted(linear @ [0.2126, 0.7152, 0.0722])
    assert (light + 0.05) / (dark + 0.05) > 3, two
