"""Two runs compared head by head: differences with intervals over documents, paired where both read the same ones.

With the same documents, leaving the same document group out of both runs gives replicates of the difference, whose
interval is much narrower than those of the two runs suggest. Runs are compared at one window, and never pooled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import bdtr, stdtrit

from qkscope.analyses.catalogue import DECLARED_TABLES
from qkscope.analyses.uncertainty import MIN_GROUPS, jackknife
from qkscope.errors import TableError
from qkscope.progress import plural
from qkscope.results.derived import suggested
from qkscope.results.reader import Folder
from qkscope.results.side import WITHOUT
from qkscope.results.study import window_of

KEY = ["layer", "head"]
MAIN = ("part_position", "part_content", "decay", "position_share", "ap_fixed_overall")
"""The columns that the sentence is about."""
_ALPHA = 0.05
ROUNDING = 1e-5
"""Differences below this share of the numbers are rounding, as between two kernels of attention in single precision."""


@dataclass(frozen=True)
class Side:
    """One of the two runs: a model of a results folder."""

    label: str
    folder: Folder

    @property
    def window(self) -> int | None:
        """The window of the run, if its tables have it."""
        return window_of(self._own(self.folder.tables))

    @property
    def corpus(self) -> str | None:
        """Digest of its documents, if they were captured."""
        return self._source().get("corpus")

    @property
    def digest(self) -> str | None:
        """Digest of the run."""
        return self._source().get("digest")

    def _entry(self) -> dict[str, Any]:
        entry = self.folder.summary.get(self.label)
        return entry if isinstance(entry, dict) else {}

    def _source(self) -> dict[str, str]:
        source = self._entry().get("dataset")
        return source if isinstance(source, dict) else {}

    def _own(self, tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
        return {name: frame[frame["model"] == self.label] for name, frame in tables.items()}

    def columns(self) -> dict[str, pd.DataFrame]:
        """Each column that has replicates: key head, value and replicates by (layer, head)."""
        tables = self._own(self.folder.tables)
        replicates = tables.get("replicates")
        if replicates is None or replicates.empty:
            raise TableError(
                f"{self.folder.path} has no replicates.parquet: its tables have no intervals, or are of an "
                "earlier version; analyse the run again"
            )
        by_column = dict(iter(replicates.groupby("column", sort=False)))
        columns = {}
        for table in DECLARED_TABLES.values():
            frame = tables.get(table.name)
            if frame is None or frame.empty or not table.about_heads:
                continue
            values = table.whole_heads(frame).set_index(KEY)
            for column in table.columns:
                se = f"{column.name}_se"
                if column.name in by_column and {column.name, se} <= set(values) and column.name not in columns:
                    rows = by_column[column.name].set_index(KEY)[list(WITHOUT)].astype(float)
                    own = values[["k_head", column.name]].join(rows, how="inner")
                    # Replicates of an earlier analysis stay where the latest one left intervals out.
                    columns[column.name] = own[values[se].reindex(own.index).notna()]
        if all(rows.empty for rows in columns.values()):
            raise TableError(f"{self.label} has no intervals, which a comparison needs; {self._why_no_intervals()}")
        return columns

    def _why_no_intervals(self) -> str:
        documents = self._entry().get("n_documents")
        if documents is None or documents >= MIN_GROUPS:
            return "analyse it again, without --no-intervals"
        return f"it was measured on {plural(documents, 'document')}: capture {MIN_GROUPS} or more"


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs, b − a."""

    a: str
    b: str
    window: int | None
    paired: bool
    """True if both read the same documents, so that replicates are paired."""
    same: bool
    """True if it is one run twice."""
    table: pd.DataFrame
    """One row per column and head."""
    summary: pd.DataFrame
    """One row per column: means over heads, the share of heads that rose and fell, and a sign test over key heads."""
    nested: bool = False
    """True if a run is compared at a shorter window than its own, which the other has too."""

    @property
    def sentence(self) -> str:
        """The change between the two runs in the main columns, in words."""
        return " ".join(self.sentences)

    @property
    def sentences(self) -> list[str]:
        """The change in the column where most heads went one way, then in the other main columns."""
        at = f" at a window of {self.window:,} tokens" if self.window else ""
        begin = f"From {self.a} to {self.b}{at}"
        if self.same:
            return [f"{self.a} and {self.b} are one run: every difference is zero."]
        rows = self.summary[self.summary["column"].isin(MAIN)]
        changed = rows[(rows["low"] > 0) | (rows["high"] < 0)]
        if changed.empty:
            share = self.table.loc[self.table["column"].isin(MAIN), "changed"].mean()
            names = ", ".join(rows["column"])
            return [
                f"{begin}, no mean over heads of {names} changed beyond its interval; {share:.0%} of the intervals of "
                "single heads exclude zero, where chance alone would make about 5% do so.",
                *self._remarks,
            ]
        largest = changed.assign(most=changed[["up", "down"]].max(axis=1)).sort_values("most", ascending=False)
        first, *others = (_in_words(row) for _, row in largest.iterrows())
        further = [f"Also: {'; '.join(others)}."] if others else []
        return [f"{begin}, {first}.", *further, *self._remarks]

    @property
    def _remarks(self) -> list[str]:
        """Sentences on what was compared, where it is not what one would expect."""
        unpaired = "The runs read different documents, so intervals are those of unpaired means."
        nested = f"{self.window:,} tokens is the largest window that both were captured at." if self.nested else ""
        return [text for text in ("" if self.paired else unpaired, nested) if text]

    @property
    def main_column(self) -> str:
        """The main column whose mean changed beyond its interval in most heads; else the first that there is."""
        rows = self.summary[self.summary["column"].isin(MAIN)]
        rows = self.summary if rows.empty else rows
        changed = rows[(rows["low"] > 0) | (rows["high"] < 0)]
        rows = rows if changed.empty else changed
        return str(rows["column"].iloc[int(rows[["up", "down"]].max(axis=1).argmax())])

    def of_column(self, column: str) -> pd.DataFrame:
        """The rows of one column; an error names those that there are."""
        rows = self.table[self.table["column"] == column]
        if rows.empty:
            advice = suggested(column, self.summary["column"].tolist())
            raise TableError(f"the runs have no column {column!r} with intervals in common{advice}")
        return rows

    def changed_most(self, column: str, n: int = 10) -> pd.DataFrame:
        """The heads that changed most in a column, of those whose interval excludes zero."""
        rows = self.of_column(column)
        rows = rows[rows["changed"]]
        return rows.reindex(rows["difference"].abs().sort_values(ascending=False, kind="stable").index).head(n)

    def __repr__(self) -> str:
        return self.sentence


def _in_words(row: pd.Series) -> str:
    verb, share = ("rose", row["up"]) if row["difference"] > 0 else ("fell", row["down"])
    interval = f"[{row['low']:+.2g}, {row['high']:+.2g}]"
    return (
        f"{row['column']} {verb} in {share:.0%} of heads "
        f"(mean {row['mean_a']:.3g} → {row['mean_b']:.3g}, difference {row['difference']:+.2g} {interval})"
    )


def compare_runs(a: Side, b: Side) -> Comparison:
    """Compare two runs of one shape at one window; an error says why they cannot be compared."""
    if a.window != b.window:
        known = sorted((side.window, side.label) for side in (a, b) if side.window)
        raise TableError(
            f"{a.label} was measured at a window of {a.window} tokens and {b.label} at {b.window}; numbers of heads "
            f"depend on the window, so capture {known[-1][1]} with --compare-at {known[0][0]} too"
        )
    columns_a, columns_b = a.columns(), b.columns()
    _check_same_heads(a, b, columns_a, columns_b)
    names = [name for name in columns_a if name in columns_b]
    paired = a.corpus is not None and a.corpus == b.corpus
    tables, rows = [], []
    for name in names:
        both = columns_a[name].add_suffix("_a").join(columns_b[name].add_suffix("_b"), how="inner")
        both = both.dropna(subset=[f"{name}_a", f"{name}_b"])
        if both.empty:
            continue
        values = [both[f"{name}_{side}"].to_numpy(float) for side in "ab"]
        replicates = [both[[f"{group}_{side}" for group in WITHOUT]].to_numpy(float) for side in "ab"]
        table, summary = _differences(values, replicates, both.reset_index()[[*KEY, "k_head_a"]], paired=paired)
        tables.append(table.assign(column=name))
        rows.append({"column": name} | summary)
    if not tables:
        raise TableError(f"{a.label} and {b.label} have no heads or columns in common; compare runs of one shape")
    table = pd.concat(tables, ignore_index=True)
    order = ["column", *KEY, "k_head", "a", "b", "difference", "difference_se", "unpaired_se", "low", "high", "changed"]
    same = a.digest is not None and a.digest == b.digest
    return Comparison(a.label, b.label, a.window, paired, same, table[order], pd.DataFrame(rows))


def _check_same_heads(a: Side, b: Side, *columns: dict[str, pd.DataFrame]) -> None:
    """Raise an error if one run has heads that the other has not."""
    heads_a, heads_b = (set().union(*(frame.index for frame in frames.values())) for frames in columns)
    if heads_a != heads_b:
        raise TableError(
            f"{a.label} has {len(heads_a)} heads and {b.label} {len(heads_b)}, of which {len(heads_a & heads_b)} are "
            "the same; compare runs of one shape"
        )


def _differences(
    values: list[Float[np.ndarray, "heads"]],
    replicates: list[Float[np.ndarray, "heads groups"]],
    heads: pd.DataFrame,
    *,
    paired: bool,
) -> tuple[pd.DataFrame, dict[str, float]]:
    """The difference of one column in each head, and what holds over all heads."""
    a, b = values
    difference = b - a
    beyond = np.where(np.abs(difference) > _rounding(values), difference, 0.0)
    se, low, high = _interval(values, replicates, paired=paired)
    unpaired_se, unpaired_low, unpaired_high = _interval(values, replicates, paired=False)
    table = pd.DataFrame({"a": a, "b": b, "difference": difference, "difference_se": se, "low": low, "high": high})
    table["unpaired_se"] = unpaired_se
    table = pd.concat([heads.rename(columns={"k_head_a": "k_head"}), table], axis=1)
    table["changed"] = (low > 0) | (high < 0)
    known = ~np.isnan(replicates[0]).all(-1) & ~np.isnan(replicates[1]).all(-1)
    means = [value[known].mean(keepdims=True) if known.any() else np.array([np.nan]) for value in values]
    over_heads = [_mean(replicate[known]) for replicate in replicates]
    _, mean_low, mean_high = _interval(means, over_heads, paired=paired)
    by_key_head = table.assign(beyond=beyond).groupby(["layer", "k_head"])["beyond"].mean()
    rose, fell = int((by_key_head > 0).sum()), int((by_key_head < 0).sum())
    summary = {
        "n_heads": len(a), "mean_a": a.mean(), "mean_b": b.mean(), "difference": difference.mean(),
        "low": mean_low[0], "high": mean_high[0], "up": (beyond > 0).mean(), "down": (beyond < 0).mean(),
        "changed": table["changed"].mean(), "changed_unpaired": ((unpaired_low > 0) | (unpaired_high < 0)).mean(),
        "se_ratio": (table["difference_se"] / table["unpaired_se"].replace(0.0, np.nan)).median(),
        "sign_p": sign_test(rose, fell),
    }  # fmt: skip
    return table, summary


def _mean(replicates: Float[np.ndarray, "heads groups"]) -> Float[np.ndarray, "1 groups"]:
    """The mean over heads without each group; NaN for a group that any head lacks."""
    return replicates.mean(0, keepdims=True) if len(replicates) else np.full((1, len(WITHOUT)), np.nan)


def _interval(
    values: list[Float[np.ndarray, "heads"]], replicates: list[Float[np.ndarray, "heads groups"]], *, paired: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standard error and 95% interval of b − a: from paired replicates, or from the two standard errors.

    The interval is wider by what rounding may change on each side.
    """
    difference, rounding = values[1] - values[0], _rounding(values)
    if paired:
        of_difference = replicates[1] - replicates[0]
        interval = jackknife(np.nan_to_num(difference), np.nan_to_num(of_difference), ~np.isnan(of_difference) * 1.0)
        return interval.se, interval.low - rounding, interval.high + rounding
    parts = [
        jackknife(np.nan_to_num(value), np.nan_to_num(replicate), ~np.isnan(replicate) * 1.0).se
        for value, replicate in zip(values, replicates, strict=True)
    ]
    se = np.hypot(*parts)
    groups = np.minimum(*((~np.isnan(replicate)).sum(-1) for replicate in replicates))
    half = stdtrit(np.maximum(groups, MIN_GROUPS) - 1, 1 - _ALPHA / 2) * se
    return se, difference - half - rounding, difference + half + rounding


def _rounding(values: list[Float[np.ndarray, "heads"]]) -> Float[np.ndarray, "heads"]:
    """The largest difference of each head that is rounding: a share of its number, or of the column's usual size."""
    size = np.maximum(*np.abs(values))
    return ROUNDING * np.maximum(size, np.median(size))


def sign_test(up: int, down: int) -> float:
    """Chance of a split at least as uneven if both directions are equally likely, ties left out.

    >>> sign_test(10, 0), sign_test(5, 5), sign_test(0, 0)
    (0.001953125, 1.0, 1.0)
    """
    n = up + down
    return min(1.0, 2.0 * float(bdtr(min(up, down), n, 0.5))) if n else 1.0


def side(folder: Folder, model: str | None = None) -> Side:
    """One model of a results folder; an error if it is not clear which."""
    if model is None and len(folder.models) > 1:
        raise TableError(
            f"{folder.path} has {len(folder.models)} models ({', '.join(folder.models)}); compare folders of one"
        )
    return Side(model or folder.models[0], folder)
