import numpy as np
import pytest
from scipy.stats import special_ortho_group
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from qkscope.analyses.complement import circles, complement_axes, line_accuracy, measure_planes
from qkscope.analyses.rotationmodel import rotation_model
from qkscope.analyses.spectrum import Circle, chance_coherence, token_positions
from qkscope.core.planted import Ring, plant
from qkscope.core.rows import Coordinates, Pair, Rows
from tests.helpers import moments_of_rows

WINDOW = 2048
RINGS = [Ring(0.9, 6.0, 6.0, 0.0, 2.0), Ring(0.11, 5.0, 5.0), Ring(0.017, 4.0, 4.0, 1.0, -1.0)]


def measured(d: int = 32, rings: list[Ring] = RINGS, turn: np.ndarray | None = None, seed: int = 3):
    head = plant(
        d, mu_q=(2.0, 9.0), mu_k=(-1.0, -9.0), rings=rings, n=2500, documents=20,
        window=WINDOW, alpha_q=4e-3, alpha_k=6e-3,
        sigma=np.linspace(0.5, 0.7, d), sigma_document=0.1, seed=seed,
    )  # fmt: skip
    turn = np.eye(d) if turn is None else turn
    q, k = (Rows(rows.x @ turn.T, rows.position, rows.example_id) for rows in (head.q, head.k))
    pair = Pair(q.ordered(), k.ordered())
    moments = moments_of_rows(q, k, WINDOW)
    model = rotation_model(moments.total_q, moments.total_k)
    return pair, model.a[0], model.b[0]


def circle(pair: Pair, a: np.ndarray, b: np.ndarray) -> Circle:
    return circles([Coordinates.of(pair, np.stack([a, b]))], pair, WINDOW)[0]


def test_planted_rings_are_found_each_in_its_plane():
    pair, a, b = measured()
    found = measure_planes(pair, complement_axes(pair, a, b), WINDOW)
    limit = chance_coherence(*token_positions(pair), WINDOW)
    assert found.active(limit)[:3].all()
    assert np.abs(found.turning.frequency[:3]) == pytest.approx([0.9, 0.11, 0.017], rel=0.01, abs=np.pi / (4 * WINDOW))
    assert found.active(limit)[3:].mean() <= 0.1
    assert (found.turning.resultant[:3] > 0.9).all()
    assert (found.ring[:3] < 0.25).all()
    assert found.ring[5:].mean() == pytest.approx(0.52, abs=0.03)  # a Rayleigh radius: √(4/π − 1)
    assert np.abs(found.qk_accuracy - 0.5).max() < 0.1


def test_the_complement_is_at_right_angles_to_both_axes_and_its_shares_are_of_what_is_left():
    pair, a, b = measured(d=16)
    basis = complement_axes(pair, a, b)
    assert basis.axes.shape == (14, 16)
    np.testing.assert_allclose(basis.axes @ np.stack([a, b]).T, 0, atol=1e-12)
    np.testing.assert_allclose(basis.axes @ basis.axes.T, np.eye(14), atol=1e-9)
    assert basis.share.sum() == pytest.approx(1)
    x = np.concatenate([pair.q.x, pair.k.x])
    off = x - x.mean(0)
    off -= np.outer(off @ a, a) + np.outer(off @ b, b)
    singular = np.linalg.svd(off, compute_uv=False)[:14] ** 2
    np.testing.assert_allclose(basis.share, singular.reshape(7, 2).sum(-1) / singular.sum(), rtol=1e-9)


def test_turning_the_space_turns_the_planes_with_it():
    turn = special_ortho_group.rvs(32, random_state=1)
    plain, turned = measured(), measured(turn=turn)
    one, other = (measure_planes(pair, complement_axes(pair, a, b), WINDOW) for pair, a, b in (plain, turned))
    np.testing.assert_allclose(np.abs(one.angle_r[:3]), np.abs(other.angle_r[:3]), rtol=1e-6)
    np.testing.assert_allclose(one.share, other.share, rtol=1e-6)
    assert circle(*plain).r_squared == pytest.approx(circle(*turned).r_squared, rel=1e-4)


def test_pure_drift_has_its_frequency_at_the_edge():
    assert circle(*measured()).at_edge


def test_the_line_is_fishers():
    rng = np.random.default_rng(0)
    q, k = rng.normal(0, [1, 3], (3, 400, 2)), rng.normal([1, 1], [1, 3], (3, 400, 2))
    for i, accuracy in enumerate(line_accuracy(*(on[..., 0] + 1j * on[..., 1] for on in (q, k)))):
        x, y = np.concatenate([q[i], k[i]]), np.repeat([1, 0], 400)
        assert accuracy == pytest.approx(LinearDiscriminantAnalysis().fit(x, y).score(x, y), abs=0.003)


def test_a_plane_without_extent_is_not_told_apart():
    flat = np.zeros((1, 10), dtype=complex)
    assert line_accuracy(flat, flat)[0] == 0.5


@pytest.mark.parametrize("likeness", [0.0, 0.95])
def test_active_planes_are_the_planted_ones(likeness):
    """Forty heads with none to three rings: every ring is active, at its frequency; of the other planes, 2% at most."""
    rng = np.random.default_rng(int(10 * likeness))
    false, others, limit = 0, 0, None
    for number in range(40):
        rings = [Ring(f, r, r, 0.3, 1.0) for f, r in ((1.1, 6.0), (0.13, 5.0), (0.02, 4.0))[: number % 4]]
        head = plant(16, n=1600, documents=40, window=WINDOW, sigma=0.0, rings=rings, seed=number)
        pair = Pair(*(Rows(r.x + _alike(rng, r, likeness), r.position, r.example_id) for r in (head.q, head.k)))
        found = measure_planes(pair, complement_axes(pair, head.truth.a, head.truth.b), WINDOW)
        limit = limit or chance_coherence(*token_positions(pair), WINDOW)
        active = found.active(limit)
        assert active[: len(rings)].all()
        frequency = np.abs(found.turning.frequency[: len(rings)])
        assert frequency == pytest.approx([ring.frequency for ring in rings], rel=0.01, abs=np.pi / (4 * WINDOW))
        false, others = false + active[len(rings) :].sum(), others + len(active) - len(rings)
    assert false / others <= 0.02


def _alike(rng: np.random.Generator, rows: Rows, likeness: float) -> np.ndarray:
    """Gaussian noise of which tokens that are one position apart have this correlation, within documents."""
    noise = rng.standard_normal(rows.x.shape)
    gap = np.r_[0, np.diff(rows.position)]
    new = np.r_[True, np.diff(rows.example_id) != 0]
    keep = np.where(new, 0.0, likeness ** np.maximum(gap, 1))
    for i in range(1, len(noise)):
        noise[i] = keep[i] * noise[i - 1] + np.sqrt(1 - keep[i] ** 2) * noise[i]
    return noise
