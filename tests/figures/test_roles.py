"""The figure of roles: shares by layer that sum to 1, and sentences that follow the heads."""

from __future__ import annotations

import pandas as pd
import pytest

from qkscope.figures.figure import NotApplicable
from qkscope.figures.roles import draw_roles, prepare_roles, say_roles
from qkscope.results.study import Study, StudyRun


def study(roles: dict[str, list[str]]) -> Study:
    """Four heads in each of two layers of each run, with these roles."""
    rows = [
        {"model": run, "family": "", "layer": 2 * (i // 4), "head": i % 4, "role": role, "echo": 0.1 * i / 8,
         "induction": 0.5 + i / 20, "previous": 0.6, "sink": 0.9}
        for run, of_run in roles.items() for i, role in enumerate(of_run)
    ]  # fmt: skip
    return Study(tuple(StudyRun(run, window=128) for run in roles), {"roles": pd.DataFrame(rows)})


ROLES = ["induction", "mixed", "sink", "sink", "induction", "previous", "mixed", "content"]


def test_bars_are_the_shares_of_each_layer():
    figure = draw_roles(prepare_roles(study({"m": ROLES})))
    heights = {(bar.get_x(), bars.get_label()): bar.get_height() for bars in figure.axes[0].containers for bar in bars}
    assert sorted({round(x + 0.43) for x, _ in heights}) == [0, 1]
    for place in {x for x, _ in heights}:
        assert sum(height for (x, _), height in heights.items() if x == place) == pytest.approx(1.0)
    assert {role: sum(h for (_, r), h in heights.items() if r == role) for role in ("sink", "previous")} == {
        "sink": 0.5, "previous": 0.25,
    }  # fmt: skip
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["0", "2"], "layers, not their places"


def test_sentences_name_the_head_that_shows_it_most_of_each_run():
    said = say_roles(prepare_roles(study({"m": ROLES, "other": ["mixed"] * 8})))
    assert said[0] == (
        "m: of 8 heads 2 look for earlier copies (l02h00 with 75%); 1 looks at the token before (l02h01 with 60%); "
        "2 rest on the first tokens (l00h02 with 90%)."
    )
    assert said[1] == "other: none of 8 heads is named after its attention."


def test_runs_without_attention_have_no_figure():
    empty = study({"m": ROLES})
    with pytest.raises(NotApplicable, match="roles of heads"):
        prepare_roles(Study(empty.runs, {}))
    empty.tables["roles"] = empty.tables["roles"].assign(role=None)
    with pytest.raises(NotApplicable, match="roles of heads"):
        prepare_roles(empty)
