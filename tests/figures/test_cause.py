"""Figures of cause: what is prepared is what the tables say, and sentences turn round with it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from qkscope.figures import attentionreach, effects, scoreterms
from qkscope.figures.figure import NotApplicable
from qkscope.figures.style import house_style
from qkscope.results.study import Study, StudyRun

TERMS = ("position", "key", "query", "content")


def study(**tables: pd.DataFrame) -> Study:
    return Study((StudyRun(label="m", family="f"),), tables, "")


def heads(n: int = 24) -> pd.DataFrame:
    rows = [(layer, head, head // 2) for layer in range(n // 4) for head in range(4)]
    frame = pd.DataFrame(rows, columns=["layer", "head", "k_head"]).assign(model="m", family="f")
    return frame.assign(curve_range=np.arange(n, dtype=float), decay=np.arange(n, dtype=float)[::-1])


def of_terms(largest: str) -> pd.DataFrame:
    shares = {f"part_{term}": 0.7 if term == largest else 0.1 for term in TERMS}
    return heads().assign(**shares)


def of_effects(rise: float) -> pd.DataFrame:
    """Effects that grow, or fall, with curve_range; two heads of each term are measured."""
    parts = []
    for term in TERMS:
        size = np.exp(rise * np.arange(24) / 8)
        part = heads()[["model", "family", "layer", "head", "k_head"]].assign(term=term, gamma=1.0, kl_predicted=size)
        measured = np.where(np.arange(24) % 4 == 0, 2 * size, np.nan)
        parts.append(part.assign(kl=measured, kl_low=measured, kl_high=measured))
    return pd.concat(parts, ignore_index=True)


def of_cuts(plain: dict[str, float], copy: dict[str, float]) -> pd.DataFrame:
    shares = {"none": 0.0, "all": 1.0}
    rows = [
        {"model": "m", "family": "f", "order": order, "draw": 0, "text": text, "w": 64, "nll": nll}
        | {"share_cut": shares.get(order, 0.5), "cache_saved": shares.get(order, 0.5) * 0.9}
        for text, losses in (("plain", plain), ("copy", copy))
        for order, nll in losses.items()
    ]
    further = [dict(row, share_cut=0.25, cache_saved=0.2, nll=9.0) for row in rows if row["order"] not in shares]
    rows += [dict(row, draw=1, nll=row["nll"] + 0.1) for row in rows if row["order"] == "random"]
    return pd.DataFrame(rows + further)


LOSSES = {"none": 3.0, "far": 3.1, "area": 3.2, "measured": 3.5, "reversed": 3.9, "all": 4.0, "random": 3.6}


def drawn(figure, data: pd.DataFrame) -> None:
    with house_style():
        assert figure.draw(data).axes


def test_terms_are_means_over_the_heads_of_a_layer():
    data = scoreterms.prepare_terms(study(scores=of_terms("key")))
    assert len(data) == 6
    assert np.allclose(data["part_key"], 0.7)
    drawn(scoreterms.SCORE_TERMS, data)
    assert "the largest part of the variance of scores is key (position 10%, key 70%" in scoreterms.say_terms(data)[0]
    other = scoreterms.prepare_terms(study(scores=of_terms("content")))
    assert "scores is content" in scoreterms.say_terms(other)[0]
    assert scoreterms.chosen_runs([str(n) for n in range(11)]) == ["0", "2", "4", "6", "8", "10"]


def test_effects_say_how_far_estimate_and_measurement_agree():
    data = effects.prepare_effects(study(effects=of_effects(1.0)))
    drawn(effects.EFFECTS_FIGURE, data)
    said = effects.say_effects(data)
    assert len(said) == 4
    assert "first is layer 5, head 3." in said[0]
    assert "On 6 heads where it was measured the ranks agree at ρ = 1.00" in said[0]
    assert effects.say_effects(data.assign(gamma=0.1))[0].startswith("With 10% of position taken away, ")
    other = effects.say_effects(effects.prepare_effects(study(effects=of_effects(-1.0))))
    assert "first is layer 0, head 0." in other[0]


def test_descriptions_turn_round_with_the_effects():
    for rise, sign in ((1.0, "+1.00"), (-1.0, "-1.00")):
        data = effects.prepare_descriptions(study(effects=of_effects(rise), heads=heads()))
        drawn(effects.DESCRIPTIONS_FIGURE, data)
        assert f"curve_range (ρ = {sign}" in effects.say_descriptions(data)[0]


def test_reach_is_the_median_over_heads():
    rows = [heads().assign(w=w, share_beyond=np.linspace(0, 1, 24) / w * 64, predicted_beyond=0.25) for w in (64, 128)]
    data = attentionreach.prepare_reach(study(reach=pd.concat(rows)))
    median = data[(data["w"] == 64) & (data["kind"] == "measured")]["median"].iloc[0]
    assert median == pytest.approx(0.5)
    drawn(attentionreach.REACH_FIGURE, data)
    said = "m: the median head has 50% of its attention, sinks apart, beyond 64 tokens, predicted from means 25%."
    assert attentionreach.say_reach(data) == [said]


def test_cuts_name_the_cheapest_and_the_dearest_order_on_each_kind_of_text():
    data = attentionreach.prepare_cuts(study(cuts=of_cuts(LOSSES, LOSSES | {"far": 3.8})))
    drawn(attentionreach.CUTS_FIGURE, data)
    plain, copy = attentionreach.say_cuts(data)
    assert "cutting 50% of key heads to 64 tokens, which saves 45% of the cache, costs least" in plain
    assert "costs least by far (+0.100 nats per token) and most by measured (+0.500)" in plain
    assert "random choices cost +0.600 to +0.700." in plain
    assert "costs least by area (+0.200 nats per token) and most by far (+0.800)" in copy


def test_without_their_tables_there_are_no_figures():
    for prepare in (
        scoreterms.prepare_terms,
        effects.prepare_effects,
        attentionreach.prepare_reach,
        attentionreach.prepare_cuts,
    ):
        with pytest.raises(NotApplicable):
            prepare(study(heads=heads()))
    nothing = of_effects(1.0).assign(kl=np.nan, kl_predicted=np.nan)
    with pytest.raises(NotApplicable, match="--passes and --measure"):
        effects.prepare_effects(study(effects=nothing))
    with pytest.raises(NotApplicable):
        effects.prepare_descriptions(
            study(effects=of_effects(1.0), heads=heads()[["model", "layer", "head", "k_head"]])
        )
