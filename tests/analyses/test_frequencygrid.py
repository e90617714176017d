import numpy as np
import pytest

from qkscope.analyses.spectrum import Grid, strongest


def by_hand(values: np.ndarray, position: np.ndarray, grid: Grid) -> np.ndarray:
    """The sums at every point of the grid, from one transform of full length, counted from the middle."""
    laid = np.zeros(grid.size, complex)
    np.add.at(laid, position, values)
    return np.fft.fft(laid) * np.exp(1j * grid.frequencies * (grid.base // 2))


@pytest.mark.parametrize("window", [5, 100, 1021, 1024, 4100])
def test_transforms_and_the_points_between_them_are_the_sums_they_stand_for(window):
    rng = np.random.default_rng(window)
    grid, position = Grid(window), rng.integers(0, window, 700)
    values = rng.standard_normal((2, 700)) + 1j * rng.standard_normal((2, 700))
    found = grid.even(values, position)
    points = np.tile(np.arange(2 * grid.base), 2)
    between = grid.between(found[None], np.repeat([0, 1], 2 * grid.base), points)[0].reshape(2, -1)
    for row, odd, one in zip(found, between, values, strict=True):
        wanted = by_hand(one, position, grid)
        limit = 2e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(np.abs(row.T.reshape(-1)), np.abs(wanted[::2]), atol=limit)
        np.testing.assert_allclose(odd, wanted[1::2], atol=limit)
        np.testing.assert_allclose(np.abs(grid.everywhere(one, position)), np.abs(wanted), atol=limit)


def test_sums_do_not_depend_on_how_many_are_asked_for():
    rng = np.random.default_rng(0)
    grid, position = Grid(1000), rng.integers(0, 1000, 500)
    parts = rng.standard_normal((5, 500)) + 1j * rng.standard_normal((5, 500))
    together = grid.even(parts, position)
    for part, found in zip(parts, together, strict=True):
        np.testing.assert_array_equal(grid.even(part[None], position)[0], found)


def test_the_frequencies_are_those_of_a_transform():
    grid = Grid(100)
    np.testing.assert_allclose(grid.frequencies, 2 * np.pi * np.fft.fftfreq(grid.size))


@pytest.mark.parametrize("ends", [False, True])
def test_the_search_finds_what_looking_everywhere_finds(ends):
    """The interpolation also holds if a sum comes from both ends of the window, where it varies fastest."""
    rng = np.random.default_rng(1)
    grid = Grid(2000)
    for _ in range(200):
        position = (
            np.r_[rng.integers(0, 30, 100), rng.integers(1970, 2000, 100)] if ends else rng.integers(0, 2000, 200)
        )
        values = rng.standard_normal(200) + 1j * rng.standard_normal(200)
        values -= values.mean()
        wanted = np.abs(by_hand(values, position, grid)) ** 2
        wanted[0] = 0
        even = grid.even(values[None], position)[None]
        (found,) = strongest(grid, even, lambda sums, _: np.abs(sums[0]) ** 2)
        assert wanted[found] > (1 - 1e-4) * wanted.max()


def test_several_signals_are_searched_as_each_alone():
    rng = np.random.default_rng(2)
    grid, position = Grid(700), rng.integers(0, 700, 300)
    values = np.exp(1j * (rng.uniform(-3, 3, (9, 1)) * position + rng.normal(0, 1.2, (9, 300))))
    even = grid.even(values, position)

    def score(sums, _):
        return np.abs(sums[0]) ** 2

    together = strongest(grid, even[None], score)
    assert together.tolist() == [int(strongest(grid, one[None, None], score)[0]) for one in even]


def test_turns_are_the_exponentials():
    grid, position, point = Grid(300), np.array([0, 7, 299]), np.array([1, 5, 1100])
    wanted = np.exp(-1j * grid.frequency(point)[:, None] * position)
    np.testing.assert_allclose(grid.turns(point, position), wanted, atol=1e-12)
