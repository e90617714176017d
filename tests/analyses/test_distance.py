import json
from dataclasses import replace

import numpy as np
import pytest

import qkscope
from qkscope.analyses.distancecurve import bin_edges, distance_curve, score_pairs
from qkscope.analyses.meanfield import mean_field
from qkscope.analyses.ropeplanes import rope_planes
from qkscope.core.headmoments import group_moments, undone_sums
from qkscope.core.moments import Moments
from qkscope.core.rope import HeadRotary, Rope
from qkscope.core.rows import Pair, Rows
from qkscope.core.visible import VisibleKeys
from qkscope.errors import QkscopeError
from qkscope.files.dataset import write_dataset
from qkscope.headids import HeadId

WINDOW, D = 1024, 12
SIGHT = VisibleKeys(WINDOW)
ROPE = Rope(np.array([1.0, 0.2, 0.03, 0.002]), "half", 0, 1)
"""Four planes, and four coordinates that are not rotated."""


def rotated(plain: np.ndarray, position: np.ndarray, rope: Rope = ROPE) -> np.ndarray:
    x = plain.copy()
    turned = rope.planes_of(plain) * np.exp(1j * rope.sign * position[:, None] * rope.frequencies)
    x[:, rope.pairs[:, 0]], x[:, rope.pairs[:, 1]] = turned.real, turned.imag
    return x


def head(noise: float, documents: int = 20, each: int = 40, seed: int = 0, rope: Rope = ROPE):
    """A head whose queries and keys are their means plus noise: mean-field by construction."""
    rng = np.random.default_rng(seed)
    mean_q, mean_k = rng.normal(size=(2, D))
    position = np.concatenate([np.sort(rng.choice(WINDOW, each, replace=False)) for _ in range(documents)])
    example = np.repeat(np.arange(documents), each)
    q, k = (
        Rows(rotated(m + noise * rng.normal(size=(len(position), D)), position, rope), position, example)
        for m in (mean_q, mean_k)
    )
    rotary = HeadRotary(rope, undone_sums(q, rope), undone_sums(k, rope))
    return Pair(q, k), rotary, (mean_q, mean_k)


def moments(rows: Rows) -> Moments:
    return Moments.from_rows(rows.x, rows.position)


def curve(pair: Pair, rotary: HeadRotary, scaling: float = 0.5):
    field = mean_field(rotary, group_moments(pair.q), group_moments(pair.k), scaling)
    return field, distance_curve(score_pairs(pair, scaling, SIGHT), field, WINDOW // 2)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("sign", [1, -1])
def test_without_noise_prediction_and_measurement_are_one(layout, sign):
    rope = Rope(ROPE.frequencies, layout, 2, sign)
    pair, rotary, _ = head(0.0, rope=rope)
    field, found = curve(pair, rotary)
    np.testing.assert_allclose(found.predicted, found.measured, atol=1e-9)
    assert found.r2 == pytest.approx(1)
    assert found.position_share_of_score[0] == pytest.approx(1)
    np.testing.assert_allclose(found.content_offset, 0.0, atol=1e-9)
    assert found.worst < 1e-9
    pairs = score_pairs(pair, 0.5, SIGHT)
    np.testing.assert_allclose(field.curves(pairs.index.distance)[0], pairs.score, atol=1e-9)


def test_with_noise_the_prediction_lies_within_the_standard_errors():
    pair, rotary, _ = head(1.0, documents=60, seed=3)
    _, found = curve(pair, rotary)
    z = (found.measured - found.predicted) / found.measured_se
    assert np.abs(z).max() < 4
    assert np.mean(np.abs(z) < 2) > 0.8
    assert 0 < found.position_share_of_score[0] < 0.5


def test_standard_errors_are_those_of_independent_documents():
    spread, claimed = [], []
    for seed in range(40):
        pair, rotary, _ = head(1.0, documents=12, seed=seed)
        _, found = curve(pair, rotary)
        known = found.low >= 64
        spread.append((found.measured - found.predicted)[known][:5])
        claimed.append(found.measured_se[known][:5])
    # The means move with the sample too, so the difference is a little narrower than the measurement alone.
    ratio = np.std(spread, axis=0) / np.mean(claimed, axis=0)
    assert 0.4 < ratio.mean() < 1.3


def test_pairs_are_of_one_document_with_the_query_after_the_key():
    q = Rows(np.eye(3), np.array([5, 9, 2]), np.array([0, 0, 1]))
    k = Rows(np.eye(3), np.array([4, 9, 1]), np.array([0, 0, 1]))
    pairs = score_pairs(Pair(q, k), 2.0, SIGHT)
    groups = pairs.index.group.tolist()
    assert sorted(zip(groups, pairs.index.distance.tolist(), pairs.score.tolist(), strict=True)) == [
        (0, 1, 2.0),
        (0, 5, 0.0),
        (1, 1, 2.0),
    ]


def test_a_temperature_of_the_query_is_multiplied_back():
    pair, rotary, _ = head(0.0)
    factor = 1 + np.arange(WINDOW) / WINDOW
    hot = Pair(Rows(pair.q.x * factor[pair.q.position][:, None], pair.q.position, pair.q.example_id), pair.k)
    field = mean_field(replace(rotary, temperature=factor), group_moments(pair.q), group_moments(pair.k), 1.0)
    found = distance_curve(score_pairs(hot, 1.0, SIGHT), field, WINDOW // 2)
    np.testing.assert_allclose(found.predicted, found.measured, atol=1e-9)


def test_no_pairs_give_an_empty_curve():
    one = Rows(np.ones((1, D)), np.array([3]), np.array([0]))
    _, rotary, _ = head(0.0)
    field = mean_field(rotary, group_moments(one), group_moments(one), 1.0)
    found = distance_curve(score_pairs(Pair(one, one), 1.0, SIGHT), field, WINDOW // 2)
    assert len(found.low) == 0
    assert np.isnan(found.r2)


@pytest.mark.parametrize("window", [2, 16, 1000, 131072])
def test_bins_cover_every_distance_once(window):
    edges = bin_edges(window)
    assert edges[0] == 1
    assert edges[-1] == max(window, 2)
    assert (np.diff(edges) > 0).all()


# ---- RoPE's own planes ---------------------------------------------------------------------------


def test_parts_of_planes_add_up_to_the_bias_and_shares_to_one():
    pair, rotary, _ = head(0.5)
    q, k = moments(pair.q), moments(pair.k)
    found = rope_planes(rotary, q, k, pair, WINDOW)
    assert len(found.theta) == 5  # four planes and what is not rotated
    assert found.theta[-1] == 0
    assert found.bias_part.sum() == pytest.approx(float(q.mean_x @ k.cov_xt / k.var_t), rel=1e-9)
    assert found.var_share.sum() == pytest.approx(1)
    assert found.bias_share.sum() == pytest.approx(1)
    np.testing.assert_allclose(found.cycles[:4], ROPE.frequencies * WINDOW / (2 * np.pi))


def test_locks_are_one_without_noise_and_fall_with_it():
    still, noisy = (rope_planes(r, moments(p.q), moments(p.k), p, WINDOW) for p, r, _ in (head(0.0), head(3.0)))
    np.testing.assert_allclose(still.lock_q, 1)
    np.testing.assert_allclose(still.lock_k, 1)
    assert (noisy.lock_q < 0.75).all()


# ---- datasets that say how they were rotated -----------------------------------------------------


def write(folder, rope: dict | None, seed: int = 0):
    """A dataset of one head that is mean-field by construction, with the card as given."""
    theta = Rope(100.0 ** (-2.0 * np.arange(6) / D))
    pair, _, _ = head(0.5, documents=40, each=60, seed=seed, rope=theta)
    heads = [(HeadId(0, 0, "q"), pair.q), (HeadId(0, 0, "k"), pair.k)]
    return write_dataset(folder, heads, q_per_kv=1, window=WINDOW, rope=rope), theta


@pytest.mark.parametrize("layers", [False, True])
def test_a_dataset_that_states_its_rotation_has_a_curve_and_planes(tmp_path, layers):
    rope = (
        {"layers": {"0": {"frequencies": (100.0 ** (-2.0 * np.arange(6) / D)).tolist()}}} if layers else {"theta": 100}
    )
    folder, theta = write(tmp_path / "data", rope)
    run = qkscope.open(folder)
    tables = qkscope.tables(run)
    assert tables["heads"]["distance_r2"].iloc[0] > 0.98
    planes = tables["planes"].query("view == 'rope'")
    np.testing.assert_allclose(planes["theta"], theta.frequencies, rtol=1e-12)
    assert planes["bias_part"].sum() == pytest.approx(tables["rotated"]["bias_full"].iloc[0], rel=1e-9)
    assert tables["plasticity"]["ap_fixed"].notna().all()
    assert not tables["rotated"]["nope"].iloc[0]


def test_a_rotation_can_be_stated_from_outside(tmp_path):
    folder, _ = write(tmp_path / "data", None)
    assert qkscope.tables(qkscope.open(folder))["distance"].empty
    assert qkscope.distance(qkscope.open(folder, rope={"theta": 100.0}))["distance_r2"].iloc[0] > 0.98
    wrong = qkscope.distance(qkscope.open(folder, rope={"theta": 10_000.0}))["distance_r2"].iloc[0]
    assert wrong < 0.9


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ([1], "expected rope to be an object"),
        ({}, "exactly one of theta and frequencies"),
        ({"theta": 1}, "theta above 1"),
        ({"theta": "big"}, "finite number"),
        ({"theta": 10.0, "freq": 1}, "unknown key rope.freq"),
        ({"frequencies": []}, "finite number"),
        ({"frequencies": [1.0] * 9}, "rotates coordinates 0 to 17, but its vectors have length 12"),
        ({"theta": 10.0, "layout": "odd"}, "layout to be half or interleaved"),
        ({"theta": 10.0, "dims": 1}, "rope.dims"),
        ({"layers": {"x": None}}, "layer numbers as keys"),
        ({"layers": {"0": 3}}, "expected rope to be an object"),
    ],
)
def test_a_rotation_that_makes_no_sense_is_named(tmp_path, rope, said):
    folder, _ = write(tmp_path / "data", None)
    card = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(card | {"rope": rope}))
    with pytest.raises(QkscopeError, match=said):
        qkscope.distance(qkscope.open(folder))
