"""The roles of heads: how many of each layer copy, look at the token before, rest on sinks (cause 06)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.analyses.roles import ROLE_NAMES
from qkscope.analyses.scores import HEAD_CLASSES
from qkscope.figures.figure import Figure, needed
from qkscope.figures.scoreterms import chosen_runs, draw_stacks, share_in_words
from qkscope.headids import head_name
from qkscope.progress import plural
from qkscope.results.study import Study

_LOOKS = {
    "induction": ("#7b3fa0", None),
    "previous": ("#3f8f5f", "////"),
    "sink": ("#9a9a9a", "...."),
    "position": (HEAD_CLASSES["position"], None),
    "content": (HEAD_CLASSES["content"], "...."),
    "mixed": ("#e2e2e2", None),
}
"""Colour and hatch of each role."""


def prepare_roles(study: Study) -> pd.DataFrame:
    """The role of each head, and the attention it is named after."""
    roles = needed(study.table("roles", "role", "echo", "induction", "previous", "sink"), "the roles of heads")
    roles = needed(roles[roles["model"].isin(chosen_runs(study.labels))].dropna(subset=["role"]), "the roles of heads")
    return roles[["model", "layer", "head", "role", "echo", "induction", "previous", "sink"]].reset_index(drop=True)


def draw_roles(data: pd.DataFrame) -> Drawing:
    """One panel per run, a stack of roles for each layer."""
    heads = data.groupby(["model", "layer"], sort=False)["role"]
    shares = heads.value_counts(normalize=True).unstack(fill_value=0).reset_index()
    looks = {role: (role, *_LOOKS[role]) for role in ROLE_NAMES if role in shares}
    return draw_stacks(shares, looks, "share of heads")


def say_roles(data: pd.DataFrame) -> list[str]:
    """The number of heads of each role that attention names, by run, with the one that shows it most."""
    sentences = []
    for run, heads in data.groupby("model", sort=False):
        evidence = heads.assign(induction=heads["echo"].fillna(0) + heads["induction"].fillna(0))
        told = []
        for role, does in _DOES.items():
            of_role = evidence[evidence["role"] == role]
            if len(of_role):
                most = of_role.loc[of_role[role].idxmax()]
                name = head_name(most["layer"], most["head"])
                verb = does[len(of_role) > 1]
                told.append(f"{len(of_role)} {verb} ({name} with {share_in_words(most[role])})")
        all_heads = plural(len(heads), "head")
        known = f"of {all_heads} {'; '.join(told)}" if told else f"none of {all_heads} is named after its attention"
        sentences.append(f"{run}: {known}.")
    return sentences


_DOES = {
    "induction": ("looks for earlier copies", "look for earlier copies"),
    "previous": ("looks at the token before", "look at the token before"),
    "sink": ("rests on the first tokens", "rest on the first tokens"),
}
"""What a head of each role does, and several do."""

ROLES_FIGURE = Figure(
    "cause/06_roles",
    "What heads do with their attention",
    "Share of the heads of each layer by role. Induction: at least half of the attention, in random tokens that come "
    "twice, on the earlier copy or the token after it; previous: on the token before; sink: on the first tokens of a "
    "document; position, content: at least half of what varies in scores. A head has the first role that applies.",
    prepare_roles,
    draw_roles,
    say_roles,
)
