"""The distance curve of every head, bin by bin, and how far the mean-field score predicts it.

``distance`` has one row per head and bin of distance. The formulas are in meanfield.py (the prediction) and
distancecurve.py (pairs, bins and the comparison of the two).
"""

from __future__ import annotations

import numpy as np

from qkscope.analyses.analysis import Analysis, AnalysisResult, Column, Scalars, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.distancecurve import DistanceCurve, distance_curve, score_pairs
from qkscope.analyses.position import curve_end
from qkscope.analyses.uncertainty import Scale
from qkscope.core.headmoments import ALL_AND_WITHOUT

_SCALARS = (
    Column(
        "distance_r2", "share", "1 − SSE/SST of the curve predicted from means, over bins; empty without rotary", "4",
        headline=True,
    ),
    Column("distance_r2_pairs", "share", "the same with each bin weighted by its pairs", "4", headline=True),
    Column(
        "distance_log_r2", "share", "R² of a straight line over log Δ fitted to the measured bins: for comparison", "4",
        headline=True,
    ),
    Column("distance_worst", "logit", "largest |measured − predicted| over bins", "4", headline=True),
    Column(
        "distance_corr", "correlation", "of the predicted and the measured distance curve over bins", "4", signed=True,
        headline=True,
    ),
    Column(
        "position_share_of_score", "share",
        "of the variance of scores over pairs that the predicted curve explains: a check of part_position, on other "
        "pairs", "4", Scale.SHARE,
    ),
    Column(
        "decay_measured", "logit per doubling", "decay of the measured curve, over its bins within decay_range", "4",
        Scale.LINEAR, signed=True,
    ),
    Column(
        "content_offset", "logit", "mean of measured − predicted over bins: how far contents agree at all", "4",
        Scale.LINEAR, signed=True,
    ),
)  # fmt: skip
DISTANCE_TABLE = Table(
    "distance",
    (
        Column("distance_low", "tokens", "smallest distance of query and key in the bin; negative: later keys", "4"),
        Column("distance_high", "tokens", "largest distance in the bin", "4"),
        Column("n_pairs", "pairs", "pairs of sampled tokens of one document in the bin", "4"),
        Column("measured", "logit", "mean of q·k × the model's scaling over these pairs", "4"),
        Column("measured_se", "logit", "its standard error, by document", "4"),
        Column("predicted", "logit", "mean of the mean-field score at the distances of these pairs", "4"),
        Column(
            "offset", "logit", "measured − predicted: how far the contents of tokens at this distance agree", "4",
            signed=True,
        ),
        *_SCALARS,
    ),
    keys=("distance_low",),
)  # fmt: skip
_WITHOUT_INTERVAL = {
    "distance_r2": "r2",
    "distance_r2_pairs": "r2_pairs",
    "distance_log_r2": "log_r2",
    "distance_worst": "worst",
    "distance_corr": "corr",
}
_WITH_INTERVAL = ("position_share_of_score", "decay_measured", "content_offset")


def compute_distance(batch: Batch) -> AnalysisResult:
    """Compute ``distance``: the curve of each head whose rotation is known and that has vectors."""
    curves = {i: curve for i in range(len(batch)) if (curve := _curve(batch, i)) is not None}
    if not curves:
        return AnalysisResult()
    rows = {
        "distance_low": "low",
        "distance_high": "high",
        **{name: name for name in ("n_pairs", "measured", "measured_se", "predicted")},
    }
    columns = {
        name: np.concatenate([getattr(curve, attribute) for curve in curves.values()])
        for name, attribute in rows.items()
    }
    columns["offset"] = columns["measured"] - columns["predicted"]
    per_head = {name: np.full(len(batch), np.nan) for name in _WITHOUT_INTERVAL}
    sets = {name: np.full((len(batch), len(ALL_AND_WITHOUT)), np.nan) for name in _WITH_INTERVAL}
    for i, curve in curves.items():
        for name, attribute in _WITHOUT_INTERVAL.items():
            per_head[name][i] = getattr(curve, attribute)
        for name, values in sets.items():
            values[i] = getattr(curve, name)
    per_head |= {name: values[:, 0] for name, values in sets.items()}
    head = np.concatenate([np.full(len(curve.low), i) for i, curve in curves.items()])
    replicates = {name: values[:, 1:] for name, values in sets.items()}
    return AnalysisResult({"distance": TableValues(columns, replicates, per_head, head)})


def _curve(batch: Batch, i: int) -> DistanceCurve | None:
    """The curve of one head; None without a known rotation, vectors or bins."""
    field, pair = batch.mean_fields[i], batch.vectors[i]
    if field is None or pair is None:
        return None
    curve = distance_curve(
        score_pairs(pair.as_double(), field.scaling, batch.visible_keys(i)), field, curve_end(batch, i)
    )
    return curve if len(curve.low) else None


DISTANCE = Analysis(
    "distance",
    "the mean score at each distance, measured on pairs and predicted from mean vectors alone",
    (DISTANCE_TABLE,),
    compute_distance,
    Scalars(
        _SCALARS,
        "distance",
        in_runs=("distance_r2", "distance_worst", "position_share_of_score", "decay_measured", "content_offset"),
    ),
    rotary=True,
)
