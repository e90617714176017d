"""Every figure, in order."""

from __future__ import annotations

from qkscope.figures import beyond, bias, collages, components, depth, drift, scatter, training
from qkscope.figures.figure import Figure

PUBLISHED: tuple[Figure, ...] = (
    components.ROLES,
    scatter.SCATTER,
    depth.R_Q,
    depth.R_K,
    components.SHARES,
    collages.COMPONENTS,
    training.SIGNAL,
    training.CLASSES_FIGURE,
    training.SHARE,
    depth.R_Q_TRAINING,
    depth.R_K_TRAINING,
    scatter.PORTRAITS_FIGURE,
    collages.PLANE,
    drift.BARS,
    drift.VARIANCE,
    bias.HISTOGRAMS,
    drift.SLOPES,
    depth.ROTATION,
    bias.SEPARATION,
    collages.COMPLEMENT,
    training.TRAJECTORY_FIGURE,
    training.DECOMPOSITION_FIGURE,
)
"""The 22 figures of the published study."""
CATALOGUE: tuple[Figure, ...] = (*PUBLISHED, beyond.SPECTRUM, beyond.CURVES, beyond.AUDIT)
BY_NAME = {figure.name: figure for figure in CATALOGUE}
