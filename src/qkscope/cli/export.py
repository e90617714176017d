"""``qkscope export``: calibration files of other tools, from a run's statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.common import Quiet, Verbose, WorkersOption, errors_as_lines, log, set_up_logging
from qkscope.progress import progress


def export_command(
    run: Annotated[Path, typer.Argument(help="Captured run.")],
    to: Annotated[str, typer.Option(help="triattention, duo-attention, kvpress-stats or mha2mla.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File or, as the format asks for, folder.")],
    by: Annotated[
        str | None, typer.Option(help="Score of key heads for duo-attention: far (by default) or area.")
    ] = None,
    recent: Annotated[
        int | None, typer.Option(min=1, help="Latest keys that a shortened head of duo-attention keeps.")
    ] = None,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a run's statistics as calibration files of tools that compress KV caches."""
    from qkscope.integrations.exports.formats import export_run

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("no file was written"):
        with progress("heads" if to == "duo-attention" else "layers") as on_done:
            written = export_run(run, to, output, by=by, recent=recent, workers=workers, on_done=on_done)
        for path in written:
            log.info("wrote %s", path)
