"""One head: the columns of the table ``heads`` as items and attributes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import qkscope
from qkscope.analyses.catalogue import table_columns
from qkscope.results import runtables
from tests.helpers import small_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = small_dataset(tmp_path_factory.mktemp("d") / "tiny", window=512)
    return qkscope.open(folder, rope={"theta": 10_000.0})


def test_every_column_is_an_item_and_an_attribute_with_the_value_of_the_table(run):
    head, row = run.head(1, 3), qkscope.analyze(run)["heads"].query("layer == 1 and head == 3").iloc[0]
    assert set(row.index) == {column.name for column in table_columns("heads")}
    for name, value in row.items():
        found = head[name]
        if isinstance(value, float) and np.isnan(value):
            assert np.isnan(found), name
        elif isinstance(value, float):
            assert found == pytest.approx(value, rel=1e-9), name
        else:
            assert found is value or found == value, name
    assert (head.layer, head.head, head.decay) == (1, 3, head["decay"])
    assert isinstance(head.part_position, float)


def test_the_row_is_computed_once_for_this_head_alone(run, monkeypatch):
    calls = []
    original = runtables.head_row
    monkeypatch.setattr(runtables, "head_row", lambda *given: calls.append(given[1]) or original(*given))
    head = run.head(0, 1)
    assert "decay" in dir(head)
    assert "rotation" in dir(head)
    assert not hasattr(head, "_repr_png_")
    assert calls == []
    assert [head.decay, head["posvar_q"]] == [head["decay"], head.posvar_q]
    assert calls == [head.id]


def test_what_a_head_computes_itself_comes_first(run):
    head = run.head(1, 3)
    assert head.a.shape == head.b.shape
    assert head.rotation.a is head.a
    assert head.head_class == head["head_class"]
    assert "_row" in vars(head)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_copies_are_equal_and_know_their_columns(run, copied):
    head = copied(run.head(1, 3))
    assert head.id == run.head(1, 3).id
    assert head.posvar_q == run.head(1, 3).posvar_q


def test_unknown_names_are_told_with_the_nearest(run):
    head = run.head(0, 0)
    with pytest.raises(AttributeError, match=r"a head has no 'part_positon'; did you mean part_position"):
        head.part_positon
    with pytest.raises(KeyError, match=r"heads have no column 'dekay'; did you mean decay"):
        head["dekay"]
    with pytest.raises(AttributeError, match=r"a head has no 'zzzz'; dir\(head\) lists all names"):
        head.zzzz
    with pytest.raises(KeyError, match="heads have no column 0"):
        head[0]
