"""The explorer in a real browser: one load of a page serves several checks."""

from __future__ import annotations

import csv
import io
import os
import re
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Locator, Page, expect

from qkscope.config import StudyRunConfig
from qkscope.headids import TERMS
from qkscope.report.explorer import explorer_html
from qkscope.results.study import Study, build
from tests.browser.chromium import PROGRAM, focused, serious, shot
from tests.studies import PASSAGE, write_model

HOSTILE = "<img src=x onerror=\"document.title='owned'\"> & $co"
TABS = ("overview", "planes", "plasticity", "all")

pytestmark = pytest.mark.filterwarnings("default")  # Playwright's loop warns about itself on the way out
if PROGRAM is None and not os.environ.get("CI"):
    pytest.skip("Chromium is not installed (Debian: apt-get install chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The tables of two models, one with a hostile name, and of three checkpoints, the last at two windows."""
    folder = tmp_path_factory.mktemp("explorer")
    write_model(folder / "base", "base", family="A", layers=8, heads=64, window=4096, points=64, nope=True)
    write_model(folder / "tuned", "tuned", family="B", layers=8, heads=64, window=4096, points=6, seed=5)
    for i, window in enumerate((1024, 1024, 4096)):
        write_model(folder / f"c{i}", f"step-{i}", family="A", layers=8, heads=64, window=window, seed=i)
    write_model(folder / "c2-at-1024", "step-2", family="A", layers=8, heads=64, window=1024, seed=7)
    return folder


@pytest.fixture(scope="module")
def page(folder) -> Path:
    entries = [
        StudyRunConfig(path=str(folder / "base")),
        StudyRunConfig(path=str(folder / "tuned"), label=HOSTILE),
        *(StudyRunConfig(path=str(folder / f"c{i}"), phase=phase, step=float(i)) for i, phase in enumerate("ssl")),
    ]
    at_1024 = build([StudyRunConfig(path=str(folder / "c2-at-1024"), window=1024)])
    study = build(entries, "Browser test", other_windows=[at_1024])
    for of_window in (study, study.at[1024]):
        with_more(of_window)
    path = folder / "explorer.html"
    path.write_text(explorer_html(study, report="report.html"), encoding="utf-8")
    return path


def with_more(study: Study) -> None:
    """Add what the made-up tables lack: parts of scores, roles of one run, distance curves, and effects of two runs."""
    heads, rng = study.tables["heads"], np.random.default_rng(3)
    parts = rng.dirichlet([3, 1, 1, 2], len(heads))
    for term, part in zip(TERMS, parts.T, strict=True):
        heads[f"part_{term}"] = part
    if "base" in study.labels:
        base = heads["model"] == "base"
        heads.loc[base, "role"] = np.where(heads.loc[base, "head"] == 3, "induction", "")
    bins = pd.DataFrame({"distance_low": 2.0 ** np.arange(10), "distance_high": 2.0 ** np.arange(1, 11) - 1})
    curve = heads[["model", "family", "layer", "head"]].merge(bins, how="cross")
    fall = -np.log2(curve["distance_high"]) * (1 + curve["head"] / 8)
    terms = heads[["model", "family", "layer", "head"]].merge(pd.DataFrame({"term": TERMS}), how="cross")
    texts = terms["model"].map({"base": 256, HOSTILE: 512})
    study.tables["effects"] = terms.assign(kl_predicted=rng.uniform(0, 1, len(terms)), window=texts).dropna()
    study.tables["distance"] = curve.assign(measured=fall, measured_se=0.1, predicted=fall + 0.2, n_pairs=50)


def opened(tab: Page, page: Path, link: str = "") -> Page:
    """The page at a link, when its panel is drawn."""
    tab.goto("about:blank")
    tab.goto(page.as_uri() + link)
    tab.wait_for_selector("body[data-ready]")
    return tab


def drawn(tab: Page, begin: str) -> None:
    """Wait until the panel shows this head."""
    tab.wait_for_selector(f'body[data-drawn^="{begin}"]')


def choose(tab: Page, select: str, label: str) -> None:
    tab.locator(select).select_option(label=label)


def saved(tab: Page, button: Locator) -> bytes:
    with tab.expect_download() as download:
        button.click()
    return Path(download.value.path()).read_bytes()


def table(content: bytes) -> pd.DataFrame:
    return pd.DataFrame(list(csv.DictReader(io.StringIO(content.decode()))))


def cell(tab: Page, layer: int, head: int, which: int = 0) -> tuple[float, float]:
    """The middle of a head on a map of the page."""
    return tuple(
        tab.locator("#maps figure").nth(which).evaluate(
            """(figure, [layer, head]) => {
                const [x, y, w, h] = chart.of(figure).cell(layer, head), svg = figure.querySelector("svg");
                const box = svg.getBoundingClientRect(), by = box.width / chart.of(figure).width;
                return [box.x + by * (x + w / 2), box.y + by * (y + h / 2)];
            }""",
            [int(layer), int(head)],
        )
    )  # fmt: skip


def colour(tab: Page, layer: int, head: int, which: int) -> tuple[int, ...]:
    x, y = cell(tab, layer, head, which)
    fill = tab.evaluate("([x, y]) => document.elementFromPoint(x, y).getAttribute('fill')", [x, y])
    return tuple(int(fill[i : i + 2], 16) for i in (1, 3, 5))


# ---- one window ----------------------------------------------------------------------------------


def test_it_opens_on_two_checkpoints_at_the_window_of_both_and_prints_it_everywhere(tab, page, folder):
    opened(tab, page)
    assert tab.locator("#run option:checked").inner_text() == "step-2"
    assert tab.locator("#other option:checked").inner_text() == "step-1"
    assert tab.locator("#window option:checked").inner_text() == "1,024 tokens"
    assert tab.locator("#window option").all_inner_texts() == ["1,024 tokens", "4,096 tokens"]
    expect(tab.locator("#missing")).to_be_empty()
    expect(tab.locator("#maps figure")).to_have_count(3)
    assert tab.locator("#about").inner_text().startswith("step-1 beside step-2 · window 1,024")
    places = tab.locator("figure:visible .at").all_inner_texts()
    assert len(places) >= 5
    assert all("window 1,024" in place for place in places), places
    strongest = tab.locator("#list tbody tr").first
    assert strongest.get_attribute("class") == "on"
    layer, head = (int(number) for number in re.findall(r"\d+", strongest.get_attribute("data-head")))
    assert tab.locator("#name").inner_text().startswith(f"layer {layer}, head {head}")
    shot(tab, "explorer-opening-1400")

    # The difference is the later run minus the earlier, both at 1,024 tokens, and orange where it is positive.
    choose(tab, "#metric", tab.locator("#metric option", has_text="bias_window").inner_text())
    frames = [pd.read_parquet(folder / name / "rotated.parquet") for name in ("c1", "c2-at-1024")]
    earlier, later = (frame.set_index(["layer", "head"])["bias_window"] for frame in frames)
    change = later - earlier
    third = tab.locator("#maps figure").nth(2)
    shown = table(saved(tab, third.locator("[data-save=csv]"))).astype(float).set_index(["layer", "head"])
    np.testing.assert_allclose(shown["bias_window"], change.reindex(shown.index), rtol=1e-3, atol=1e-3)
    assert "later minus the earlier" in third.locator("figcaption").inner_text()
    red, _, blue = colour(tab, *change.idxmax(), which=2)
    assert red > blue, "what rose is orange"
    red, _, blue = colour(tab, *change.idxmin(), which=2)
    assert blue > red, "what fell is purple"
    up = int((change > 0).sum())
    expect(tab.locator("#maps > p")).to_contain_text(f"rises in {up} of 64 heads and falls in {64 - up}")
    # Chosen the other way round, it is the same difference.
    tab.locator("#run").select_option(label="step-1")
    choose(tab, "#other", "step-2")
    again = table(saved(tab, third.locator("[data-save=csv]")))
    pd.testing.assert_series_equal(again["bias_window"].astype(float), shown["bias_window"].reset_index(drop=True))


def test_another_window_shows_its_own_numbers_and_a_run_without_it_says_so(tab, page, folder):
    opened(tab, page, "#l01h01;run=step-2;at=4096;metric=r_q")
    of_window = {
        window: pd.read_parquet(folder / name / "qk.parquet").query("pc == 0").set_index(["layer", "head"])["r_q"]
        for window, name in ((1024, "c2-at-1024"), (4096, "c2"))
    }
    for window in (4096, 1024):
        choose(tab, "#window", f"{window:,} tokens")
        value = float(tab.locator("#list tr[data-head=l01h01] td").nth(1).inner_text())
        assert value == pytest.approx(of_window[window][1, 1], abs=1e-3)
    choose(tab, "#window", "4,096 tokens")
    choose(tab, "#other", "step-0")
    expect(tab.locator("#missing")).to_have_text("step-0 was not measured at a window of 4,096 tokens, only at 1,024.")
    expect(tab.locator("#maps figure")).to_have_count(1)
    tab.locator("#tab-all").click()
    expect(tab.locator("#numbers thead")).to_contain_text("95% interval")
    choose(tab, "#window", "1,024 tokens")
    expect(tab.locator("#missing")).to_be_empty()
    expect(tab.locator("#maps figure")).to_have_count(3)
    expect(tab.locator("#numbers thead")).to_contain_text("later − earlier")
    expect(tab.locator("#numbers caption")).to_have_text("window 1,024")
    row = tab.locator("#numbers tbody tr", has_text="explained_variance").first.locator("td").all_inner_texts()
    first, second, difference = (float(text.replace("−", "-")) for text in row)
    assert difference == pytest.approx(second - first, abs=2e-3)
    # Neither run has the window: nothing is drawn, and both say why.
    choose(tab, "#other", "step-1")
    choose(tab, "#run", "step-0")
    choose(tab, "#window", "4,096 tokens")
    assert tab.locator("#missing").inner_text().count("was not measured") == 2
    expect(tab.locator("#chosen")).to_be_hidden()
    expect(tab.locator("#list tbody tr")).to_have_count(0)


def test_without_a_second_run_the_map_leaves_the_list_alone(tab, page):
    opened(tab, page, "#l01h01;run=step-2;vs=step-1")
    tab.locator("#other").select_option("")
    expect(tab.locator("#maps figure")).to_have_count(1)
    places = [tab.locator(part).bounding_box() for part in ("#maps svg", ".list", "#scatter")]
    assert all(above["y"] + above["height"] <= below["y"] + 1 for above, below in pairwise(places))
    assert "vs=" not in tab.url


def test_effects_have_the_window_of_their_texts_and_are_compared_at_one_only(tab, page):
    opened(tab, page, f"#l01h01;run=base;vs={quote(HOSTILE)};metric=effect_position")
    expect(tab.locator("#maps figure")).to_have_count(2)
    places = tab.locator("#maps .at").all_inner_texts()
    assert places == ["texts of 256 tokens", "texts of 512 tokens"]
    expect(tab.locator("#missing")).to_contain_text("so no difference is drawn")
    expect(tab.locator("#list thead")).not_to_contain_text("later")
    tab.locator("#tab-all").click()
    row = tab.locator("#numbers tbody tr", has_text="effect_position")
    assert row.locator("td").last.inner_text() == "–"
    expect(row.locator("th")).to_contain_text("on texts of 256 tokens and texts of 512 tokens")
    assert tab.locator("#numbers tbody tr", has_text="r_k_a").locator("td").last.inner_text() != "–"


def test_models_of_other_shapes_stand_side_by_side_without_a_difference(tab, tmp_path):
    paths = [
        write_model(tmp_path / name, name, layers=layers, heads=layers * 8) for name, layers in (("a", 3), ("b", 4))
    ]
    page = tmp_path / "explorer.html"
    page.write_text(explorer_html(build([StudyRunConfig(path=path) for path in paths])), encoding="utf-8")
    opened(tab, page, "#l01h01;run=b;vs=a")
    expect(tab.locator("#maps figure")).to_have_count(2)
    expect(tab.locator("#maps")).not_to_contain_text("rises in")
    expect(tab.locator("#missing")).to_contain_text("do not have the same heads, so no difference is drawn")
    expect(tab.locator("#list thead")).not_to_contain_text("later")


def test_every_number_of_a_head_is_that_of_its_table_at_the_window(tab, page, folder):
    opened(tab, page, "#l02h05;run=step-2;at=4096;tab=all")
    for window, name in ((4096, "c2"), (1024, "c2-at-1024")):
        choose(tab, "#window", f"{window:,} tokens")
        expect(tab.locator("#numbers caption")).to_have_text(f"window {window:,}")
        known: dict[str, float] = {}
        for part in ("rotated", "heads", "qk"):
            rows = pd.read_parquet(folder / name / f"{part}.parquet").query("layer == 2 and head == 5")
            known |= (rows[rows["pc"] == 0] if part == "qk" else rows).iloc[0].to_dict()
        shown = tab.evaluate(
            "[...document.querySelectorAll('#numbers tbody tr')].map((row) =>"
            " [row.cells[0].firstChild.data, row.cells[1].textContent])"
        )
        checked = [(column, float(text.replace("−", "-")), known[column]) for column, text in shown if column in known]
        assert len(checked) > 20
        assert all(value == pytest.approx(expected, rel=6e-3) for _, value, expected in checked), checked
        others = {column for column, _ in shown} - known.keys()
        assert others == {f"{what}_{term}" for term in TERMS for what in ("part", "effect")}, "these were made up"
        listed = tab.locator("#list tr[data-head=l02h05] td").nth(1).inner_text()
        metric = tab.locator("#metric").input_value()
        assert listed == tab.locator("#numbers tbody tr").nth(int(metric)).locator("td").first.inner_text()


# ---- choosing ------------------------------------------------------------------------------------


def test_a_click_opens_a_head_and_arrows_move_on(tab, page):
    opened(tab, page, "#;run=base")
    expect(tab.locator("#nothing")).to_be_visible()
    x, y = cell(tab, 2, 6)
    tab.mouse.move(x, y)
    expect(tab.locator("#tip")).to_contain_text("layer 2, head 6")
    expect(tab.locator("#tip")).to_contain_text("window 4,096")
    tab.mouse.click(x, y)
    drawn(tab, "l02h06")
    assert "#l02h06;run=base;at=4096" in tab.url
    for key, head in (
        ("ArrowRight", "l02h07"),
        ("ArrowRight", "l02h07"),
        ("ArrowDown", "l03h07"),
        ("ArrowLeft", "l03h06"),
    ):
        tab.keyboard.press(key)
        drawn(tab, head)
    expect(tab.locator("#about")).to_contain_text("no rotary encoding in this layer")
    # The ring on the map and the row of the list are this head's.
    ring = tab.locator("#maps .chosen").bounding_box()
    x, y = cell(tab, 3, 6)
    assert ring["x"] < x < ring["x"] + ring["width"]
    assert ring["y"] < y < ring["y"] + ring["height"]
    assert tab.locator("#list tr.on").get_attribute("data-head") == "l03h06"
    assert tab.evaluate(
        "[...document.querySelectorAll('#list tr.on > *')]"
        ".every((cell) => getComputedStyle(cell).boxShadow.includes('0, 165, 196'))"
    ), "the outline of the row is around every cell of it"
    # A list that was used with the mouse gives the arrow keys back.
    tab.locator("#run").click()
    choose(tab, "#run", "step-1")
    choose(tab, "#window", "1,024 tokens")
    tab.keyboard.press("ArrowDown")
    drawn(tab, "l04h06")
    tab.keyboard.press("]")
    expect(tab.locator("#about")).to_contain_text("step-2")
    tab.keyboard.press("[")
    expect(tab.locator("#about")).to_contain_text("step-1")
    tab.locator("#play").click()
    expect(tab.locator("#about")).to_contain_text("step-2")
    expect(tab.locator("#play")).to_have_attribute("aria-pressed", "false")


def test_heads_are_found_by_name_class_role_and_number(tab, page):
    opened(tab, page, "#;run=base")
    rows, status = tab.locator("#list tbody tr"), tab.locator("#status")

    def find(text: str) -> list[str]:
        tab.locator("#find").fill(text)
        return rows.evaluate_all("all => all.map((row) => row.dataset.head)")

    assert find("l03h0") == sorted(find("l03h0"), key=find("l03h0").index)
    assert len(find("l03h0")) == 8
    tab.keyboard.press("Enter")
    drawn(tab, "l03h0")
    count = len(find("class:mixed r_q>0.5"))
    assert 0 < count < 64
    assert all("mixed" in text for text in rows.all_inner_texts())
    expect(status).to_have_text(f"{count} of 64 heads")
    assert find("class: mixed  r_q > 0.5") == find("class:mixed r_q>0.5")
    assert set(find("role:induction")) == {f"l{layer:02d}h03" for layer in range(8)}
    assert "induction" in rows.first.inner_text()
    rows.first.locator("button").click()
    expect(tab.locator("#name")).to_have_text(re.compile(r"^layer \d, head 3 · .* · induction · reads key head \d$"))
    assert set(find("layer = 2 head < 2")) == {"l02h00", "l02h01"}
    assert find("r_q > 5") == []
    expect(status).to_have_text("No head of base at window 4,096 matches “r_q > 5”; Esc clears it.")
    assert find("nothing>3") == []
    expect(status).to_have_text("Nothing found: no number is called nothing.")
    choose(tab, "#run", "step-0")
    choose(tab, "#window", "1,024 tokens")
    assert find("role:induction") == []
    expect(status).to_have_text("Nothing found: these tables have no role of heads.")
    tab.locator("#find").press("Escape")
    expect(rows).to_have_count(64)


def test_the_list_sorts_both_ways_by_value_and_by_change_and_draws_training(tab, page):
    opened(tab, page, "#l00h00;run=step-2;vs=step-1")

    def column(number: int) -> list[float]:
        texts = tab.locator(f"#list tbody tr > :nth-child({number})").all_inner_texts()
        return [float(text.replace("−", "-")) for text in texts]

    assert column(3) == sorted(column(3), reverse=True)
    tab.locator("[data-sort=value]").click()
    assert column(3) == sorted(column(3))
    tab.locator("[data-sort=change]").click()
    assert column(4) == sorted(column(4))
    assert "sort=change,up" in tab.url
    expect(tab.locator("th[aria-sort=ascending]")).to_contain_text("later − earlier")
    assert tab.locator("#list .spark polyline").count() == 64
    assert tab.locator("#list .spark").first.get_attribute("aria-label").count("–") == 2, "two runs lack this window"


def test_a_box_stays_and_marks_heads_everywhere(tab, page):
    opened(tab, page, "#;run=base")
    tab.locator("#scatter").scroll_into_view_if_needed()
    box = tab.locator("#scatter > svg").bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.1)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] * 0.45, steps=5)
    tab.mouse.up()
    expect(tab.locator("#status")).to_contain_text("of 64 heads")
    marked = int(tab.locator("#status").inner_text().split()[0])
    assert 0 < marked < 64
    expect(tab.locator("#maps .marked")).to_have_attribute("data-count", str(marked))
    expect(tab.locator("#list tbody tr")).to_have_count(marked)
    tab.locator("#list tbody button").first.click()
    drawn(tab, "l")
    expect(tab.locator("#scatter .band")).to_have_count(1)
    expect(tab.locator("#scatter [data-inside]")).to_have_attribute("data-inside", str(marked))
    assert "box=" in tab.url
    tab.keyboard.press("Escape")
    expect(tab.locator("#list tbody tr")).to_have_count(64)
    expect(tab.locator("#scatter .band")).to_have_count(0)


def test_colours_have_plain_names_first_and_all_numbers_on_request(tab, page):
    opened(tab, page, "#l00h00;run=base")
    names = tab.locator("#metric > option").all_inner_texts()
    assert len(names) <= 13
    assert names[-1] == "more…"
    assert all(re.fullmatch(r"[\w' %-]+ · \w+", name) for name in names[:-1]), names
    choose(tab, "#metric", "more…")
    groups = tab.locator("#metric optgroup").evaluate_all("all => all.map((group) => group.label)")
    assert groups[:2] == ["Position", "Bias"]
    tab.locator("#metric").select_option(label=tab.locator("#metric option", has_text="r_k_a –").inner_text())
    expect(tab.locator("#meaning")).to_contain_text("correlation")
    assert "metric=r_k_a" in tab.url


# ---- links ---------------------------------------------------------------------------------------


def test_a_link_brings_everything_back_and_leads_to_the_finding(tab, page):
    link = (
        "#l02h03;run=step-1;vs=step-2;at=1024;metric=r_k_a;tab=plasticity;sort=change,up;box=0.2,1,-1,1;find=l02"
        ";from=decay"
    )
    opened(tab, page, link)
    read = (
        "[...['run', 'other', 'window', 'metric', 'find'].map((id) => document.getElementById(id).value),"
        " ...['name', 'about', 'status'].map((id) => document.getElementById(id).textContent),"
        " document.querySelector('[aria-selected=true]').id, location.hash]"
    )
    before = tab.evaluate(read)
    assert before[2] == "1024"
    assert before[-2] == "tab-plasticity"
    assert before[-1] == link
    assert tab.locator("#back").inner_text() == "← back to the finding"
    assert tab.locator("#back").get_attribute("href") == "report.html#decay"
    tab.keyboard.press("ArrowRight")
    drawn(tab, "l02h04")
    moved = tab.evaluate(read)
    opened(tab, page, moved[-1])
    assert tab.evaluate(read) == moved
    opened(tab, page, "#l02h03;run=base")
    assert tab.locator("#back").get_attribute("href") == "report.html"


def test_a_link_that_names_nothing_says_so(tab, page):
    for link, says in (
        ("#l99h99", "head l99h99"),
        ("#<b>", "head <b>"),
        ("#l00h00;run=nobody;vs=%zz;metric=nothing;at=7", "run nobody, number nothing, window 7"),
    ):
        opened(tab, page, link)
        expect(tab.locator("#missing")).to_contain_text(says)
        expect(tab.locator("#maps figure")).to_have_count(1)


def test_a_hostile_label_is_text_everywhere(tab, page):
    opened(tab, page, f"#l00h00;run={quote(HOSTILE)};vs=base")
    assert HOSTILE in tab.locator("#about").inner_text()
    assert HOSTILE[:20] in tab.locator("#maps").inner_text()
    for name in TABS:
        tab.locator(f"#tab-{name}").click()
        drawn(tab, f"l00h00;{name}")
    assert HOSTILE in tab.locator("#numbers thead").inner_text()
    assert tab.locator("img").count() == 0
    assert tab.title() != "owned"


# ---- the panel -----------------------------------------------------------------------------------


def test_tabs_are_built_when_opened_and_move_with_the_keyboard(tab, page):
    opened(tab, page, "#l01h02;run=base")
    figures = "id => document.getElementById(id).querySelectorAll('figure.chart, tbody tr').length"
    counts = {name: tab.evaluate(figures, f"page-{name}") for name in TABS}
    assert counts["overview"] >= 3
    assert not any(counts[name] for name in TABS[1:])
    dots = "all => all.reduce((n, path) => n + path.getAttribute('d').split('M').length - 1, 0)"
    clouds = tab.locator("#overview figure", has_text="Drift and separation").locator(".spots")
    assert clouds.evaluate_all(dots) == 400
    tab.locator("#tab-overview").focus()
    for name in (*TABS[1:], TABS[0]):
        tab.keyboard.press("ArrowRight")
        drawn(tab, f"l01h02;{name}")
        assert tab.evaluate(figures, f"page-{name}") > 0
        assert tab.locator("[role=tabpanel]:visible").count() == 1
        assert tab.evaluate("document.activeElement.id") == f"tab-{name}"
    assert tab.locator("#page-planes .rings figure").count() == 6
    opened(tab, page, "#l07h07;run=step-1")
    expect(tab.locator("#overview")).to_contain_text("qkscope view")
    expect(tab.locator("#text")).to_be_hidden()


def test_two_runs_are_overlaid_or_side_by_side_on_the_same_axes(tab, page):
    both = [f"l{i // 8:02d}h{i % 8:02d}" for i in range(6)]
    opened(tab, page, f"#{both[1]};run=base;vs={quote(HOSTILE)}")
    clouds = tab.locator("#overview figure", has_text="Drift and separation")
    expect(clouds).to_have_count(2)
    ticks = [clouds.nth(n).locator("svg > text").all_inner_texts() for n in range(2)]
    assert ticks[0] == ticks[1]
    assert tab.locator("#text .reading").count() == 2
    assert tab.locator("#text .token[aria-pressed=true]").count() == 2
    widths = "all => all.map((line) => line.getBoundingClientRect().width)"
    scale = []  # pixels per logit
    for line in tab.locator("#text .line").all():
        plus, minus = (sum(line.locator(f".{way} i").evaluate_all(widths)) for way in ("plus", "minus"))
        total = float(line.locator(".sum").inner_text().replace("−", "-"))
        if abs(total) > 5:
            scale.append((plus - minus) / total)
    assert len(scale) > 2
    assert max(scale) < 1.1 * min(scale), "bars of both runs, to both sides, have one scale"
    shot(tab, "explorer-compare-1400")
    tab.locator("#tab-plasticity").click()
    drawn(tab, f"{both[1]};plasticity")
    lines = tab.locator("#plasticity svg").inner_html()
    assert "var(--run0)" in lines
    assert "var(--run1)" in lines
    tab.locator("#tab-planes").click()
    drawn(tab, f"{both[1]};planes")
    spectra = tab.locator("#page-planes figure", has_text="Share of each plane of the complement")
    assert (
        spectra.nth(0).locator("svg > text").all_inner_texts() == spectra.nth(1).locator("svg > text").all_inner_texts()
    )
    left, right = (tab.locator("#page-planes .side").nth(n).bounding_box() for n in range(2))
    assert left["x"] + left["width"] <= right["x"] + 1


def passage_of(folder: Path, head: tuple[int, int], query: int) -> pd.DataFrame:
    """The four terms of one query of the page's run “base”, in logits above the mean of its later keys."""
    frame = pd.read_parquet(folder / "base" / "passage.parquet")
    rows = frame[(frame["layer"] == head[0]) & (frame["head"] == head[1]) & (frame["q_token"] == query)]
    rows = rows.sort_values("k_token").set_index("k_token")
    terms = rows[list(TERMS)].mul(rows["unit"], axis=0)
    return terms - terms[4 if len(terms) > 8 else 0 :].mean()


WORDS = [[0], [1, 2], [3], [4], [5], [6], [7], [8], [9], [10, 11]]
"""The tokens of the made-up passage by word: a word begins after or with a space."""


def test_a_text_is_coloured_by_what_a_query_scores_and_lists_keys_in_their_context(tab, page, folder):
    opened(tab, page, "#l01h02;run=base;text=10,score")
    tokens = tab.locator("#text .token")
    expect(tokens).to_have_count(len(PASSAGE))
    expect(tokens.nth(2)).to_have_text("</script>")
    expect(tokens.nth(10)).to_have_attribute("aria-pressed", "true")
    terms = passage_of(folder, (1, 2), 10)
    score = terms.sum(axis=1)
    word = {token: n for n, members in enumerate(WORDS) for token in members}
    best = score[:-1].sort_values(ascending=False, kind="stable")
    best = best[~best.index.map(word).duplicated()].head(6)
    shown = tab.locator("#text .line .sum").all_inner_texts()
    assert [float(text.replace("−", "-")) for text in shown] == pytest.approx(best.tolist(), abs=0.5)
    first = tab.locator("#text .line .what").first
    assert first.locator("b").inner_text().strip() == "".join(PASSAGE[k] for k in WORDS[word[best.index[0]]]).strip()
    assert tab.locator("#text .line .far").first.inner_text() == f"{10 - best.index[0]} back"
    key = tab.locator("#text [data-part=key]").inner_text()
    most = score[4:].abs().max()
    assert float(re.search(r"\+([\d.]+): above", key)[1]) == pytest.approx(most, abs=0.51)
    said = tab.locator("#text [data-part=said]").inner_text()
    rest = slice(4, None)
    shares = {term: float((terms[term][rest] * score[rest]).sum() / (score[rest] ** 2).sum()) for term in TERMS}
    assert sum(shares.values()) == pytest.approx(1)
    for term, share in shares.items():
        percent = str(int(np.floor(100 * share + 0.5))).replace("-", "−")  # as the page rounds: ties upwards
        assert f"{term} {percent}%" in said

    # It is read with mouse and keyboard, and stays in the link.
    tokens.nth(6).click()
    expect(tokens.nth(6)).to_have_attribute("aria-pressed", "true")
    assert tokens.nth(7).evaluate("x => x.classList.contains('later')"), "later tokens have no score"
    tab.keyboard.press("ArrowRight")
    expect(tokens.nth(7)).to_have_attribute("aria-pressed", "true")
    assert "l01h02" in tab.url, "arrows in the text leave the head alone"
    tab.get_by_role("button", name="position", exact=True).click()
    assert "text=7,position" in tab.url
    colours = tokens.nth(3).evaluate("x => getComputedStyle(x).backgroundColor")
    opened(tab, page, "#" + tab.url.partition("#")[2])
    expect(tokens.nth(7)).to_have_attribute("aria-pressed", "true")
    assert tokens.nth(3).evaluate("x => getComputedStyle(x).backgroundColor") == colours
    tab.keyboard.press("ArrowDown")
    drawn(tab, "l02h02")
    expect(tokens.nth(7)).to_have_attribute("aria-pressed", "true")


def test_texts_of_encoders_and_of_tokenizers_without_spaces(tab, page):
    n, rng = 6, np.random.default_rng(0)
    query, key = np.indices((n, n)).reshape(2, -1)
    levels = {term: rng.integers(-127, 128, n * n).astype(np.int8) for term in TERMS}
    packed = np.full(n, 0.5, "<f4").tobytes() + b"".join(levels[term].tobytes() for term in TERMS)
    opened(tab, page, "#l01h02;run=base")
    sides = [["t0", "t1", "##t2", "t3", "t4", "t5"], ["t0", "t1##t2", "t3t4", "t5", "", ""]]
    found = tab.evaluate(
        """([bytes, sides]) => textView.draw(document.getElementById("text"),
            sides.map((tokens) => ({ label: "m", at: "", bytes: Uint8Array.from(bytes), tokens })), { query: 3 },
            () => {})""",
        [list(packed), sides],
    )
    rows = pd.DataFrame({"q": query, "k": key} | {term: levels[term].astype(int) for term in TERMS})
    score = rows[rows["q"] == 3].set_index("k")[list(TERMS)].sum(axis=1).drop(3)
    order = score.sort_values(ascending=False).index.to_series()
    one_of_each_word = order[~order.replace(2, 1).duplicated()]
    assert found[0]["best"] == one_of_each_word.tolist()
    assert found[1]["query"] == 2, "the token at the same place of the same text"
    assert tab.locator("#text .later").count() == 0
    assert tab.locator("#text .reading").first.locator(".word").all_inner_texts() == ["t0", "t1##t2", "t3", "t4", "t5"]


# ---- files ---------------------------------------------------------------------------------------


def test_what_is_seen_is_saved_at_twice_its_size_and_charts_as_files(browser, page, tmp_path):
    """The picture is the screen, text and all: beside a screenshot of a screen with twice the pixels."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, device_scale_factor=2)
    tab = context.new_page()
    opened(tab, page, f"#l00h01;run=base;vs={quote(HOSTILE)}")
    tab.mouse.wheel(0, 120)
    tab.wait_for_timeout(200)
    picture = Image.open(io.BytesIO(saved(tab, tab.locator("#png"))))
    assert picture.size == (2800, 1800)
    tab.evaluate("document.activeElement.blur()")
    tab.mouse.move(1390, 5)
    screen = Image.open(io.BytesIO(tab.screenshot()))
    small = [image.convert("L").resize((350, 225)) for image in (picture, screen)]  # text is smoothed in other ways
    assert ImageStat.Stat(ImageChops.difference(*small)).mean[0] < 3, "of 255"
    blank = sum(picture.convert("L").histogram()[250:]) / (2800 * 1800)
    assert blank < 0.8
    curve = tab.locator("#overview figure").first
    drawing = saved(tab, curve.locator("[data-save=svg]")).decode()
    title = curve.locator(".title").inner_text()
    assert title in drawing
    assert "window 4,096" in drawing
    assert "var(--" not in drawing
    alone = tmp_path / "chart.svg"
    alone.write_text(drawing)
    tab.goto(alone.as_uri())  # an error in its XML would have no such root
    assert tab.evaluate("document.documentElement.tagName") == "svg"
    assert tab.evaluate("document.querySelectorAll('path, rect').length") > 5
    context.close()


def test_numbers_are_saved_as_csv(tab, page, folder):
    opened(tab, page, "#l05h03;run=base;find=l05")
    rows = table(saved(tab, tab.locator("#csv")))
    assert list(rows)[:5] == ["model", "window", "layer", "head", "class"]
    assert len(rows) == 8
    assert set(rows["window"]) == {"4096"}
    expected = pd.read_parquet(folder / "base" / "rotated.parquet").query("layer == 5")["bias_window"]
    np.testing.assert_allclose(rows["bias_window"].astype(float), expected, rtol=1e-3)
    points = table(saved(tab, tab.locator("#scatter [data-save=csv]")))
    assert len(points) == 64


# ---- for everybody -------------------------------------------------------------------------------

CUT_OFF = """() => [...document.querySelectorAll("main *")].filter((item) => {
  const box = item.getBoundingClientRect();
  return box.width > 0 && box.right > innerWidth + 1 && !item.closest(".scroll, svg, .what");
}).map((item) => item.outerHTML.slice(0, 80))"""
TOO_SMALL = """() => [...document.querySelectorAll("button, select, input, a, [role=tab]")].filter((item) => {
  const box = item.getBoundingClientRect();
  const inText = item.closest(".passage");
  return box.width > 0 && (box.height < 23.9 || (box.width < 23.9 && !inText));
}).map((item) => item.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_width_and_follows_the_rules_for_all_readers(tab, page, scheme):
    tab.emulate_media(color_scheme=scheme)
    opened(tab, page, f"#l00h01;run=base;vs={quote(HOSTILE)}")
    for width in (1400, 800, 390):
        tab.set_viewport_size({"width": width, "height": 900})
        for name in TABS:
            tab.locator(f"#tab-{name}").click()
            drawn(tab, f"l00h01;{name}")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (width, name)
            assert tab.evaluate(CUT_OFF) == [], (width, name)
            assert tab.locator("[role=tabpanel]:visible").count() == 1
            assert tab.evaluate(TOO_SMALL) == [], (width, name)
            shot(tab, f"explorer-{name}-{width}-{scheme}")
    unnamed = (
        "[...document.querySelectorAll('svg')].filter((x) => x.getAttribute('role') !== 'img' || !x.ariaLabel).length"
    )
    tab.locator("#tab-overview").click()
    drawn(tab, "l00h01;overview")
    assert tab.locator("svg").count() > 60
    assert tab.evaluate(unnamed) == 0
    assert tab.locator("#overview svg").first.get_attribute("aria-label").endswith("%")
    assert serious(tab) == []
    tab.locator("#tab-all").click()
    drawn(tab, "l00h01;all")
    assert serious(tab) == []


def test_dark_or_light_is_a_choice(tab, page):
    opened(tab, page, "#l00h00;run=base")
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.locator("#theme").click()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
    content = tab.locator("#overview figure").first.locator("rect[fill='var(--content)']").first
    assert content.evaluate("x => getComputedStyle(x).fill") == "rgb(242, 193, 78)", "content is seen in the dark"


def test_on_a_phone_a_tap_opens_the_head_as_a_sheet(browser, page):
    phone = browser.new_page(viewport={"width": 390, "height": 800}, has_touch=True)
    opened(phone, page, "#;run=base")
    phone.locator("#maps").scroll_into_view_if_needed()
    x, y = cell(phone, 2, 6)
    phone.touchscreen.tap(x, y)
    drawn(phone, "l02h06")
    box = phone.locator("#name").bounding_box()
    assert 0 <= box["y"] < 300, "it is in sight"
    shot(phone, "explorer-sheet-390", full_page=False)
    phone.locator("#close").click()
    assert phone.locator("#name").bounding_box()["y"] > 800
    phone.close()


def test_the_keyboard_alone_reaches_every_control(tab, page):
    opened(tab, page, "#l01h02;run=base")
    seen = focused(tab, 200)
    for control in ("back", "run", "play", "slider", "other", "window", "metric", "find", "link", "png", "csv", "theme",
                    "score", "position", "content", "token", "scroll list", "tab-overview"):  # fmt: skip
        assert control in seen, control
    tab.keyboard.press("ArrowDown")
    drawn(tab, "l02h02")
