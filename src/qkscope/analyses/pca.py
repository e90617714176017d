"""Combined QK PCA: queries and keys pooled, their principal components, and the correlation of each with position.

``qk`` has one row per head and component; ``heads`` has the results for whole heads. The formulas are in
components.py, the line between queries and keys on held-out documents in heldout.py.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from qkscope.analyses.analysis import COUNTS, Analysis, AnalysisResult, Column, Means, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.components import TAXONOMY, HeadVariance, head_variance, taxonomy
from qkscope.analyses.heldout import lda_accuracy
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import Scale, constant
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import N_GROUPS

_CORRELATION, _SHARE, _LINEAR = Scale.CORRELATION, Scale.SHARE, Scale.LINEAR
_TAXONOMY = Column(
    "taxonomy_published", "",
    "published class from PC0: position-dominated, q-positional, k-positional, content-focused or mixed; empty where "
    "all queries, or all keys, are the same; head_class says what the scores are made of", "1",
    dtype="text",
)  # fmt: skip
_ON_PC0 = " (component 0 only)"


def first_component(qk: pd.DataFrame) -> pd.DataFrame:
    """The rows of component 0."""
    return qk[qk["pc"] == 0]


def _signs(rows: pd.DataFrame, replicates: Columns) -> Means:
    """|r_k| of each head, and whether its keys drift against the queries."""
    abs_replicates = np.abs(replicates["r_k"]) if "r_k" in replicates else None
    discordant = (rows["r_k"] < 0).astype(float).where(rows["concordant"].notna())
    return {
        "abs_r_k": (rows["r_k"].abs(), abs_replicates, Scale.MAGNITUDE),
        "discordant_share": (discordant, None, Scale.SHARE),
    }


def _ambiguous(batch: Batch, columns: Columns) -> dict[str, Bool[np.ndarray, "heads"]]:
    """Heads whose class on PC0 could be another: the interval of r_q or |r_k| contains a threshold."""
    limits = np.array([batch.options.pca.low, batch.options.pca.high])
    low_q, high_q, low_k, high_k = (
        columns[f"{name}_{end}"][:, :1] for name in ("r_q", "r_k") for end in ("low", "high")
    )
    nearest = np.where(low_k * high_k < 0, 0.0, np.minimum(np.abs(low_k), np.abs(high_k)))
    farthest = np.maximum(np.abs(low_k), np.abs(high_k))
    crosses = (low_q < limits) & (limits < high_q) | (nearest < limits) & (limits < farthest)
    return {"ambiguous_class": np.asarray(crosses.any(-1))}


QK_TABLE = Table(
    "qk",
    (
        Column("pc", "index", "principal component, from 0, by descending variance", "1"),
        *COUNTS,
        Column(
            "explained_variance", "share", "share of the pooled variance of queries and keys on this component", "1",
            _SHARE,
        ),
        Column(
            "r_q", "correlation", "of the queries' projection with position; sign canonical", "1", _CORRELATION,
            signed=True, interval_note=_ON_PC0,
        ),
        Column(
            "r_k", "correlation", "of the keys' projection with position; negative: drifts against the queries", "1",
            _CORRELATION, signed=True, interval_note=_ON_PC0,
        ),
        Column("mu_q", "vector units", "mean projection of the queries, not centred", "1", signed=True),
        Column("mu_k", "vector units", "mean projection of the keys, not centred", "1", signed=True),
        Column("slope_q", "per token", "regression slope of the queries' projection on position", "1", signed=True),
        Column("slope_k", "per token", "regression slope of the keys' projection on position", "1", signed=True),
        Column("var_q", "squared units", "variance of the queries' projection", "1"),
        Column("var_k", "squared units", "variance of the keys' projection", "1"),
        Column("fisher", "ratio", "(mu_q − mu_k)² / (var_q + var_k)", "1"),
        Column("separation", "vector units", "|mu_q − mu_k|", "1"),
        Column(
            "concordant", "true/false", "r_k > 0; empty where |r_q| < 0.05 leaves the sign of r_k undefined", "1",
            dtype="boolean",
        ),
        Column("eigengap", "ratio", "relative distance to the nearer neighbouring eigenvalue", "1"),
        Column("degenerate", "true/false", "eigengap < 0.02: r of this component alone means little", "1"),
        _TAXONOMY,
    ),
    keys=("pc",),
    flags=True,
    raises=_ambiguous,
    interval_order=("r_q", "r_k", "explained_variance"),
    in_runs=("explained_variance", "r_q", "r_k"),
    needed=("r_q", "r_k"),
    whole_heads=first_component,
    further_means=_signs,
)  # fmt: skip
HEADS_TABLE = Table(
    "heads",
    (
        _TAXONOMY,
        Column(
            "posvar_q_published", "mixed share", "Σ explained_variance·r_q² over the kept components, as published",
            "1", _SHARE,
        ),
        Column(
            "posvar_k_published", "mixed share", "Σ explained_variance·r_k² over the kept components, as published",
            "1", _SHARE,
        ),
        Column("posvar_q_pc0_share", "share", "component 0's part of posvar_q_published", "1"),
        Column("posvar_k_pc0_share", "share", "component 0's part of posvar_k_published", "1"),
        Column(
            "posvar_q", "share", "exact share of the queries' variance (vectors, not scores) linear in position",
            "1", _SHARE,
        ),
        Column("posvar_k", "share", "the same for the keys", "1", _SHARE),
        Column(
            "positional_overhead", "share", "the same for queries and keys together, each class about its own mean",
            "1", _SHARE,
        ),
        Column("amplification", "score per token", "mu_q·slope_k on component 0", "1", _LINEAR, signed=True),
        Column(
            "amplification_window", "score", "amplification × reach", "1", _LINEAR, signed=True,
            per_token="amplification",
        ),
        Column("fisher", "ratio", "of component 0", "1", Scale.POSITIVE),
        Column("separation", "vector units", "of component 0", "1", Scale.POSITIVE),
        Column(
            "lda_accuracy_gaussian", "share", "accuracy of Fisher's line on components 0 and 1 for Gaussian classes",
            "1", _SHARE, headline=False,
        ),
        Column(
            "lda_accuracy", "share", "accuracy of that line on sampled vectors of documents it was not fitted to", "1",
            Scale.PROPORTION,
        ),
    ),
    notes=True,
    flags=True,
    in_runs=("positional_overhead", "posvar_q", "posvar_k", "lda_accuracy"),
)  # fmt: skip

_PER_COMPONENT = ("explained_variance", "r_q", "r_k", "mu_q", "mu_k", "slope_q", "slope_k", "var_q", "var_k",
                  "fisher", "separation", "eigengap", "degenerate")  # fmt: skip


def compute_pca(batch: Batch) -> AnalysisResult:
    """Compute ``qk``, ``heads`` and the axes themselves."""
    kind = _classes(batch)
    tables = {"qk": _components(batch, kind), "heads": _heads(batch, kind)}
    return AnalysisResult(tables, {"axes": _axes(batch)})


def _classes(batch: Batch) -> np.ndarray:
    """The class of each head by its PC0; None where all queries or all keys are equal."""
    options, pcs = batch.options.pca, batch.components
    kind = np.array(TAXONOMY, dtype=object)[taxonomy(pcs.r_q[:, 0], pcs.r_k[:, 0], options.high, options.low)]
    kind[constant(batch.moments.total_q) | constant(batch.moments.total_k)] = None
    return kind


def _components(batch: Batch, kind: np.ndarray) -> TableValues:
    pcs, replicates = batch.components, batch.replicates
    n_heads, n_pcs = pcs.r_q.shape
    n_q, n_k = (moments.n.sum(-1).astype(np.int64) for moments in (batch.moments.q, batch.moments.k))
    columns = {name: getattr(pcs, name) for name in _PER_COMPONENT}
    pc = np.tile(np.arange(n_pcs), (n_heads, 1))
    columns |= {"pc": pc, "concordant": np.where(pcs.sign_anchored_on_k, np.nan, pcs.concordant)}
    column_replicates = {}
    if replicates is not None:
        column_replicates = {name: replicates.of_components(name) for name in ("explained_variance", "r_q", "r_k")}
        for name in ("r_q", "r_k"):  # later components may change order and have no interval
            column_replicates[name] = np.where(np.arange(n_pcs) == 0, column_replicates[name], np.nan)
    # n rows span n − 1 dimensions about their mean; components beyond that do not exist.
    exists = pc < (n_q + n_k - 1)[:, None]
    return TableValues(columns, column_replicates, {"taxonomy_published": kind, "n_q": n_q, "n_k": n_k}, rows=exists)


def _heads(batch: Batch, kind: np.ndarray) -> TableValues:
    variance = head_variance(batch.moments.total_q, batch.moments.total_k, batch.components)
    accuracy, accuracy_replicates = _line_accuracy(batch)
    columns = {name: getattr(variance, name) for name in HeadVariance.__dataclass_fields__}
    columns |= {"taxonomy_published": kind, "lda_accuracy": accuracy}
    if batch.replicates is None:
        return TableValues(columns)
    replicates = batch.replicates
    with_interval = [
        c.name for c in HEADS_TABLE.columns if c.scale is not None and c.name in HeadVariance.__dataclass_fields__
    ]
    return TableValues(
        columns,
        {name: replicates.of_head(name) for name in with_interval} | {"lda_accuracy": accuracy_replicates},
        documents={"lda_accuracy": np.array([_documents(head) for head in batch.heads])},
    )


def _line_accuracy(batch: Batch) -> tuple[Float[np.ndarray, "heads"], Float[np.ndarray, "heads 8"]]:
    """``lda_accuracy`` of each head that has vectors, and with each document group left out, where defined."""
    accuracies = [
        (np.nan, np.full(N_GROUPS, np.nan))
        if head.vectors is None
        else lda_accuracy(head.moments.q, head.moments.k, head.vectors, axes[:2], on.pcs)
        for head, axes, on in zip(batch.heads, batch.components.axes, batch.coordinates, strict=True)
    ]
    replicates = np.stack([without_group for _, without_group in accuracies])
    return np.array([value for value, _ in accuracies]), np.where(
        np.isnan(replicates).any(-1, keepdims=True), np.nan, replicates
    )


def _documents(head: HeadData) -> int:
    """Documents with sampled vectors, of queries or of keys, whichever are fewer."""
    rows = () if head.vectors is None else (head.vectors.q, head.vectors.k)
    return min((len(np.unique(kind.example_id)) for kind in rows), default=0)


def _axes(batch: Batch) -> Columns:
    """The axes themselves: one row per head and component, with a column of vectors."""
    n_heads, n_pcs, d = batch.components.axes.shape
    columns = {name: batch.index[name].repeat(n_pcs, 0) for name in ("model", "layer", "head")}
    axes = batch.components.axes.reshape(-1, d).astype(np.float32)
    return columns | {"pc": np.tile(np.arange(n_pcs), n_heads), "axis": axes}


def _class_shares(frames: dict[str, pd.DataFrame]) -> dict[str, object]:
    heads = frames.get("heads")
    if heads is None or not len(heads):
        return {}
    shares = heads["taxonomy_published"].value_counts(normalize=True)
    return {"taxonomy": {kind: float(shares.get(kind, 0.0)) for kind in TAXONOMY}}


PCA = Analysis(
    "pca",
    "principal components of queries and keys together, and the correlation of each with position",
    (QK_TABLE, HEADS_TABLE),
    compute_pca,
    summary=_class_shares,
)
