"""The rows that stand for all rows of a document."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from qkscope.core.rows import evenly_spaced, rows_of


@pytest.mark.parametrize("first", [0, 1, 100, 12_345])
def test_thinning_does_not_depend_on_where_a_document_begins(first):
    """Of 436 rows thinned to 96, spacing computed from row 100 on lost one to rounding."""
    example_id = np.repeat([0, 1, 2], [first, 436, 5])
    expected = [int(Fraction(i * 435, 95)) for i in range(96)]
    assert (rows_of(example_id, 1, 96) - first).tolist() == expected


@pytest.mark.parametrize(
    ("n", "most", "expected"), [(0, 3, []), (1, 3, [0]), (3, 3, [0, 1, 2]), (4, 3, [0, 1, 3]), (5, 1, [0])]
)
def test_few_rows_are_all_kept(n, most, expected):
    assert evenly_spaced(n, most).tolist() == expected
