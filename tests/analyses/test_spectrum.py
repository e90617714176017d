import numpy as np
import pytest

from qkscope.analyses.spectrum import Circle, Grid, TokenPositions, chance_coherence, fit_circles, turning

WINDOW = 1024


def turning_of(angle_q, angle_k, tokens_q, tokens_k, window):
    """``turning`` from angles."""
    return turning(np.exp(1j * angle_q), np.exp(1j * angle_k), tokens_q, tokens_k, window)


def fit_circle(w_q: np.ndarray, w_k: np.ndarray, q: TokenPositions, k: TokenPositions, window: int) -> Circle:
    return fit_circles([(w_q, w_k)], q, k, window)[0]


def tokens(rng: np.random.Generator, documents: int = 16, each: int = 128) -> TokenPositions:
    position = np.concatenate([np.sort(rng.choice(WINDOW, each, replace=False)) for _ in range(documents)])
    return TokenPositions(np.repeat(np.arange(documents), each), position)


@pytest.fixture
def classes():
    rng = np.random.default_rng(0)
    return tokens(rng), tokens(rng), rng


@pytest.mark.parametrize("omega", [0.01, -0.01, 0.37, -2.9])
def test_the_frequency_of_a_noisy_rotation_is_found_with_its_sign(classes, omega):
    q, k, rng = classes
    noise = rng.normal(0, 0.8, (2, len(q)))
    found = turning_of(
        (omega * q.position + 1 + noise[0])[None], (omega * k.position - 2 + noise[1])[None], q, k, WINDOW
    )
    assert found.frequency[0] == pytest.approx(omega, rel=0.01, abs=2 * np.pi / (4 * WINDOW))
    # A slow rotation does not come round to a mean of zero within the window, which costs it a little.
    assert found.resultant[0] == pytest.approx(np.exp(-(0.8**2) / 2), abs=0.05)
    assert found.coherence[0] > 14


def test_rings_in_antiphase_do_not_cancel(classes):
    q, k, _ = classes
    found = turning_of((0.3 * q.position)[None], (0.3 * k.position + np.pi)[None], q, k, WINDOW)
    # The grid comes within half a step of 0.3, which costs little.
    assert found.resultant[0] > 0.95


def test_the_grid_agrees_with_the_sum_it_stands_for(classes):
    q, k, rng = classes
    angles = rng.uniform(-np.pi, np.pi, (2, len(q)))
    found = turning_of(angles[:1], angles[1:], q, k, WINDOW)
    grid = Grid(WINDOW).frequencies
    centred = [np.exp(1j * angle) - np.exp(1j * angle).mean() for angle in angles]
    by_hand = sum(
        np.abs((e * np.exp(-1j * grid[:, None] * at.position)).sum(-1)) for e, at in zip(centred, (q, k), strict=True)
    )
    by_hand[0] = 0
    assert found.resultant[0] == pytest.approx(by_hand.max() / (2 * len(q)), rel=1e-6)


def test_chance_is_passed_by_one_percent_of_structureless_planes(classes):
    q, k, rng = classes
    limit = chance_coherence(q, k, WINDOW)
    angles = rng.uniform(-np.pi, np.pi, (2, 400, len(q)))
    passed = turning_of(angles[0], angles[1], q, k, WINDOW).coherence > limit
    assert passed.mean() <= 0.03


def test_content_that_depends_on_its_neighbours_does_not_pass_for_rotation(classes):
    q, k, rng = classes
    limit = chance_coherence(q, k, WINDOW)

    def walk(at: TokenPositions) -> np.ndarray:
        """Angles of a smooth process along each document, a new one in each."""
        steps = rng.normal(0, 0.05, (400, 16, WINDOW)).cumsum(-1) + rng.uniform(-np.pi, np.pi, (400, 16, 1))
        return steps[:, at.example_id, at.position]

    assert (turning_of(walk(q), walk(k), q, k, WINDOW).coherence > limit).mean() <= 0.03


def test_the_order_of_planes_does_not_matter(classes):
    q, k, rng = classes
    angles = rng.uniform(-np.pi, np.pi, (2, 5, len(q)))
    whole = turning_of(angles[0], angles[1], q, k, WINDOW)
    backwards = turning_of(angles[0][::-1], angles[1][::-1], q, k, WINDOW)
    np.testing.assert_array_equal(whole.frequency, backwards.frequency[::-1])
    np.testing.assert_allclose(whole.coherence, backwards.coherence[::-1])


def test_a_circle_between_two_centres_is_found(classes):
    q, k, rng = classes
    noise = rng.normal(0, 0.5, (2, len(q), 2)) @ np.array([1, 1j])
    w = [3 * np.exp(0.02j * at.position) + centre + e for at, centre, e in zip((q, k), (5, -5j), noise, strict=True)]
    fit = fit_circle(*w, q, k, WINDOW)
    assert fit.omega == pytest.approx(0.02, abs=2 * np.pi / (8 * WINDOW))
    assert fit.r_squared == pytest.approx(9 / 9.5, abs=0.02)
    assert not fit.at_edge


def test_a_pure_drift_lies_at_the_edge(classes):
    q, k, _ = classes
    fit = fit_circle(*(at.position / WINDOW + 0j for at in (q, k)), q, k, WINDOW)
    assert fit.at_edge
    assert abs(fit.omega) == pytest.approx(2 * np.pi / (4 * WINDOW))


def test_what_does_not_vary_has_no_frequency(classes):
    q, k, _ = classes
    assert np.isnan(fit_circle(np.ones(len(q), complex), np.ones(len(k), complex), q, k, WINDOW).omega)


def test_a_cloud_off_the_centre_does_not_pass_for_slow_rotation(classes):
    q, k, rng = classes
    noise = rng.normal(0, 0.3, (2, 1, len(q)))
    still = turning_of(1.0 + noise[0], -2.0 + noise[1], q, k, WINDOW)
    assert still.resultant[0] < 0.1
    assert still.coherence[0] < chance_coherence(q, k, WINDOW)


def test_a_ring_off_the_centre_is_found(classes):
    q, k, _ = classes

    def angle(at: TokenPositions, centre: float) -> np.ndarray:
        return np.angle(centre + np.exp(0.3j * at.position))[None]

    found = turning_of(angle(q, 1.5), angle(k, -1.5), q, k, WINDOW)
    assert abs(found.frequency[0]) == pytest.approx(0.3, rel=0.01)
    assert found.coherence[0] > 10


def test_nothing_turns_where_nothing_varies_with_position():
    """All of w cancels at every position: no frequency fits better than another, and none fits."""
    at = TokenPositions(np.zeros(40, dtype=np.int64), np.repeat(np.arange(20), 2))
    w = np.tile([1.0 + 0j, -1.0], 20)
    assert fit_circle(w, w, at, at, 64).r_squared == pytest.approx(0.0, abs=1e-12)
    one_place = TokenPositions(np.arange(40), np.zeros(40, dtype=np.int64))
    assert np.isnan(fit_circle(w, w, one_place, one_place, 64).omega)
    still = turning_of(np.zeros((1, 40)), np.zeros((1, 40)), at, at, 64)
    assert (still.resultant[0], still.coherence[0]) == (0.0, 0.0)
    assert still.frequency[0] == pytest.approx(2 * np.pi / 256)


def test_positions_of_another_type_are_read_as_they_are(classes):
    q, k, _ = classes
    w = [np.exp(0.02j * at.position) for at in (q, k)]
    narrow = [TokenPositions(at.example_id, at.position.astype(np.int32)) for at in (q, k)]
    assert fit_circle(*w, *narrow, WINDOW) == fit_circle(*w, q, k, WINDOW)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e16, 1e20])
def test_the_scale_of_a_circle_does_not_matter(classes, scale):
    q, k, rng = classes
    w = [np.exp(0.3j * at.position) + 0.2 * rng.standard_normal(len(at)) for at in (q, k)]
    plain, scaled = fit_circle(*w, q, k, WINDOW), fit_circle(*(scale * one for one in w), q, k, WINDOW)
    assert scaled.omega == plain.omega
    assert scaled.r_squared == pytest.approx(plain.r_squared, rel=1e-9)
