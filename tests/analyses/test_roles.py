"""Roles: which one a head has, from planted attention; intervals, and heads of which something is not known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qkscope.analyses.roles import _on_repeats
from qkscope.analyses.uncertainty import Scale, jackknife
from qkscope.core.reach import LOWEST
from qkscope.core.rows import Pair
from tests.analyses.test_attentionreach import measured
from tests.analyses.test_scores import planted
from tests.helpers import tables_of


def repeats(echo: float, induction: float, spread: float = 0.0) -> np.ndarray:
    """Eight draws whose attention differs by ``spread``."""
    away = spread * np.linspace(-1, 1, 8)
    return np.stack([np.ones(8), np.full(8, echo), induction + away], -1)


def head(previous: float = 0.1, sink: float = 0.2, copied: np.ndarray | None = None, seed: int = 0, noise: float = 0.5):
    reach = measured({0: 1 - previous - sink, 1: previous}, sink)
    reach = replace(reach, entropy=np.full(8, 4 * 0.7), max_logit=9.5, repeats=copied)
    return planted(seed, noise, noise)._replace(reach=reach)


def role(planted_head):
    return tables_of(planted_head, "roles")["roles"].iloc[0]


def test_columns_are_means_over_queries_and_over_draws():
    row = role(head(previous=0.25, sink=0.15, copied=repeats(0.125, 0.25)))
    assert row["previous"] == pytest.approx(0.25)
    assert row["sink"] == pytest.approx(0.15)
    assert row["echo"] == pytest.approx(0.125)
    assert row["induction"] == pytest.approx(0.25)
    assert row["entropy"] == pytest.approx(0.7)
    assert row["max_logit"] == 9.5


@pytest.mark.parametrize(
    ("planted_head", "expected"),
    [
        (head(previous=0.1, sink=0.8, copied=repeats(0.2, 0.4)), "induction"),
        (head(previous=0.1, sink=0.8, copied=repeats(0.2, 0.2)), "sink"),
        (head(previous=0.6, sink=0.3, copied=repeats(0.0, 0.0)), "previous"),
        (head(copied=repeats(0.7, 0.0)), "induction"),
        (head(copied=None, sink=0.9, previous=0.0), "sink"),
    ],
)
def test_the_most_specific_role_that_applies_is_named(planted_head, expected):
    assert role(planted_head)["role"] == expected


def test_of_the_rest_the_parts_decide():
    heads = [head(copied=repeats(0.0, 0.0), seed=seed, noise=noise) for seed in range(2) for noise in (0.1, 0.5, 3.0)]
    names = set()
    for tables in (tables_of(one, "roles", "scores") for one in heads):
        row, scores = tables["roles"].iloc[0], tables["scores"].iloc[0]
        named = [term for term in ("position", "content") if scores[f"part_{term}"] >= 0.5]
        assert row["role"] == (named[0] if named else "mixed")
        names.add(row["role"])
    assert names == {"position", "content", "mixed"}


def test_a_flat_head_is_not_named_after_its_parts():
    planted_head = head(copied=repeats(0.0, 0.0))
    moments = planted_head.moments
    flat = planted_head._replace(moments=replace(moments, scaling=np.asarray(moments.scaling * 1e-4)))
    assert role(flat)["role"] == "mixed"


def test_rounding_may_make_the_variance_of_equal_scores_negative():
    """Equal queries and equal keys, so equal scores; a warning is an error here."""
    planted_head = head(copied=repeats(0.0, 0.0))._replace(rotary=None, nope=True)
    q, k = planted_head.vectors.q, planted_head.vectors.k
    constant = Pair(replace(q, x=np.full_like(q.x, 1.1)), replace(k, x=np.full_like(k.x, 3.1)))
    assert role(planted_head._replace(vectors=constant))["role"] == "mixed"


def test_a_role_near_one_half_is_ambiguous_and_a_clear_one_is_not():
    assert "ambiguous_role" in role(head(copied=repeats(0.0, 0.52, spread=0.2)))["flags"]
    assert "ambiguous_role" in role(head(copied=repeats(0.0, 0.45, spread=0.2), sink=0.7, previous=0.0))["flags"]
    assert "ambiguous_role" not in role(head(copied=repeats(0.0, 0.9, spread=0.02)))["flags"]
    assert "ambiguous_role" not in role(head(copied=repeats(0.0, 0.1, spread=0.02), sink=0.95, previous=0.0))["flags"]


def test_intervals_of_draws_cover_their_mean_with_few_document_groups_too():
    """Draws are dealt out to the groups that are there, or a jackknife over five groups would see five of eight."""
    rng, covered = np.random.default_rng(1), []
    for _ in range(300):
        draws = repeats(0.0, 0.0)
        draws[:, 2] = 0.5 + 0.1 * rng.normal(size=8)
        usable = np.array([1.0, 1, 0, 1, 0, 1, 1, 0])
        reach = replace(measured({0: 0.8}, 0.2), repeats=draws)
        values = _on_repeats(reach, usable)["induction"]
        interval = jackknife(values[:1], values[None, 1:], usable[None], Scale.SHARE)
        covered.append(interval.low[0] <= 0.5 <= interval.high[0])
    assert 0.92 <= np.mean(covered) <= 0.98


def test_of_an_encoder_the_token_before_is_not_known():
    assert np.isnan(role(head(previous=0.9, sink=0.05)._replace(both=True))["previous"])


def test_what_was_not_measured_is_empty():
    row = role(planted(0, 0.5, 0.5)._replace(reach=measured({0: 0.8}, 0.2)))
    assert np.isnan(row[["echo", "induction", "entropy", "max_logit"]].astype(float)).all()
    assert "roles" not in tables_of(planted(0, 0.5, 0.5), "roles"), "without attention there are no roles"


def test_no_queries_no_numbers():
    reach = measured({0: 0.8}, 0.2)
    none = replace(reach, sums=np.zeros_like(reach.sums), entropy=np.zeros(8), max_logit=LOWEST)
    row = role(planted(0, 0.5, 0.5)._replace(reach=none))
    assert np.isnan(row[["sink", "previous", "entropy", "max_logit"]].astype(float)).all()
