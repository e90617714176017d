"""Time and size of the figures, the report and the explorer of a study of the published size.

11 models × 300 heads and 10 checkpoints × 300 heads of made-up numbers; then an explorer of 1,000 heads with points
and a passage of 64 tokens each, and, where Chromium is installed, how long a head's panel takes to open in it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
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
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        published(folder, options.workers)
        explorer(folder)
    finally:
        shutil.rmtree(folder)


def published(folder: Path, workers: int) -> None:
    study = published_shape(folder / "study", points=4)
    started = time.perf_counter()
    written, left_out = write_figures(study, folder / "figures", workers=workers)
    drawn = time.perf_counter()
    page = report_html(study, written, left_out)
    done = time.perf_counter()
    print(f"{len(written)} figures, {len(left_out)} left out: {drawn - started:.1f} s with {workers} workers")
    print(f"report.html: {done - drawn:.1f} s, {len(page.encode()) / 1e6:.1f} MB; together {done - started:.1f} s")


def explorer(folder: Path) -> None:
    results = write_model(folder / "wide", "a thousand heads", layers=25, heads=1000, points=1000)
    heads = pd.read_parquet(results / "heads.parquet")[["model", "layer", "head"]]
    passage = make_passage(heads, np.random.default_rng(0), [f" token {i}" for i in range(PASSAGE_TOKENS)])
    (results / PASSAGES.file).write_bytes(PASSAGES.content(results, passage))
    study = build([StudyRunConfig(path=results)])
    started = time.perf_counter()
    page = explorer_html(study)
    path = folder / "explorer.html"
    path.write_text(page, encoding="utf-8")
    print(f"explorer.html of 1,000 heads: {time.perf_counter() - started:.1f} s, {len(page.encode()) / 1e6:.1f} MB")
    with launch() as browser:
        if browser is None:
            print("no Chromium here: the panel was not timed")
            return
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        opened = time.perf_counter()
        tab.goto(path.as_uri())
        print(f"opens in {time.perf_counter() - opened:.1f} s")
        script, painted = [], []
        for i in range(CLICKS):
            painted.append(tab.evaluate(PAINTED, "ArrowDown" if i % 5 == 4 else "ArrowRight"))
            script.append(float(tab.evaluate("document.body.dataset.headMs")))
        print(f"head panel: median {sorted(script)[CLICKS // 2]:.0f} ms, worst {max(script):.0f} ms of script;")
        print(f"until painted: median {sorted(painted)[CLICKS // 2]:.0f} ms, worst {max(painted):.0f} ms")


PAINTED = """key => new Promise((done) => {
  const start = performance.now();
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
})"""
"""Move to a neighbouring head, which does what a click does, and wait until the browser has painted it."""

if __name__ == "__main__":
    main()
