"""Planar rotation model of every head: the drift axis a, the separation axis b, and the resulting bias.

``rotated`` has one row per head. The formulas are in rotationmodel.py (axes), heldout.py (correlations along axes
fitted to other documents), causal.py (the bias over pairs that attention scores), spectrum.py (ω) and nulls.py.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from qkscope.analyses.analysis import COUNTS, Analysis, AnalysisResult, Column, Means, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.causal import CausalBias, causal_bias
from qkscope.analyses.complement import circles
from qkscope.analyses.heldout import held_out
from qkscope.analyses.nulls import null_r95
from qkscope.analyses.rotationmodel import Rotation, leftovers, pool_without_drift
from qkscope.analyses.spectrum import Circle
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import Scale
from qkscope.core.headmoments import ALL_AND_WITHOUT

CIRCLES_AT_ONCE = 2
"""Heads whose ω is searched together; they fill one batch of transforms."""
_CORRELATION, _SHARE, _LINEAR = Scale.CORRELATION, Scale.SHARE, Scale.LINEAR


def _bias_signs(rows: pd.DataFrame, _: Columns) -> Means:
    # A share of signs does not vary smoothly, so the jackknife does not apply.
    return {"positive_bias_share": (rows["bias_strength"] > 0, None, Scale.SHARE)}


WEAK_R = 0.2
"""Below this correlation of either class with position, the axis a is not well determined."""


def _weak_axis(_: Batch, columns: Columns) -> dict[str, Bool[np.ndarray, "heads"]]:
    """True for heads whose axis a may be chance: intervals along it cover the true value less often than stated."""
    below = columns["position_r"] <= np.nan_to_num(columns["null_r95"])
    return {"weak_axis": below | (np.minimum(np.abs(columns["r_q_a"]), np.abs(columns["r_k_a"])) < WEAK_R)}


ROTATED_TABLE = Table(
    "rotated",
    (
        *COUNTS,
        Column("window", "tokens", "context length: as the dataset says, or the head's last position + 1", "0"),
        Column("reach", "tokens", "how far back queries see: the window, or the sliding window if smaller", "0"),
        Column(
            "position_r", "correlation", "|corr| of the pooled projection on a with position", "2", Scale.MAGNITUDE
        ),
        Column("r_q_a", "correlation", "of the queries' projection on a with position", "2", _CORRELATION, signed=True),
        Column("r_k_a", "correlation", "of the keys' projection on a with position", "2", _CORRELATION, signed=True),
        Column("alpha_q", "per token", "drift slope of the queries on a", "2", _LINEAR, signed=True),
        Column("alpha_k", "per token", "drift slope of the keys on a", "2", _LINEAR, signed=True),
        Column("mu_q_a", "vector units", "mean of the queries on a, not centred", "2", _LINEAR, signed=True),
        Column("mu_k_a", "vector units", "mean of the keys on a, not centred", "2", _LINEAR, signed=True),
        Column(
            "mu_q_b", "vector units", "mean of the queries on b, not centred", "2", _LINEAR, signed=True, headline=False
        ),
        Column(
            "mu_k_b", "vector units", "mean of the keys on b, not centred", "2", _LINEAR, signed=True, headline=False
        ),
        Column("separation_strength", "share", "share of E‖q − k‖² on b", "2", _SHARE),
        Column("var_frac_a", "share", "share of the pooled variance on a", "2", _SHARE),
        Column("var_frac_b", "share", "share of the pooled variance on b", "2", _SHARE),
        Column("plane_var_fraction", "share", "var_frac_a + var_frac_b", "2", _SHARE),
        Column("content_var_b", "squared units", "variance on b within a class, mean of the two", "2", Scale.POSITIVE),
        Column(
            "bias_strength", "score per token", "mu_q_a·alpha_k; positive: later keys score higher (recency)", "2",
            _LINEAR, signed=True,
        ),
        Column(
            "query_term", "score per token", "alpha_q·mu_k_a, the coefficient of the query's position", "2", _LINEAR,
            signed=True,
        ),
        Column(
            "interaction", "score per token²", "alpha_q·alpha_k, the coefficient of both positions", "2", _LINEAR,
            signed=True,
        ),
        Column("constant", "score", "mu_q_a·mu_k_a + mu_q_b·mu_k_b", "2", _LINEAR, signed=True),
        Column(
            "bias_full", "score per token", "μ_Q·β_K over all dimensions, of which bias_strength is the part on a",
            "2", _LINEAR, signed=True,
        ),
        Column(
            "bias_causal", "score per token",
            "slope of the score on the key's position within queries, over earlier keys", "2", _LINEAR, signed=True,
        ),
        Column(
            "bias_causal_by_query", "score per token",
            "mean of each query's own slope, of those with 8 keys before them: bias_causal with equal weight per query",
            "2", _LINEAR, signed=True,
        ),
        Column("alpha_k_window", "vector units", "alpha_k × reach", "2", _LINEAR, signed=True, per_token="alpha_k"),
        Column(
            "bias_window", "score", "bias_strength × reach", "2", _LINEAR, signed=True, per_token="bias_strength"
        ),
        Column(
            "bias_full_window", "score", "bias_full × reach", "2", _LINEAR, signed=True, per_token="bias_full"
        ),
        Column(
            "bias_causal_window", "score", "bias_causal × reach", "2", _LINEAR, signed=True, per_token="bias_causal"
        ),
        Column(
            "logit_bias_window", "logit", "bias_full × reach × the model's scaling of q·k", "2", signed=True
        ),
        Column("residual_pos_r", "correlation", "largest |corr| with position off a: rounding only, by the lemma", "2"),
        Column(
            "residual_r_q", "correlation", "|corr| of the queries with position along the part of their drift off a",
            "2",
        ),
        Column(
            "residual_r_k", "correlation", "|corr| of the keys with position along the part of their drift off a", "2"
        ),
        Column("a_qk_cos", "cosine", "between the drift of the queries and the drift of the keys", "2", signed=True),
        Column(
            "b_centroid_cos", "cosine", "between b and the difference of the class means off a", "2", signed=True
        ),
        Column(
            "linearity_r2", "share", "how straight the keys' drift on a is: squared correlation of bucket means", "2"
        ),
        Column(
            "omega", "radians per token", "signed frequency of the best circle through x_a + i·x_b, from the sample",
            "3", signed=True,
        ),
        Column(
            "omega_r_squared", "share", "how much of x_a + i·x_b about its class means that circle explains", "3"
        ),
        Column(
            "omega_at_edge", "true/false", "omega is the lowest frequency searched: drift rather than rotation", "3",
            dtype="boolean",
        ),
        Column(
            "null_r95", "correlation",
            "95th percentile of position_r if content ignores position; empty below 6 documents", "6",
        ),
        Column("r_q_heldout", "correlation", "r_q_a along an axis a that other documents chose", "6", signed=True),
        Column("r_k_heldout", "correlation", "r_k_a along an axis a that other documents chose", "6", signed=True),
    ),
    notes=True,
    flags=True,
    raises=_weak_axis,
    in_runs=(
        "r_q_a", "r_k_a", "bias_strength", "bias_window", "bias_full_window", "bias_causal_window",
        "separation_strength", "plane_var_fraction",
    ),
    further_means=_bias_signs,
)  # fmt: skip

_OF_MODEL = tuple(
    column.name for column in ROTATED_TABLE.columns if column.name in {*vars(Rotation), *Rotation.__dataclass_fields__}
)
_WITH_INTERVAL = tuple(c.name for c in ROTATED_TABLE.columns if c.scale is not None and c.name in _OF_MODEL)


def compute_rotation(batch: Batch) -> AnalysisResult:
    """Compute ``rotated``: the model, checks of what it leaves out, and results from sampled vectors."""
    moments, options = batch.moments, batch.options.rotation
    q, k = moments.total_q, moments.total_k
    columns = {name: getattr(batch.rotation, name) for name in _OF_MODEL}
    for result in (
        leftovers(q, k, moments.k_buckets, batch.rotation, options.centering),
        held_out(moments, options.centering),
    ):
        columns |= {name: getattr(result, name) for name in type(result).__dataclass_fields__}
    columns["logit_bias_window"] = columns["bias_full"] * batch.reach * moments.scaling
    columns |= {"n_q": q.n.astype(np.int64), "n_k": k.n.astype(np.int64), "window": moments.window}
    causal = _causal(batch)
    columns |= {name: values[:, 0] for name, values in causal.items()}
    columns |= {"reach": batch.reach, "null_r95": _nulls(batch)} | _omega(batch)
    if batch.replicates is None:
        return AnalysisResult({"rotated": TableValues(columns)})
    replicates = {name: batch.replicates.of_rotation(name) for name in _WITH_INTERVAL}
    return AnalysisResult(
        {"rotated": TableValues(columns, replicates | {name: values[:, 1:] for name, values in causal.items()})}
    )


def _causal(batch: Batch) -> dict[str, Float[np.ndarray, "heads 9"]]:
    """The causal biases of each head that has vectors, then with each document group left out."""
    none = np.full(len(ALL_AND_WITHOUT), np.nan)
    biases = [
        CausalBias(none, none) if pair is None else causal_bias(pair, batch.visible_keys(i))
        for i, pair in enumerate(batch.vectors)
    ]
    return {
        "bias_causal": np.stack([bias.pooled for bias in biases]),
        "bias_causal_by_query": np.stack([bias.by_query for bias in biases]),
    }


def _nulls(batch: Batch) -> Float[np.ndarray, "heads"]:
    """``null_r95`` of each head that has vectors."""
    q, k, centering = batch.moments.total_q, batch.moments.total_k, batch.options.rotation.centering
    covs = pool_without_drift(q, k, centering)
    return np.array(
        [
            np.nan
            if pair is None or not min(len(pair.q), len(pair.k))
            else null_r95(pair, cov, drifts, within=centering == "within")
            for pair, cov, *drifts in zip(batch.vectors, covs, q.slopes, k.slopes, strict=True)
        ]
    )


def _omega(batch: Batch) -> Columns:
    """``omega``, ``omega_r_squared``, ``omega_at_edge`` of each head; empty without vectors."""
    heads = batch.plane_vectors
    fits: list[Circle | None] = [None] * len(heads)
    measurable = [(i, head, head.measured()) for i, head in enumerate(heads) if head is not None and head.enough]
    for _, same_tokens in groupby(measurable, lambda entry: (entry[2].q.tokens, entry[2].k.tokens, entry[1].window)):
        heads_on_tokens = list(same_tokens)
        for start in range(0, len(heads_on_tokens), CIRCLES_AT_ONCE):
            chunk = heads_on_tokens[start : start + CIRCLES_AT_ONCE]
            chunk_fits = circles([head.on_plane(pair) for _, head, pair in chunk], chunk[0][2], chunk[0][1].window)
            for (i, *_), fit in zip(chunk, chunk_fits, strict=True):
                fits[i] = fit
    return {
        "omega": np.array([np.nan if fit is None else fit.omega for fit in fits]),
        "omega_r_squared": np.array([np.nan if fit is None else fit.r_squared for fit in fits]),
        "omega_at_edge": np.array([np.nan if fit is None else float(fit.at_edge) for fit in fits]),
    }


ROTATION = Analysis(
    "rotation",
    "the axis along which a head drifts with position, the axis that separates queries from keys, and the bias",
    (ROTATED_TABLE,),
    compute_rotation,
    axes=True,
)
