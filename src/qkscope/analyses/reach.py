"""The reach of a head's attention: measured on the queries that a capture follows, and predicted from means.

``reach`` has one row per head and window w. Measured is the attention weight on keys that a window of w tokens does not
see, Δ ≥ w (|Δ| ≥ w in encoders), without the sinks; predicted is the same share under the softmax of the mean-field
score (meanfield.py) over the same queries' keys. ``curve_area`` is the mean over distance of that softmax cumulated
from the nearest key on: near 1 if nothing but the nearest keys count, 1/2 if all count alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from qkscope.analyses.analysis import Analysis, AnalysisResult, Column, Scalars, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.meanfield import MeanField
from qkscope.analyses.uncertainty import Scale
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import ALL_AND_WITHOUT, N_GROUPS
from qkscope.core.linalg import ratio
from qkscope.core.reach import REACH_COUNTS, HeadReach, cut_windows

_SCALARS = (
    Column("mass_sink", "share", "of attention on the first keys of a document, the sinks", "10", Scale.SHARE),
    Column(
        "reach90", "tokens", "distance within which 90% of the attention without sinks lies", "10", Scale.POSITIVE,
        headline=True,
    ),
    Column(
        "curve_area", "share", "mean over distance of the predicted attention cumulated from the nearest key on", "10",
        Scale.SHARE,
    ),
)  # fmt: skip
REACH_TABLE = Table(
    "reach",
    (
        Column("w", "tokens", "a window: it sees the keys less than this far away", "10"),
        Column(
            "mass_beyond", "share", "of attention on keys beyond the window, without sinks", "10", Scale.SHARE,
            headline=False,
        ),
        Column(
            "share_beyond", "share", "the same as a share of the attention without sinks", "10", Scale.SHARE,
            headline=False,
        ),
        Column(
            "predicted_beyond", "share", "share_beyond as predicted from means alone", "10", Scale.SHARE, headline=False
        ),
        *_SCALARS,
    ),
    keys=("w",),
)  # fmt: skip
_ROWS = ("mass_beyond", "share_beyond", "predicted_beyond")


def compute_reach(batch: Batch) -> AnalysisResult:
    """Compute ``reach`` of each head that was measured or whose rotation is known."""
    windows = np.array([int(head.moments.window) for head in batch.heads])
    widths = cut_windows(int(windows.max()))
    sets = len(ALL_AND_WITHOUT)
    rows = {name: np.full((len(batch), sets, len(widths)), np.nan) for name in _ROWS}
    numbers = {column.name: np.full((len(batch), sets), np.nan) for column in _SCALARS}
    furthest = np.full(len(batch), np.nan)
    for i, (head, field) in enumerate(zip(batch.heads, batch.mean_fields, strict=True)):
        if head.reach is not None:
            rows["mass_beyond"][i], rows["share_beyond"][i] = _measured(head.reach, widths)
            furthest[i] = min(_furthest(head.reach, both=head.both), int(batch.reach[i]))
            numbers["mass_sink"][i], numbers["reach90"][i] = _sinks(head.reach), _reach90(head.reach, furthest[i])
        if field is not None or head.nope:
            curves = Curves.of(field, int(batch.reach[i]), both=head.both)
            rows["predicted_beyond"][i] = _predicted(curves, field, head, widths)
            numbers["curve_area"][i] = curve_area(curves)
    has_values = np.isfinite(rows["mass_beyond"][:, 0]) | np.isfinite(rows["predicted_beyond"][:, 0])
    exists = has_values & (widths <= np.maximum(windows // 2, widths[0])[:, None])
    if not exists.any():
        return AnalysisResult()
    columns = {"w": np.tile(widths, (len(batch), 1)), **{name: values[:, 0] for name, values in rows.items()}}
    replicates = {name: values[:, 1:] for name, values in (rows | numbers).items()}
    per_head = {name: values[:, 0] for name, values in numbers.items()}
    values = TableValues(columns, replicates, per_head, rows=exists, most={"reach90": furthest})
    return AnalysisResult({"reach": values})


class Curves(NamedTuple):
    """The mean-field score at each distance."""

    earlier: Float[np.ndarray, "sets n"]
    """Of the query's own key and of earlier ones: at Δ = 0, 1, …"""
    later: Float[np.ndarray, "sets m"]
    """Of later keys: at Δ = −1, −2, …; none where queries do not see them."""

    @classmethod
    def of(cls, field: MeanField | None, n: int, *, both: bool) -> Curves:
        """The curves at distances below ``n``; without rotary the mean score is the same at all of them."""
        none = np.zeros((len(ALL_AND_WITHOUT), n))
        earlier, later = (none, none) if field is None else (field.dense(n), field.mirrored.dense(n) if both else none)
        return cls(earlier, later[:, 1:] if both else none[:, :0])

    @property
    def weights(self) -> tuple[Float[np.ndarray, "sets n"], Float[np.ndarray, "sets m"]]:
        """The softmax over both curves together, times a constant."""
        top = np.maximum(self.earlier.max(-1), self.later.max(-1, initial=-np.inf))[:, None]
        return np.exp(self.earlier - top), np.exp(self.later - top)


def curve_area(curves: Curves) -> Float[np.ndarray, "sets"]:
    """Mean over distance of the softmax of each curve, cumulated from the nearest key on.

    >>> curve_area(Curves(np.zeros((1, 3)), np.zeros((1, 0)))).round(3).tolist()
    [0.667]
    """
    weights, later = curves.weights
    weights[:, 1 : later.shape[1] + 1] += later
    cumulated = np.cumsum(weights, -1)
    return (cumulated / cumulated[:, -1:]).mean(-1)


def predicted_beyond(
    curves: Curves,
    n_earlier: Int[np.ndarray, "queries"],
    after: Int[np.ndarray, "queries"],
    widths: Int[np.ndarray, "windows"],
) -> Float[np.ndarray, "sets queries windows"]:
    """Share of the softmax of each curve on distances of w and more.

    Queries see Δ = 0 … n_earlier − 1 and, where there is a curve of later keys, Δ = −1 … −after.
    """
    earlier, later = (np.pad(np.cumsum(weights, -1), ((0, 0), (1, 0))) for weights in curves.weights)
    after = np.minimum(after, later.shape[1] - 1)
    inside = earlier[:, np.minimum(widths, n_earlier[:, None])] + later[:, np.minimum(widths - 1, after[:, None])]
    return 1.0 - inside / (earlier[:, n_earlier] + later[:, after])[..., None]


def _predicted(
    curves: Curves, field: MeanField | None, head: HeadData, widths: Int[np.ndarray, "windows"]
) -> Float[np.ndarray, "sets windows"]:
    """Mean over the followed queries, or else over the sampled ones."""
    position, after, group, skip_first = _queries(head)
    if not len(position):
        return np.full((len(ALL_AND_WITHOUT), len(widths)), np.nan)
    if not head.both:
        after = np.zeros_like(position)
    (positions, later), of_query = np.unique([position, after], axis=1, return_inverse=True)
    n_earlier = np.clip(positions - skip_first + 1, 1, curves.earlier.shape[1])
    if field is None or field.temperature is None:
        shares = predicted_beyond(curves, n_earlier, later, widths)
    else:
        hot = (Curves(*(curve * factor for curve in curves)) for factor in field.factors(positions))
        by_query = [predicted_beyond(c, n_earlier[n : n + 1], later[n : n + 1], widths) for n, c in enumerate(hot)]
        shares = np.concatenate(by_query, 1)
    counts = np.zeros((N_GROUPS, len(positions)))
    np.add.at(counts, (group, of_query), 1.0)
    weights = ALL_AND_WITHOUT @ counts
    return ratio(np.einsum("sq,sqw->sw", weights, shares), weights.sum(-1, keepdims=True))


class _Queries(NamedTuple):
    position: Int[np.ndarray, "n"]
    after: Int[np.ndarray, "n"]
    """Number of tokens of the document after the query."""
    group: Int[np.ndarray, "n"]
    sinks: int
    """Number of keys of a document that are sinks."""


def _queries(head: HeadData) -> _Queries:
    """The followed queries, or else the sampled ones, whose documents have no known end."""
    if head.reach is not None:
        return _Queries(head.reach.positions, head.reach.after, head.reach.groups, head.reach.skip_first)
    if head.vectors is None:
        none = np.zeros(0, dtype=np.int64)
        return _Queries(none, none, none, 0)
    position = head.vectors.q.position
    return _Queries(position, int(head.moments.window) - 1 - position, head.vectors.q.example_id % N_GROUPS, 0)


def _measured(
    reach: HeadReach, widths: Int[np.ndarray, "windows"]
) -> tuple[Float[np.ndarray, "sets windows"], Float[np.ndarray, "sets windows"]]:
    """Attention beyond each window as a share of all attention, and of that without sinks."""
    n, masses = ALL_AND_WITHOUT @ reach.sums[:, 0], ALL_AND_WITHOUT @ reach.sums[:, len(REACH_COUNTS) :]
    beyond = masses @ (reach.starts[:, None] >= widths).astype(float)
    missing = np.where(n > 0, 0.0, np.nan)[:, None]
    return ratio(beyond, n[:, None]) + missing, ratio(beyond, masses.sum(-1, keepdims=True)) + missing


def _sinks(reach: HeadReach) -> Float[np.ndarray, "sets"]:
    n, sink = (ALL_AND_WITHOUT @ reach.sums[:, REACH_COUNTS.index(name)] for name in ("n", "sink"))
    return np.where(n > 0, ratio(sink, n), np.nan)


def _furthest(reach: HeadReach, *, both: bool) -> int:
    """One more than the largest distance between a followed query and a key that is not a sink."""
    earlier, later = reach.positions - reach.skip_first, reach.after if both else np.zeros_like(reach.after)
    return int(np.maximum(earlier, later).max(initial=0)) + 1


def _reach90(reach: HeadReach, furthest: float) -> Float[np.ndarray, "sets"]:
    """The distance within which 90% of the weight lies, linear within its bin; the last bin ends at ``furthest``."""
    masses = ALL_AND_WITHOUT @ reach.sums[:, len(REACH_COUNTS) :]
    edges = np.minimum(np.append(reach.starts, furthest), furthest)
    cumulated = np.pad(np.cumsum(masses, -1), ((0, 0), (1, 0)))
    return np.array([np.interp(0.9 * row[-1], row, edges) if row[-1] > 0 else np.nan for row in cumulated])


REACH = Analysis(
    "reach",
    "how far attention goes, measured on some queries and predicted from mean vectors alone",
    (REACH_TABLE,),
    compute_reach,
    Scalars(_SCALARS, "reach", in_runs=("mass_sink", "reach90", "curve_area")),
    rotary=True,
)
