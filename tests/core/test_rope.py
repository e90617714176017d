import numpy as np
import pytest

from qkscope.core.rope import Rope

THETA = np.array([1.0, 0.3, 0.01])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("start", [0, 2])
def test_undoing_the_rotation_gives_the_vector_that_was_rotated(layout, sign, start):
    rope = Rope(THETA, layout, start, sign)
    rng = np.random.default_rng(0)
    plain, position = rng.normal(size=(50, 9)), rng.integers(0, 5000, 50)
    rotated = plain.copy()
    for m, (u, v) in enumerate(rope.pairs):
        angle = sign * THETA[m] * position
        rotated[:, u] = np.cos(angle) * plain[:, u] - np.sin(angle) * plain[:, v]
        rotated[:, v] = np.sin(angle) * plain[:, u] + np.cos(angle) * plain[:, v]
    np.testing.assert_allclose(rope.unrotated(rotated, position), rope.planes_of(plain), atol=1e-9)


def test_planes_and_the_rest_share_out_the_coordinates():
    rope = Rope(THETA, "half", 1)
    assert rope.pairs.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert rope.rest(8).tolist() == [0, 7]
    assert Rope(THETA, "interleaved").pairs.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert Rope(THETA).rest(6).tolist() == []
