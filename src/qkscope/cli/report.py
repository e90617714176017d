"""``qkscope report`` and ``qkscope view``."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.common import (
    Quiet,
    Verbose,
    WorkersOption,
    errors_as_lines,
    heads_done,
    log,
    name_heads,
    set_up_logging,
)
from qkscope.cli.ending import clickable, print_findings, show
from qkscope.progress import plural, progress

Given = Annotated[
    list[str],
    typer.Argument(help="A study file (.yaml), or runs, datasets and results folders; each is one model or more."),
]
OpenPage = Annotated[bool, typer.Option("--open", help="Open the report in the browser.")]


def report_command(
    given: Given,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for figures and pages.")] = Path("report"),
    no_points: Annotated[
        bool, typer.Option("--no-points", help="Leave out the vectors of heads: no collages, smaller pages.")
    ] = False,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Print the report to report.pdf too, by an installed Chromium or Chrome.")
    ] = False,
    open_page: OpenPage = False,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Draw all figures and write report.html and explorer.html.

    Each page is one file that opens from disk. A folder of another report stands for the runs in it.
    """
    from qkscope.files.atomic import check_writable
    from qkscope.report.gather import gather, study_config
    from qkscope.report.page import browser, print_page
    from qkscope.report.report import EXPLORER, PDF, REPORT, check_pages, write_pages
    from qkscope.results.reader import TABLES_FOLDER

    started = time.monotonic()
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        check_writable(output)
        check_pages(output / REPORT, output / EXPLORER)
        printer = browser() if pdf else None
        with heads_done() as on_done:
            study = gather(
                study_config(given), output / TABLES_FOLDER, points=not no_points, workers=workers, on_done=on_done
            )
        log.info("%s: %s", plural(len(study.runs), "run"), ", ".join(study.labels))
        with progress("figures") as on_figures:
            skipped = write_pages(study, output, command=_command(), workers=workers, on_figures=on_figures)
        if printer is not None:
            print_page(printer, output / REPORT, output / PDF)
        for figure in skipped:
            log.info("left out %s: %s", figure.name, figure.reason)
        print_findings(study, quiet=quiet)
        log.info("wrote in %.1f s:", time.monotonic() - started)
        for name in (REPORT, EXPLORER, *([PDF] if pdf else [])):
            typer.echo(clickable(output / name))
        if open_page:
            show(output / REPORT)


def view_command(
    given: Given,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("explorer.html"),
    no_open: Annotated[bool, typer.Option("--no-open", help="Write the page and do not open it.")] = False,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write the explorer of one or more runs, and open it.

    It is one page that needs no server. A folder of a report stands for the runs in it.
    """
    from qkscope.files.atomic import check_writable
    from qkscope.report.gather import gather, study_config
    from qkscope.report.report import check_pages, write_explorer

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        check_writable(output.parent)
        check_pages(output)
        with heads_done() as on_done:
            study = gather(study_config(given), output.with_suffix(".tables"), workers=workers, on_done=on_done)
        write_explorer(study, output)
        name_heads(study.tables)
        typer.echo(clickable(output))
        if not no_open:
            show(output)


def _command() -> str:
    """Return the command as it was typed, for the report's record."""
    return shlex.join(["qkscope", *sys.argv[1:]]) if Path(sys.argv[0]).stem in ("qkscope", "__main__") else "qkscope"
