"""How far back a head's attention goes: measured on the queries that a capture follows, and predicted from means.

``reach`` has one row per head and window w. Measured is the attention weight on keys that a window of w tokens does not
see, Δ ≥ w, without the sinks; predicted is the same share under the softmax of the mean-field score (meanfield.py) over
the same queries' keys. ``curve_area`` is the mean over distance of that softmax cumulated from the nearest key on: near
1 if nothing but the nearest keys count, 1/2 if all count alike.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from qkscope.analyses.analysis import Analysis, Column, Found, Scalars, Table, Values
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
        Column("w", "tokens", "a window: it sees the keys less than this far back", "10"),
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


def compute_reach(batch: Batch) -> Found:
    """``reach``: of each head that was measured or whose rotation is known."""
    windows = np.array([int(head.moments.window) for head in batch.heads])
    widths = cut_windows(int(windows.max()))
    sets = len(ALL_AND_WITHOUT)
    rows = {name: np.full((len(batch), sets, len(widths)), np.nan) for name in _ROWS}
    numbers = {column.name: np.full((len(batch), sets), np.nan) for column in _SCALARS}
    for i, (head, field) in enumerate(zip(batch.heads, batch.mean_fields, strict=True)):
        if head.reach is not None:
            rows["mass_beyond"][i], rows["share_beyond"][i] = _measured(head.reach, widths)
            numbers["mass_sink"][i], numbers["reach90"][i] = _sinks(head.reach), _reach90(head.reach)
        if field is not None or head.nope:
            flat = np.zeros((sets, int(batch.reach[i])))  # without rotary the mean score is the same at every distance
            curves = flat if field is None else field.dense(int(batch.reach[i]))
            rows["predicted_beyond"][i] = _predicted(curves, field, head, widths)
            numbers["curve_area"][i] = curve_area(curves)
    known = np.isfinite(rows["mass_beyond"][:, 0]) | np.isfinite(rows["predicted_beyond"][:, 0])
    exists = known & (widths <= np.maximum(windows // 2, widths[0])[:, None])
    if not exists.any():
        return Found()
    columns = {"w": np.tile(widths, (len(batch), 1)), **{name: values[:, 0] for name, values in rows.items()}}
    left_out = {name: values[:, 1:] for name, values in (rows | numbers).items()}
    per_head = {name: values[:, 0] for name, values in numbers.items()}
    return Found({"reach": Values(columns, left_out, per_head, rows=exists)})


def curve_area(curves: Float[np.ndarray, "sets n"]) -> Float[np.ndarray, "sets"]:
    """Mean over distance of the softmax of each curve, cumulated from the nearest key on.

    >>> curve_area(np.zeros((1, 3))).round(3).tolist()
    [0.667]
    """
    weights = np.exp(curves - curves.max(-1, keepdims=True))
    cumulated = np.cumsum(weights, -1)
    return (cumulated / cumulated[:, -1:]).mean(-1)


def predicted_beyond(
    curves: Float[np.ndarray, "sets n"], seen: Int[np.ndarray, "queries"], widths: Int[np.ndarray, "windows"]
) -> Float[np.ndarray, "sets queries windows"]:
    """Share of the softmax of each curve on distances of w and more, for queries that see Δ = 0 … seen − 1."""
    weights = np.exp(curves - curves.max(-1, keepdims=True))
    cumulated = np.pad(np.cumsum(weights, -1), ((0, 0), (1, 0)))
    whole = cumulated[:, seen][..., None]
    return 1.0 - cumulated[:, np.minimum(widths, seen[:, None])] / whole


def _predicted(
    curves: Float[np.ndarray, "sets n"], field: MeanField | None, head: HeadData, widths: Int[np.ndarray, "windows"]
) -> Float[np.ndarray, "sets windows"]:
    """Mean over the queries that were followed, or else over the sampled ones."""
    position, group, skip_first = _queries(head)
    if not len(position):
        return np.full((len(ALL_AND_WITHOUT), len(widths)), np.nan)
    at, of_query = np.unique(position, return_inverse=True)
    seen = np.clip(at - skip_first + 1, 1, curves.shape[1])
    if field is None or field.temperature is None:
        shares = predicted_beyond(curves, seen, widths)
    else:
        factors = field.factors(at)
        parts = [predicted_beyond(curves * factors[n], seen[n : n + 1], widths) for n in range(len(at))]
        shares = np.concatenate(parts, 1)
    counts = np.zeros((N_GROUPS, len(at)))
    np.add.at(counts, (group, of_query), 1.0)
    weights = ALL_AND_WITHOUT @ counts
    return ratio(np.einsum("sq,sqw->sw", weights, shares), weights.sum(-1, keepdims=True))


def _queries(head: HeadData) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"], int]:
    """Position and document group of the queries, and how many keys of a document are sinks."""
    if head.reach is not None:
        return head.reach.positions, head.reach.groups, head.reach.skip_first
    if head.vectors is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0
    return head.vectors.q.position, head.vectors.q.example_id % N_GROUPS, 0


def _measured(
    reach: HeadReach, widths: Int[np.ndarray, "windows"]
) -> tuple[Float[np.ndarray, "sets windows"], Float[np.ndarray, "sets windows"]]:
    """Attention beyond each window: of all, and of that without sinks."""
    n, masses = ALL_AND_WITHOUT @ reach.sums[:, 0], ALL_AND_WITHOUT @ reach.sums[:, len(REACH_COUNTS) :]
    beyond = masses @ (reach.starts[:, None] >= widths).astype(float)
    missing = np.where(n > 0, 0.0, np.nan)[:, None]
    return ratio(beyond, n[:, None]) + missing, ratio(beyond, masses.sum(-1, keepdims=True)) + missing


def _sinks(reach: HeadReach) -> Float[np.ndarray, "sets"]:
    n, sink = (ALL_AND_WITHOUT @ reach.sums[:, REACH_COUNTS.index(name)] for name in ("n", "sink"))
    return np.where(n > 0, ratio(sink, n), np.nan)


def _reach90(reach: HeadReach) -> Float[np.ndarray, "sets"]:
    """The distance below which 90% of the weight lies, linear within its bin."""
    masses = ALL_AND_WITHOUT @ reach.sums[:, len(REACH_COUNTS) :]
    last = max(int(reach.positions.max(initial=0)), int(reach.starts[-1])) + 1
    ends = np.append(reach.starts[1:], last)
    cumulated = np.pad(np.cumsum(masses, -1), ((0, 0), (1, 0)))
    edges = np.append(reach.starts[:1], ends)
    return np.array([np.interp(0.9 * row[-1], row, edges) if row[-1] > 0 else np.nan for row in cumulated])


REACH = Analysis(
    "reach",
    "how far back attention goes, measured on some queries and predicted from mean vectors alone",
    (REACH_TABLE,),
    compute_reach,
    Scalars(_SCALARS, "reach", in_runs=("mass_sink", "reach90", "curve_area")),
    rotary=True,
)
