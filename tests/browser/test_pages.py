"""The report and the explorer in a real browser."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from qkscope.config import StudyRunConfig
from qkscope.heads import TERMS
from qkscope.report.explorerdata import packed_passage
from qkscope.report.report import write_pages
from qkscope.results.study import build
from tests.browser.chromium import PROGRAM, launch
from tests.studies import PASSAGE, write_model

HOSTILE = "<img src=x onerror=\"document.title='owned'\"> & $co"
SHOTS = Path(os.environ.get("QKSCOPE_SCREENSHOTS", Path(__file__).parents[2] / "test-artefacts" / "screenshots"))
WIDTHS = (1400, 800, 390)

pytestmark = pytest.mark.filterwarnings("default")  # Playwright's loop warns about itself on the way out
if PROGRAM is None and not os.environ.get("CI"):
    pytest.skip("Chromium is not installed (Debian: apt-get install chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """A report of two models, one with a hostile name, and three checkpoints."""
    folder = tmp_path_factory.mktemp("report")
    write_model(folder / "base", "base", family="A", layers=8, heads=64, points=64, nope=True)
    write_model(folder / "tuned", "tuned", family="B", layers=8, heads=64, points=6, seed=5)
    entries = [StudyRunConfig(path=folder / "base"), StudyRunConfig(path=folder / "tuned", label=HOSTILE)]
    for i, (phase, window) in enumerate((("short", 1024), ("short", 1024), ("long", 4096))):
        write_model(folder / f"c{i}", f"step-{i}", family="A", layers=8, heads=64, window=window, seed=i)
        entries.append(StudyRunConfig(path=folder / f"c{i}", phase=phase, step=float(i)))
    write_pages(build(entries, "Browser test"), folder / "report", command="qkscope report study.yaml")
    return folder / "report"


@pytest.fixture(scope="module")
def browser():
    assert PROGRAM is not None, "CI needs Chromium: .ci/run installs it"
    with launch() as found:
        yield found


@pytest.fixture
def tab(browser):
    """A tab that notes every complaint and every request but the page's own."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.complaints, page.asked = [], []
    page.on(
        "console",
        lambda message: page.complaints.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on(
        "request",
        lambda request: page.asked.append(request.url) if not request.url.startswith(("data:", "blob:")) else None,
    )
    yield page
    assert page.complaints == []
    assert all(url.startswith("file:") for url in page.asked), page.asked
    page.close()


def shot(page: Page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_opens_quietly_and_fits(tab, pages, width, scheme):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme)
    tab.goto((pages / "report.html").as_uri())
    expect(tab.locator(".brand")).to_contain_text("Browser test")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("main figure img").count() == 28
    assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    filters = tab.evaluate("[...document.images].map((image) => getComputedStyle(image).filter)")
    assert all(("invert" in one) is (scheme == "dark") for one in filters), "figures are as dark as the page"
    assert tab.title() == "Browser test · qkscope"
    assert len(tab.asked) == 1
    shot(tab, f"report-{width}-{scheme}")


def test_the_first_screen_holds_the_sentence_the_picture_and_the_numbers(tab, pages):
    tab.set_viewport_size({"width": 1400, "height": 900})
    tab.goto((pages / "report.html").as_uri())
    for part in ("h1", ".hero img", ".tiles"):
        box = tab.locator(part).first.bounding_box()
        assert box["y"] + box["height"] <= 900, part
    tiles = tab.locator(".tile")
    assert tiles.count() >= 1
    for tile in tiles.all():
        assert tile.get_attribute("title"), "a number says on hover what it is"
        assert tile.inner_text().count("[") <= 1
    outside = tab.evaluate("document.querySelector('header').innerText.split('[').length - 1")
    assert outside == sum(tile.inner_text().count("[") for tile in tiles.all())
    tab.locator(".card").first.click()
    assert tab.locator(tab.evaluate("location.hash")).count() == 1, "a finding leads to its section"


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_keep_their_first_column_and_show_that_there_is_more(tab, pages, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto((pages / "report.html").as_uri())
    for table in tab.locator("main section:not(#heads) .scroll").all():
        room, content = table.evaluate("box => [box.clientWidth, box.scrollWidth]")
        assert content <= room or width < 1400, "no table is cut on a desktop"
        assert "gradient" in table.evaluate("box => getComputedStyle(box).backgroundImage")
        first = table.locator("tbody th").first
        if content > room and first.is_visible():
            name, edge = "box.querySelector('tbody th').getBoundingClientRect()", "box.getBoundingClientRect()"
            cells = "[...box.querySelector('tbody tr').cells].slice(1).map((cell) => cell.getBoundingClientRect())"
            seen = table.evaluate(f"box => {cells}.filter((at) => at.right <= {edge}.right + 1).length")
            assert seen >= 2, "two numbers beside the names, at least"
            table.evaluate("box => { box.scrollLeft = 150; }")
            assert abs(table.evaluate(f"box => {name}.left - {edge}.left")) < 2, "the names stay in sight"


def test_rows_between_the_ends_of_a_phase_unfold(tab, pages):
    tab.goto((pages / "report.html").as_uri())
    section = tab.locator("section", has=tab.locator(".unfold")).first
    if section.count() == 0:  # two checkpoints of a phase are its ends
        assert tab.locator("tr.folded").count() == 0
        return
    expect(section.locator("tr.folded").first).to_be_hidden()
    section.locator(".unfold").click()
    expect(section.locator("tr.folded").first).to_be_visible()


def test_words_say_what_they_mean_and_figures_come_as_files(tab, pages):
    tab.goto((pages / "report.html").as_uri())
    word = tab.locator("abbr", has_text=re.compile("^r_q$")).first
    assert "correlation" in word.get_attribute("title")
    for link in tab.locator("figcaption .files a").all():
        assert (pages / link.get_attribute("href")).is_file()
    assert tab.locator("#glossary dt").count() > 10


def column(tab: Page, number: int) -> list[str]:
    return tab.locator(f"#table tbody tr > :nth-child({number})").all_inner_texts()


def test_the_table_sorts_filters_pages_and_downloads(tab, pages):
    tab.goto((pages / "report.html").as_uri())
    expect(tab.locator("#count")).to_have_text("64 of 320 heads")
    assert set(column(tab, 2)) == {"step-2"}, "it begins with the last run"
    link = tab.locator("#table tbody th a").first
    assert link.get_attribute("href") == "explorer.html#l00h00;run=step-2"
    tab.locator("#run").select_option("")
    expect(tab.locator("#count")).to_have_text("320 of 320 heads")
    tab.locator("#table th", has_text="bias_window").first.click()
    shown = [float(text) for text in column(tab, 12)]
    assert tab.locator("#table th[aria-sort=descending]").inner_text().startswith("bias_window")
    assert shown == sorted(shown, reverse=True)
    tab.locator("#table th", has_text="bias_window").first.click()
    assert [float(text) for text in column(tab, 12)] == sorted(float(text) for text in column(tab, 12))
    tab.locator("#find").fill("l03h0")
    expect(tab.locator("#count")).to_have_text("40 of 320 heads")
    assert set(column(tab, 1)) == {f"l03h0{i}" for i in range(8)}
    tab.locator("#run").select_option(HOSTILE)
    expect(tab.locator("#count")).to_have_text("8 of 320 heads")
    with tab.expect_download() as download:
        tab.locator("#download").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("model,layer,head,class,")
    assert len(lines) == 9
    tab.locator("#find").fill("")
    tab.locator("#run").select_option("")
    tab.locator("#next").click()
    expect(tab.locator("#page")).to_have_text("page 2 of 7")


def test_the_report_prints(tab, pages):
    tab.goto((pages / "report.html").as_uri())
    tab.emulate_media(media="print")
    assert not tab.locator("#heads").is_visible()
    assert not tab.locator("nav").is_visible()
    SHOTS.mkdir(parents=True, exist_ok=True)
    pdf = tab.pdf(path=SHOTS / "report.pdf", format="A4")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 5


@pytest.mark.parametrize("width", WIDTHS)
def test_a_link_opens_its_head(tab, pages, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto((pages / "explorer.html").as_uri() + "#l05h03;run=base")
    expect(tab.locator("#name")).to_have_text("base · l05h03")
    assert tab.locator("#clouds .js-plotly-plot .points path").count() > 200
    assert tab.locator("#numbers tbody tr").count() > 20
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    rings = tab.locator(".rings canvas")
    expect(rings).to_have_count(6)
    ink = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x > 0)"
    tab.wait_for_timeout(100)
    assert rings.first.evaluate(ink)
    shot(tab, f"explorer-{width}")


def cell(tab: Page, layer: int, head: int, layers: int = 8, heads: int = 8) -> tuple[float, float]:
    """Position of a head on the screen."""
    box = tab.locator("#maps .nsewdrag").first.bounding_box()
    return box["x"] + box["width"] * (head + 0.5) / heads, box["y"] + box["height"] * (layer + 0.5) / layers


def explorer(pages: Path, link: str = "") -> str:
    return (pages / "explorer.html").as_uri() + link


def test_it_opens_on_the_strongest_head_of_the_last_run_beside_the_shortest_window(tab, pages):
    tab.goto(explorer(pages))
    label, name = tab.locator("#name").inner_text().split(" · ")
    assert label == "step-2"
    assert tab.locator("#other option:checked").inner_text() == "step-1"
    strongest = tab.locator("#list tbody tr").first
    assert strongest.get_attribute("data-head") == name
    assert "on" in strongest.get_attribute("class")
    expect(tab.locator("#maps > div")).to_have_count(3)
    shot(tab, "explorer-opening-1400")


def test_a_click_opens_a_head_and_arrows_move_on(tab, pages):
    tab.goto(explorer(pages, "#;run=base"))
    expect(tab.locator("#nothing")).to_be_visible()
    x, y = cell(tab, 2, 6)
    tab.mouse.move(x, y)
    expect(tab.locator("#maps .hoverlayer")).to_contain_text("l02h06")
    tab.mouse.click(x, y)
    expect(tab.locator("#name")).to_have_text("base · l02h06")
    assert "#l02h06;run=base" in tab.url
    for key, name in (
        ("ArrowRight", "l02h07"),
        ("ArrowRight", "l02h07"),
        ("ArrowDown", "l03h07"),
        ("ArrowLeft", "l03h06"),
    ):
        tab.keyboard.press(key)
        expect(tab.locator("#name")).to_have_text(f"base · {name}")
    expect(tab.locator("#about")).to_contain_text("no rotary encoding in this layer")


def test_arrows_move_heads_after_a_run_was_chosen_with_the_mouse(tab, pages):
    tab.goto(explorer(pages, "#l02h02;run=step-0"))
    tab.locator("#run").click()
    tab.locator("#run").select_option(label="step-1")
    tab.keyboard.press("ArrowDown")
    expect(tab.locator("#name")).to_have_text("step-1 · l03h02")
    tab.keyboard.press("]")
    expect(tab.locator("#name")).to_have_text("step-2 · l03h02")
    tab.keyboard.press("[")
    expect(tab.locator("#name")).to_have_text("step-1 · l03h02")


def test_two_runs_side_by_side_and_their_difference(tab, pages):
    tab.goto(explorer(pages, "#l01h01;run=base"))
    tab.locator("#other").select_option(label=HOSTILE)
    expect(tab.locator("#maps > div")).to_have_count(3)
    boxes = [tab.locator("#maps > div .svg-container").nth(n).bounding_box() for n in range(3)]
    assert all(a["x"] + a["width"] <= b["x"] + 1 for a, b in pairwise(boxes)), "maps overlap"
    expect(tab.locator("#numbers thead")).to_contain_text("difference")
    row = tab.locator("#numbers tbody tr", has_text="explained_variance").first.locator("td").all_inner_texts()
    first, second, difference = (float(text) for text in row)
    assert difference == pytest.approx(first - second, abs=2e-3)
    assert "vs=" in tab.url
    shot(tab, "explorer-compare-1400")
    tab.reload()
    expect(tab.locator("#maps > div")).to_have_count(3)
    tab.locator("#other").select_option("")
    expect(tab.locator("#maps > div")).to_have_count(1)


def test_heads_of_two_runs_stand_side_by_side_on_the_same_axes(tab, pages):
    tab.goto(explorer(pages, "#;run=base"))
    both = "i => document.getElementById(`points-0-${i}`) && document.getElementById(`points-1-${i}`)"
    head = tab.evaluate(f"[...Array(64).keys()].find({both})")
    tab.goto("about:blank")
    tab.goto(explorer(pages, f"#l{head // 8:02d}h{head % 8:02d};run=base;vs={quote(HOSTILE)}"))
    runs = tab.locator("#clouds .run")
    expect(runs).to_have_count(2)
    left, right = (runs.nth(n).bounding_box() for n in range(2))
    assert abs(left["y"] - right["y"]) < 2
    assert left["x"] + left["width"] <= right["x"] + 1
    ranges = tab.evaluate(
        "[...document.querySelectorAll('#clouds .ab')].map((plot) => plot._fullLayout)"
        ".map((of) => [...of.xaxis.range, ...of.yaxis.range])"
    )
    assert len(ranges) == 2
    assert ranges[0] == pytest.approx(ranges[1])


def test_a_box_stays_and_marks_heads_everywhere(tab, pages):
    tab.goto(explorer(pages, "#;run=base"))
    box = tab.locator("#scatter .nsewdrag").bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 5)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] * 0.5, steps=5)
    tab.mouse.up()
    expect(tab.locator("#status")).to_contain_text("of 64 heads")
    marked = int(tab.locator("#status").inner_text().split()[0])
    assert 0 < marked < 64
    expect(tab.locator("#maps .scatterlayer .points path")).to_have_count(marked)
    expect(tab.locator("#list tbody tr")).to_have_count(marked)
    tab.locator("#list tbody button").first.click()
    tab.wait_for_timeout(300)
    assert tab.locator("#scatter .selectionlayer path").count() > 0, "the box stays"
    opacity = tab.evaluate(
        "[...document.querySelectorAll('#scatter .points path')].map((dot) => Number(getComputedStyle(dot).opacity))"
    )
    assert sum(one > 0.9 for one in opacity) == marked, "the chosen ones do not fade"
    assert sum(one < 0.3 for one in opacity) == 64 - marked
    assert "box=" in tab.url
    tab.keyboard.press("Escape")
    expect(tab.locator("#list tbody tr")).to_have_count(64)


def test_heads_are_found_by_name_class_and_number(tab, pages):
    tab.goto(explorer(pages, "#;run=base"))
    tab.locator("#find").fill("l03h0")
    expect(tab.locator("#list tbody tr")).to_have_count(8)
    tab.keyboard.press("Enter")
    expect(tab.locator("#name")).to_contain_text("base · l03h0")
    tab.locator("#find").fill("class:mixed r_q>0.5")
    rows = tab.locator("#list tbody tr")
    count = rows.count()
    assert 0 < count < 64
    assert all("mixed" in text for text in rows.all_inner_texts())
    assert int(tab.locator("#status").inner_text().split()[0]) == count
    tab.locator("#find").fill("nothing>3")
    expect(tab.locator("#status")).to_contain_text("no number is called nothing")


def test_the_list_sorts_both_ways_and_draws_training(tab, pages):
    tab.goto(explorer(pages, "#;run=base"))

    def values() -> list[float]:
        return [float(text) for text in tab.locator("#list tbody td:nth-child(3)").all_inner_texts()]

    assert values() == sorted(values(), reverse=True)
    tab.locator("#list thead button").click()
    assert values() == sorted(values())
    assert tab.locator("#list .spark polyline").count() == 64


def test_runs_play_one_after_the_other(tab, pages):
    tab.goto(explorer(pages, "#l00h00;run=base"))
    tab.locator("#slider").fill("3")
    expect(tab.locator("#name")).to_have_text("step-1 · l00h00")
    tab.locator("#play").click()
    expect(tab.locator("#name")).to_have_text("step-2 · l00h00")
    expect(tab.locator("#play")).to_have_attribute("aria-pressed", "false")


def test_a_link_brings_everything_back(tab, pages):
    tab.goto(explorer(pages, "#l02h03;run=step-1;vs=base;metric=r_k_a;box=0.2,1,-1,1;find=l02"))
    read = (
        "[...['run', 'other', 'metric', 'find'].map((id) => document.getElementById(id).value),"
        " ...['name', 'status'].map((id) => document.getElementById(id).textContent), location.hash]"
    )
    before = tab.evaluate(read)
    assert before[3:5] == ["l02", "step-1 · l02h03"]
    tab.keyboard.press("ArrowRight")
    moved = tab.evaluate(read)
    assert moved[4] == "step-1 · l02h04"
    tab.goto("about:blank")
    tab.goto(explorer(pages, moved[-1]))
    assert tab.evaluate(read) == moved


@pytest.mark.parametrize(("button", "ending"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("csv", b"model,layer,head")])
def test_what_is_seen_is_saved(tab, pages, button, ending):
    tab.goto(explorer(pages, "#l05h03;run=base"))
    tab.wait_for_timeout(300)
    with tab.expect_download() as download:
        tab.locator(f"#{button}").click()
    content = Path(download.value.path()).read_bytes()
    assert content.startswith(ending)
    assert download.value.suggested_filename == f"qkscope-base-l05h03.{button}"
    if button == "svg":
        assert content.count(b"<svg") > 4
        assert "base · l05h03".encode() in content


def test_on_a_phone_a_tap_opens_the_head_as_a_sheet(browser, pages):
    phone = browser.new_page(viewport={"width": 390, "height": 800}, has_touch=True)
    phone.goto(explorer(pages, "#;run=base"))
    x, y = cell(phone, 2, 6)
    phone.touchscreen.tap(x, y)
    expect(phone.locator("#name")).to_have_text("base · l02h06")
    box = phone.locator("#name").bounding_box()
    assert 0 <= box["y"] < 300, "it is in sight"
    phone.screenshot(path=SHOTS / "explorer-sheet-390.png")
    phone.locator("#close").click()
    assert phone.locator("#name").bounding_box()["y"] > 800
    phone.close()


def test_numbers_are_grouped_by_question_and_the_colours_can_be_dark(tab, pages):
    tab.goto(explorer(pages, "#l00h00;run=base"))
    groups = tab.locator("#metric optgroup").evaluate_all("all => all.map((group) => group.label)")
    assert groups[:2] == ["Position", "Bias"]
    tab.locator("#metric").select_option(label=tab.locator("#metric option", has_text="r_k_a –").inner_text())
    expect(tab.locator("#meaning")).to_contain_text("correlation")
    assert "metric=r_k_a" in tab.url
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.locator("#theme").click()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
    shot(tab, "explorer-dark-1400")


def test_a_hostile_label_is_text_everywhere(tab, pages):
    tab.goto((pages / "explorer.html").as_uri())
    tab.locator("#run").select_option(label=HOSTILE)
    x, y = cell(tab, 0, 0)
    tab.mouse.click(x, y)
    expect(tab.locator("#name")).to_have_text(f"{HOSTILE} · l00h00")
    assert HOSTILE[:20] in tab.locator("#maps .gtitle").first.text_content()
    assert tab.title() != "owned"
    tab.goto((pages / "report.html").as_uri())
    expect(tab.locator("#about")).to_contain_text(HOSTILE)
    assert tab.title() != "owned"


def test_a_link_that_names_nothing_says_so(tab, pages):
    for link, says in (
        ("#l99h99", "head l99h99"),
        ("#<b>", "head <b>"),
        ("#l00h00;run=nobody;vs=%zz;metric=nothing", "run nobody, number nothing"),
    ):
        tab.goto("about:blank")
        tab.goto(explorer(pages, link))
        expect(tab.locator("#missing")).to_contain_text(says)
        expect(tab.locator("#maps > div")).to_have_count(1)


def test_a_head_without_points_says_how_to_get_them(tab, pages):
    tab.goto((pages / "explorer.html").as_uri() + "#l07h07;run=step-1")
    expect(tab.locator("#clouds")).to_contain_text("qkscope view")


# ---- the text ------------------------------------------------------------------------------------


def passage_of(pages: Path, head: tuple[int, int], query: int) -> pd.DataFrame:
    """The four terms of one query of the page's run “base”, in logits above the mean of its later keys."""
    table = pd.read_parquet(pages.parent / "base" / "passage.parquet")
    rows = table[(table["layer"] == head[0]) & (table["head"] == head[1]) & (table["q_token"] == query)]
    rows = rows.sort_values("k_token").set_index("k_token")
    terms = rows[list(TERMS)].mul(rows["unit"], axis=0)
    return terms - terms[4 if len(terms) > 8 else 0 :].mean()


def test_a_text_is_coloured_by_what_a_query_scores(tab, pages):
    tab.goto((pages / "explorer.html").as_uri() + "#l01h02;run=base;text=10,score")
    tokens = tab.locator("#text .token")
    expect(tokens).to_have_count(len(PASSAGE))
    expect(tokens.nth(2)).to_have_text("</script>")
    expect(tokens.nth(10)).to_have_attribute("aria-pressed", "true")
    terms = passage_of(pages, (1, 2), 10)
    score = terms.sum(axis=1)
    best = score[:-1].sort_values(ascending=False, kind="stable")
    shown = tab.locator("#text .line .sum").all_inner_texts()
    assert [float(text.replace("−", "-")) for text in shown] == pytest.approx(best.head(6).tolist(), abs=0.5)
    said = tab.locator("#text [data-part=said]").inner_text()
    rest = slice(4, None)
    shares = {term: float((terms[term][rest] * score[rest]).sum() / (score[rest] ** 2).sum()) for term in TERMS}
    assert sum(shares.values()) == pytest.approx(1)
    for term, share in shares.items():
        # Rounding as the page does: to the nearest, ties upwards.
        assert f"{term} {int(np.floor(100 * share + 0.5))}%".replace(" -0%", " 0%") in said.replace(" -0%", " 0%")
    tab.screenshot(path=_made(SHOTS) / "text.png")


def test_a_text_is_read_with_mouse_and_keyboard_and_stays_in_the_link(tab, pages):
    tab.goto((pages / "explorer.html").as_uri() + "#l01h02;run=base")
    tokens = tab.locator("#text .token")
    expect(tokens.last).to_have_attribute("aria-pressed", "true")
    tokens.nth(6).click()
    expect(tokens.nth(6)).to_have_attribute("aria-pressed", "true")
    assert tokens.nth(7).evaluate("x => x.classList.contains('later')"), "later tokens have no score"
    tab.keyboard.press("ArrowRight")
    expect(tokens.nth(7)).to_have_attribute("aria-pressed", "true")
    assert tab.locator("#name").inner_text().endswith("l01h02"), "arrows in the text leave the head alone"
    tab.get_by_role("button", name="position", exact=True).click()
    assert "text=7,position" in tab.url
    colours = tokens.nth(3).evaluate("x => getComputedStyle(x).backgroundColor")
    tab.reload()
    expect(tokens.nth(7)).to_have_attribute("aria-pressed", "true")
    assert tokens.nth(3).evaluate("x => getComputedStyle(x).backgroundColor") == colours
    tab.keyboard.press("ArrowDown")
    expect(tab.locator("#name")).to_contain_text("l02h02")
    expect(tokens.nth(7)).to_have_attribute("aria-pressed", "true")


def test_of_an_encoder_a_text_has_scores_of_later_tokens_too(tab, pages):
    n, rng = 6, np.random.default_rng(0)
    query, key = np.indices((n, n)).reshape(2, -1)
    levels = {term: rng.integers(-127, 128, n * n) for term in TERMS}
    rows = pd.DataFrame({"q_token": query, "k_token": key, "text": "x", "unit": 0.5, **levels})
    tab.goto((pages / "explorer.html").as_uri() + "#l01h02;run=base")
    drawn = tab.evaluate(
        """([packed, tokens]) => {
            const script = document.createElement("div");
            script.textContent = packed;
            return textView.draw(document.getElementById("text"), script, tokens, { query: 2 }, () => {});
        }""",
        [packed_passage(rows), [f"t{i}" for i in range(n)]],
    )
    score = rows[rows["q_token"] == 2].set_index("k_token")[list(TERMS)].sum(axis=1).drop(2)
    assert drawn["best"] == score.sort_values(ascending=False).index.tolist()
    assert tab.locator("#text .later").count() == 0
    said = tab.locator("#text .line .what").all_inner_texts()
    assert said == [f"t{k} {abs(2 - k)} {'back' if k < 2 else 'ahead'}" for k in drawn["best"]]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_text_fits(tab, pages, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto((pages / "explorer.html").as_uri() + "#l01h02;run=base")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    text = tab.locator("#text .reading")
    assert text.evaluate("x => x.scrollWidth <= x.clientWidth + 1")


def test_a_run_without_a_passage_has_no_text(tab, pages):
    tab.goto((pages / "explorer.html").as_uri() + "#l01h02;run=step-1")
    expect(tab.locator("#name")).to_contain_text("step-1")
    expect(tab.locator("#text")).to_be_hidden()


# ---- for everybody -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "page", ["report.html", "explorer.html#l01h02;run=base", "explorer.html#l01h02;run=base;vs=step-1"]
)
def test_accessibility_rules_find_nothing_serious(tab, pages, page, scheme):
    tab.emulate_media(color_scheme=scheme)
    name, _, hash_part = page.partition("#")
    tab.goto((pages / name).as_uri() + f"#{hash_part}" * bool(hash_part))
    tab.wait_for_timeout(500)
    found = Axe().run(tab).response["violations"]
    assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found if rule["impact"] in ("serious", "critical")] == []


def focused(tab: Page, most: int) -> list[str]:
    """Elements that get the focus one after the other, from the top of the page, by id, data or class."""
    name = "x => x.id || x.dataset.term || (x.dataset.token && 'token') || x.className || x.tagName"
    seen = []
    for _ in range(most):
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate(f"({name})(document.activeElement)"))
        if seen[-1] == "BODY":
            break
    return seen


def test_the_keyboard_alone_reaches_every_control_of_the_explorer(tab, pages):
    tab.goto((pages / "explorer.html").as_uri() + "#l01h02;run=base")
    seen = focused(tab, 150)
    for control in ("run", "play", "slider", "other", "metric", "find", "link", "png", "svg", "csv", "theme", "score",
                    "position", "content", "token", "scroll list"):  # fmt: skip
        assert control in seen, control
    tab.keyboard.press("ArrowDown")
    expect(tab.locator("#name")).to_contain_text("l02h02")


def test_the_keyboard_alone_reaches_every_control_of_the_report(tab, pages):
    tab.goto((pages / "report.html").as_uri())
    seen = focused(tab, 500)
    controls = "[...document.querySelectorAll('a[href], button, input, select')]"
    assert tab.evaluate(f"{controls}.filter(x => x.tabIndex < 0).length") == 0
    for control in ("tile", "card", "copy", "find", "run", "class", "download", "next"):
        assert control in seen, control


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
