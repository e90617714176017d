import numpy as np
import pandas as pd
import pytest

from qkscope.errors import TableError
from qkscope.results.side import POINTS


def points(model: str, head: int, value: float, *names: str) -> pd.DataFrame:
    index = {"model": model, "layer": 0, "head": head, "kind": ["q", "k"], "example_id": 0, "position": [1, 2]}
    return pd.DataFrame(index | {name: np.float32(value) for name in names or ("pc0", "a", "b")})


def test_points_of_a_head_are_replaced_and_those_of_others_kept(tmp_path):
    assert POINTS.read(tmp_path) is None
    POINTS.write(tmp_path, pd.concat([points("m", 0, 1.0), points("m", 1, 2.0), points("n", 0, 3.0)]))
    POINTS.write(tmp_path, points("m", 1, 9.0))
    found = POINTS.read(tmp_path)
    assert found.groupby(["model", "head"])["a"].first().to_dict() == {("m", 0): 1.0, ("m", 1): 9.0, ("n", 0): 3.0}
    assert len(found) == 6


def test_columns_stand_in_the_order_of_their_numbers_and_absent_ones_are_empty(tmp_path):
    POINTS.write(tmp_path, points("m", 0, 1.0, "svd_10", "svd_2", "b", "a", "pc1", "pc0"))
    POINTS.write(tmp_path, points("m", 1, 1.0, "pc0", "pc3", "a", "b"))
    found = POINTS.read(tmp_path)
    assert list(found)[6:] == ["pc0", "pc1", "pc3", "a", "b", "svd_2", "svd_10"]
    assert found.loc[found["head"] == 1, "svd_2"].isna().all()


def test_files_that_are_not_points_are_named(tmp_path):
    (tmp_path / POINTS.file).write_bytes(b"nothing")
    with pytest.raises(TableError, match=r"points.parquet cannot be read"):
        POINTS.read(tmp_path)
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / POINTS.file)
    with pytest.raises(TableError, match=r"points.parquet has no column model"):
        POINTS.read(tmp_path)
