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
from qkscope.heads import TERMS
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
    assert "expected a head such as l07h00, got 'seven'" in ran(dataset, "seven", code=2)
    assert "ends with .png or .svg" in ran(dataset, "l00h01", "-o", tmp_path / "x.gif", code=2)
    assert not (tmp_path / "x.png").exists()
