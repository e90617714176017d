"""One task: some key heads and the heads that read them, from what was loaded of them to their rows of every table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import pandas as pd

from qkscope.analyses.columns import Columns, Tables, frame_of, together, under_each_other
from qkscope.analyses.distance import mean_field
from qkscope.analyses.heldout import lda_accuracy
from qkscope.analyses.nulls import null_r95
from qkscope.analyses.pca import Components, components
from qkscope.analyses.replicates import Replicates, replicates
from qkscope.analyses.rotation import Centering, Rotation, centred, has_drift
from qkscope.analyses.scoretables import (
    SCALARS,
    HeadScores,
    causal_columns,
    distance_tables,
    merged_pairs,
    plasticity_tables,
)
from qkscope.analyses.tabulate import (
    pca_columns_again,
    pca_tables,
    rotation_columns_again,
    rotation_model,
    rotation_tables,
)
from qkscope.analyses.vectortables import (
    PLANE_ROWS,
    HeadVectors,
    both_views,
    of_model,
    omega_columns,
    planes_table,
    points_table,
    rope_table,
)
from qkscope.core.headmoments import N_BUCKETS, N_GROUPS, HeadMoments
from qkscope.core.rows import Coordinates
from qkscope.errors import HeadError
from qkscope.heads import HeadId
from qkscope.jobs import Failure, Task
from qkscope.load import Loaded, LoadedHead, Reading
from qkscope.run import Run


def do_task(task: Task) -> tuple[Tables, list[Failure]]:
    """Read each key head and the query heads that read it, and tabulate them all together."""
    run, reading = task.job.run, _reading(task)
    loaded: Loaded = []
    errors: list[HeadError] = []
    for group in task.groups:
        some, failed = run.source.load(group, reading)
        loaded += some
        errors += failed
    parts = []
    for _, some_of_one_d in groupby(loaded, lambda one: one.moments.d):  # neighbours only: rows stay in order
        tables, failed = _tabulate(task, list(some_of_one_d))
        parts.append(tables)
        errors += failed
    return joined(parts), [Failure(run.model, error) for error in errors]


def _tabulate(task: Task, loaded: Loaded) -> tuple[Tables, list[HeadError]]:
    """All analyses of the heads at once; if the mathematics fails, head by head, to see whose it is."""
    try:
        return _tabulate_together(task, loaded)
    except (np.linalg.LinAlgError, FloatingPointError) as error:
        if len(loaded) == 1:
            head = loaded[0].head
            return Tables({}), [HeadError(head, f"cannot be analysed ({error})", task.job.run.source.file(head))]
    parts = [_tabulate(task, [one]) for one in loaded]
    return joined([tables for tables, _ in parts]), [error for _, errors in parts for error in errors]


def _tabulate_together(task: Task, loaded: Loaded) -> tuple[Tables, list[HeadError]]:
    run, job = task.job.run, task.job
    moments = HeadMoments.stack([one.moments for one in loaded])
    axes, errors = bool({"rotation", "planes"} & set(task.analyses)) or job.points is not None, []
    drifts = np.asarray(has_drift(moments.total_q, moments.total_k, job.rotation.centering))
    if not axes or drifts.all():
        parts = _off_moments(task, loaded, moments, pca=True, axes=axes)
    else:
        # Heads without axis a are told of, and have no part in what follows from it.
        errors = [_no_drift(run, one.head) for one, drift in zip(loaded, drifts, strict=True) if not drift]
        parts = _off_moments(task, loaded, moments, pca=True, axes=False)
        drifting = [one for one, drift in zip(loaded, drifts, strict=True) if drift]
        if drifting:
            some = HeadMoments.stack([one.moments for one in drifting])
            parts += _off_moments(task, drifting, some, pca=False, axes=True)
    scores = [_scores(run, one) for one in loaded]
    if "distance" in task.analyses:
        parts.append(distance_tables(frame_of(_index(run, loaded)), scores, intervals=task.intervals))
    if "plasticity" in task.analyses:
        parts.append(plasticity_tables(frame_of(_index(run, loaded)), scores, intervals=task.intervals))
    return together(parts), errors


def _off_moments(task: Task, loaded: Loaded, moments: HeadMoments, *, pca: bool, axes: bool) -> list[Tables]:
    """The PCA, and what needs the axes a and b, as far as the task wants them."""
    job, parts = task.job, []
    pcs = _components(task, moments) if pca and "pca" in task.analyses else None
    model = rotation_model(moments, job.rotation, intervals=task.intervals) if axes else None
    again: dict[str, Replicates] = {}
    if task.intervals:
        wanted = {} if pcs is None else {"pca": pca_columns_again(pcs)}
        if model is not None and "rotation" in task.analyses:
            wanted["rotation"] = rotation_columns_again(job.rotation, model)
        again = dict(zip(wanted, replicates(moments, *wanted.values()), strict=True))
    on = _coordinates(loaded, pcs, model)
    if pcs is not None:
        parts.append(_of_components(task, loaded, moments, pcs, on, again.get("pca")))
    if model is not None:
        parts.append(_of_axes(task, loaded, moments, model, on, again.get("rotation")))
    return parts


@dataclass(frozen=True)
class _On:
    """Coordinates of a head's vectors on its first two components, and on a and b."""

    pcs: Coordinates | None
    plane: Coordinates | None


def _coordinates(loaded: Loaded, pcs: Components | None, model: Rotation | None) -> list[_On]:
    """All of a head's in one product; nothing where either is not wanted, or there are no vectors."""
    found = []
    for i, one in enumerate(loaded):
        if one.vectors is None or pcs is None or model is None:
            found.append(_On(None, None))
            continue
        axes = pcs.axes[i, :2]
        on = Coordinates.of(one.vectors, np.vstack([axes, model.a[i], model.b[i]]))
        found.append(_On(on.some(slice(len(axes))), on.some(slice(len(axes), None))))
    return found


def _components(task: Task, moments: HeadMoments) -> Components:
    count = task.job.pca.n_components
    return components(moments.total_q, moments.total_k, count, pooled=moments.pooled, whole_basis=task.intervals)


def _of_components(
    task: Task, loaded: Loaded, moments: HeadMoments, pcs: Components, on: list[_On], again: Replicates | None
) -> Tables:
    """The combined PCA, with the line between queries and keys scored on vectors."""
    lines = [_line(one, axes[:2], at.pcs) for one, axes, at in zip(loaded, pcs.axes, on, strict=True)]
    index = _index(task.job.run, loaded)
    return pca_tables(index, moments, task.job.pca, pcs, lines, again, intervals=task.intervals)


def _line(one: LoadedHead, axes: np.ndarray, on: Coordinates | None) -> tuple[float, np.ndarray]:
    if one.vectors is None:
        return float("nan"), np.full(N_GROUPS, np.nan)
    return lda_accuracy(one.moments.q, one.moments.k, one.vectors, axes, on)


def _of_axes(
    task: Task, loaded: Loaded, moments: HeadMoments, model: Rotation, on: list[_On], again: Replicates | None
) -> Tables:
    """What needs the axes a and b: the rotation model, the planes of its complement, points."""
    job, index = task.job, _index(task.job.run, loaded)
    pairs, windows = [one.vectors for one in loaded], moments.window.tolist()
    vectors = of_model(model, pairs, windows, [at.plane for at in on])
    parts = []
    if "rotation" in task.analyses:
        tables = rotation_tables(index, moments, job.rotation, model, again, intervals=task.intervals)
        causal, left_out = causal_columns([_scores(job.run, one) for one in loaded], intervals=task.intervals)
        nulls = {"null_r95": np.array(_nulls(loaded, moments, job.rotation.centering))}
        parts.append(Tables(tables.given, tables.replicates | left_out))
        parts[-1].columns("rotated").update(omega_columns(vectors) | causal | nulls)
    if "planes" in task.analyses:
        named = frame_of(index)
        found = both_views(planes_table(named, vectors, task.chance), _rope_view(named, loaded))
        parts.append(Tables({"planes": found} if len(found) else {}))
    points = _points(task, loaded, vectors)
    parts.append(Tables({"points": pd.concat(points, ignore_index=True)} if points else {}))
    return together(parts)


def _rope_view(index: pd.DataFrame, loaded: Loaded) -> list[pd.DataFrame]:
    return [
        rope_table(
            index.iloc[[i]],
            one.rotary,
            one.moments.total_q,
            one.moments.total_k,
            one.vectors,
            int(one.moments.window),
        )
        for i, one in enumerate(loaded)
        if one.rotary is not None and one.vectors is not None
    ]


def _scores(run: Run, one: LoadedHead) -> HeadScores:
    moments, field = one.moments, None
    if one.rotary is not None:
        field = mean_field(one.rotary, moments.total_q, moments.total_k, float(moments.scaling))
    return HeadScores(moments, one.vectors, one.rotary, field, run.source.layer_notes(one.head).sliding_window)


def _nulls(loaded: Loaded, moments: HeadMoments, centering: Centering) -> list[float]:
    """``null_r95`` of each head that has vectors."""
    covs = centred(moments.total_q, moments.total_k, centering).cov_x
    return [
        float("nan")
        if one.vectors is None or not min(len(one.vectors.q), len(one.vectors.k))
        else null_r95(one.vectors, cov, within=centering == "within")
        for one, cov in zip(loaded, covs, strict=True)
    ]


def _points(task: Task, loaded: Loaded, vectors: Sequence[HeadVectors | None]) -> list[pd.DataFrame]:
    options = task.job.points
    if options is None:
        return []
    count, index = max(options.pcs) + 1, frame_of(_index(task.job.run, loaded))
    return [
        points_table(index.iloc[[i]], head, components(one.moments.total_q, one.moments.total_k, count), options)
        for i, (one, head) in enumerate(zip(loaded, vectors, strict=True))
        if head is not None and head.enough and options.of(one.head.layer, one.head.head)[0]
    ]


def _reading(task: Task) -> Reading:
    """What the analyses need beside the moments: pairs by token, vectors."""
    paired = "rotation" in task.analyses and task.job.rotation.pairing == "token"
    sample = PLANE_ROWS if task.job.points is None else max(PLANE_ROWS, task.job.points.rows)
    buckets = (task.job.buckets or N_BUCKETS) if "plasticity" in task.analyses else 0
    rotary = bool({"planes", "distance", "plasticity"} & set(task.analyses))
    return replace(task.job.run.reading, paired=paired, sample=sample, buckets=buckets, rotary=rotary)


def with_notes(run: Run, frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """The columns of a head table that say what kind of layer it is, and those that other analyses fill."""
    if table not in ("heads", "rotated"):
        return frame
    firsts = frame.drop_duplicates("layer")
    heads = [HeadId(int(a), int(b), "q") for a, b in zip(firsts["layer"], firsts["head"], strict=True)]
    notes = {head.layer: run.source.layer_notes(head) for head in heads}
    noted: dict[str, object] = {
        "nope": pd.array([notes[layer].nope for layer in frame["layer"]], dtype="boolean"),
        "sliding_window": pd.array([notes[layer].sliding_window for layer in frame["layer"]], dtype="Int64"),
    }
    if table == "heads":
        noted["active_planes"] = pd.array([None] * len(frame), dtype="Int64")
        noted |= dict.fromkeys(("active_share", *(name for names in SCALARS.values() for name in names)), np.nan)
    return pd.concat([frame, pd.DataFrame(noted, index=frame.index)], axis=1)


def joined(parts: list[Tables]) -> Tables:
    """The tables of several tasks or heads under each other; what is told of pairs in a layer is added up."""
    if len(parts) == 1:
        return parts[0]
    whole = under_each_other(parts)
    pairs = whole.given.get("plasticity_pairs")
    if not isinstance(pairs, pd.DataFrame):
        return whole
    return together([whole, Tables({"plasticity_pairs": merged_pairs([pairs])})])


def _no_drift(run: Run, head: HeadId) -> HeadError:
    reason = "no linear drift with position at all, so axis a is undefined"
    return HeadError(head, reason, run.source.file(head))


def _index(run: Run, loaded: Loaded) -> Columns:
    heads = [one.head for one in loaded]
    return {
        "model": np.full(len(heads), run.model),
        "family": np.full(len(heads), run.family),
        "layer": np.array([head.layer for head in heads]),
        "head": np.array([head.head for head in heads]),
        "k_head": np.array([run.source.key_head(head).head for head in heads]),
    }
