"""Cards of single heads: what they say turns with the numbers, and what is not known is left out."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import qkscope
from qkscope.cli.main import app
from qkscope.figures import card
from qkscope.figures.figure import NotApplicable
from qkscope.figures.style import house_style
from qkscope.headids import TERMS
from qkscope.report.report import png_size
from qkscope.results.study import Study, StudyRun
from tests.helpers import small_dataset

HEAD = (2, 1)


def study(shares=(0.6, 0.2, 0.1, 0.1), width=0.05, decay=(1.5, 1.2, 1.8)) -> Study:
    index = {"model": "m", "family": "", "layer": 2, "head": 1}
    scores = {f"part_{term}": share for term, share in zip(TERMS, shares, strict=True)}
    scores |= {f"part_{term}_low": share - width for term, share in zip(TERMS, shares, strict=True)}
    scores |= {f"part_{term}_high": share + width for term, share in zip(TERMS, shares, strict=True)}
    position = dict(zip(("decay", "decay_low", "decay_high"), decay, strict=True))
    low = 2.0 ** np.arange(6)
    distance = pd.DataFrame({"distance_low": low, "distance_high": 2 * low, "measured": -low, "predicted": -low})
    tables = {"scores": pd.DataFrame([index | scores]), "position": pd.DataFrame([index | position]),
              "distance": distance.assign(**index)}  # fmt: skip
    return Study((StudyRun("m", window=128),), tables)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "Most of what varies in its scores is position (60%; key 20%). Its mean score falls by 1.5 logits"),
        ({"shares": (0.1, 0.1, 0.2, 0.6)}, "Most of what varies in its scores is content (60%; query 20%)."),
        ({"shares": (0.45, 0.25, 0.2, 0.1)}, "The largest part of what varies in its scores is position (45%"),
        ({"width": 0.3}, "What varies in its scores is position (60%) and key (20%) about as much."),
        ({"decay": (-0.7, -0.9, -0.5)}, "Its mean score rises by 0.7 logits with every doubling of the distance."),
        ({"decay": (0.2, -0.1, 0.5)}, "Its mean score does not change with distance beyond its interval."),
    ],
)  # fmt: skip
def test_the_sentence_turns_with_the_numbers(given, said):
    assert said in card.say(study(**given), HEAD)


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("induction", "Of random tokens that come twice it gives the earlier copy 80% of its attention (induction)."),
        ("previous", "It gives the token before 20% of its attention."),
        ("sink", "It rests on the first tokens with 70% of its attention."),
        ("mixed", ""),
        ("position", ""),
    ],
)
def test_what_it_does_with_its_attention_is_said(role, said):
    known = study()
    row = {"role": role, "echo": 0.3, "induction": 0.5, "previous": 0.2, "sink": 0.7}
    known.tables["roles"] = pd.DataFrame([{"model": "m", "family": "", "layer": 2, "head": 1} | row])
    assert card.say(known, HEAD).endswith(said or "of the distance.")
    assert ("attention" in card.say(known, HEAD)) == bool(said)


def test_a_flat_head_is_flat_whatever_its_parts_are():
    flat = study(shares=(0.0, 0.02, 0.02, 0.96), decay=(1e-5, -1e-3, 1e-3))
    flat.tables["scores"] = flat.tables["scores"].assign(head_class="flat", logit_sd=0.012)
    said = card.say(flat, HEAD)
    assert said.startswith("It is flat: its scores vary by 0.012 logits, less than 0.1, so it attends almost evenly")
    assert "96%" not in said
    assert "content (104%; position under 1%)" in card.say(study(shares=(-0.02, -0.03, -0.04, 1.04)), HEAD)


def with_text() -> Study:
    """A head that scores the token after the earlier occurrence of a token highest, and a passage of three words."""
    tokens = [" one", " two", " th", "ree"] * 8
    query, key = np.tril_indices(len(tokens))
    copies = (key > 0) & np.array([tokens[k - 1] == tokens[q] for q, k in zip(query, key, strict=True)])
    rows = pd.DataFrame({"q_token": query, "k_token": key, "text": [tokens[k] for k in key], "unit": 0.5})
    rows = rows.assign(position=0, key=0, query=0, content=np.where(copies, 100 + query, -20))
    known = study()
    known.tables["passage"] = rows.assign(model="m", layer=2, head=1)
    return known


def test_two_tokens_of_the_passage_stand_on_their_scores():
    data = card.prepare_card(with_text(), HEAD)
    text = data[data["part"] == "text"]
    assert text["q_token"].nunique() == 2
    assert (text["k_token"] < text["q_token"]).all()
    np.testing.assert_allclose(text.groupby("q_token")["score"].mean(), 0, atol=1e-9)
    for _, of_query in text.groupby("q_token"):
        best = of_query.loc[of_query["score"].idxmax()]
        before = of_query.loc[of_query["k_token"] == best["k_token"] - 1, "text"].iloc[0]
        assert before == best["q_text"], "the key after the earlier occurrence of the query's token"
        assert best["rest"] == ("ree" if best["q_text"] == " th" else "")
    with house_style():
        drawn = card.draw_card(data)
    bold = [words.get_text() for words in drawn.texts if words.get_weight() == "bold"]
    assert bold == ["layer 2, head 1", *text.drop_duplicates("q_token").sort_values("q_token")["q_text"]]


def test_a_passage_of_few_tokens_is_left_out():
    few = with_text()
    few.tables["passage"] = few.tables["passage"].query("q_token < 8")
    assert "text" not in set(card.prepare_card(few, HEAD)["part"])


def test_names_of_the_clouds_stand_outside_them(tmp_path):
    run = qkscope.open(small_dataset(tmp_path / "set", layers=1), window=512)
    drawn = qkscope.plot.card(run, (0, 1))
    drawn.draw_without_rendering()
    cell = drawn.axes[0]
    names = {text.get_text(): text.get_window_extent() for text in cell.texts}
    assert {"queries", "keys"} <= set(names)
    assert all(box.y0 >= cell.get_window_extent().y1 for box in names.values())


def test_the_fall_says_up_to_which_distance_it_holds():
    known = study()
    known.tables["position"] = known.tables["position"].assign(decay_range=512)
    assert "falls by 1.5 logits with every doubling of the distance, up to 512 tokens." in card.say(known, HEAD)


def test_the_window_stands_beside_the_parts():
    with house_style():
        drawn = card.draw_card(card.prepare_card(study(), HEAD))
    assert "share of their variance, window 128" in [cell.get_xlabel() for cell in drawn.axes]


def test_the_parts_there_are_are_drawn_at_the_size_of_a_card():
    data = card.prepare_card(study(), HEAD)
    assert set(data["part"]) == {"curve", "terms"}
    with house_style():
        drawn = card.draw_card(data)
    picture = io.BytesIO()
    drawn.savefig(picture, format="png", dpi=card.CARD_DPI)
    assert png_size(picture.getvalue()) == (1200, 630)
    assert len(drawn.axes) == 2
    with pytest.raises(NotApplicable, match="nothing is known about head l00h00 of m"):
        card.prepare_card(study(), (0, 0))


def test_a_dataset_without_rotary_encoding_has_clouds_and_a_sentence(tmp_path):
    run = qkscope.open(small_dataset(tmp_path / "set", layers=1), window=512)
    drawn = qkscope.plot.card(run, (0, 1))
    said = " ".join(text.get_text().replace("\n", " ") for text in drawn.texts)
    assert "layer 0, head 1" in said
    assert "Along the axis of drift its queries follow position with r = " in said


def test_the_command_draws_and_refuses(tmp_path):
    dataset = small_dataset(tmp_path / "set", layers=1)

    def ran(*arguments, code=0) -> str:
        done = CliRunner().invoke(app, ["card", *map(str, arguments)])
        assert done.exit_code == code, done.output
        return done.output.replace("\n", "")

    assert str(tmp_path / "card.png") in ran(dataset, "l00h01", "-o", tmp_path / "card.png")
    assert png_size((tmp_path / "card.png").read_bytes()) == (1200, 630)
    ran(dataset, "l00h01", "-o", tmp_path / "card.svg")
    assert b"<svg" in (tmp_path / "card.svg").read_bytes()[:500]
    assert "has no head l09h00" in ran(dataset, "l09h00", "-o", tmp_path / "x.png", code=2)
    assert "expected query heads such as l04h01 or (4, 1), got 'seven'" in ran(dataset, "seven", code=2)
    assert "ends with .png or .svg" in ran(dataset, "l00h01", "-o", tmp_path / "x.gif", code=2)
    assert not (tmp_path / "x.png").exists()
