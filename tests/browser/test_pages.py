"""The report in a real browser."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import Page, expect

from qkscope.config import StudyRunConfig
from qkscope.report.report import write_pages
from qkscope.results.study import build
from tests.browser.chromium import PROGRAM, SCHEMES, SHOTS, WIDTHS, focused, serious, shot
from tests.studies import add_scores, write_model

HOSTILE = "<img src=x onerror=\"document.title='owned'\"> & $co"

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
        points = 64 if i == 2 else 0
        write_model(folder / f"c{i}", f"step-{i}", family="A", layers=8, heads=64, window=window, seed=i, points=points)
        add_scores(folder / f"c{i}", fall=0.5 + i, seed=i)
        entries.append(StudyRunConfig(path=folder / f"c{i}", phase=phase, step=float(i)))
    write_pages(build(entries, "Browser test"), folder / "report", command="qkscope report study.yaml")
    return folder / "report"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_opens_quietly_and_fits(tab, pages, width, scheme):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme)
    tab.goto((pages / "report.html").as_uri())
    expect(tab.locator(".study")).to_have_text("Browser test")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    tab.evaluate("Promise.all([...document.images].map((one) => { one.loading = 'eager'; return one.decode(); }))")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "also unfolded"
    drawn = [path for path in pages.glob("figures/*/*/figure*.png") if not path.stem.endswith("-dark")]
    assert tab.locator("figure img").count() == len(drawn), "each once"
    assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    shown = "[...document.images].map((one) => one.currentSrc === one.previousElementSibling.srcset)"
    assert all(dark is (scheme == "dark") for dark in tab.evaluate(shown)), "figures are as dark as the page"
    assert tab.title() == "Browser test · qkscope"
    assert len(tab.asked) == 1
    shot(tab, f"report-{width}-{scheme}")


def test_a_map_of_many_layers_goes_from_left_to_right_and_scrolls_on_a_phone(tab, tmp_path):
    write_model(tmp_path / "deep", "deep", layers=24, heads=24 * 14)
    add_scores(tmp_path / "deep", fall=0.5)
    write_pages(build([StudyRunConfig(path=tmp_path / "deep")]), tmp_path / "report")
    for width in (1400, 800, 390):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.goto((tmp_path / "report" / "report.html").as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        cells = tab.locator(".maps a rect.flat")
        assert cells.count() == 24 * 14
        assert min(cells.first.bounding_box()[side] for side in ("width", "height")) >= 8
    words = tab.locator(".maps text").all_text_contents()
    assert words[:4] == ["layer", "0", "1", "2"]
    assert words[-14] == "head 0"
    assert "layers from left to right" in tab.locator(".maps figcaption").inner_text()


def test_the_first_screen_holds_the_sentence_the_picture_and_the_numbers(tab, pages):
    tab.set_viewport_size({"width": 1400, "height": 900})
    tab.goto((pages / "report.html").as_uri())
    for part in ("h1", ".hero img", ".text >> nth=1", ".maps svg", ".tiles"):
        box = tab.locator(part).first.bounding_box()
        assert box["y"] + box["height"] <= 900, part
    tiles = tab.locator(".tile")
    assert tiles.count() >= 1
    for tile in tiles.all():
        assert tile.get_attribute("title"), "a number says on hover what it is"
        runs_told = 1 + tile.locator("strong").inner_text().count(" · ")
        assert tile.inner_text().count("[") <= runs_told, "one interval per number"
    outside = tab.evaluate("document.querySelector('header').innerText.split('[').length - 1")
    assert outside == sum(tile.inner_text().count("[") for tile in tiles.all())
    heads = pd.read_parquet(pages.parent / "c2" / "heads.parquet")
    strongest = heads.loc[heads["part_position"].idxmax()]
    panel = tab.locator(".text").first
    expect(panel.locator("a")).to_have_text(
        f"step-2, layer {strongest['layer']}, head {strongest['head']} · {strongest['head_class']}"
    )
    expect(panel.locator(".parts")).to_contain_text(f"position {strongest['part_position']:.0%}")
    assert panel.locator(".passage .query").count() == 1
    assert tab.locator(".maps svg a").count() == len(heads)
    link = tab.locator(".maps svg a").nth(9)
    assert link.get_attribute("href") == "explorer.html#l01h01;run=step-2;from=top"
    assert link.locator("title").text_content().startswith("layer 1, head 1 · ")
    tab.locator(".finding a", has_text="The numbers").first.click()
    target = tab.locator(tab.evaluate("location.hash"))
    assert target.get_attribute("open") is not None, "a finding leads to its section and unfolds it"


def test_the_appendix_is_folded_and_its_navigation_stays_in_sight(tab, pages):
    tab.set_viewport_size({"width": 1400, "height": 900})
    tab.goto((pages / "report.html").as_uri())
    assert tab.evaluate("document.documentElement.scrollHeight") < 9 * 900, "five findings and a list"
    tab.locator("nav a[href='#bias']").click()
    expect(tab.locator("#bias[open] table.numbers")).to_have_count(1)
    order = tab.evaluate(
        "[...document.querySelectorAll('#bias > :is(div, .tracks, details.table)')].map((x) => x.className)"
    )
    assert order.index("tracks") < order.index("table"), "small multiples before the table"
    assert tab.locator("#bias .tracks figure").count() >= 4
    tab.mouse.wheel(0, 3000)
    assert tab.locator("nav").bounding_box()["y"] >= -1, "it stays"
    assert tab.locator("#bias details.table").get_attribute("open") is None


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_keep_their_first_column_and_show_that_there_is_more(tab, pages, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto((pages / "report.html").as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for table in tab.locator("main details:not(#heads) > .scroll").all():
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
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    section = tab.locator("details.table", has=tab.locator(".unfold")).first
    if section.count() == 0:  # two checkpoints of a phase are its ends
        assert tab.locator("tr.folded").count() == 0
        return
    expect(section.locator("tr.folded").first).to_be_hidden()
    section.locator(".unfold").click()
    expect(section.locator("tr.folded").first).to_be_visible()


def test_words_say_what_they_mean_and_figures_come_as_files(tab, pages):
    tab.goto((pages / "report.html").as_uri() + "#axes")
    word = tab.locator("abbr", has_text=re.compile("^r_q$")).first
    assert "correlation" in word.get_attribute("title")
    assert tab.locator("details.own figcaption .files a").count() > 0, "also of folded versions"
    for link in tab.locator("figcaption .files a").all():
        assert (pages / link.get_attribute("href")).is_file()
    assert tab.locator("#glossary dt").count() > 10


def column(tab: Page, number: int) -> list[str]:
    return tab.locator(f"#table tbody tr > :nth-child({number})").all_inner_texts()


def test_the_table_sorts_filters_pages_and_downloads(tab, pages):
    tab.goto((pages / "report.html").as_uri() + "#heads")
    expect(tab.locator("#count")).to_have_text("64 of 320 heads")
    assert set(column(tab, 2)) == {"step-2"}, "it begins with the last run"
    link = tab.locator("#table tbody th a").first
    assert link.get_attribute("href") == "explorer.html#l00h00;run=step-2;from=heads"
    tab.locator("#run").select_option("")
    expect(tab.locator("#count")).to_have_text("320 of 320 heads")
    tab.locator("#table th", has_text="bias_window").first.click()
    number = 1 + tab.locator("#table thead th").all_inner_texts().index("bias_window")
    shown = [float(text) for text in column(tab, number)]
    assert tab.locator("#table th[aria-sort=descending]").inner_text().startswith("bias_window")
    assert shown == sorted(shown, reverse=True)
    tab.locator("#table th", has_text="bias_window").first.click()
    assert [float(text) for text in column(tab, number)] == sorted(float(text) for text in column(tab, number))
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


# ---- for everybody -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_accessibility_rules_find_nothing_serious_in_the_report(tab, pages, scheme):
    tab.emulate_media(color_scheme=scheme)
    tab.goto((pages / "report.html").as_uri())
    tab.wait_for_timeout(500)
    assert serious(tab) == []


def test_the_keyboard_alone_reaches_every_control_of_the_report(tab, pages):
    tab.goto((pages / "report.html").as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    seen = focused(tab, 900)
    controls = "[...document.querySelectorAll('a[href], button, input, select')]"
    assert tab.evaluate(f"{controls}.filter(x => x.tabIndex < 0).length") == 0
    for control in ("tile", "go", "copy", "find", "run", "class", "download", "next"):
        assert control in seen, control
