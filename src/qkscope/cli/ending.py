"""How commands that write pages end: what was found, where the pages are, and the browser if it is wanted."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qkscope.cli.common import log, printable

if TYPE_CHECKING:
    from qkscope.results.study import Study


def say_findings(study: Study, *, quiet: bool = False) -> None:
    """What the report's first screen says, in two lines."""
    if quiet:
        return
    from qkscope.report.claims import Claims
    from qkscope.report.front import front

    first = front(Claims(study))
    numbers = "; ".join(f"{tile.number} {tile.label}" for tile in first.tiles)
    for line in (first.sentence, f"{first.of}: {numbers}." if first.tiles else ""):
        if line:
            typer.echo(printable(line))


def clickable(path: Path) -> str:
    """The whole path; in a terminal, as a link that opens it."""
    there = path.resolve()
    shown = printable(str(there))
    return f"\x1b]8;;{there.as_uri()}\x1b\\{shown}\x1b]8;;\x1b\\" if sys.stdout.isatty() else shown


def show(page: Path) -> None:
    """Open a page in the browser."""
    if not webbrowser.open(page.resolve().as_uri()):
        log.info("no browser was found; open the file yourself")
