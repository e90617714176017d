"""Principal components followed from checkpoint to checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from qkscope.analyses.components import DEGENERATE_GAP
from qkscope.results.study import Study, StudyRun


@dataclass(frozen=True)
class Match:
    """For each component of one checkpoint, its successor among the components of the next; −1 where there is none."""

    pc: Int[np.ndarray, "c"]
    cos: Float[np.ndarray, "c"]
    """|cos| of the two axes."""
    angle: Float[np.ndarray, "c"]
    """Degrees between the axis and the span of the components that cannot be distinguished from its successor."""


def match(
    before: Float[np.ndarray, "c d"], after: Float[np.ndarray, "e d"], share_after: Float[np.ndarray, "e"]
) -> Match:
    """Pair the axes of one checkpoint with those of the next."""
    cos = np.abs(before @ after.T)
    rows, columns = linear_sum_assignment(cos, maximize=True)
    pc = np.full(len(before), -1)
    pc[rows] = columns
    blocks = degenerate_blocks(share_after)
    matched_cos, angle = np.zeros(len(before)), np.full(len(before), 90.0)
    for i in rows.tolist():
        matched_cos[i] = cos[i, pc[i]]
        within = float(np.linalg.norm(cos[i, blocks == blocks[pc[i]]]))
        angle[i] = np.degrees(np.arccos(min(within, 1.0)))
    return Match(pc, matched_cos, angle)


def degenerate_blocks(share: Float[np.ndarray, "c"]) -> Int[np.ndarray, "c"]:
    """A number for each component; neighbours whose variances nearly coincide have the same one.

    >>> degenerate_blocks(np.array([5.0, 2.0, 1.99, 1.0])).tolist()
    [0, 1, 1, 2]
    """
    gap = (share[:-1] - share[1:]) / np.maximum(share[:-1], 1e-300)
    return np.concatenate([[0], np.cumsum(gap >= DEGENERATE_GAP)]).astype(np.int64)


def follow(axes: list[Float[np.ndarray, "_ d"]], shares: list[Float[np.ndarray, "_"]]) -> list[Match]:
    """Each component of the first checkpoint followed through all of them; the first match is with itself.

    ``cos`` and ``angle`` are from one checkpoint to the next.
    """
    n = len(axes[0])
    steps = [Match(np.arange(n), np.ones(n), np.zeros(n))]
    for i in range(1, len(axes)):
        step = match(axes[i - 1], axes[i], shares[i])
        pc = steps[-1].pc
        lost = pc < 0
        steps.append(
            Match(
                np.where(lost, -1, step.pc[pc]), np.where(lost, 0.0, step.cos[pc]), np.where(lost, 90.0, step.angle[pc])
            )
        )
    return steps


HEAD = ["layer", "head"]
_NUMBERS = ("r_q", "r_k", "explained_variance")


def component_tracks(study: Study, runs: list[StudyRun]) -> pd.DataFrame | None:
    """One row per head, checkpoint and track (a component of the first checkpoint); None if a run has no axes.

    Columns: model, layer, head, track, pc (empty where the track is lost), match_cos and match_angle to the previous
    checkpoint, and r_q, r_k, explained_variance of that component.
    """
    axes, qk = study.tables.get("axes"), study.table("qk", "pc", *_NUMBERS)
    labels = [run.label for run in runs]
    if axes is None or qk is None or not set(labels) <= set(axes["model"]):
        return None
    vectors, numbers = _by_head(axes), _by_head(qk)
    heads = sorted({(key[1], key[2]) for key in vectors if key[0] == labels[0]})
    tracks = [
        _of_head(labels, head, vectors, numbers)
        for head in heads
        if _in_all_checkpoints(labels, head, vectors, numbers)
    ]
    return pd.concat(tracks, ignore_index=True) if tracks else None


ByHead = dict[tuple[str, int, int], pd.DataFrame]


def _by_head(frame: pd.DataFrame) -> ByHead:
    groups = frame.sort_values("pc").groupby(["model", *HEAD])
    return {(str(model), int(layer), int(head)): rows for (model, layer, head), rows in groups}


def _in_all_checkpoints(labels: list[str], head: tuple[int, int], *tables: ByHead) -> bool:
    """Return True if the head is in every checkpoint, with vectors of equal length."""
    if not all((label, *head) in table for label in labels for table in tables):
        return False
    return len({len(tables[0][label, *head]["axis"].iloc[0]) for label in labels}) == 1


def _of_head(
    labels: list[str],
    head: tuple[int, int],
    vectors: ByHead,
    numbers: ByHead,
) -> pd.DataFrame:
    checkpoints = [(vectors[label, *head], numbers[label, *head]) for label in labels]
    n = min(len(table) for pair in checkpoints for table in pair)
    steps = follow(
        [np.stack(a["axis"].to_list()[:n]).astype(float) for a, _ in checkpoints],
        [q["explained_variance"].to_numpy(float)[:n] for _, q in checkpoints],
    )
    frames = []
    for label, (_, q), step in zip(labels, checkpoints, steps, strict=True):
        lost = step.pc < 0
        values = q[list(_NUMBERS)].to_numpy(float)[:n][np.where(lost, 0, step.pc)]
        frame = pd.DataFrame(np.where(lost[:, None], np.nan, values), columns=list(_NUMBERS))
        frames.append(
            frame.assign(
                model=label, layer=head[0], head=head[1], track=np.arange(n), pc=np.where(lost, np.nan, step.pc),
                match_cos=step.cos, match_angle=step.angle,
            )
        )  # fmt: skip
    order = ["model", *HEAD, "track", "pc", "match_cos", "match_angle", *_NUMBERS]
    return pd.concat(frames, ignore_index=True)[order]
