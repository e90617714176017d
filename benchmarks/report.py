"""Time and size of the figures, the report and the explorer of a study of the published size.

11 models × 300 heads and 10 checkpoints × 300 heads of made-up numbers; then two explorers with points and a passage of
64 tokens of each head: ten checkpoints of 32 heads, as the demo has, and one model of 1,000 heads. Where Chromium is
installed: processor time of its renderer until the first view is drawn, and for each change of the head while two runs
are compared (or in one run). ``--page FILE`` measures an explorer.html that exists, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from playwright.sync_api import CDPSession
from tests.browser.chromium import launch
from tests.studies import make_passage, published_shape, write_model

from qkscope.capture.corpus import PASSAGE_TOKENS
from qkscope.config import StudyRunConfig
from qkscope.figures.write import write_figures
from qkscope.report.explorer import explorer_html
from qkscope.report.report import report_html
from qkscope.results.side import PASSAGES
from qkscope.results.study import build

CLICKS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path, help="an explorer.html to measure")
    options = parser.parse_args()
    if options.page is not None:
        in_browser(options.page.resolve())
        return
    folder = Path(tempfile.mkdtemp())
    try:
        published(folder, options.workers)
        explorer(folder, "ten checkpoints of 32 heads", [f"step-{i}" for i in range(10)], layers=8, heads=32)
        explorer(folder, "1,000 heads", ["wide"], layers=25, heads=1000)
    finally:
        shutil.rmtree(folder)


def published(folder: Path, workers: int) -> None:
    study = published_shape(folder / "study", points=4)
    started, spent_before = time.perf_counter(), sum(os.times()[:4])
    written, left_out = write_figures(study, folder / "figures", workers=workers)
    drawn, spent_drawing = time.perf_counter(), sum(os.times()[:4])
    page = report_html(study, written, left_out)
    done, spent_in_all = time.perf_counter(), sum(os.times()[:4])
    print(
        f"{len(written)} figures, {len(left_out)} left out: {spent_drawing - spent_before:.0f} s of processor time, "
        f"{drawn - started:.1f} s with {workers} workers"
    )
    print(
        f"report.html, {len(page.encode()) / 1e6:.1f} MB: {spent_in_all - spent_drawing:.0f} s of processor time, "
        f"{done - drawn:.1f} s"
    )


def explorer(folder: Path, title: str, runs: list[str], *, layers: int, heads: int) -> None:
    entries = []
    for i, run in enumerate(runs):
        results = write_model(folder / run, run, layers=layers, heads=heads, points=heads, window=1024, seed=i)
        index = pd.read_parquet(results / "heads.parquet")[["model", "layer", "head"]]
        passage = make_passage(index, np.random.default_rng(i), [f" token {n}" for n in range(PASSAGE_TOKENS)])
        PASSAGES.write(results, passage)
        entries.append(StudyRunConfig(path=str(results), **({"phase": "p", "step": float(i)} if len(runs) > 1 else {})))
    study = build(entries)
    started = time.perf_counter()
    page = explorer_html(study)
    path = folder / "explorer.html"
    path.write_text(page, encoding="utf-8")
    print(f"explorer.html of {title}: written in {time.perf_counter() - started:.1f} s")
    in_browser(path)


def in_browser(path: Path) -> None:
    """Print the size of an explorer and the processor time it takes."""
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    with launch() as browser:
        if browser is None:
            print("no Chromium here: the page was not timed")
            return
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        processes = browser.new_browser_cdp_session()
        before = renderer_times(processes)
        opened = time.perf_counter()
        tab.goto(path.as_uri())
        tab.wait_for_selector("body[data-ready]")
        tab.evaluate(PAINTED)
        elapsed = time.perf_counter() - opened
        print(f"first view: {spent(before, renderer_times(processes)):.2f} s of processor time, {elapsed:.1f} s")
        compared = tab.locator("#other").input_value() != ""
        before, painted = renderer_times(processes), []
        for i in range(1, CLICKS + 1):
            painted.append(tab.evaluate(CHOSEN, i))
            tab.wait_for_timeout(30)  # what is left for later counts too
        each = 1000 * spent(before, renderer_times(processes)) / CLICKS
        where = "two runs compared" if compared else "one run"
        print(f"another head, {where}: {each:.0f} ms of processor time, of all threads;")
        print(f"until painted: median {sorted(painted)[CLICKS // 2]:.0f} ms, worst {max(painted):.0f} ms")


def renderer_times(processes: CDPSession) -> dict[int, float]:
    """Return the processor time of each renderer so far."""
    found = processes.send("SystemInfo.getProcessInfo")["processInfo"]
    return {process["id"]: process["cpuTime"] for process in found if process["type"] == "renderer"}


def spent(before: dict[int, float], after: dict[int, float]) -> float:
    """Return the processor time in between; a page may get a new renderer."""
    return sum(seconds - before.get(process, 0.0) for process, seconds in after.items())


PAINTED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
CHOSEN = """i => new Promise((done) => {
  const row = document.querySelectorAll("#list tr[data-head]")[i], start = performance.now();
  row.querySelector("button").click();
  const wait = () => (document.body.dataset.drawn.startsWith(row.dataset.head)
    ? requestAnimationFrame(() => done(performance.now() - start)) : requestAnimationFrame(wait));
  wait();
})"""
"""Choose a head in the list, and wait until the browser has painted it."""

if __name__ == "__main__":
    main()
