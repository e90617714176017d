"""The role of a head: what it does with its attention, and with what its scores are made of.

``roles`` has one row per head. The attention is that of core/reach.py: of some queries of the texts on the first keys
and on the token before, and of random tokens that come twice on their earlier copy. The role is the most specific that
applies: a head that looks for earlier copies may rest on a sink meanwhile, and one that looks at the token before is
positional, too.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from qkscope.analyses.analysis import Analysis, AnalysisResult, Column, Scalars, Table, TableValues
from qkscope.analyses.batch import Batch
from qkscope.analyses.scores import FLAT
from qkscope.analyses.tables import Columns
from qkscope.analyses.uncertainty import Scale, jackknife
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import ALL_AND_WITHOUT
from qkscope.core.linalg import ratio
from qkscope.core.reach import LOWEST, REACH_COUNTS, REPEAT_COUNTS, HeadReach
from qkscope.headids import TERMS

ROLE_NAMES = ("induction", "previous", "sink", "position", "content", "mixed")
"""Roles, the most specific first; a head has the first one whose number is at least ``ENOUGH``."""
ENOUGH = 0.5


def class_and_role(head_class: object, role: object) -> str:
    """The class and the role of a head as its title gives them; a role only if it adds something.

    >>> class_and_role("content", "induction"), class_and_role("position", "position"), class_and_role("key", "mixed")
    ('content · induction', 'position', 'key')
    """
    kind, role = (value if isinstance(value, str) else "" for value in (head_class, role))
    return " · ".join(name for name in (kind, "" if role in (kind, "mixed") else role) if name)


_SINK = Column("sink", "share", "of attention on the first keys of a document, as mass_sink", "11", Scale.SHARE)
_SCALARS = (
    Column(
        "role", "",
        f"the first that is at least {ENOUGH} of echo + induction, previous, sink, part_position, part_content: "
        "induction, previous, sink, position or content; else mixed; empty in runs that did not measure attention",
        "11", dtype="text",
    ),
    Column(
        "previous", "share", "of attention on the token before the query, unless it is a sink; empty in encoders", "11",
        Scale.SHARE,
    ),
    Column(
        "echo", "share", "of attention, in random tokens that come twice, on the earlier copy of the query's token",
        "11", Scale.SHARE,
    ),
    Column("induction", "share", "of attention, in the same tokens, on the token after that copy", "11", Scale.SHARE),
    Column("entropy", "nats", "of the attention of a query, mean over queries", "11", Scale.POSITIVE),
    Column(
        "max_logit", "logit", "largest score before the softmax, of the same queries on all keys they see", "11",
        signed=True,
    ),
)  # fmt: skip


_ATTENTION = ("sink", "previous", "echo", "induction", "entropy")


def compute_roles(batch: Batch) -> AnalysisResult:
    """Compute ``roles`` of each head whose attention was measured."""
    measured = np.array([i for i, head in enumerate(batch.heads) if head.reach is not None], dtype=np.int64)
    if not len(measured):
        return AnalysisResult()
    numbers = _attention(batch)
    per_head = {name: values[:, 0] for name, values in numbers.items()}
    role = np.array(ROLE_NAMES, dtype=object)[_first_at_least(_evidence(batch, numbers)[:, 0])]
    per_head |= {"role": role, "max_logit": np.array([*map(_largest, batch.heads)])}
    replicates = {name: values[:, 1:] for name, values in numbers.items()}
    return AnalysisResult({"roles": TableValues({}, replicates, per_head, measured)})


def _attention(batch: Batch) -> dict[str, Float[np.ndarray, "heads sets"]]:
    """Where each head's attention goes, and its entropy; NaN where it was not measured."""
    numbers = {name: np.full((len(batch), len(ALL_AND_WITHOUT)), np.nan) for name in _ATTENTION}
    for i, head in enumerate(batch.heads):
        if head.reach is not None:
            for name, values in (_on_text(head.reach) | _on_repeats(head.reach, batch.usable[i])).items():
                numbers[name][i] = values
        if head.both:
            numbers["previous"][i] = np.nan  # reach does not tell the token before from the one after
    return numbers


def _evidence(batch: Batch, numbers: Columns) -> Float[np.ndarray, "heads sets roles"]:
    """The number behind each role but mixed; parts of a head whose scores hardly vary do not count."""
    parts = np.full((len(batch), len(ALL_AND_WITHOUT), len(TERMS)), np.nan)
    for i, of_head in enumerate(batch.score_parts):
        if of_head is not None and of_head[1][0] >= FLAT**2:
            parts[i] = of_head[0]
    position, content = (parts[..., TERMS.index(term)] for term in ("position", "content"))
    copied = numbers["echo"] + numbers["induction"]
    return np.stack([copied, numbers["previous"], numbers["sink"], position, content], -1)


def _first_at_least(evidence: Float[np.ndarray, "heads roles"]) -> Int[np.ndarray, "heads"]:
    """Index in ROLE_NAMES of the first role whose number is large enough; the last one, mixed, if none is."""
    enough = np.nan_to_num(evidence) >= ENOUGH
    return np.argmax(np.pad(enough, ((0, 0), (0, 1)), constant_values=True), -1)


def _ambiguous(batch: Batch, _columns: Columns) -> dict[str, Bool[np.ndarray, "heads"]]:
    """Heads whose role could be another: the interval of its number, or of an earlier role's, contains one half."""
    evidence = _evidence(batch, _attention(batch))
    role = _first_at_least(evidence[:, 0])
    known = ~np.isnan(evidence).any(1)
    present = batch.usable[..., None] * known[:, None]
    of_roles = jackknife(np.nan_to_num(evidence[:, 0]), np.nan_to_num(evidence[:, 1:]), present)
    crosses = (of_roles.low < ENOUGH) & (of_roles.high >= ENOUGH)
    return {"ambiguous_role": np.asarray((crosses & (np.arange(evidence.shape[-1]) <= role[:, None])).any(-1))}


def _on_text(reach: HeadReach) -> Columns:
    """Attention on sinks and on the token before, and its entropy."""
    n, sink = (ALL_AND_WITHOUT @ reach.sums[:, REACH_COUNTS.index(name)] for name in ("n", "sink"))
    before = ALL_AND_WITHOUT @ reach.sums[:, len(REACH_COUNTS) + reach.starts.tolist().index(1)]
    sums = {"sink": sink, "previous": before}
    if reach.entropy is not None:
        sums["entropy"] = ALL_AND_WITHOUT @ reach.entropy
    return {name: np.where(n > 0, ratio(total, n), np.nan) for name, total in sums.items()}


def _on_repeats(reach: HeadReach, usable: Float[np.ndarray, "8"]) -> Columns:
    """Attention on the earlier copy; draws are dealt out to the document groups that the jackknife deletes."""
    if reach.repeats is None:
        return {}
    groups, draws = np.flatnonzero(usable), reach.repeats
    if len(groups):
        dealt = np.zeros_like(draws)
        np.add.at(dealt, groups[np.arange(len(draws)) % len(groups)], draws)
        draws = dealt
    sums = dict(zip(REPEAT_COUNTS, (ALL_AND_WITHOUT @ draws).T, strict=True))
    n = sums.pop("n")
    return {name: np.where(n > 0, ratio(total, n), np.nan) for name, total in sums.items()}


def _largest(head: HeadData) -> float:
    """The largest score of a head's followed queries; NaN where none was recorded."""
    largest = None if head.reach is None else head.reach.max_logit
    return np.nan if largest is None or largest <= LOWEST else largest


ROLES_TABLE = Table("roles", (*_SCALARS[:3], _SINK, *_SCALARS[3:]), flags=True, raises=_ambiguous)
ROLES = Analysis(
    "roles",
    "what a head does: attend to the first tokens, to the token before, or to what came before; or position or content",
    (ROLES_TABLE,),
    compute_roles,
    Scalars(_SCALARS, "roles", in_runs=("previous", "induction", "entropy")),
    rotary=True,
)
