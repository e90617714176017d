"""``qkscope demo``: the whole pipeline on bundled models and texts."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkscope.capture.options import need_torch
from qkscope.cli.common import Quiet, Verbose, WorkersOption, errors_as_lines, heads_done, log, set_up_logging
from qkscope.cli.ending import clickable, print_findings, show
from qkscope.cli.report import OpenPage
from qkscope.progress import progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from qkscope.capture.corpus import Corpus
    from qkscope.capture.options import ModelOptions
    from qkscope.data.family import Checkpoint
    from qkscope.results.study import Study


PASSES = 8
"""Backward passes for the effects of single heads, which one figure ranks."""


def demo_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for runs, tables and report.")] = Path("demo"),
    fast: Annotated[bool, typer.Option("--fast", help="Three checkpoints on half of the texts.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="All checkpoints that are installed: ten in a checkout, instead of four.")
    ] = False,
    planted: Annotated[
        bool, typer.Option("--planted", help="48 heads of known structure instead of a model; needs no torch.")
    ] = False,
    open_page: OpenPage = False,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run the whole pipeline offline, on the bundled model family.

    It captures the checkpoints, analyses them and writes the report.
    """
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        from qkscope.files.atomic import check_writable
        from qkscope.report.report import EXPLORER, REPORT, check_pages

        check_writable(output)
        check_pages(*(output / "report" / name for name in (REPORT, EXPLORER)))
        started = time.monotonic()
        study = _planted(output, workers) if planted else _family(output, chosen_checkpoints(fast, everything), workers)
        with step("wrote tables, figures and pages"):
            _report(study, output / "report", workers)
        print_findings(study, quiet=quiet)
        log.info("done in %.0f s", time.monotonic() - started)
        for name in (REPORT, EXPLORER):
            typer.echo(f"{Path(name).stem}: {clickable(output / 'report' / name)}")
        if open_page:
            show(output / "report" / REPORT)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Log a step and its seconds at its end."""
    started = time.monotonic()
    yield
    log.info("%s in %.0f s", name, time.monotonic() - started)


def _family(output: Path, chosen: Sequence[Checkpoint], workers: int | None) -> Study:
    """Capture the checkpoints one by one, then analyse them together."""
    need_torch("; without it: qkscope demo --planted")
    from qkscope.capture.model import load_quietly
    from qkscope.config import StudyConfig, StudyRunConfig
    from qkscope.data.family import FAMILY_TITLE, other_windows
    from qkscope.report.gather import gather

    load_quietly()  # checkpoints load too fast for a progress bar
    items = []
    for number, checkpoint in enumerate(chosen, start=1):
        windows = other_windows(checkpoint, chosen)
        listed = " and ".join(f"{window:,}" for window in (checkpoint.window, *windows))
        with step(f"captured {checkpoint.name} ({number} of {len(chosen)}), window {listed}"):
            folder = _capture(checkpoint, output / "runs" / checkpoint.name, windows)
        fields = {"label": checkpoint.name, "family": "tinyrope", "phase": checkpoint.phase, "step": checkpoint.step}
        items.append(StudyRunConfig(path=str(folder), **fields))  # type: ignore[arg-type]
    with step("analysed all heads"), heads_done() as on_done:
        study = gather(
            StudyConfig(runs=items, title=FAMILY_TITLE), output / "results", workers=workers, on_done=on_done
        )
    last, window = chosen[-1], min(checkpoint.window for checkpoint in chosen)
    with step(f"removed terms from the scores of {last.name}, window {window:,},"):
        return _with_effects(study, output, last, window)


def chosen_checkpoints(fast: bool, everything: bool) -> tuple[Checkpoint, ...]:
    """Return the checkpoints to capture; log if some that are asked for are not installed."""
    from qkscope.data.family import CHECKPOINTS, NAME, bundled_checkpoints, demo_checkpoints, fast_checkpoints

    if not everything:
        return fast_checkpoints() if fast else demo_checkpoints()
    bundled = bundled_checkpoints()
    if len(bundled) < len(CHECKPOINTS):
        have, trained = len(bundled), len(CHECKPOINTS)
        log.info("%d of the %d checkpoints of %s are installed; a checkout has all of them", have, trained, NAME)
    return bundled


def _with_effects(study: Study, output: Path, last: Checkpoint, window: int) -> Study:
    """Add the effects of removing each term from the last checkpoint, on texts that its means were not made from."""
    from qkscope.api import effects
    from qkscope.capture.model import load_model
    from qkscope.cause.effects import EffectOptions
    from qkscope.data.family import other_texts
    from qkscope.files.runfolder import at_window
    from qkscope.results.effects import write_measured
    from qkscope.runs.run import open_run

    source = _source(last)
    run = Path(at_window(str(output / "runs" / last.name), window))
    with progress("passes") as on_done:
        frames = effects(
            load_model(source), run, _corpus(source, other_texts(last.documents)).ids,
            options=EffectOptions(PASSES, measure=0), window=window, label=last.name,
            on_progress=lambda done, in_all: on_done(round(done), round(in_all)),
        )  # fmt: skip
    frames = {name: frame.assign(family="tinyrope") for name, frame in frames.items()}
    write_measured(output / "results" / "effects", frames, open_run(run).source.identity())
    return replace(study, tables=study.tables | frames)


def _source(checkpoint: Checkpoint) -> ModelOptions:
    from qkscope.capture.options import ModelOptions
    from qkscope.data.family import tokenizer

    return ModelOptions(str(checkpoint.folder), tokenizer=str(tokenizer()), dtype="float32", device="cpu")


def _corpus(source: ModelOptions, paths: list[Path]) -> Corpus:
    from qkscope.capture.corpus import Corpus
    from qkscope.capture.options import TextOptions

    return Corpus.read(TextOptions(tuple(map(str, paths))), source)


def _capture(checkpoint: Checkpoint, output: Path, windows: Sequence[int]) -> Path:
    """Capture a checkpoint at its window and, from the same passes, at shorter ones."""
    from qkscope.capture.options import CaptureOptions, ExecutionOptions
    from qkscope.capture.run import capture
    from qkscope.data.family import some_texts

    source = _source(checkpoint)
    corpus = _corpus(source, some_texts(checkpoint.documents))
    options = CaptureOptions(window=checkpoint.window, compare_at=tuple(windows))
    with progress("capturing", "tokens") as on_progress:
        execution = ExecutionOptions(on_progress=on_progress)
        return capture(source, corpus, output, options, corpus.about(checkpoint.name), execution)


def _planted(output: Path, workers: int | None) -> Study:
    from qkscope.config import StudyConfig, StudyRunConfig
    from qkscope.data.planted import PLANTED_TITLE, write_demo_dataset
    from qkscope.report.gather import gather

    log.info("planting a dataset of 48 query heads in %s", output / "dataset")
    dataset = write_demo_dataset(output / "dataset")
    runs = [StudyRunConfig(path=str(dataset), label="planted heads")]
    with heads_done() as on_done:
        return gather(StudyConfig(runs=runs, title=PLANTED_TITLE), output / "results", workers=workers, on_done=on_done)


def _report(study: Study, folder: Path, workers: int | None) -> None:
    from qkscope.report.report import write_pages

    with progress("figures") as on_figures:
        write_pages(study, folder, command="qkscope demo", workers=workers, on_figures=on_figures)
