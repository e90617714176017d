"""Every figure, in order."""

from __future__ import annotations

from qkscope.figures import (
    attentionreach,
    bias,
    collages,
    components,
    depth,
    distance,
    drift,
    effects,
    formulas,
    hero,
    plasticity,
    plasticityheads,
    roles,
    ropeplanes,
    sameweights,
    scatter,
    scoreterms,
    training,
    trajectory,
)
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
    depth.ROTATION_BY_DEPTH,
    bias.SEPARATION,
    collages.COMPLEMENT,
    trajectory.TRAJECTORY_FIGURE,
    trajectory.DECOMPOSITION_FIGURE,
)
"""The 22 figures of the published study."""
CATALOGUE: tuple[Figure, ...] = (
    *PUBLISHED,
    ropeplanes.SPECTRUM,
    distance.CURVES,
    distance.BY_DEPTH,
    plasticity.PROFILE_FIGURE,
    plasticity.PAIRS,
    plasticityheads.BY_CLASS,
    plasticityheads.DROP,
    plasticity.TRAINING,
    scoreterms.SCORE_TERMS,
    effects.EFFECTS_FIGURE,
    effects.DESCRIPTIONS_FIGURE,
    attentionreach.REACH_FIGURE,
    attentionreach.CUTS_FIGURE,
    roles.ROLES_FIGURE,
    formulas.AUDIT,
    sameweights.SAME_WEIGHTS_FIGURE,
    hero.HERO,
)
FIGURES_BY_NAME = {figure.name: figure for figure in CATALOGUE}
