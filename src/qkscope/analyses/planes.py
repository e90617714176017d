"""Planes of every head in two views: principal planes of the complement of a and b (svd), and RoPE planes (rope).

``planes`` has one row per head, view and plane. The formulas are in complement.py and ropeplanes.py.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.analyses.analysis import HEAD_KEY, Analysis, AnalysisResult, Column, Scalars, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.complement import PLANE_ROWS, PlaneVectors, complement_axes, measure_planes
from qkscope.analyses.positionlocked import LockedSplit
from qkscope.analyses.ropeplanes import RopePlanes, rope_planes
from qkscope.analyses.spectrum import chance_coherence, token_positions
from qkscope.analyses.tables import Columns
from qkscope.core.headdata import HeadData
from qkscope.core.sample import sample_pair

_SVD = (
    Column("angle_r", "correlation", "resultant with the sign of the frequency", "3", signed=True),
    Column(
        "frequency", "radians per token", "at which the angle turns with position; its sign is the plane's", "3",
        signed=True,
    ),
    Column("resultant", "share", "mean length of e^{iθ} less its class mean, turned back by ωt, of both classes", "3"),
    Column("coherence", "ratio", "|Σ_d F_d|² / Σ_d |F_d|² over documents: about 1 by chance", "3"),
    Column("coherence_chance", "ratio", "99th percentile of coherence of structureless planes on the same tokens", "3"),
    Column("ring", "ratio", "coefficient of variation of the radius: 0 is a perfect ring, 0.5 a Gaussian cloud", "3"),
    Column("active", "true/false", "coherence > coherence_chance", "3", dtype="boolean"),
    Column("qk_accuracy", "share", "how well a line in the plane tells queries from keys: 0.5 on a shared ring", "3"),
)  # fmt: skip
_ROPE = (
    Column("theta", "radians per token", "RoPE's frequency of the plane; 0 for the coordinates it leaves alone", "3"),
    Column(
        "lock_q", "share", "how firmly queries are locked to the rotation: |mean with it undone| / mean length", "3"
    ),
    Column("lock_k", "share", "the same of keys", "3"),
    Column(
        "position_share_q", "share", "of the queries' variance in the plane that position alone determines", "4",
    ),
    Column("position_share_k", "share", "the same of keys", "4"),
    Column("cycles", "turns", "theta × window / 2π", "3"),
    Column("bias_part", "score per token", "the plane's part of bias_full; the parts add up to it", "3", signed=True),
    Column("bias_share", "share", "|bias_part| over the sum of all |bias_part|", "3"),
)  # fmt: skip
PLANES_TABLE = Table(
    "planes",
    (
        Column(
            "view", "", "svd: principal planes of the complement of a and b; rope: the planes that RoPE turns", "3",
            dtype="text",
        ),
        Column("plane", "index", "plane within the view, from 0: by descending variance, or as RoPE numbers them", "3"),
        Column("n_q", "rows", "query vectors measured", "3"),
        Column("n_k", "rows", "key vectors measured", "3"),
        Column(
            "var_share", "share", "svd: of the complement's variance in this plane; rope: of the pooled variance", "3"
        ),
        *_SVD,
        *_ROPE,
    ),
    keys=("view", "plane"),
)  # fmt: skip


def compute_planes(batch: Batch) -> AnalysisResult:
    """Compute ``planes``: both views of each head with vectors; columns that do not apply to a view are empty."""
    views: list[tuple[int, Columns]] = []
    for i, vectors in enumerate(batch.plane_vectors):
        if vectors is not None and vectors.enough:
            views.append((i, _svd_view(vectors, batch.options.chance)))
    for i, head_data in enumerate(batch.heads):
        if head_data.rotary is not None and head_data.vectors is not None:
            views.append((i, _rope_view(head_data, batch.locked[i])))
    if not views:
        return AnalysisResult()
    head = np.concatenate([np.full(len(view["plane"]), i) for i, view in views])
    columns = {
        column.name: np.concatenate([view.get(column.name, np.full(len(view["plane"]), np.nan)) for _, view in views])
        for column in PLANES_TABLE.columns
    }
    return AnalysisResult({"planes": TableValues(columns, head=head)})


def _svd_view(head: PlaneVectors, chance: float | None) -> Columns:
    pair = head.measured().as_double()
    planes = measure_planes(pair, complement_axes(pair, head.a, head.b), head.window)
    limit = chance_coherence(*token_positions(pair), head.window) if chance is None else chance
    n = len(planes.share)
    return {
        "view": np.full(n, "svd"),
        "plane": np.arange(n),
        "n_q": np.full(n, len(pair.q)),
        "n_k": np.full(n, len(pair.k)),
        "var_share": planes.share,
        "angle_r": planes.angle_r,
        "frequency": planes.turning.frequency,
        "resultant": planes.turning.resultant,
        "coherence": planes.turning.coherence,
        "coherence_chance": np.full(n, limit),
        "ring": planes.ring,
        "active": planes.active(limit).astype(float),
        "qk_accuracy": planes.qk_accuracy,
    }


def _rope_view(head: HeadData, locked: tuple[LockedSplit, LockedSplit] | None) -> Columns:
    """One row per RoPE plane, and one for the coordinates that are not rotated."""
    assert head.rotary is not None
    assert head.vectors is not None
    measured = sample_pair(head.vectors, PLANE_ROWS).as_double()
    moments = head.moments
    planes = rope_planes(head.rotary, moments.total_q, moments.total_k, measured, int(moments.window))
    n = len(planes.theta)
    counts = {"n_q": np.full(n, len(measured.q)), "n_k": np.full(n, len(measured.k))}
    columns = {"view": np.full(n, "rope"), "plane": np.arange(n)} | counts
    if locked is not None:
        columns |= {f"position_share_{kind}": split.by_plane[:n] for kind, split in zip("qk", locked, strict=True)}
    return columns | {name: getattr(planes, name) for name in RopePlanes.__dataclass_fields__}


STRONG_R = 0.3
"""An active plane with at least this |angle_r| follows position closely."""


def active_planes(planes: pd.DataFrame) -> pd.DataFrame:
    """Number of planes of each head that turn with position (significance), and their share of variance (size)."""
    planes = planes[planes["view"] == "svd"]
    active = planes["active"].astype(float)
    strength = planes["angle_r"].abs() if "angle_r" in planes else np.nan * active
    measured = planes.assign(
        active_share=planes["var_share"] * active,
        strong=active * (strength >= STRONG_R),
        turning_share=planes["var_share"] * active * strength**2,
    )
    return measured.groupby(HEAD_KEY, as_index=False).agg(
        active_planes=("active", "sum"),
        active_share=("active_share", "sum"),
        strong_planes=("strong", "sum"),
        turning_share=("turning_share", "sum"),
    )


PLANES = Analysis(
    "planes",
    "planes in which vectors turn with position: of the complement of a and b, and RoPE's own",
    (PLANES_TABLE,),
    compute_planes,
    Scalars(
        (
            Column(
                "active_planes", "count", "planes of the complement that turn with position; empty without planes.csv",
                "3", dtype="Int64",
            ),
            Column("active_share", "share", "of the complement's variance in those planes", "3"),
            Column(
                "strong_planes", "count", "active planes that follow position closely: |angle_r| of 0.3 or more", "3",
                dtype="Int64",
            ),
            Column(
                "turning_share", "share",
                "of the complement's variance that turns with position: Σ var_share·angle_r² over active planes", "3",
            ),
        ),
        "planes",
        in_runs=("active_planes", "turning_share"),
        of=active_planes,
    ),
    axes=True,
    rotary=True,
    chance=True,
)  # fmt: skip
