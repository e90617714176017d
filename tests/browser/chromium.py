"""Debian's Chromium through Playwright, without a word to the network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAM = os.environ.get("QKSCOPE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SHOTS = Path(os.environ.get("QKSCOPE_SCREENSHOTS", Path(__file__).parents[2] / "test-artefacts" / "screenshots"))
WIDTHS = (1400, pytest.param(800, marks=pytest.mark.slow), 390)
SCHEMES = ("light", pytest.param("dark", marks=pytest.mark.slow))


@contextmanager
def launch() -> Iterator[Browser | None]:
    """A browser, or None where there is none."""
    if PROGRAM is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=ARGUMENTS)
        yield browser
        browser.close()


def shot(page: Page, name: str, *, full_page: bool = True) -> None:
    """A picture of the page among the artefacts of the tests."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=full_page)


def serious(tab: Page) -> list[tuple[str, str]]:
    """Violations of accessibility rules that axe calls serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(tab).response["violations"]
    return [(rule["id"], rule["nodes"][0]["html"]) for rule in found if rule["impact"] in ("serious", "critical")]


def focused(tab: Page, most: int) -> list[str]:
    """Elements that get the focus one after the other, from the top of the page, by id, data or class."""
    name = "x => x.id || x.dataset.term || (x.dataset.token && 'token') || x.className || x.tagName"
    seen: list[str] = []
    for _ in range(most):
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate(f"({name})(document.activeElement)"))
        if seen[-1] == "BODY":
            break
    return seen
