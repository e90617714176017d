"""Figures of cause: what is prepared is what the tables say, and sentences turn round with it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from qkscope.figures import attentionreach, effects, scoreterms
from qkscope.figures.figure import NotApplicable, window_of
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
        chosen = np.where(np.isnan(measured), "", np.where(np.arange(24) < 12, "random", "strongest"))
        parts.append(part.assign(kl=measured, kl_low=measured, kl_high=measured, chosen=chosen))
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
    layers = data.dropna(subset=["layer"])
    assert len(layers) == 6
    assert np.allclose(layers["part_key"], 0.7)
    drawn(scoreterms.SCORE_TERMS, data)
    claim, parts = scoreterms.say_terms(data)
    assert claim == "In m most of what varies in scores is the term key."
    assert parts == "m: position 10%, key 70%, query 10%, content 10% (means over 24 heads)."
    other = scoreterms.prepare_terms(study(scores=of_terms("content")))
    assert "is the term content" in scoreterms.say_terms(other)[0]
    assert scoreterms.chosen_runs([str(n) for n in range(11)]) == ["0", "2", "4", "6", "8", "10"]


def test_parts_whose_intervals_overlap_are_about_equal():
    scores = of_terms("key").assign(part_query=0.6, part_key=np.where(np.arange(24) < 12, 1.1, 0.2))
    claim = scoreterms.say_terms(scoreterms.prepare_terms(study(scores=scores)))[0]
    assert claim == "In m the terms key and query have about equal parts in what varies in scores."


def test_effects_say_how_far_estimate_and_measurement_agree():
    data = effects.prepare_effects(study(effects=of_effects(1.0)))
    drawn(effects.EFFECTS_FIGURE, data)
    said = effects.say_effects(data)
    assert len(said) == 5
    assert "the first is l05h00." in said[1], "where it was measured, the measurement counts: twice the estimate"
    estimated = effects.say_effects(data.assign(kl=np.nan))[1]
    assert "the first is l05h03, whose effect is estimated; such estimates are often too large." in estimated
    for choice in ("random", "strongest"):
        assert f"On 3 {choice} heads that were measured the ranks agree at ρ = +1.00 (3 heads only)" in said[1]
    assert said[1].endswith(", and the median estimate is 0.5 times the measurement.")
    assert effects.say_effects(data.assign(gamma=0.1))[1].startswith("With 10% of position taken away, ")
    other = effects.say_effects(effects.prepare_effects(study(effects=of_effects(-1.0))))
    assert "the first is l00h00." in other[1]


@pytest.mark.parametrize("largest", ["content", "key"])
def test_the_term_that_matters_most_is_that_of_the_data(largest):
    table = of_effects(1.0)
    scaled = table.assign(kl_predicted=table["kl_predicted"] * np.where(table["term"] == largest, 5, 1), kl=np.nan)
    said = effects.say_effects(effects.prepare_effects(study(effects=scaled)))
    assert said[0].startswith(f"m: of the four terms of one head, {largest} matters most to the prediction")


def test_captions_promise_what_is_drawn():
    data = effects.prepare_effects(study(effects=of_effects(1.0)))
    assert "rings are measured" in effects.EFFECTS_FIGURE.caption(data)
    estimated = effects.prepare_effects(study(effects=of_effects(1.0).assign(kl=np.nan)))
    assert "rings" not in effects.EFFECTS_FIGURE.caption(estimated)
    assert "dots" not in effects.EFFECTS_FIGURE.caption(data.assign(kl_predicted=np.nan))
    cuts = attentionreach.prepare_cuts(study(cuts=of_cuts(LOSSES, LOSSES)))
    assert "second copy" in attentionreach.CUTS_FIGURE.caption(cuts)
    without = {order: loss for order, loss in LOSSES.items() if order != "random"}
    plain = attentionreach.prepare_cuts(study(cuts=of_cuts(without, {})))
    assert "copy" not in attentionreach.CUTS_FIGURE.caption(plain)
    assert "random" not in attentionreach.CUTS_FIGURE.caption(plain)
    assert len(attentionreach.say_cuts(plain)) == 1
    drawn(attentionreach.CUTS_FIGURE, plain)


def test_effects_stand_at_the_window_of_the_texts_on_which_they_were_measured():
    run = Study((StudyRun("m", window=768),), {"effects": of_effects(1.0).assign(window=256)})
    assert window_of(effects.EFFECTS_FIGURE.prepared(run)) == "window of 256 tokens"
    unknown = Study((StudyRun("m", window=768),), {"effects": of_effects(1.0)})
    assert window_of(effects.EFFECTS_FIGURE.prepared(unknown)) == ""


def test_descriptions_turn_round_with_the_effects():
    for rise, sign, word in ((1.0, "+1.00", "larger"), (-1.0, "-1.00", "smaller")):
        data = effects.prepare_descriptions(study(effects=of_effects(rise), heads=heads()))
        drawn(effects.DESCRIPTIONS_FIGURE, data)
        said = effects.say_descriptions(data)
        assert said[1].startswith(
            f"The {word} the range of the distance curve, the larger the effect of position: ρ = {sign}"
        )


def test_descriptions_of_few_heads_or_without_a_clear_sign_foretell_nothing():
    few = heads().head(4)
    data = effects.prepare_descriptions(study(effects=of_effects(1.0), heads=few))
    assert data["rho_low"].isna().all()
    said = effects.say_descriptions(data)
    assert said[0] == "m: over 4 heads, no description goes with the estimated effect of any term."
    assert "[" not in " ".join(said)
    noise = heads().assign(curve_range=np.random.default_rng(0).permutation(24), decay=0.0)
    unclear = effects.say_descriptions(effects.prepare_descriptions(study(effects=of_effects(1.0), heads=noise)))
    assert "The effect of key goes with no description beyond its interval." in unclear


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
