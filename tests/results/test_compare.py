"""Two runs compared: coverage of paired differences, runs that are one, and what cannot be compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qkscope.analyses.catalogue import DECLARED_TABLES
from qkscope.cli.top import heads_as_lines
from qkscope.errors import TableError
from qkscope.results.compare import Comparison, Side, compare_runs, side
from qkscope.results.derived import one_row_per_head, top_heads
from qkscope.results.reader import Folder
from qkscope.results.side import replicate_rows

HEADS, DOCUMENTS = 1000, 32
GROUP = np.arange(DOCUMENTS) % 8


def folder(label: str, by_document: np.ndarray, corpus: str | None = "c", digest: str = "", window: int = 64) -> Folder:
    """Results whose ``decay`` is the mean over documents (heads × documents)."""
    heads = pd.DataFrame({"model": label, "family": "", "layer": np.arange(len(by_document)) // 10})
    heads = heads.assign(head=np.arange(len(by_document)) % 10, k_head=np.arange(len(by_document)) % 10 // 2)
    values = {"decay": np.stack([by_document[:, group != GROUP].mean(1) for group in range(8)], 1)}
    tables = {
        "position": heads.assign(decay=by_document.mean(1), decay_se=0.1),
        "rotated": heads.assign(window=window),
        "replicates": replicate_rows(heads, values),
    }
    source = {"corpus": corpus, "digest": digest or label}
    return Folder(Path(label), tables, {label: {"dataset": source}})


def documents(rng: np.random.Generator, shift: float = 0.0, common: np.ndarray | float = 0.0) -> np.ndarray:
    return 1.0 + shift + common + 0.3 * rng.standard_normal((HEADS, DOCUMENTS))


def compared(a: Folder, b: Folder) -> Comparison:
    return compare_runs(side(a), side(b))


def test_paired_intervals_cover_the_difference_and_are_narrower():
    """Documents differ much, in both runs alike: the difference of two runs on the same documents does not."""
    rng = np.random.default_rng(0)
    common = 2.0 * rng.standard_normal((HEADS, DOCUMENTS))
    a, b = documents(rng, common=common), documents(rng, 0.2, common)
    paired = compared(folder("a", a), folder("b", b)).table
    unpaired = compared(folder("a", a), folder("b", b, corpus="other")).table
    covered = ((paired["low"] < 0.2) & (paired["high"] > 0.2)).mean()
    assert 0.92 < covered < 0.98
    width = [(table["high"] - table["low"]).median() for table in (paired, unpaired)]
    assert width[0] < 0.25 * width[1]


def test_unpaired_intervals_cover_the_difference_of_two_corpora():
    rng = np.random.default_rng(1)
    comparison = compared(folder("a", documents(rng)), folder("b", documents(rng), corpus="other"))
    assert not comparison.paired
    assert "no mean over heads" in comparison.sentence
    assert "different documents" in comparison.sentence, "also where nothing changed"
    assert comparison.table["changed"].mean() < 0.05
    assert (
        "different documents"
        in compared(folder("a", documents(rng)), folder("b", documents(rng, 1.0), corpus="other")).sentence
    )


def test_the_sentence_says_what_changed_in_how_many_heads():
    rng = np.random.default_rng(2)
    common = rng.standard_normal((HEADS, DOCUMENTS))
    comparison = compared(folder("a", documents(rng, 0.5, common)), folder("b", documents(rng, 0.0, common)))
    share = (comparison.table["difference"] < 0).mean()
    assert comparison.sentence.startswith(
        f"From a to b at a window of 64 tokens, decay fell in {share:.0%} of heads (mean "
    )
    assert comparison.main_column == "decay"
    row = comparison.summary.iloc[0]
    assert row["low"] < -0.5 < row["high"] < 0
    assert row["sign_p"] < 1e-9
    most = comparison.changed_most("decay", 5)
    assert most["difference"].abs().is_monotonic_decreasing
    assert (most["changed"] & (most["difference"] < most["difference"].mean() + 1)).all()
    turned = compared(folder("b", documents(rng, 0.0, common)), folder("a", documents(rng, 0.5, common)))
    assert "decay rose in" in turned.sentence


def test_the_same_documents_without_a_change_say_so():
    rng = np.random.default_rng(3)
    common = rng.standard_normal((HEADS, DOCUMENTS))
    comparison = compared(folder("a", documents(rng, 0, common)), folder("b", documents(rng, 0, common)))
    assert "no mean over heads of decay changed beyond its interval" in comparison.sentence
    assert comparison.table["changed"].mean() < 0.08


def test_one_run_twice_is_one_run():
    values = documents(np.random.default_rng(4))
    comparison = compared(folder("a", values, digest="d"), folder("b", values, digest="d"))
    assert comparison.sentence == "a and b are one run: every difference is zero."
    assert (comparison.table["difference"] == 0).all()
    assert not comparison.table["changed"].any()


def test_what_cannot_be_compared_is_refused():
    values = documents(np.random.default_rng(5))
    with pytest.raises(
        TableError, match=r"a was measured at .* 64 tokens and b at 32; .*capture a with --compare-at 32 too"
    ):
        compared(folder("a", values), folder("b", values, window=32))
    for a, b, counts in (
        (values, values[:7], "a has 1000 heads and b 7"),
        (values[:7], values, "a has 7 heads and b 1000"),
    ):
        with pytest.raises(TableError, match=f"{counts}, of which 7 are the same; compare runs of one shape"):
            compared(folder("a", a), folder("b", b))
    plain = folder("a", values)
    del plain.tables["replicates"]
    with pytest.raises(TableError, match=r"a has no replicates\.parquet"):
        compare_runs(Side("a", plain), Side("b", folder("b", values)))
    without = folder("a", values)
    without.tables["position"]["decay_se"] = np.nan
    with pytest.raises(TableError, match=r"a has no intervals, .*; analyse it again, without --no-intervals"):
        compared(without, folder("b", values))
    with pytest.raises(TableError, match="no column 'decai' with intervals in common; did you mean decay"):
        compared(plain_again := folder("a", values), plain_again).of_column("decai")


def test_top_heads_are_those_with_the_highest_values():
    heads = pd.DataFrame(
        {"model": "m", "layer": [0, 0, 1], "head": [0, 1, 0], "k_head": 0, "decay": [0.1, np.nan, 0.5],
         "decay_low": [0.0, np.nan, 0.4], "decay_high": [0.2, np.nan, 0.6], "head_class": ["content", None, "position"],
         "part_position": [0.1, np.nan, 0.8]}
    )  # fmt: skip
    top = top_heads(heads, "decay", 5)
    assert top[["layer", "head"]].to_numpy().tolist() == [[1, 0], [0, 0]]
    assert top_heads(heads, "decay", 1, lowest=True)["layer"].tolist() == [0]
    lines = heads_as_lines(top, "decay")
    assert lines[1].startswith("l01h00   0.5 [0.4, 0.6]")
    assert lines[1].split()[-3:] == ["position", "80%", "+0.50"]
    with pytest.raises(TableError, match="heads have no number 'cay'; did you mean decay or decay_low or decay_high"):
        top_heads(heads, "cay")
    with pytest.raises(TableError, match="heads have no number 'part_poistion'; did you mean part_position"):
        top_heads(heads, "part_poistion")
    with pytest.raises(TableError, match="heads have no number 'xyz'; qkscope analyze --columns lists all"):
        top_heads(heads, "xyz")
    with pytest.raises(TableError, match="there is no model 'x'; there are m"):
        one_row_per_head({"heads": heads}, "x")


def test_columns_with_intervals_have_names_of_their_own():
    """Replicates and comparisons go by name, whatever the table."""
    names = [column.name for table in DECLARED_TABLES.values() for column in table.columns if column.scale is not None]
    assert len(names) == len(set(names))
