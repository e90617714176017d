"""Principal components followed over a study's checkpoints, as a table."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.analyses.componentmatch import follow
from qkscope.study.study import Study, StudyRun

HEAD = ["layer", "head"]
_KEPT = ("r_q", "r_k", "explained_variance")


def component_tracks(study: Study, runs: list[StudyRun]) -> pd.DataFrame | None:
    """One row per head, checkpoint and track (a component of the first checkpoint); None if a run has no axes.

    Columns: model, layer, head, track, pc (empty where the track is lost), match_cos and match_angle to the previous
    checkpoint, and r_q, r_k, explained_variance of that component.
    """
    axes, qk = study.tables.get("axes"), study.table("qk", "pc", *_KEPT)
    labels = [run.label for run in runs]
    if axes is None or qk is None or not set(labels) <= set(axes["model"]):
        return None
    vectors, numbers = _by_head(axes), _by_head(qk)
    heads = sorted({(key[1], key[2]) for key in vectors if key[0] == labels[0]})
    tracks = [_of_head(labels, head, vectors, numbers) for head in heads if _everywhere(labels, head, vectors, numbers)]
    return pd.concat(tracks, ignore_index=True) if tracks else None


ByHead = dict[tuple[str, int, int], pd.DataFrame]


def _by_head(frame: pd.DataFrame) -> ByHead:
    groups = frame.sort_values("pc").groupby(["model", *HEAD])
    return {(str(model), int(layer), int(head)): rows for (model, layer, head), rows in groups}


def _everywhere(labels: list[str], head: tuple[int, int], *tables: ByHead) -> bool:
    """Whether the head is in every checkpoint, with vectors of equal length."""
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
        values = q[list(_KEPT)].to_numpy(float)[:n][np.where(lost, 0, step.pc)]
        frame = pd.DataFrame(np.where(lost[:, None], np.nan, values), columns=list(_KEPT))
        frames.append(
            frame.assign(
                model=label, layer=head[0], head=head[1], track=np.arange(n), pc=np.where(lost, np.nan, step.pc),
                match_cos=step.cos, match_angle=step.angle,
            )
        )  # fmt: skip
    order = ["model", *HEAD, "track", "pc", "match_cos", "match_angle", *_KEPT]
    return pd.concat(frames, ignore_index=True)[order]
