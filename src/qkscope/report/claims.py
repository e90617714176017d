"""Claims: each statement of the report, computed once with its numbers, their window and its wordings.

The first screen, the answers below it, sections, the card of a push and the last lines of commands show claims. None
of them computes a number or decides which of two is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

import pandas as pd

from qkscope.analyses.acrossheads import correlation
from qkscope.analyses.components import TAXONOMY
from qkscope.analyses.scores import FLAT
from qkscope.errors import TableError
from qkscope.figures.bias import prepare_separation
from qkscope.figures.eachrun import by_run, together
from qkscope.figures.figure import NotApplicable, before_and_after, checkpoints, models
from qkscope.headids import TERMS, head_name
from qkscope.report.values import (
    CLASS_COLUMNS,
    DOCUMENTS,
    Value,
    figures,
    frames_of,
    in_text,
    mean_of,
    over_what,
    pooled,
    published,
    rounded,
)
from qkscope.report.windows import OneModel, at_which_windows, changes, comparison, in_percent, same_weights
from qkscope.results.compare import Comparison, Side, compare_runs
from qkscope.results.reader import Folder, read_folder
from qkscope.results.study import Study, StudyRun, select_runs
from qkscope.results.summary import read_summary

SAME = 0.1
"""A curve whose fall per doubling moved by less than this share is said to be unchanged."""
LINE_CHANGED = 0.5
"""A change of the published slope by at least this share is reported next to that of the curve."""
STAND_OUT = 3
"""Heads named for each extreme."""
FIRST_PAGE = (("decay", "heads"), ("position_share_q", "heads"), ("r_q", "qk"), ("class_position", "heads"),
              ("bias_window", "rotated"))  # fmt: skip
"""Columns that the first page follows over training, with their tables."""
FOLLOWED = (("decay", "heads"), ("position_share_q", "heads"), ("position_share_k", "heads"), ("r_q", "qk"),
            ("r_k", "qk"), ("abs_r_k", "qk"), ("explained_variance", "qk"), ("class_position", "heads"),
            ("position-dominated", "qk"), ("r_k_a", "rotated"), ("mu_q_a", "rotated"), ("alpha_k_window", "rotated"),
            ("bias_window", "rotated"), ("plane_var_fraction", "rotated"))  # fmt: skip
"""Columns that the section on training follows."""


@dataclass(frozen=True)
class Claim:
    """A statement, its numbers, and its wordings for each place in the report."""

    headline: str
    """Wording as a title, or as the sentence of a finding."""
    detail: str = ""
    """Wording as an answer or in a section: with intervals."""
    values: Mapping[str, Value] = field(default_factory=dict)
    """The numbers with their intervals, by column."""
    order: int = 0
    """The result of the comparison that decides the wording: 1, −1, or 0 where the intervals overlap."""
    sure: str = ""
    """The certainty, in words."""
    window: str = ""
    """The window at which the numbers were measured, in words."""
    short: str = ""
    """Wording of the title beside those of other runs that say something else."""


_C = TypeVar("_C", bound="Claim | None")


def _of_each_run(claim: Callable[[Claims], _C]) -> cached_property[_C]:
    """A claim about one run; of several runs, what it says of each."""

    def of_each_run(self: Claims) -> _C:
        if len(self.labels) == 1:
            return claim(self)
        told = {name: one for name, claims in self.each.items() if (one := getattr(claims, claim.__name__)) is not None}
        return cast("_C", _together(told) if told else None)

    of_each_run.__doc__ = claim.__doc__
    return cached_property(of_each_run)


def _together(claims: Mapping[str, Claim]) -> Claim:
    """A claim about several runs from those about each, with the order that all of them have."""
    orders, windows = {claim.order for claim in claims.values()}, {claim.window for claim in claims.values()}
    shorter = len({claim.short for claim in claims.values()}) > 1
    titles = {name: (shorter and claim.short) or claim.headline for name, claim in claims.items()}
    headline = together({name: title for name, title in titles.items() if title}, brief=True)
    detail, sure = (
        together({name: getattr(claim, wording) for name, claim in claims.items() if getattr(claim, wording)})
        for wording in ("detail", "sure")
    )
    order, window = orders.pop() if len(orders) == 1 else 0, windows.pop() if len(windows) == 1 else ""
    return Claim(headline, detail, {}, order, sure, window)


@dataclass(frozen=True)
class Claims:
    """Every claim about a study; None where its tables do not have the numbers.

    A claim is about the models that are compared, each for itself, or, if all runs are checkpoints, about the last one.
    """

    study: Study

    @cached_property
    def labels(self) -> list[str]:
        """The runs that claims are about; the same run twice is one."""
        return [run.label for run in models(self.study) if run.label not in self.copies]

    @cached_property
    def copies(self) -> dict[str, str]:
        """Models of the study that are an earlier one again, by the digest of their run, and that one."""
        first: dict[str, str] = {}
        digests = {run.label: _digest(run) for run in models(self.study)}
        return {
            label: earlier
            for label, digest in digests.items()
            if digest and (earlier := first.setdefault(digest, label)) != label
        }

    @cached_property
    def each(self) -> dict[str, Claims]:
        """Claims about each run alone, by its name, which has its window if windows differ."""
        if len(self.labels) == 1:
            return {self.labels[0]: self}
        runs = [self.study.run(label) for label in self.labels]
        differ = len({run.window for run in runs}) > 1
        return {
            f"{run.label} at window {run.window:,}" if differ and run.window else run.label: Claims(
                select_runs(self.study, [run.label])
            )
            for run in runs
        }

    @cached_property
    def frames(self) -> dict[str, pd.DataFrame | None]:
        """The tables with the columns that follow from them."""
        return frames_of(self.study)

    @cached_property
    def window(self) -> str:
        """The window of these runs, in words; empty if it is not known."""
        runs = [self.study.run(label) for label in self.labels]
        windows = {run.label: f"{run.window:,}" for run in runs if run.window}
        return f"window {by_run(windows)}" if windows else ""

    def mean(self, table: str, column: str) -> Value | None:
        """Return the mean of a column over all heads of the run."""
        (label,) = self.labels
        return mean_of(self.study, label, self.frames[table], column)

    def _means(self, table: str, *columns: str) -> dict[str, Value]:
        return {column: value for column in columns if (value := self.mean(table, column)) is not None}

    # ---- the first sentence ------------------------------------------------------------------------

    @cached_property
    def first(self) -> Claim:
        """The strongest statement that the data supports: extension, training, two runs, else the present state."""
        return self.extension or self.training or self.compared or self.state

    @cached_property
    def extension(self) -> Claim | None:
        """The effect of a longer context on the distance curve, at one window or over the same distances."""
        ends = self._before_and_after("decay", "heads")
        if ends is None:
            return None
        before, after, (first, last) = ends
        windows = [self.study.as_captured.run(label).window for label in (before, after)]
        if windows[0] == windows[1] or None in windows or first.value <= 0:
            return None
        change = last.value / first.value - 1
        course = "left this model's preference for near tokens as it was"
        if abs(change) >= SAME:
            course = f"made this model's preference for near tokens {abs(change):.0%} "
            course += "stronger" if change > 0 else "weaker"
        of_window = at_which_windows(self.study, before, after)
        extending = f"xtending the context from {windows[0]:,} to {windows[1]:,} tokens {course}."
        shown = {self.study.run(label).window for label in (before, after)}
        return Claim(
            f"E{extending}" if len(shown) > 1 else f"Within {shown.pop():,} tokens, e{extending}",
            f"Score lost with every doubling of the distance to a key: {in_text(first.value)} logits before and "
            f"{in_text(last.value)} after ({change:+.0%}){of_window}.",
            {before: first, after: last},
            last.compare(first),
            window=of_window,
        )

    @cached_property
    def published_slope(self) -> Claim | None:
        """The published slope before and after an extension, each run at its own window and both at one."""
        if self.extension is None:
            return None
        before, after = before_and_after(self.study)
        own = self.study.as_captured
        slopes = {}
        for name, study in {"own windows": own, "one window": self.study}.items():
            table = frames_of(study)["rotated"]
            ends = [mean_of(study, label, table, "bias_strength") for label in (before, after)]
            if ends[0] is None or ends[1] is None or ends[0].value <= 0:
                return None
            slopes[name] = (ends[0], ends[1], ends[1].value / ends[0].value - 1)
        first, last, change = slopes["own windows"]
        if abs(change) < LINE_CHANGED:
            return None
        windows = [f"{own.run(label).window:,}" for label in (before, after)]
        at_one = "" if self.study.own is None else f"; {slopes['one window'][2]:+.0%} at one window"
        detail = (
            f"The published bias mu_q_a · alpha_k is the slope of a straight line through the scores along axis a, in "
            f"q·k per token. At the runs' own windows, {windows[0]} and {windows[1]} tokens, its mean goes from "
            f"{in_text(first.value)} to {in_text(last.value)} ({change:+.0%})."
        )
        if self.study.own is not None:
            both, later, at_one_window = slopes["one window"]
            detail += (
                f" At one window, {self.study.run(after).window:,} tokens, it goes from {in_text(both.value)} to "
                f"{in_text(later.value)} ({at_one_window:+.0%})."
            )
        detail += (
            " The scores fall about as the logarithm of the distance, and a line through a logarithm is the flatter "
            "the longer the window; it also changes with the size of queries and keys along one axis. The fall per "
            "doubling of the distance does not depend on the window."
        )
        return Claim(f"Why the published slope says {change:+.0%} (own windows{at_one})", detail)

    @cached_property
    def training(self) -> Claim | None:
        """The effect of training on the part that position determines."""
        ends = self._before_and_after("position_share", "heads")
        if ends is None:
            return None
        before, after, (first, last) = ends
        order = last.compare(first)
        course = {1: "grew", -1: "shrank", 0: "did not change beyond its intervals"}[order]
        return Claim(
            f"Through training the part of queries and keys that position alone determines {course}.",
            f"{before}: {first.share()} of the variance; {after}: {last.share()}.",
            {before: first, after: last},
            order,
            window=at_which_windows(self.study, before, after),
        )

    @cached_property
    def _comparison(self) -> Comparison | TableError | None:
        """The two models of the study compared head by head, or why they are not; None if there are not two."""
        if len(self.study.runs) != 2 or len(self.labels) != 2:
            return None
        try:
            a, b = (Side(_model_in(folder, run), folder) for run in self.study.runs
                    for folder in [read_folder(Path(run.source))])  # fmt: skip
            return replace(compare_runs(a, b), a=self.labels[0], b=self.labels[1])
        except TableError as error:
            return error

    @cached_property
    def not_compared(self) -> Claim | None:
        """The reason why two models cannot be compared head by head: their shapes, windows or tables."""
        reason = self._comparison
        if not isinstance(reason, TableError):
            return None
        sentence = f"The two runs are not compared head by head: {reason}."
        return Claim(sentence, sentence)

    @cached_property
    def compared(self) -> Claim | None:
        """The differences between two models of one shape at one window, head by head (qkscope compare)."""
        difference = self._comparison
        if not isinstance(difference, Comparison):
            return None
        column = difference.main_column
        heads = ", ".join(
            f"{head_name(row['layer'], row['head'])} ({in_text(row['a'])} → {in_text(row['b'])})"
            for row in difference.changed_most(column, 5).to_dict("records")
        )
        detail = f"{column} changed most in {heads}." if heads else ""
        headline, *others = difference.sentences
        return Claim(headline, " ".join([*others, detail]).strip(), window=self.window)

    def _before_and_after(self, column: str, table: str) -> tuple[str, str, tuple[Value, Value]] | None:
        try:
            before, after = before_and_after(self.study)
        except NotApplicable:
            return None
        ends = comparison(self.study, column, table, before, after)
        return None if ends is None else (before, after, ends)

    @_of_each_run
    def state(self) -> Claim:
        """The share of heads that favour near keys, and the share of the vectors that is position."""
        values = self._means("heads", "decays", "position_share")
        phrases = [f"{self._flat.share()} of heads are flat, attending almost evenly"] if self._flat else []
        if "decays" in values:
            phrases.append(f"{values['decays'].share()} of heads score near keys higher than far ones")
        if "position_share" in values:
            share = values["position_share"].share()
            phrases.append(f"position alone determines {share} of the variance of queries and keys")
        if not phrases:
            values = self._means("qk", "r_q")
            phrases = [
                f"along their first component queries follow position with a correlation of {in_text(value.value)}"
                for value in values.values()
            ]
        sentence = ", and ".join(filter(None, [", ".join(phrases[:-1]), *phrases[-1:]]))
        return Claim(f"{sentence[:1].upper()}{sentence[1:]}." if phrases else "", values=values, window=self.window)

    @cached_property
    def _flat(self) -> Value | None:
        """The share of heads that are flat, if it is most of them."""
        flat = self.mean("heads", "class_flat")
        return flat if flat is not None and flat.value > 0.5 else None

    # ---- the score ---------------------------------------------------------------------------------

    @_of_each_run
    def recency(self) -> Claim | None:
        """The direction and size of the change of the mean score with distance."""
        values = self._means("heads", "decay", "decays")
        decay = values.get("decay")
        if decay is None:
            return None
        order = 1 if decay.low > 0 else -1 if decay.high < 0 else 0
        verb = {1: "falls", -1: "rises", 0: "may fall or rise"}[order]
        sure = f"the interval {decay.interval()} holds 0"
        if order:
            sure = f"the interval is {decay.interval()}, over {decay.over}"
        course = {
            1: f"falls by {decay.text()} logits",
            -1: f"rises by {decay.negative().text()} logits",
            0: f"falls by {decay.text()} logits, which may be none,",
        }[order]
        return Claim(
            f"The mean score {verb} by {in_text(abs(decay.value))} logits with every doubling of the distance.",
            f"{values['decays'].text(percent=True)} of heads favour near keys: with every doubling of the distance the "
            f"mean score {course} on average over heads.",
            values,
            order,
            sure,
            self.window,
        )

    @_of_each_run
    def published_line(self) -> Claim | None:
        """The direction of the bias by the published line, with the published shares."""
        values = self._means("rotated", "positive", "bias_window", "mu_q_a_positive")
        if "positive" not in values:
            return None
        reach = "the window"
        if self.study.run(self.labels[0]).sliding_layers:
            reach += ", or the reach of sliding layers,"
        size = f", by {values['bias_window'].text()} in q·k over {reach} on average" if "bias_window" in values else ""
        mean_query = ""
        if "mu_q_a_positive" in values:
            mean_query = (
                f"; mu_q_a is positive in {values['mu_q_a_positive'].text(percent=True)} "
                f"(published {pooled('mu_q_a_positive_share'):.1%})"
            )
        sentence = (
            f"By the published line {values['positive'].text(percent=True)} of heads favour later keys (published "
        )
        sentence += f"{pooled('positive_bias_share'):.1%} over 11 models){size}{mean_query}."
        return Claim(sentence, sentence, values, window=self.window)

    @_of_each_run
    def terms(self) -> Claim | None:
        """The largest of the four terms in the variance of scores."""
        values = {term: value for term in TERMS if (value := self.mean("heads", f"part_{term}")) is not None}
        if len(values) < len(TERMS):
            return None
        largest = sorted(values, key=lambda term: -values[term].value)
        order = values[largest[0]].compare(values[largest[1]])
        shares = ", ".join(f"{term} {values[term].share()}" for term in largest)
        first = f"What varies in scores is {largest[0]} and {largest[1]} about alike"
        sure = "their intervals overlap"
        if order:
            first = f"The largest part of what varies in scores is {largest[0]}"
            sure = "the first is larger than the second beyond the intervals"
        short = f"{first}."
        if self._flat is not None:
            first = f"In {self._flat.share()} of heads scores vary by less than {FLAT} logits; of what little varies"
            short = ""
        return Claim(f"{first}: {shares}.", "", values, order, sure, self.window, short)

    @_of_each_run
    def score_share(self) -> Claim | None:
        """The part of position in the variance of scores."""
        value = self.mean("heads", "part_position")
        if value is None:
            return None
        sentence = f"Position accounts for {value.text(percent=True)} of the variance of scores."
        return Claim(sentence, sentence, {"part_position": value}, window=self.window)

    @_of_each_run
    def loss(self) -> Claim | None:
        """The rise of the loss without each term of all heads' scores; no sentence about one term alone."""
        table = self.study.tables.get("effects_together")
        if table is None:
            return None
        of_all = table["heads"] == "all" if "heads" in table else True  # not of heads that were named
        measured = table[
            (table["over"] == "all") & of_all & table["change"].isin(TERMS) & table["model"].isin(self.labels)
        ]
        values = {
            str(row["change"]): Value(row["delta_nll"], row["delta_nll_low"], row["delta_nll_high"], DOCUMENTS)
            for _, row in measured[measured["model"] == measured["model"].iloc[-1:].max()].iterrows()
        }
        if not values:
            return None
        windows = sorted(int(window) for window in measured["window"].dropna().unique()) if "window" in measured else []
        largest = sorted(values, key=lambda term: -values[term].value)
        rises = ", ".join(f"without {term} {values[term].value:+.2f}" for term in largest)
        return Claim(
            f"The loss depends most on {largest[0]}, in nats per token: {rises}." if len(largest) > 1 else "",
            "",
            values,
            values[largest[0]].compare(values[largest[1]]) if len(largest) > 1 else 0,
            "measured by taking the term away in all heads, on texts that the means were not made from",
            f"texts of up to {windows[-1]:,} tokens" if windows else "",
        )

    @_of_each_run
    def distance(self) -> Claim:
        """The accuracy with which means predict the distance curve: with and without a constant, by reach of layers."""
        curves, heads = self._rows("distance", "measured", "predicted"), self._rows("heads", "distance_worst")
        if curves is None or heads is None:
            return Claim("The distance curve and what means say of it")
        fits = curves.groupby(["layer", "head"])[["measured", "predicted"]].apply(_fits).dropna().reset_index()
        sliding = self.study.run(self.labels[0]).sliding_layers
        of_layers = {
            "layers with a sliding window": fits[fits["layer"].isin(sliding)],
            "layers that see everything": fits[~fits["layer"].isin(sliding)],
        }
        groups = {name: rows for name, rows in of_layers.items() if len(rows)}
        phrases = [
            f"R² {rows['r2'].median():.2f} in the median head{f' of {name}' if len(groups) > 1 else ''} "
            f"({rows['r2_shape'].median():.2f} apart from a constant)"
            for name, rows in groups.items()
        ]
        worst = heads["distance_worst"].quantile([0.5, 0.9])
        return Claim(
            f"Means alone predict the distance curve with {', and with '.join(phrases)}",
            f"The largest error of a head's curve is {in_text(worst[0.5])} logits in the median head; in a tenth of "
            f"the heads it exceeds {in_text(worst[0.9])}.",
            window=self.window,
        )

    # ---- queries and keys --------------------------------------------------------------------------

    @_of_each_run
    def share(self) -> Claim | None:
        """The share of queries and keys that position determines, and its linear part."""
        columns = ("position_share", "position_share_q", "position_share_k", "posvar_q", "posvar_k")
        values = self._means("heads", *columns)
        sentences = []
        if {"position_share_q", "position_share_k"} <= set(values):
            sentences.append(
                f"Position alone determines {values['position_share_q'].text(percent=True)} of the queries' variance "
                f"and {values['position_share_k'].text(percent=True)} of the keys'."
            )
        if {"posvar_q", "posvar_k"} <= set(values):
            linear_part = "Its linear part, the drift, is" if sentences else "Linear in position are"
            linear = [values[column].text(percent=True) for column in ("posvar_q", "posvar_k")]
            sentences.append(f"{linear_part} {linear[0]} and {linear[1]}.")
        if not sentences:
            return None
        over = next(iter(values.values())).over
        return Claim(
            sentences[0],
            " ".join(sentences),
            values,
            sure=over and f"intervals are {over_what(over)}",
            window=self.window,
        )

    @_of_each_run
    def formula(self) -> Claim | None:
        """The published formula of positional variance against the exact share."""
        values = self._means("heads", "posvar_q", "posvar_q_published", "posvar_q_pc0_share", "posvar_k_pc0_share")
        if not {"posvar_q", "posvar_q_published"} <= set(values):
            return None
        exact, by_formula = values["posvar_q"], values["posvar_q_published"]
        order = by_formula.compare(exact)
        headline = (
            "The published formula and the exact one cannot be told apart here: "
            f"{by_formula.share()} and {exact.share()} of the queries' variance."
        )
        if order:
            headline = (
                f"The published formula gives {'more' if order > 0 else 'less'} positional variance than there is: "
                f"{by_formula.share()} of the queries' variance, where {exact.share()} is linear in position."
            )
        detail = ""
        if {"posvar_q_pc0_share", "posvar_k_pc0_share"} <= set(values):
            pc0_shares = [
                f"{values[name].value:.0%} of the {kind} (published {pooled(name):.0%})"
                for name, kind in (("posvar_q_pc0_share", "queries'"), ("posvar_k_pc0_share", "keys'"))
            ]
            detail = f"Of the published sum over components, PC0 alone makes {' and '.join(pc0_shares)}."
        sure = "beyond their intervals" if order else "their intervals overlap"
        return Claim(headline, detail, values, order, sure, self.window)

    @_of_each_run
    def first_component(self) -> Claim | None:
        """The correlations of queries and keys with position along PC0."""
        values = self._means("qk", "r_q", "abs_r_k", "explained_variance")
        if not {"r_q", "abs_r_k"} <= set(values):
            return None
        sentence = (
            f"On PC0 queries correlate with position at {values['r_q'].text()}, keys at {values['abs_r_k'].text()} "
        )
        sentence += "(absolute)."
        if "explained_variance" in values:
            sentence += f" PC0 holds {values['explained_variance'].text(percent=True)} of the variance."
        return Claim(sentence, sentence, values, window=self.window)

    @_of_each_run
    def classes(self) -> Claim | None:
        """The kinds of heads by the parts of their scores, the most frequent first, and by the published classes."""
        kinds = {name: value for name, value in self._means("heads", *CLASS_COLUMNS).items() if value.value > 0}
        as_published = {kind: value for kind, value in self._means("qk", *TAXONOMY).items() if value.value > 0}
        sentences = []
        if kinds:
            at = f" over a {self.window.replace('window', 'window of')} tokens" if self.window else ""
            sentences.append(f"By the parts of their scores{at}: {_shares(kinds)}.")
        if as_published:
            sentences.append(f"By the published classes, on PC0: {_shares(as_published)}.")
        text = " ".join(sentences)
        return Claim(text, text, kinds | as_published, window=self.window) if sentences else None

    @_of_each_run
    def axes(self) -> Claim:
        """The class, queries or keys, that follows position more closely along axis a, beyond the intervals."""
        values = self._means("rotated", "r_q_a", "r_k_a")
        if len(values) < 2:
            return Claim("Queries and keys along the axis of drift")
        q, k = values["r_q_a"], values["r_k_a"]
        order = k.compare(q)
        who = {1: "Keys", -1: "Queries", 0: "Neither, beyond the intervals"}[order]
        headline = {
            1: "Keys follow position more closely than queries",
            -1: "Queries follow position more closely than keys",
            0: "Queries and keys follow position about as closely",
        }[order]
        return Claim(
            headline,
            f"{who}: correlations along the drift axis are r_q_a {q.text()}, r_k_a {k.text()}.",
            values,
            order,
            f"beyond their intervals over {q.over}" if order else f"their intervals over {q.over} overlap",
            self.window,
        )

    @_of_each_run
    def axes_order(self) -> Claim | None:
        """The order of queries and keys on PC0 against that on axis a."""
        values = self._means("qk", "r_q", "abs_r_k") | dict(self.axes.values)
        if len(values) < 4:
            return None
        orders = values["r_q"].compare(values["abs_r_k"]), values["r_q_a"].compare(values["r_k_a"])
        turn = "The order is the same on both axes" if orders[0] == orders[1] else "The order reverses"
        if 0 in orders:
            turn = "The order on the two axes cannot be told from these intervals"
        numbers = f"on PC0 r_q {values['r_q'].text()} against |r_k| {values['abs_r_k'].text()}, "
        numbers += f"on axis a r_q_a {values['r_q_a'].text()} against r_k_a {values['r_k_a'].text()}"
        return Claim(turn, f"{turn}: {numbers}.", values, orders[0] * orders[1], window=self.window)

    @_of_each_run
    def separation(self) -> Claim | None:
        """The separation of queries and keys."""
        values = self._means("heads", "lda_accuracy_gaussian") | self._means("rotated", "plane_var_fraction")
        if "lda_accuracy_gaussian" not in values:
            return None
        accuracy = values["lda_accuracy_gaussian"].text(percent=True)
        sentence = f"Were both clouds Gaussian, a line on PC0 and PC1 would tell {accuracy} of them apart."
        if "plane_var_fraction" in values:
            plane = values["plane_var_fraction"].text(percent=True)
            sentence += f" The plane of drift and separation holds {plane} of the variance."
        return Claim(sentence, sentence, values, window=self.window)

    @_of_each_run
    def rings(self) -> Claim | None:
        """The number of planes that turn with position, and their share of the variance."""
        values = self._means("heads", "active_planes", "strong_planes", "turning_share")
        if "active_planes" not in values:
            return None
        closely = size = ""
        if "strong_planes" in values:
            closely = f", {values['strong_planes'].text()} of them closely (|r| of 0.3 or more)"
        if "turning_share" in values:
            size = f" What turns is {values['turning_share'].text(percent=True)} of the variance off a and b."
        sentence = (
            f"Rotation: {values['active_planes'].text()} of at most 30 planes turn with position beyond chance, a "
        )
        sentence += f"count that grows with the number of documents{closely}.{size}"
        return Claim(sentence, sentence, values, window=self.window)

    @_of_each_run
    def residual_drift(self) -> Claim | None:
        """The correlation with position within a class along the strongest direction off a and b."""
        rows = self._rows("rotated", "residual_r_q", "residual_r_k")
        if rows is None:
            return None
        medians = [Value(float(rows[column].median())) for column in ("residual_r_q", "residual_r_k")]
        sentence = (
            "Within a class some directions off a do drift: along the strongest, |r| with position is "
            f"{medians[0].value:.2f} for queries and {medians[1].value:.2f} for keys in the median head."
        )
        return Claim(sentence, sentence, dict(zip(("residual_r_q", "residual_r_k"), medians, strict=True)))

    @_of_each_run
    def outstanding(self) -> Claim | None:
        """The heads with the largest and smallest bias, and with the least positional variance."""
        phrases = []
        bias = self._rows("rotated", "bias_window")
        if bias is not None:
            phrases.append(
                "strongest bias by the published line: "
                + self._names(bias.nlargest(STAND_OUT, "bias_window"), "bias_window")
            )
            if (bias["bias_window"] < 0).any():
                least = bias[bias["bias_window"] < 0].nsmallest(STAND_OUT, "bias_window")
                phrases.append("most against it: " + self._names(least, "bias_window"))
        overhead = self._rows("heads", "positional_overhead")
        if overhead is not None:
            least = overhead.nsmallest(STAND_OUT, "positional_overhead")
            named_heads = self._names(least, "positional_overhead", ".1%")
            phrases.append(f"least variance that is linear in position: {named_heads}")
        if not phrases:
            return None
        phrases[0] = f"{phrases[0][0].upper()}{phrases[0][1:]}"
        sentence = "; ".join(phrases) + "."
        return Claim(sentence, sentence, window=self.window)

    def _rows(self, table: str, *columns: str) -> pd.DataFrame | None:
        frame = self.frames.get(table, self.study.tables.get(table))
        if frame is None or not set(columns) <= set(frame):
            return None
        rows = frame[frame["model"].isin(self.labels)].dropna(subset=list(columns))
        return None if rows.empty else rows

    def _names(self, rows: pd.DataFrame, column: str, form: str = ".3g") -> str:
        named_values = zip(rows["layer"], rows["head"], rows[column], strict=True)
        return ", ".join(f"{head_name(layer, head)} ({value:{form}})" for layer, head, value in named_values)

    # ---- several runs ------------------------------------------------------------------------------

    @cached_property
    def same_weights(self) -> OneModel | None:
        """The numbers of one model at several windows."""
        return same_weights(self.study)

    @cached_property
    def windows(self) -> Claim | None:
        """The effect of the window alone on the numbers of one model."""
        model = self.same_weights
        if model is None:
            return None
        ends = {column: (name.split(":")[0], values[0], values[-1]) for name, column, values in model.rows}
        shown = [ends[column] for column in ("bias_strength", "bias_window", "decay") if column in ends]
        moved = [
            f"{name} {last.value / first.value - 1:+.0%}" for name, first, last in shown if first.value * last.value > 0
        ]
        if not moved:
            return None
        beyond = [name for name, first, last in shown if last.compare(first)]
        return Claim(
            f"The same weights, looked at over {model.windows[-1]:,} instead of {model.windows[0]:,} tokens, have: "
            f"{', '.join(moved)}.",
            values={column: last for column, (_, _, last) in ends.items()},
            order=int(bool(beyond)),
            sure=f"{model.label}; beyond the intervals: {', '.join(beyond) or 'none'}",
        )

    @cached_property
    def changed(self) -> Claim | None:
        """The changes over training, in the columns of the first page."""
        try:
            before, after = before_and_after(self.study)
        except NotApplicable:
            return None
        lines = changes(self.study, FIRST_PAGE, before, after)
        if not lines:
            return None
        at_windows = at_which_windows(self.study, before, after)
        sentence = f"From {before} to {after}{at_windows}: " + " ".join(line for _, line in lines)
        return Claim(sentence, sentence, window=at_windows)

    def training_lines(self) -> list[str]:
        """Return the changes of means from the first checkpoint to the last, and from the first window to the last."""
        try:
            runs = checkpoints(self.study.as_captured)
        except NotApplicable:
            return []
        lines = self._changes(runs[0].label, runs[-1].label)
        shorter = [run.label for run in runs if run.window == runs[0].window]
        if len(shorter) not in (1, len(runs)):
            lines += self._changes(shorter[-1], runs[-1].label)
            lines += self._own_windows(shorter[-1], runs[-1].label)
        return lines

    def _changes(self, before: str, after: str) -> list[str]:
        lines = []
        for column, line in changes(self.study, FOLLOWED, before, after):
            ends = [published(label, column, in_percent(column)) for label in (before, after)]
            lines.append(f"{line} (published {ends[0]} → {ends[1]})" if all(ends) else line)
        at_windows = at_which_windows(self.study, before, after)
        return [f"Means over heads from {before} to {after}{at_windows}:", *lines] if lines else []

    def _own_windows(self, before: str, after: str) -> list[str]:
        """Return the change of the published lines at each run's own window, which are not directly comparable."""
        own = self.study.as_captured
        windows, table = [own.run(label).window for label in (before, after)], frames_of(own)["rotated"]
        phrases = []
        for column, name in (("bias_strength", "per token"), ("bias_window", "per window")):
            ends = [mean_of(own, label, table, column) for label in (before, after)]
            if ends[0] is not None and ends[1] is not None:
                phrases.append(f"{name} the bias {ends[0].change(ends[1])} ({ends[0].text()} → {ends[1].text()})")
        if not phrases or None in windows or windows[0] == windows[1]:
            return []
        return [
            f"At their own windows ({windows[0]:,} and {windows[1]:,}), by a line fitted to a curve that is close to "
            f"logarithmic: {'; '.join(phrases)}. Neither says whether the head changed."
        ]

    def family_lines(self) -> list[str]:
        """Return the correlation of bias and separation over all heads, and family by family."""
        try:
            data = prepare_separation(self.study)
        except NotApplicable:
            return []
        over_all = correlation(data["separation_strength"], data["bias_strength"])
        lines = [f"Over all {len(data):,} heads: r = {over_all:+.2f}."]
        published_r = pooled("bias_separation_r")
        within = next((name for name in ("family", "model") if data[name].nunique() > 1), None)
        for group, heads in data.groupby(within, sort=False) if within else ():
            r = correlation(heads["separation_strength"], heads["bias_strength"])
            published_note = f" (published {published_r[group]:+.2f})" if group in published_r else ""
            lines.append(f"{str(group) or 'No family'}: r = {r:+.2f}{published_note}, {len(heads):,} heads.")
        return lines

    def published_lines(self, *columns: tuple[str, str]) -> list[str]:
        """Return published values over all models, if the study contains at least two of those models."""
        if sum(label.lower() in figures()["models"] for label in self.labels) < 2:
            return []
        values = [f"{text} {_range(value)}" for name, text in columns if (value := pooled(name)) is not None]
        return [f"Published over 11 models and 3,239 heads: {', '.join(values)}."]


def _fits(curve: pd.DataFrame) -> pd.Series:
    """R² of the predicted curve of a head over its bins, and of its shape alone, apart from a constant."""
    error, spread = curve["measured"] - curve["predicted"], ((curve["measured"] - curve["measured"].mean()) ** 2).sum()
    missed = {"r2": (error**2).sum(), "r2_shape": ((error - error.mean()) ** 2).sum()}
    return pd.Series({name: 1 - size / spread if spread > 0 else float("nan") for name, size in missed.items()})


def _range(value: float | list[float]) -> str:
    """Return a published value, or the range over models that a pair of values means."""
    return " to ".join(rounded(end) for end in value) + " by model" if isinstance(value, list) else rounded(value)


def _shares(kinds: Mapping[str, Value]) -> str:
    """Classes with their shares of heads, the most frequent first."""
    largest = sorted(kinds, key=lambda kind: -kinds[kind].value)
    return ", ".join(f"{kinds[kind].text(percent=True)} {CLASS_COLUMNS.get(kind, kind)}" for kind in largest)


def _digest(run: StudyRun) -> str:
    """The digest of a run, from the summary of its tables; empty if there is none."""
    entries = read_summary(Path(run.source))["models"] if run.source else {}
    entry = entries.get(run.label) or (next(iter(entries.values())) if len(entries) == 1 else {})
    source = entry.get("dataset")
    return str(source.get("digest") or "") if isinstance(source, dict) else ""


def _model_in(folder: Folder, run: StudyRun) -> str:
    """The name of a study's run in its results folder, whose only model may have another label."""
    return run.label if run.label in folder.models or len(folder.models) > 1 else folder.models[0]


def details(*claims: Claim | None) -> list[str]:
    """Return the detailed wording of the claims that can be made."""
    return [claim.detail for claim in claims if claim is not None and claim.detail]
