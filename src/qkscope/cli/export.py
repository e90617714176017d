"""``qkscope export``: calibration files of other tools, from a run's statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.common import (
    SOME_HEADS_FAILED,
    Quiet,
    Verbose,
    WorkersOption,
    errors_as_lines,
    log,
    set_up_logging,
)
from qkscope.errors import ConfigError
from qkscope.progress import progress


def export_command(
    run: Annotated[Path, typer.Argument(help="Captured run.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="triattention, triattention-flat, duo-attention, kvpress-stats (of a capture --keep undone-cov) or "
            "mha2mla."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File or, as the format asks for, folder; csv with --check.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Compare this calibration file of TriAttention with the run instead.")
    ] = None,
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
    """Write calibration files of tools that compress KV caches.

    They are a run's statistics, in the format of each tool. Somebody's calibration is compared with a run; exit code 1
    if they differ.
    """
    from qkscope.integrations.exports.formats import export_run

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("no file was written"):
        if check is not None:
            if to is not None or by is not None or recent is not None:
                raise ConfigError("--check compares a file and writes none; leave out --to, --by and --recent")
            raise typer.Exit(_checked(check, run, output))
        if to is None or output is None:
            raise ConfigError("give --to and --output (-o), or --check with a calibration file")
        with progress("heads" if to == "duo-attention" else "layers") as on_done:
            written = export_run(run, to, output, by=by, recent=recent, workers=workers, on_done=on_done)
        for path in written:
            log.info("wrote %s", path)


def _checked(path: Path, run: Path, output: Path | None) -> int:
    """Print how a calibration agrees with a run, and return the exit code."""
    from qkscope.files.atomic import write_together
    from qkscope.integrations.exports.about import folder_of, open_captured_run
    from qkscope.integrations.exports.checking import compare_calibration
    from qkscope.results.frames import csv_bytes

    with progress("layers") as on_done:
        found = compare_calibration(path, folder_of(open_captured_run(run)), on_done)
    for problem in found.problems:
        typer.echo(problem)
    typer.echo(f"{path}: {found.summary}")
    if output is not None:
        write_together(output.parent, {output.name: csv_bytes(found.heads)})
        log.info("wrote %s", output)
    return SOME_HEADS_FAILED if found.problems else 0
