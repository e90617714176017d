"""The report and the explorer in a real browser."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from qkscope.report.write import write_report
from qkscope.study.study import Entry, build
from tests.browser.chromium import PROGRAM, launch
from tests.studies import write_model

HOSTILE = "<img src=x onerror=\"document.title='owned'\"> & $co"
SHOTS = Path(os.environ.get("QKSCOPE_SCREENSHOTS", Path(__file__).parents[2] / "test-artefacts" / "screenshots"))
WIDTHS = (1400, 390)

pytestmark = pytest.mark.filterwarnings("default")  # Playwright's loop warns about itself on the way out
if PROGRAM is None and not os.environ.get("CI"):
    pytest.skip("Chromium is not installed (Debian: apt-get install chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """A report of two models, one with a hostile name, and three checkpoints."""
    folder = tmp_path_factory.mktemp("report")
    write_model(folder / "base", "base", family="A", layers=8, heads=64, points=64, nope=True)
    write_model(folder / "tuned", "tuned", family="B", layers=8, heads=64, points=6, seed=5)
    entries = [Entry(folder / "base"), Entry(folder / "tuned", label=HOSTILE)]
    for i, (phase, window) in enumerate((("short", 1024), ("short", 1024), ("long", 4096))):
        write_model(folder / f"c{i}", f"step-{i}", family="A", layers=8, heads=64, window=window, seed=i)
        entries.append(Entry(folder / f"c{i}", phase=phase, step=float(i)))
    write_report(build(entries, "Browser test"), folder / "report", command="qkscope report study.yaml")
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


@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_opens_quietly_and_fits(tab, pages, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto((pages / "report.html").as_uri())
    expect(tab.locator("h1")).to_have_text("Browser test")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("figure img").count() == 28
    assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert tab.title() == "Browser test · qkscope"
    assert len(tab.asked) == 1
    shot(tab, f"report-{width}")


def column(tab: Page, number: int) -> list[str]:
    return tab.locator(f"#table tbody tr > :nth-child({number})").all_inner_texts()


def test_the_table_sorts_filters_pages_and_downloads(tab, pages):
    tab.goto((pages / "report.html").as_uri())
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
    assert lines[0].startswith("model,layer,head,taxonomy,explained_variance,r_q")
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
    tab.goto((pages / "explorer.html").as_uri() + "#l05h03")
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
    """Where a head is on the screen."""
    box = tab.locator("#maps .nsewdrag").first.bounding_box()
    return box["x"] + box["width"] * (head + 0.5) / heads, box["y"] + box["height"] * (layer + 0.5) / layers


def test_a_click_opens_a_head_and_arrows_move_on(tab, pages):
    tab.goto((pages / "explorer.html").as_uri())
    expect(tab.locator("#nothing")).to_be_visible()
    x, y = cell(tab, 2, 6)
    tab.mouse.move(x, y)
    expect(tab.locator("#maps .hoverlayer")).to_contain_text("l02h06")
    tab.mouse.click(x, y)
    expect(tab.locator("#name")).to_have_text("base · l02h06")
    assert tab.url.endswith("#l02h06")
    for key, name in (
        ("ArrowRight", "l02h07"),
        ("ArrowRight", "l02h07"),
        ("ArrowDown", "l03h07"),
        ("ArrowLeft", "l03h06"),
    ):
        tab.keyboard.press(key)
        expect(tab.locator("#name")).to_have_text(f"base · {name}")
    expect(tab.locator("#about")).to_contain_text("no rotary encoding in this layer")
    tab.go_back()


def test_two_runs_side_by_side_and_their_difference(tab, pages):
    tab.goto((pages / "explorer.html").as_uri() + "#l01h01")
    tab.locator("#other").select_option(label=HOSTILE)
    expect(tab.locator("#maps > div")).to_have_count(3)
    boxes = [tab.locator("#maps > div .svg-container").nth(n).bounding_box() for n in range(3)]
    assert all(a["x"] + a["width"] <= b["x"] + 1 for a, b in pairwise(boxes)), "maps overlap"
    expect(tab.locator("#numbers thead")).to_contain_text("difference")
    row = tab.locator("#numbers tbody tr", has_text="explained_variance").first.locator("td").all_inner_texts()
    before, after, difference = (float(text) for text in row)
    assert difference == pytest.approx(after - before, abs=2e-3)
    assert "vs=" in tab.url
    shot(tab, "explorer-compare-1400")
    tab.reload()
    expect(tab.locator("#maps > div")).to_have_count(3)
    tab.locator("#other").select_option("")
    expect(tab.locator("#maps > div")).to_have_count(1)


def test_a_box_in_the_plane_of_correlations_marks_heads_on_the_map(tab, pages):
    tab.goto((pages / "explorer.html").as_uri())
    box = tab.locator("#scatter .nsewdrag").bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 5)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] * 0.5, steps=5)
    tab.mouse.up()
    expect(tab.locator("#brushed")).to_contain_text("heads marked")
    marked = int(tab.locator("#brushed").inner_text().split()[0])
    expect(tab.locator("#maps .scatterlayer .points path")).to_have_count(marked)


def test_the_metric_is_chosen_and_the_colours_can_be_dark(tab, pages):
    tab.goto((pages / "explorer.html").as_uri() + "#l00h00")
    tab.locator("#metric").select_option(label="r_k_a")
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


def test_a_link_that_names_nothing_opens_the_map(tab, pages):
    for link in ("#l99h99", "#<b>", "#l00h00;run=nobody;vs=%zz;metric=nothing"):
        tab.goto("about:blank")
        tab.goto((pages / "explorer.html").as_uri() + link)
        expect(tab.locator("#maps > div")).to_have_count(1)


def test_a_head_without_points_says_how_to_get_them(tab, pages):
    tab.goto((pages / "explorer.html").as_uri() + "#l07h07;run=step-1")
    expect(tab.locator("#clouds")).to_contain_text("qkscope view")
