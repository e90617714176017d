"""Shared test setting: shapes in annotations are checked at run time, by beartype, and tests are put in order."""

import logging
import os

import pytest
from jaxtyping import install_import_hook

install_import_hook(["qkscope.core", "qkscope.analyses"], "beartype.beartype")

TOGETHER = (
    "browser/test_pages.py",
    "figures/test_write.py",
    "report/test_pages.py",
    "cli/test_report.py",
    "test_api.py",
    "test_plot.py",
    "cli/test_verify.py",
    "integrations/test_exports.py",
    "integrations/test_push.py",
    "capture/test_undonequeries.py",
    "test_house.py",
)
"""Modules whose fixtures take long to make: one process makes them."""


if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests share the cores already: where a test does not say how many workers there are, there is none but itself.
    import qkscope.engine

    qkscope.engine.cores = lambda: 1


@pytest.fixture(autouse=True)
def _logger_as_it_was():
    """Commands that run in this process set the logger up for themselves; the next test finds it as it was."""
    log = logging.getLogger("qkscope")
    before = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])  # which also forgets what it knew of levels


@pytest.fixture
def few_figures(monkeypatch):
    """Reports with three figures, for tests that look at something else: all of them take as long as the rest."""
    from qkscope.figures import write

    few = {"front/01_hero", "qk-pca/02_rq_vs_rk_scatter", "qk-pca/07_position_signal"}
    monkeypatch.setattr(write, "CATALOGUE", tuple(figure for figure in write.CATALOGUE if figure.name in few))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep such modules together, and begin with what takes long, so that no process is left with it in the end."""
    for item in items:
        if str(item.path).endswith(TOGETHER):
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    items.sort(key=lambda item: not (item.get_closest_marker("slow") or item.get_closest_marker("xdist_group")))
