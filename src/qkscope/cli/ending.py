"""The end of commands that write pages: print findings and links, and open the browser if requested."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qkscope.cli.common import heads_in_a_line, log, printable

if TYPE_CHECKING:
    from qkscope.results.study import Study


def print_findings(study: Study, *, quiet: bool = False) -> None:
    """Print the first screen of the report in two lines, and name heads in a third."""
    if quiet:
        return
    from qkscope.report.claims import Claims
    from qkscope.report.front import front

    first = front(Claims(study))
    numbers = "; ".join(f"{tile.number} {tile.label}" for tile in first.tiles)
    for line in (first.sentence, f"{first.of}: {numbers}." if first.tiles else "", heads_in_a_line(study.tables)):
        if line:
            typer.echo(printable(line))


def clickable(path: Path) -> str:
    """Return the absolute path; in a terminal, as a link that opens it."""
    absolute = path.resolve()
    text = printable(str(absolute))
    return f"\x1b]8;;{absolute.as_uri()}\x1b\\{text}\x1b]8;;\x1b\\" if sys.stdout.isatty() else text


def show(page: Path) -> None:
    """Open a page in the browser."""
    if not webbrowser.open(page.resolve().as_uri()):
        log.info("no browser was found; open the file yourself")
