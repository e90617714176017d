"""A browser for all tests of pages, and a tab that must stay quiet."""

from __future__ import annotations

import pytest

from tests.browser.chromium import PROGRAM, launch


@pytest.fixture(scope="module")
def browser():
    assert PROGRAM is not None, "CI needs Chromium: .ci/run installs it"
    with launch() as found:
        yield found


@pytest.fixture
def tab(browser):
    """A tab that notes every complaint and every request but the page's own."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(10_000)
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
